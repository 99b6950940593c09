"""What an artifact holds of layers beyond the formula: golden tensors, defaults, the warm-up."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pydantic import TypeAdapter
from safetensors.numpy import load_file, save_file

from export.gate import GateFailed, formula_of
from export.publish import publish, verify
from export.sources import Source
from export.weights_file import read_spec
from service.contract import FP32_TOLERANCE, Manifest
from service.inference.artifact import Artifact, read_artifact
from service.inference.parity import absolute_error, relative_error
from tests.support.layers import Layers, sha256_of
from tests.support.models import load_model
from tests.support.specs import KINDS, random_source

SEED = 5
"""Any."""

GOLDEN = {"embeddings", "attend_mask", "plain_output", "output", "attention_weights"}

WANTED: dict[str, set[str]] = {
    "halves": set(),
    "dynamic": set(),
    "soft-capped distances": set(),
    "sinks": {"extra_weights"},
    "learned and zero keys": {"extra_weights"},
    "two memories": {"memory", "value_memory"},
    "learned positions": set(),
}
"""What a golden file holds beside `GOLDEN`."""

Change = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Published:
    """A layer and its artifact."""

    source: Source
    artifact: Artifact


@pytest.fixture(autouse=True)
def _one_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the proof short: what the gate finds is tested elsewhere."""
    monkeypatch.setattr("export.grid.GRID", ((7, 3, ("none", "all")),))


def _publish(kind: str, repository: Path) -> Published:
    source = random_source(KINDS[kind], SEED)
    return Published(source, publish(source, repository, "layer"))


@pytest.mark.parametrize("kind", WANTED)
def test_golden_file_holds_the_default_call_of_the_layer(kind: str, tmp_path: Path) -> None:
    """Each input and output that it has; the answers are the formula's, causal by default."""
    published = _publish(kind, tmp_path)

    tensors = load_file(published.artifact.path / "golden.safetensors")

    assert tensors.keys() == GOLDEN | WANTED[kind]
    formula = formula_of(published.source)
    sources = tensors["embeddings"], tensors.get("memory"), tensors.get("value_memory")
    masked = formula(*sources, attend_mask=tensors["attend_mask"])
    assert relative_error(tensors["plain_output"], formula(*sources).output) <= FP32_TOLERANCE
    assert relative_error(tensors["output"], masked.output) <= FP32_TOLERANCE
    assert absolute_error(tensors["attention_weights"], masked.weights) <= FP32_TOLERANCE
    if "extra_weights" in tensors:
        assert absolute_error(tensors["extra_weights"], masked.extra_weights) <= FP32_TOLERANCE
    if published.source.config.causal:
        otherwise = formula(*sources, causal=False).output
        assert relative_error(tensors["plain_output"], otherwise) > 100 * FP32_TOLERANCE


@pytest.mark.parametrize("kind", WANTED)
def test_artifact_is_read_as_it_was_published_and_warms_up(kind: str, tmp_path: Path) -> None:
    """Manifest, weights and golden answers are enough to serve it and to prove it again."""
    published = _publish(kind, tmp_path)
    path = published.artifact.path

    model = load_model(path)
    model.warm_up()

    assert model.problem is None
    assert model.layer == published.source.config
    assert json.loads((path / "manifest.json").read_text())["format"] == 2
    spec = read_spec(published.artifact.graph, model.layer)
    for name, tensor in published.source.spec.tensors.items():
        np.testing.assert_array_equal(spec.tensors[name].numpy(), tensor.numpy())
    assert verify(path).worst_error <= FP32_TOLERANCE


def test_manifest_says_each_option_and_comes_back_the_same(tmp_path: Path) -> None:
    """Options are objects; lists keep their order."""
    path = _publish("sinks", tmp_path).artifact.path
    manifest = read_artifact(path).manifest

    text = json.loads(manifest.to_json())["layer"]

    assert text == dataclasses.asdict(KINDS["sinks"]) | {
        "biases": list(KINDS["sinks"].biases),
        "extra_keys": ["sink"],
    }
    assert (text["causal"], text["window"], text["num_kv_heads"]) == (True, 6, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_manifest_of_every_kind_of_layer_is_read_back(kind: str, layers: Layers) -> None:
    """What is written is what is meant, read as strictly as the service reads it."""
    manifest = read_artifact(layers.artifact("tiny")).manifest
    written = dataclasses.replace(manifest, layer=KINDS[kind])

    assert TypeAdapter(Manifest).validate_json(written.to_json()) == written


def _alter(path: Path, name: str, change: Change) -> None:
    """Change one golden tensor, and the checksum with it."""
    file = path / "golden.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: np.ascontiguousarray(change(tensors[name]))}, file)
    manifest = json.loads((path / "manifest.json").read_text())
    entry = {"sha256": sha256_of(file), "size_bytes": file.stat().st_size}
    manifest["files"]["golden.safetensors"] = entry
    (path / "manifest.json").write_text(json.dumps(manifest))


FORGERIES: dict[str, tuple[str, str, Change, str, str]] = {
    "extra weights": (
        "sinks",
        "extra_weights",
        lambda array: array + np.float32(1e-3),
        r"extra_weights differs by 0\.00\d+, allowed 1e-05",
        r"golden extra_weights: differs from the layer by 0\.00\d+",
    ),
    "extra weights of one head": (
        "sinks",
        "extra_weights",
        lambda array: array[:, :1],
        r"extra_weights differs by inf, allowed 1e-05",
        r"golden extra_weights: expected shape \[2, 4, 5, 1\], got \[2, 1, 5, 1\]",
    ),
    "value memory": (
        "two memories",
        "value_memory",
        lambda array: array[::-1],
        r"output without masks differs by 0\.\d+, allowed 1e-05",
        r"golden plain_output: differs from the layer by 0\.\d+",
    ),
    "output of a causal layer": (
        "halves",
        "plain_output",
        lambda array: array[:, ::-1],
        r"output without masks differs by 0\.\d+, allowed 1e-05",
        r"golden plain_output: differs from the layer by 0\.\d+",
    ),
}


@pytest.mark.parametrize(
    ("kind", "name", "change", "problem", "message"), FORGERIES.values(), ids=FORGERIES
)
def test_golden_tensor_that_differs_is_found_by_warm_up_and_by_verify(
    kind: str, name: str, change: Change, problem: str, message: str, tmp_path: Path
) -> None:
    """Both say which tensor and how far."""
    path = _publish(kind, tmp_path).artifact.path
    _alter(path, name, change)

    model = load_model(path)
    model.warm_up()

    assert re.fullmatch(f"golden answer: {problem}", model.problem or "")
    with pytest.raises(GateFailed, match=f"^{message}$"):
        verify(path)


def test_warm_up_notices_a_layer_that_lost_its_causal_default(tmp_path: Path) -> None:
    """Not with a mask that would hide it: on the plain path, as most calls are."""
    path = _publish("halves", tmp_path).artifact.path
    model = load_model(path)
    otherwise = dataclasses.replace(model.layer, causal=False)
    model.engine.layer = otherwise
    model.manifest = dataclasses.replace(model.manifest, layer=otherwise)

    model.warm_up()

    assert (model.problem or "").startswith("golden answer: output differs by 0.")
