"""The gate for every kind of layer: all pass, and errors in each option are seen failing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor

from export.formula import Formula
from export.gate import GateFailed, ShapesDiffer, formula_of, pass_gate
from export.graph import LONG, write_graph
from export.grid import GRID, Cell, grid
from export.layer_spec import LayerSpec
from export.sources import Source
from service.contract import FP32_TOLERANCE
from service.inference.artifact import Graph, read_graph
from service.inference.calls import Inputs, Outputs
from service.inference.engine import Engine, OnnxEngine
from service.layer_config import PositionBias
from tests.support.attention_cases import engine_of
from tests.support.doubles import FaultyEngine
from tests.support.specs import KINDS, random_source, said_to_be
from tests.support.wrong_formulas import (
    CapAfterBias,
    CapAfterMask,
    FormulaEngine,
    GroupedInTurn,
    LengthOfTheBatch,
    NormAfterRotary,
    SinkScaled,
)

SEED = 3
"""Any: the gate judges every layer alike."""

WITH_POSITIONS = [name for name, config in KINDS.items() if config.takes_positions]

Make = Callable[[Source, Path], Engine]


@pytest.mark.parametrize("kind", KINDS)
def test_gate_passes_a_good_layer_of_every_kind(kind: str) -> None:
    """Every cell is near every reference that has an answer to it, weights of extra keys too."""
    source = random_source(KINDS[kind], SEED)

    report = pass_gate(engine_of(source.spec), source)

    cells = grid(source.config)
    rows = {
        name: [
            Cell(row.batch, row.length, row.key_length, row.masks)
            for row in report.rows
            if row.reference == name
        ]
        for name in ("formula", "layer", "torch", "alone")
    }
    assert rows["formula"] == rows["layer"] == cells
    assert rows["alone"] == [cell for cell in cells if cell.batch > 1]
    assert bool(rows["torch"]) == (kind in ("learned and zero keys", "two memories"))
    assert max(row.output_error for row in report.rows) <= FP32_TOLERANCE
    assert all(
        row.weights_error is not None and row.weights_error <= FP32_TOLERANCE for row in report.rows
    )


@pytest.mark.parametrize("kind", KINDS)
def test_grid_reaches_every_way_of_every_kind(kind: str) -> None:
    """Both lengths, every mask, and what a layer has beside them: positions and its default."""
    config = KINDS[kind]
    cells = grid(config)

    short = {cell.masks for cell in cells if cell.length == 7}
    wanted = {masks for _, _, kinds in GRID for masks in kinds}
    if config.causal:
        wanted = {masks.replace("causal", "not causal") for masks in wanted}
    if config.is_cross:
        wanted = {masks for masks in wanted if "causal" not in masks}
    if config.takes_positions:
        wanted |= {"positions"}
    assert len(set(cells)) == len(cells)
    assert short == wanted
    assert all(not cell.masks.startswith("causal") for cell in cells) or not config.causal
    assert any(cell.masks == "positions+padding" for cell in cells) == config.takes_positions
    beyond = [cell for cell in cells if cell.length > (config.max_positions or cell.length)]
    assert {"positions" in cell.masks for cell in beyond} <= {True}
    for batch in (1, 2):
        bare = [cell for cell in cells if cell.masks in ("none", "positions")]
        assert any(cell.key_length >= LONG and cell.batch == batch for cell in bare)


def test_grid_asks_a_causal_layer_not_to_be_so_where_sequences_are_short() -> None:
    """ALiBi without its mask gives far keys a logit beyond what FP32 and a softmax tell apart."""
    cells = grid(KINDS["alibi"])

    lengths = {cell.length for cell in cells if "not causal" in cell.masks}

    assert lengths == {7}


def _graph_of(
    source: Source, directory: Path, changes: dict[str, Any], tensors: dict[str, Any]
) -> Graph:
    """Return the graph of almost the same layer; a tensor's change None takes it away."""
    config = replace(source.config, **changes)
    changed = dict(source.spec.tensors)
    for name, change in tensors.items():
        if change is None:
            del changed[name]
        else:
            changed[name] = change(changed[name]).contiguous()
    write_graph(LayerSpec(config, changed), directory / "layer.onnx")
    return read_graph(directory / "layer.onnx")


def _other(
    tensors: dict[str, Callable[[Tensor], Tensor] | None] | None = None, **changes: Any
) -> Make:
    """Return the maker of an engine whose graph is of almost the same layer."""
    return lambda source, directory: OnnxEngine(
        said_to_be(source.config, _graph_of(source, directory, changes, tensors or {})),
        source.config,
    )


def _rotary(**changes: Any) -> Make:
    """Return the maker of an engine whose graph turns otherwise."""

    def make(source: Source, directory: Path) -> Engine:
        assert source.config.rotary is not None
        return _other(rotary=replace(source.config.rotary, **changes))(source, directory)

    return make


def _engine_believes(**changes: Any) -> Make:
    """Return the maker of an engine that takes the layer for almost the same one."""

    def make(source: Source, directory: Path) -> Engine:
        config = replace(source.config, **changes)
        return OnnxEngine(said_to_be(config, _graph_of(source, directory, {}, {})), config)

    return make


