"""Artifacts of manifest format 1, as an earlier exporter published them, can be used for good."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.format1 import read_spec
from export.gate import GateFailed, formula_of
from export.graph import write_graph
from export.grid import grid
from export.publish import verify
from export.sources import Source, random_layer
from service.contract import FP32_TOLERANCE
from service.errors import ArtifactUnreadable
from service.inference.artifact import read_artifact
from service.inference.calls import Inputs
from service.inference.parity import absolute_error, relative_error
from service.layer_config import PROJECTIONS, LayerConfig
from tests.support.layers import sha256_of
from tests.support.models import load_model
from tests.support.server import Server

PUBLISHED = Path(__file__).parents[1] / "data" / "format1"
"""Written by `python -m export` before format 2, with its defaults: see `SOURCES`."""

SOURCES: dict[str, Callable[[], Source]] = {
    "tiny": lambda: random_layer(8, 2, seed=0),
    "cross": lambda: random_layer(12, 3, seed=0, memory_dim=6, bias=False),
}
"""What PyTorch draws for the seeds of the manifests."""

CONFIGS = {
    "tiny": LayerConfig(8, 2),
    "cross": LayerConfig(12, 3, memory_dim=6, biases=()),
}

each = pytest.mark.parametrize("name", CONFIGS)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return the artifact `tiny`, to be changed."""
    return Path(shutil.copytree(PUBLISHED / "tiny" / "1", tmp_path / "tiny" / "1"))


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def _sign(path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        for name, entry in manifest["files"].items():
            entry |= {"sha256": sha256_of(path / name), "size_bytes": (path / name).stat().st_size}

    _edit(path, change)


@each
def test_format_1_is_read_as_the_layer_that_it_always_was(name: str) -> None:
    """`bias` is the biases of all projections or of none, and what format 1 lacks is not there."""
    manifest = read_artifact(PUBLISHED / name / "1").manifest

    assert manifest.format == 1
    assert manifest.layer == CONFIGS[name]
    assert (manifest.tensors, manifest.proof) == ((), "whole")


@each
def test_format_1_is_served_as_the_layer_that_was_exported(name: str) -> None:
    """The warm-up meets the golden answers, and a call the layer that the seed gives."""
    model, source = load_model(PUBLISHED / name / "1"), SOURCES[name]()
    config, random = source.config, np.random.default_rng(1)
    x = random.standard_normal((2, 5, config.embed_dim)).astype(np.float32)
    memory, mask = None, np.array([[True] * 5, [True, False, True, True, False]])
    if config.memory_dim is not None:
        memory = random.standard_normal((2, 5, config.memory_dim)).astype(np.float32)

    model.warm_up()
    answer = model.engine.run(Inputs(x, memory, mask), weights=True)

    expected = formula_of(source)(x, memory, attend_mask=mask)
    assert model.problem is None
    assert answer.attention_weights is not None
    assert relative_error(answer.output, expected.output) <= FP32_TOLERANCE
    assert absolute_error(answer.attention_weights, expected.weights) <= FP32_TOLERANCE


def test_format_1_is_served_over_http(tmp_path: Path) -> None:
    """An old repository needs no new export."""
    with Server(Path(shutil.copytree(PUBLISHED, tmp_path / "repository"))) as server:
        page = server.get("/v1/models/tiny").json()
        answer = server.post(
            "/v1/attention", json={"model": "tiny", "embeddings": [[1] * 8, [0] * 8]}
        )

    x = np.array([[[1] * 8, [0] * 8]], np.float32)
    expected = formula_of(SOURCES["tiny"]())(x).output[0]
    assert page["layer"]["embed_dim"] == 8
    assert relative_error(answer.json()["output"], expected) <= FP32_TOLERANCE


@each
def test_verify_of_format_1_repeats_the_whole_proof(name: str) -> None:
    """Its graph was written by PyTorch's exporter; its weights are found all the same."""
    report = verify(PUBLISHED / name / "1")

    assert {row.reference for row in report.rows} == {"formula", "layer", "torch", "alone"}
    assert sum(row.reference == "formula" for row in report.rows) == len(grid(CONFIGS[name]))
    assert report.worst_error <= FP32_TOLERANCE


@each
def test_read_spec_of_format_1_gives_back_the_weights_to_the_bit(name: str) -> None:
    """Split where the exporter had fused them, and turned as nn.Linear has them."""
    artifact, source = read_artifact(PUBLISHED / name / "1"), SOURCES[name]()

    spec = read_spec(artifact.graph, artifact.manifest.layer)

    assert spec.tensors.keys() == source.spec.tensors.keys()
    for key, tensor in spec.tensors.items():
        np.testing.assert_array_equal(tensor.numpy(), source.spec.tensors[key].numpy())


def _alter_weight(path: Path) -> None:
    numbers = np.fromfile(path / "layer.weights", np.float32)
    numbers[-1] += 0.5
    numbers.tofile(path / "layer.weights")
    _sign(path)


def _graph_of_today(path: Path) -> None:
    write_graph(SOURCES["tiny"]().spec, path / "layer.onnx")
    _sign(path)


FORGERIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a weight": (_alter_weight, r"golden plain_output: differs from the layer by 0\.\d+"),
    "no bias": (
        lambda path: _edit(path, lambda manifest: manifest["layer"].update(bias=False)),
        r".*/layer\.onnx: graph: expected 2 projections, found 2 matrices and 2 biases",
    ),
    "said to be format 2": (
        lambda path: _edit(
            path,
            lambda m: m.update(
                format=2, layer={"embed_dim": 8, "num_heads": 2, "memory_dim": None}
            ),
        ),
        r".*/layer\.onnx: graph: expected the weights query_key_value\.weight, .+, found .+",
    ),
}


@pytest.mark.parametrize(("forge", "message"), FORGERIES.values(), ids=FORGERIES)
def test_verify_forged_format_1_fails_though_its_checksums_are_right(
    copy: Path, forge: Callable[[Path], object], message: str
) -> None:
    """The parts of an old artifact witness for each other as those of a new one do."""
    forge(copy)

    with pytest.raises(GateFailed, match=f"^{message}$"):
        verify(copy)


def test_verify_of_format_1_with_a_graph_of_today_passes(copy: Path) -> None:
    """The graph counts, not its author: both have one matrix after the other."""
    _graph_of_today(copy)

    assert verify(copy).worst_error <= FP32_TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    {
        "a bias that is no truth value": (
            lambda m: m["layer"].update(bias=1),
            "layer.bias: Unexpected keyword argument",
        ),
        "a format of the future": (
            lambda m: m.update(format=3),
            "format: this version reads formats 1 to 2; export the layer again",
        ),
        "a format in words": (
            lambda m: m.update(format="1"),
            "format: this version reads formats 1 to 2; export the layer again",
        ),
        "an unknown key": (
            lambda m: m["layer"].update(dropout=0.1),
            "layer.dropout: Unexpected keyword argument",
        ),
        "no layer": (lambda m: m.update(layer=None), "layer: Input should be an object"),
    }.values(),
)
def test_read_artifact_of_format_1_stays_strict(
    copy: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    """What format 1 does not have is refused, not guessed."""
    _edit(copy, change)

    with pytest.raises(ArtifactUnreadable) as caught:
        read_artifact(copy)

    assert str(caught.value).startswith(f"{copy}/manifest.json: {message}")


def test_read_artifact_of_format_1_without_a_bias_has_one(copy: Path) -> None:
    """That was its default."""
    _edit(copy, lambda manifest: manifest["layer"].pop("bias"))

    assert read_artifact(copy).manifest.layer.biases == PROJECTIONS
