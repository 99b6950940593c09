"""`--check`: a caller's inputs and expected answers, held against the layer through the engine."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from export.check_file import CheckFailed, pass_check, read_check
from export.errors import SourceInvalid
from export.formula import Formula
from export.layer_spec import LayerSpec
from export.random_weights import random_spec
from service.contract import FP32_TOLERANCE
from service.inference.engine import OnnxEngine
from service.layer_config import LayerConfig, Rotary
from tests.support.attention_cases import engine_of

SEED = 3
"""Any: every rule here holds for all weights."""

CONFIGS = {
    "self": LayerConfig(
        8, 2, rotary=Rotary(10000.0, 4), extra_keys=("learned",), causal=True, window=4
    ),
    "cross": LayerConfig(8, 2, 6, 3),
    "table": LayerConfig(8, 2, positional="learned", max_positions=9),
}

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def specs() -> dict[str, LayerSpec]:
    """Return the layers."""
    return {name: random_spec(config, SEED) for name, config in CONFIGS.items()}


@pytest.fixture(scope="module")
def engines(specs: dict[str, LayerSpec]) -> dict[str, OnnxEngine]:
    """Return what serves them."""
    return {name: engine_of(spec) for name, spec in specs.items()}


def call_of(config: LayerConfig) -> Tensors:
    """Return everything that a call to such a layer may hold."""
    random = torch.Generator().manual_seed(SEED)
    keys = 4 if config.is_cross else 5
    tensors = {
        "embeddings": torch.randn(2, 5, config.embed_dim, generator=random),
        "attend_mask": torch.rand(2, keys, generator=random) < 0.8,
        "pair_mask": torch.rand(1, 2, 5, keys, generator=random) < 0.8,
        "head_mask": torch.rand(2, 2, generator=random),
    }
    if config.memory_dim is not None:
        tensors["memory"] = torch.randn(2, keys, config.memory_dim, generator=random)
    if config.value_memory_dim is not None:
        tensors["value_memory"] = torch.randn(2, keys, config.value_memory_dim, generator=random)
    if config.takes_positions:
        tensors["positions"] = torch.arange(5).flip(0).repeat(2, 1)
    return tensors


def answered(spec: LayerSpec, tensors: Tensors, *, causal: bool | None = None) -> Tensors:
    """Return the call with the answer that the float64 formula gives."""
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    formula = Formula(spec.config, {name: t.numpy() for name, t in spec.tensors.items()})
    answer = formula(**arrays, causal=causal)
    expected = {"output": answer.output, "attention_weights": answer.weights}
    if spec.config.extra_keys:
        expected["extra_weights"] = answer.extra_weights
    return tensors | {name: torch.from_numpy(array) for name, array in expected.items()}


def written(tensors: Tensors, directory: Path, metadata: dict[str, str] | None = None) -> Path:
    """Return the file that holds them."""
    file = directory / "calls.safetensors"
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, file, metadata)
    return file


@pytest.mark.parametrize("name", CONFIGS)
def test_check_of_the_right_answer_passes(
    name: str, specs: dict[str, LayerSpec], engines: dict[str, OnnxEngine], tmp_path: Path
) -> None:
    """Every input of the contract is understood, and the row says what was compared."""
    spec = specs[name]
    file = written(answered(spec, call_of(spec.config)), tmp_path)

    row = pass_check(engines[name], read_check(file, spec.config))

    assert row.reference == "check calls.safetensors"
    assert (row.batch, row.length, row.key_length) == (2, 5, 4 if name == "cross" else 5)
    masks = "attend_mask, pair_mask, head_mask"
    assert row.masks == (f"{masks}, causal" if spec.config.causal else masks)
    assert row.output_error <= FP32_TOLERANCE
    assert row.weights_error is not None
    assert row.weights_error <= FP32_TOLERANCE


def test_check_needs_an_output_alone_and_takes_integers_as_masks(
    specs: dict[str, LayerSpec], engines: dict[str, OnnxEngine], tmp_path: Path
) -> None:
    """0 and 1 are false and true, as on every wire; what is not expected is not compared."""
    spec, tensors = specs["cross"], call_of(CONFIGS["cross"])
    expected = answered(spec, tensors)["output"].to(torch.float32)
    tensors["attend_mask"] = tensors["attend_mask"].to(torch.int64)
    file = written(tensors | {"output": expected}, tmp_path, {"format": "pt"})

    row = pass_check(engines["cross"], read_check(file, spec.config))

    assert row.weights_error is None


@pytest.mark.parametrize("causal", [True, False])
def test_check_causal_is_the_layers_unless_the_metadata_says(
    causal: bool, specs: dict[str, LayerSpec], engines: dict[str, OnnxEngine], tmp_path: Path
) -> None:
    """The layer is causal by default; each way answers otherwise."""
    spec, tensors = specs["self"], call_of(CONFIGS["self"])
    right = answered(spec, tensors, causal=causal)
    file = written(right, tmp_path, {"causal": str(causal).lower()})

    check = read_check(file, spec.config)
    row = pass_check(engines["self"], check)

    assert check.inputs.causal == causal
    assert ("causal" in row.masks) == causal
    unsaid = read_check(written(right, tmp_path), spec.config)
    assert unsaid.inputs.causal
    if not causal:
        with pytest.raises(CheckFailed, match="output"):
            pass_check(engines["self"], unsaid)


def test_check_of_a_wrong_answer_names_every_difference_with_its_size_and_place(
    specs: dict[str, LayerSpec], engines: dict[str, OnnxEngine], tmp_path: Path
) -> None:
    """Whoever expected something else learns where to look."""
    tensors = answered(specs["self"], call_of(CONFIGS["self"]))
    tensors["output"][1, 2, 3] += 0.5
    tensors["output"][0, 0, 0] -= 0.25
    tensors["extra_weights"][0, 1, 4, 0] -= 0.125
    file = written(tensors, tmp_path)

    with pytest.raises(CheckFailed) as caught:
        pass_check(engines["self"], read_check(file, CONFIGS["self"]))

    output, extra = str(caught.value).removeprefix(f"{file}: ").split("; extra_weights")
    expected = float(tensors["output"][1, 2, 3])
    allowed = FP32_TOLERANCE * max(1.0, float(tensors["output"].abs().max()))
    found = re.fullmatch(
        rf"output\[1, 2, 3\]: expected {expected:.7g}, got (\S+), which differs by 0\.5;"
        rf" allowed {allowed:.3g}; 2 of 80 numbers differ by more",
        output,
    )
    assert found is not None, output
    assert float(found[1]) == pytest.approx(expected - 0.5, abs=FP32_TOLERANCE)
    assert extra.startswith("[0, 1, 4, 0]: expected ")
    assert extra.endswith(", which differs by 0.125; allowed 1e-05; 1 of 20 numbers differ by more")


Change = Callable[[Tensors], Any]

REFUSED: dict[str, tuple[str, Change, str]] = {
    "no embeddings": (
        "self",
        lambda t: t.pop("embeddings"),
        "embeddings: expected [B, S, 8], got none",
    ),
    "one sequence": (
        "self",
        lambda t: t.update(embeddings=torch.zeros(5, 8)),
        "embeddings: expected [B, S, 8], got [5, 8]",
    ),
    "another width": (
        "self",
        lambda t: t.update(embeddings=torch.zeros(2, 5, 7)),
        "embeddings: expected [2, 5, 8], got [2, 5, 7]",
    ),
    "no output": ("self", lambda t: t.pop("output"), "output: expected [2, 5, 8], got none"),
    "no memory": ("cross", lambda t: t.pop("memory"), "memory: expected [B, T, 6], got none"),
    "no value memory": (
        "cross",
        lambda t: t.pop("value_memory"),
        "value_memory: expected [2, 4, 3], got none",
    ),
    "a memory too many": (
        "self",
        lambda t: t.update(memory=torch.zeros(2, 4, 6)),
        "memory: expected only embeddings, attend_mask, pair_mask, head_mask, output,"
        " attention_weights, positions, extra_weights",
    ),
    "a name of elsewhere": (
        "cross",
        lambda t: t.update(attention_mask=t["attend_mask"]),
        "attention_mask: expected only embeddings, attend_mask, pair_mask, head_mask, output,"
        " attention_weights, memory, value_memory; a padding mask is attend_mask, a mask of"
        " pairs is pair_mask",
    ),
    "a mask of other pairs": (
        "self",
        lambda t: t.update(pair_mask=torch.ones(2, 3, 5, 5).bool()),
        "pair_mask: expected [1, 1, 5, 5] or [1, 2, 5, 5] or [2, 1, 5, 5] or [2, 2, 5, 5],"
        " got [2, 3, 5, 5]",
    ),
    "a mask of numbers": (
        "self",
        lambda t: t.update(attend_mask=torch.ones(2, 5)),
        "attend_mask: expected integers or booleans, got torch.float32",
    ),
    "a mask of 2": (
        "self",
        lambda t: t.update(attend_mask=torch.full((2, 5), 2)),
        "attend_mask: expected true and false, or 1 and 0",
    ),
    "integers as embeddings": (
        "self",
        lambda t: t.update(embeddings=torch.zeros(2, 5, 8, dtype=torch.int64)),
        "embeddings: expected floating-point numbers, got torch.int64",
    ),
    "NaN expected": (
        "self",
        lambda t: t.update(output=torch.full((2, 5, 8), torch.nan)),
        "output: expected finite numbers, got NaN or infinity",
    ),
    "a negative position": (
        "self",
        lambda t: t.update(positions=torch.full((2, 5), -1)),
        "positions: expected 0 to 16777215",
    ),
    "a position beyond the table": (
        "table",
        lambda t: t.update(positions=torch.full((2, 5), 9)),
        "positions: expected 0 to 8",
    ),
    "more tokens than positions": (
        "table",
        lambda t: t.update(embeddings=torch.zeros(2, 10, 8)),
        "embeddings: at most 9 positions, got 10",
    ),
}


@pytest.mark.parametrize(("name", "change", "message"), REFUSED.values(), ids=REFUSED)
def test_read_check_what_is_no_call_to_the_layer_is_refused(
    name: str, change: Change, message: str, specs: dict[str, LayerSpec], tmp_path: Path
) -> None:
    """The message names the tensor, what was expected and what came."""
    tensors = answered(specs[name], call_of(CONFIGS[name]))
    change(tensors)
    file = written(tensors, tmp_path)

    with pytest.raises(SourceInvalid) as caught:
        read_check(file, CONFIGS[name])

    assert str(caught.value) == f"{file}: {message}"


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        ("self", {"casual": "true"}, "expected causal alone, got casual"),
        ("self", {"causal": "yes"}, "causal: expected true or false, got 'yes'"),
        ("cross", {"causal": "true"}, "causal: expected false for cross-attention"),
    ],
    ids=str,
)
def test_read_check_other_metadata_is_refused(
    name: str,
    metadata: dict[str, str],
    message: str,
    specs: dict[str, LayerSpec],
    tmp_path: Path,
) -> None:
    """A misspelt option is never ignored."""
    file = written(answered(specs[name], call_of(CONFIGS[name])), tmp_path, metadata)

    with pytest.raises(SourceInvalid) as caught:
        read_check(file, CONFIGS[name])

    assert str(caught.value) == f"{file}: metadata: {message}"


def test_read_check_of_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    """A missing file and one of another kind, each in one line."""
    file = tmp_path / "calls.safetensors"

    with pytest.raises(SourceInvalid, match=f"{file}: no such file"):
        read_check(file, CONFIGS["self"])
    file.write_bytes(b"text")
    with pytest.raises(SourceInvalid, match=f"{file}: expected a safetensors file: "):
        read_check(file, CONFIGS["self"])


def test_pass_check_compares_the_answer_without_weights_too(
    specs: dict[str, LayerSpec], engines: dict[str, OnnxEngine], tmp_path: Path
) -> None:
    """A call that asks for nothing extra takes another way through the graph."""

    class Forgetful(OnnxEngine):
        """Answers wrong where no weights are asked for."""

        def __init__(self) -> None:
            self.layer = CONFIGS["self"]

        def run(self, inputs: Any, *, weights: bool, **options: Any) -> Any:
            """Return the answer, without weights half of it."""
            answer = engines["self"].run(inputs, weights=weights)
            if not weights:
                answer.output *= np.float32(0.5)
            return answer

    file = written(answered(specs["self"], call_of(CONFIGS["self"])), tmp_path)

    with pytest.raises(CheckFailed, match=r"output\["):
        pass_check(Forgetful(), read_check(file, CONFIGS["self"]))