def _asked(change: Callable[[Inputs], Inputs]) -> Make:
    """Return the maker of an engine that is given another call."""
    return lambda source, directory: FaultyEngine(engine_of(source.spec), ask=change)


def _answered(change: Callable[[Inputs, Outputs], Outputs]) -> Make:
    """Return the maker of an engine whose answers are changed."""
    return lambda source, directory: FaultyEngine(engine_of(source.spec), answer=change)


def _planted(operator: str, branch: str, change: Callable[[onnx.NodeProto], object]) -> Make:
    """Return the maker of an engine with an error in the first such node of a branch."""

    def make(source: Source, directory: Path) -> Engine:
        graph = _graph_of(source, directory, {}, {})
        model = onnx.load_model_from_string(graph.model)
        nodes = model.graph.node
        if branch:
            chosen = next(node for node in nodes if node.op_type == "If")
            nodes = next(a.g for a in chosen.attribute if a.name == branch).node
        change(next(node for node in nodes if node.op_type == operator))
        return OnnxEngine(replace(graph, model=model.SerializeToString()), source.config)

    return make


def _set(name: str, value: object) -> Callable[[onnx.NodeProto], None]:
    def change(node: onnx.NodeProto) -> None:
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend(kept)
        if value is not None:
            node.attribute.append(helper.make_attribute(name, value))

    return change


def _by(formula: type[Formula]) -> Make:
    return lambda source, directory: FormulaEngine(source, formula)


def _flipped(tensor: Tensor) -> Tensor:
    return tensor.flip(0)


def _rolled(tensor: Tensor) -> Tensor:
    return tensor.roll(1, 0)


def _nowhere(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, -1e9)


def _reversed(array: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    return None if array is None else np.ascontiguousarray(array[::-1])


def _shared_by_all(inputs: Inputs) -> Inputs:
    positions = inputs.positions
    if positions is None:
        return inputs
    return replace(inputs, positions=np.repeat(positions[:1], len(positions), axis=0))


ERRORS: dict[str, tuple[str, Make]] = {
    "keys and values grouped in turn": ("grouped", _by(GroupedInTurn)),
    "a bias left out": ("grouped", _other({"value.bias": None}, biases=("query",))),
    "neighbours turned in place of halves": ("halves", _rotary(interleaved=True)),
    "halves turned in place of neighbours": ("interleaved", _rotary(interleaved=False)),
    "frequencies off by one": ("halves", _other({"rotary.frequencies": _rolled})),
    "turned the other way": ("norm and rotary", _other({"rotary.frequencies": torch.neg})),
    "the magnitude left out": ("interleaved", _rotary(magnitude=1.0)),
    "one pair not turned": (
        "halves",
        _other({"rotary.frequencies": lambda f: f * torch.tensor([1.0, 0.0])}),
    ),
    "all frequencies dynamic": ("dynamic", _rotary(original_length=1)),
    "no frequency dynamic": ("dynamic", _rotary(original_length=10**6)),
    "another factor": ("dynamic", _rotary(factor=2.1)),
    "the length of the batch": ("dynamic", _by(LengthOfTheBatch)),
    "longer one token too late": ("dynamic", _rotary(original_length=65)),
    "long frequencies never": ("longrope", _rotary(original_length=10**6)),
    "the long frequencies of the batch": ("longrope", _by(LengthOfTheBatch)),
    "the norm's epsilon": ("rms per head", _planted("RMSNormalization", "", _set("epsilon", 1e-5))),
    "the norm's epsilon of the keys": (
        "norm of the projection",
        _planted("LayerNormalization", "", _set("epsilon", 1e-5)),
    ),
    # Without positions between norm and product the two are interchangeable.
    "norms of queries and keys swapped": (
        "norm and rotary",
        lambda source, directory: _other(
            {
                "query_norm.weight": lambda _: source.spec.tensors["key_norm.weight"],
                "key_norm.weight": lambda _: source.spec.tensors["query_norm.weight"],
            }
        )(source, directory),
    ),
    "the norm's bias left out": (
        "norm of the projection",
        _other({"query_norm.bias": torch.zeros_like}),
    ),
    "the norm after the positions": ("norm and rotary", _by(NormAfterRotary)),
    "the bias for distances with the other sign": (
        "alibi",
        _other({"position_bias.slopes": torch.neg}),
    ),
    "slopes of the other head": ("alibi", _other({"position_bias.slopes": _flipped})),
    "distances the other way round": ("buckets", _other({"position_bias.table": _flipped})),
    "distances off by one": ("buckets", _other({"position_bias.table": _rolled})),
    "distances within a shorter reach": (
        "buckets",
        _other(
            {"position_bias.table": lambda table: table[1:-1]},
            position_bias=PositionBias("buckets", 4),
        ),
    ),
    "the scale left out": ("buckets", _other(scale=None)),
    "the cap left out": ("soft-capped window", _other(softcap=None)),
    "the cap before the scale": ("soft-capped window", _other(softcap=2.0 / 2)),
    "the cap after the bias": ("soft-capped distances", _by(CapAfterBias)),
    "the cap after the mask": ("soft-capped window", _by(CapAfterMask)),
    "the window one too wide": ("soft-capped window", _engine_believes(window=6)),
    "the window one too narrow": ("soft-capped window", _engine_believes(window=4)),
    "the window one too wide on both sides": ("window both ways", _engine_believes(window=4)),
    "the window left out": ("sinks", _engine_believes(window=None)),
    "the causal default lost": ("halves", _asked(lambda inputs: replace(inputs, causal=False))),
    "the causal default lost on the plain path": (
        "halves",
        _planted("Attention", "then_branch", _set("is_causal", None)),
    ),
    "the causal default lost beside distances": (
        "alibi",
        _planted("Attention", "then_branch", _set("is_causal", None)),
    ),
    "the causal default lost beside sinks": (
        "sinks",
        _planted("GreaterOrEqual", "then_branch", lambda node: setattr(node, "op_type", "Greater")),
    ),
    "a causal layer that cannot be otherwise": (
        "halves",
        _asked(lambda inputs: replace(inputs, causal=True)),
    ),
    "sinks left out": ("sinks", _other({"extra.sinks": _nowhere})),
    "sinks left out on the plain path": (
        "sinks",
        _planted("Attention", "then_branch", lambda node: node.input.pop(3)),
    ),
    "sinks of the other heads": ("sinks", _other({"extra.sinks": _flipped})),
    "sinks scaled": ("sinks", _by(SinkScaled)),
    "learned key and value swapped": (
        "learned and zero keys",
        lambda source, directory: _other(
            {
                "extra.key": lambda _: source.spec.tensors["extra.value"],
                "extra.value": lambda _: source.spec.tensors["extra.key"],
            }
        )(source, directory),
    ),
    "extra keys in another order": (
        "learned and zero keys",
        _other(extra_keys=("zero", "learned")),
    ),
    "extra weights of nothing": (
        "sinks",
        _answered(
            lambda inputs, outputs: (
                outputs
                if outputs.extra_weights is None
                else replace(outputs, extra_weights=0 * outputs.extra_weights)
            )
        ),
    ),
    "values of the other rows": (
        "two memories",
        _asked(lambda inputs: replace(inputs, value_memory=_reversed(inputs.value_memory))),
    ),
    "the table of positions off by one": (
        "learned positions",
        _other({"positional.table": _rolled}),
    ),
    "sines and cosines swapped": (
        "sinusoidal",
        _planted("Where", "", lambda node: node.input.extend([node.input.pop(1)])),
    ),
    **{
        f"positions ignored, {kind}": (
            kind,
            _asked(lambda inputs: replace(inputs, positions=None)),
        )
        for kind in WITH_POSITIONS
    },
    **{
        f"positions of the first row for all, {kind}": (kind, _asked(_shared_by_all))
        for kind in ("halves", "alibi", "sinusoidal")
    },
}


@pytest.fixture
def _unscaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the search for the inputs' scale, which is 1 for all of these layers."""
    monkeypatch.setattr("export.gate._input_scale", lambda *arguments: 1.0)


@pytest.mark.usefixtures("_unscaled")
@pytest.mark.parametrize(("kind", "make"), ERRORS.values(), ids=ERRORS)
def test_gate_finds_every_error_planted_in_an_option(kind: str, make: Make, tmp_path: Path) -> None:
    """In the graph, in the weights, in the engine, or in the arithmetic."""
    source = random_source(KINDS[kind], SEED)
    engine = make(source, tmp_path)

    with pytest.raises(GateFailed):
        pass_gate(engine, source)


@pytest.mark.usefixtures("_unscaled")
@pytest.mark.parametrize("kind", ["grouped", "soft-capped distances", "norm and rotary", "dynamic"])
def test_formula_in_an_engines_place_passes(kind: str) -> None:
    """The errors above that are planted in the formula are of that error each."""
    source = random_source(KINDS[kind], SEED)

    assert pass_gate(FormulaEngine(source, Formula), source).rows


def test_gate_answer_without_the_weights_of_extra_keys_fails() -> None:
    """Both together are what sums to 1, and both are compared."""
    source = random_source(KINDS["sinks"], SEED)
    make = _answered(lambda inputs, outputs: replace(outputs, extra_weights=None))

    with pytest.raises(
        ShapesDiffer, match=r"attention_weights: expected shape \[1, 4, 1, 2\], got \[1, 4, 1, 1\]"
    ):
        pass_gate(make(source, Path()), source)


def test_formula_plain_output_is_that_of_a_default_call() -> None:
    """Where not all weights fit, the causal default and the extra keys still count."""
    for kind in ("halves", "sinks", "soft-capped window"):
        formula = formula_of(random_source(KINDS[kind], SEED))
        x = np.random.default_rng(SEED).standard_normal((2, 9, KINDS[kind].embed_dim))

        assert (formula.plain_output(x) == formula(x).output).all()
