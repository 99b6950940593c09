"""The publishing gate: good layers pass, and every fault it is there for is seen failing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from export.gate import (
    LOGIT_LIMIT,
    GateFailed,
    Report,
    ShapesDiffer,
    ValuesDiffer,
    formula_of,
    pass_gate,
)
from export.graph import LONG, write_graph
from export.grid import GRID, REDUCED_GRID, WEIGHTS_BYTES, Cell, compares_weights, grid, proof_of
from export.layer_spec import LayerSpec
from export.publish import publish
from export.sources import Source, random_layer
from service.contract import GraphTensor, graph_inputs, graph_outputs
from service.errors import ArtifactUnreadable, InferenceFailed
from service.inference.artifact import Graph, read_graph
from service.inference.calls import Inputs, Outputs
from service.inference.engine import Engine, OnnxEngine, Provider, Stop
from service.layer_config import LayerConfig
from tests.support.doubles import FaultyEngine

SEED = 2
"""Any: the gate judges every layer alike."""

TOLERANCE = 1e-5
"""What the contract promises for FP32, which the gate must not widen."""

LAYERS: dict[str, LayerConfig] = {
    "self": LayerConfig(8, 2),
    "self without bias": LayerConfig(12, 3, biases=()),
    "one head": LayerConfig(8, 1),
    "cross": LayerConfig(8, 2, memory_dim=6),
}


def _source(config: LayerConfig, seed: int = SEED) -> Source:
    """Return a layer whose answers to the gate are smaller than 1: relative is absolute."""
    return random_layer(
        config.embed_dim,
        config.num_heads,
        seed=seed,
        memory_dim=config.memory_dim,
        bias=bool(config.biases),
    )


@dataclass(frozen=True)
class Exported:
    """A layer and the engine that answers for it."""

    source: Source
    engine: Engine


def _export(source: Source, directory: Path) -> Exported:
    path = directory / "layer.onnx"
    write_graph(source.spec, path)
    return Exported(source, OnnxEngine(read_graph(path), source.config))


@pytest.fixture(scope="module", params=LAYERS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Return each kind of layer, exported once."""
    source = _source(LAYERS[request.param])
    return _export(source, tmp_path_factory.mktemp("exported"))


only_self = pytest.mark.parametrize("exported", ["self"], indirect=True)


def test_gate_passes_a_good_layer(exported: Exported) -> None:
    """Every cell is measured against every reference that has an answer to it, and told of."""
    told: list[Cell | None] = []
    shares: list[float] = []

    def note(cell: Cell | None, share: float) -> None:
        told.append(cell)
        shares.append(share)

    report = pass_gate(exported.engine, exported.source, on_cell=note)

    cells = grid(exported.source.config)
    found = [(row.batch, row.length, row.key_length, row.masks) for row in report.rows]
    by_reference = {
        name: [cell for cell, row in zip(found, report.rows, strict=True) if row.reference == name]
        for name in ("formula", "layer", "torch", "alone")
    }
    places = [(cell.batch, cell.length, cell.key_length, cell.masks) for cell in cells]
    assert told == [None, None, *cells]
    assert shares == sorted(shares)
    assert (shares[0], shares[1] > 0, shares[-1]) == (0, True, 1)
    assert by_reference == {
        "formula": places,
        "layer": places,
        "torch": [p for p in places if p[3] not in ("empty row", "head mask", "all")],
        "alone": [place for place in places if place[0] > 1],
    }
    assert max(row.output_error for row in report.rows) <= TOLERANCE
    assert all(
        row.weights_error is not None and row.weights_error <= TOLERANCE for row in report.rows
    )
    assert report.input_scale == 1


def test_grid_reaches_every_way_through_graph_and_engine() -> None:
    """What the grid leaves out of all lengths, batches and masks repeats one of these ways."""
    cells = grid(LAYERS["self"])

    assert len(set(cells)) == len(cells) == sum(len(masks) for _, _, masks in GRID)
    assert all(cell.key_length == cell.length for cell in cells)
    for many_keys in (False, True):
        here = [cell for cell in cells if (cell.key_length >= LONG) == many_keys]
        for is_plain in (True, False):
            # A plain cell runs with weights, too: with a mask that hides nothing.
            ways = [cell for cell in here if cell.masks == "none" or not is_plain]
            assert {cell.batch > 1 for cell in ways} == {True, False}
            assert any(cell.length % 2 for cell in ways), "an odd length"
            assert any(cell.length % 8 == 0 for cell in ways if cell.key_length > 8)
    odd = {cell.masks for cell in cells if (cell.length, cell.batch) == (7, 3)}
    assert odd == {masks for _, _, kinds in GRID for masks in kinds}


def test_grid_of_cross_attention_has_keys_of_another_length_and_no_causal() -> None:
    """Queries and keys of cross-attention share no order, and no length: fewer keys, and more."""
    cells = grid(LAYERS["cross"])

    lengths = {cell.length: cell.key_length for cell in cells}

    assert lengths == {1: 1, 7: 5, 128: 96, 389: 401, 512: 384}
    assert {cell.masks for cell in cells} == {
        *("none", "padding", "pair", "head mask", "empty row", "all")
    }


@pytest.mark.fault("G11")
@pytest.mark.parametrize("num_heads", [1, 12, 192, 1024, 65536])
def test_grid_of_many_heads_stays_within_its_memory(num_heads: int) -> None:
    """Only plain cells above the limit are left, and they are compared without their weights."""
    config = LayerConfig(8, num_heads, head_dim=1)  # small enough for the whole grid

    cells = grid(config)

    large = [cell for cell in cells if not compares_weights(config, cell)]
    assert {cell.masks for cell in large} <= {"none"}
    assert (num_heads > 147) == bool(large)
    assert any(cell.key_length >= LONG for cell in cells)
    assert {cell.masks for cell in cells} == {masks for _, _, kinds in GRID for masks in kinds}
    weights = max(
        c.batch * num_heads * c.length * c.key_length * 4 for c in cells if c not in large
    )
    assert weights < WEIGHTS_BYTES / 4


@pytest.mark.fault("G11")
def test_gate_cell_without_weights_is_compared_with_the_formula_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the weights do not fit the output is still proven, and the report says which is not."""
    source = _source(LAYERS["self"])
    exported = _export(source, tmp_path)
    monkeypatch.setattr("export.grid.WEIGHTS_BYTES", 24 * 2 * 100_000)

    report = pass_gate(exported.engine, source)

    bare = [row for row in report.rows if row.weights_error is None]
    assert {(row.length, row.batch, row.masks, row.reference) for row in bare} == {
        (389, 2, "none", "formula"),
        (512, 1, "none", "formula"),
    }
    assert max(row.output_error for row in bare) <= TOLERANCE
    assert {row.length for row in report.rows if row.masks == "all"} == {1, 7, 256}
    off = FaultyEngine(
        exported.engine,
        answer=_where(lambda inputs, outputs: inputs.key_length > 500, lambda out: out + 0.001),
    )
    with pytest.raises(ValuesDiffer, match=r"length 512, masks none: output differs from formula"):
        pass_gate(off, source)


def test_gate_scales_its_inputs_down_for_large_weights(tmp_path: Path) -> None:
    """Beyond logits of 100 FP32 blurs the softmax; such a layer is tried where it can be right."""
    large = _scaled(random_layer(16, 2, seed=SEED), 10)
    exported = _export(large, tmp_path)

    report = pass_gate(exported.engine, exported.source)

    assert _largest_logit(large, 1.0) > LOGIT_LIMIT
    assert report.input_scale in (1 / 2, 1 / 4, 1 / 8)
    assert _largest_logit(large, report.input_scale) < LOGIT_LIMIT
    assert max(row.output_error for row in report.rows) <= TOLERANCE


def _scaled(source: Source, factor: float) -> Source:
    """Return the layer with every weight and bias that many times as large."""
    tensors = {name: factor * tensor for name, tensor in source.spec.tensors.items()}
    return Source(LayerSpec(source.config, tensors), {})


def _largest_logit(source: Source, scale: float) -> float:
    """Return the largest logit among as many random inputs as the longest cell has."""
    random = np.random.default_rng(SEED)
    embeddings = scale * random.standard_normal((1, 512, source.config.embed_dim))
    return formula_of(source).largest_logit(embeddings)


def test_gate_bounds_the_logits_of_every_cell_not_of_one() -> None:
    """A layer near the limit is not let over it by a cell that happens to draw larger inputs."""
    source = _scaled(random_layer(16, 2, seed=39), 3.5)
    seen = _WatchingEngine(source)

    with pytest.raises(ShapesDiffer):
        pass_gate(seen, source)

    # These weights reach 53 at length 128, 44 at length 389 and 47 at length 512.
    assert _largest_logit(source, 1.0) < LOGIT_LIMIT

    assert seen.scale is not None
    assert seen.scale < 0.75


class _WatchingEngine:
    """An engine that answers nothing but remembers how large its first input was."""

    def __init__(self, source: Source) -> None:
        self.layer = source.config
        self.provider: Provider = "cpu"
        self.concurrent_runs = 1
        self.scale: float | None = None

    def run(
        self, inputs: Inputs, *, weights: bool, stop: Stop | None = None, concurrent: bool = False
    ) -> Outputs:
        """See `Engine.run`."""
        self.scale = self.scale or float(inputs.embeddings.std())
        return Outputs(inputs.embeddings, None)


def test_gate_layer_whose_biases_alone_pass_the_limit_ends() -> None:
    """Where no scale helps, the search for one ends all the same, and the answer is judged."""
    tensors = _source(LAYERS["self"]).spec.tensors
    large = {f"{name}.bias": torch.full((8,), 100.0) for name in ("query", "key", "value")}
    source = Source(LayerSpec(LAYERS["self"], {**tensors, **large}), {})
    engine = _WatchingEngine(source)

    with pytest.raises(ShapesDiffer):
        pass_gate(engine, source)

    assert engine.scale is not None
    assert engine.scale < 1e-5


def _output(change: Callable[[Any], Any]) -> Callable[[Inputs, Outputs], Outputs]:
    """Change every output."""
    return lambda inputs, outputs: replace(outputs, output=change(outputs.output))


def _weights(change: Callable[[Any], Any]) -> Callable[[Inputs, Outputs], Outputs]:
    """Change the weights where they are asked for."""

    def answer(inputs: Inputs, outputs: Outputs) -> Outputs:
        if outputs.attention_weights is None:
            return outputs
        return replace(outputs, attention_weights=change(outputs.attention_weights))

    return answer


def _where(
    condition: Callable[[Inputs, Outputs], bool], change: Callable[[Any], Any]
) -> Callable[[Inputs, Outputs], Outputs]:
    """Change the output of some calls."""
    return lambda inputs, outputs: (
        replace(outputs, output=change(outputs.output)) if condition(inputs, outputs) else outputs
    )


def _one_nan(output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    output = output.copy()
    output.flat[-1] = np.nan
    return output


def _mean_of_values(inputs: Inputs, outputs: Outputs) -> Outputs:
    """Answer to an empty row as a runtime does that hides keys with a large finite number."""
    if inputs.pair_mask is None or outputs.attention_weights is None:
        return outputs
    weights = outputs.attention_weights.copy()
    weights[~inputs.pair_mask.any(axis=-1)] = 1 / inputs.key_length
    return replace(outputs, attention_weights=weights)


FIRST = r"batch 1, length 1, masks none: "
ALLOWED = r", allowed 1e-05"

VALUE_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "output off": (
        {"answer": _output(lambda output: output + 0.001)},
        FIRST + r"output differs from formula by 0\.001" + ALLOWED,
    ),
    "output off by little": (
        {"answer": _output(lambda output: output + 1.2e-5)},
        FIRST + r"output differs from formula by 1\.[12]\d*e-05" + ALLOWED,
    ),
    "one NaN": (
        {"answer": _output(_one_nan)},
        FIRST + r"output differs from formula by inf" + ALLOWED,
    ),
    "infinity": (
        {"answer": _output(lambda output: output * np.float32(np.inf))},
        FIRST + r"output differs from formula by inf" + ALLOWED,
    ),
    "weights off": (
        {"answer": _weights(lambda weights: weights * 0.99)},
        FIRST + r"attention_weights differs from formula by 0\.01" + ALLOWED,
    ),
    "weights NaN": (
        {"answer": _weights(lambda weights: weights * np.float32(np.nan))},
        FIRST + r"attention_weights differs from formula by inf" + ALLOWED,
    ),
    "heads averaged": (
        {
            "answer": _weights(
                lambda weights: np.broadcast_to(weights.mean(1, keepdims=True), weights.shape)
            )
        },
        r"batch 1, length 7, masks none: attention_weights differs from formula by 0\.\d+"
        + ALLOWED,
    ),
    "heads swapped": (
        {"answer": _weights(lambda weights: weights[:, ::-1])},
        r"batch 1, length 7, masks none: attention_weights differs from formula by 0\.\d+"
        + ALLOWED,
    ),
    "queries and keys swapped": (
        {"answer": _weights(lambda weights: weights.swapaxes(2, 3))},
        r"batch 1, length 7, masks none: attention_weights differs from formula by 0\.\d+"
        + ALLOWED,
    ),
    "causal ignored": (
        {"ask": lambda inputs: replace(inputs, causal=False)},
        r"batch \d, length 7, masks causal: output differs from formula by 0\.\d+" + ALLOWED,
    ),
    "padding ignored": (
        {"ask": lambda inputs: replace(inputs, attend_mask=None)},
        r"batch 3, length 7, masks padding: output differs from formula by 0\.\d+" + ALLOWED,
    ),
    "head mask ignored": (
        {"ask": lambda inputs: replace(inputs, head_mask=None)},
        r"batch 3, length 1, masks all: output differs from formula by 0\.\d+" + ALLOWED,
    ),
    "padding upside down": (
        {
            "ask": lambda inputs: replace(
                inputs, attend_mask=None if inputs.attend_mask is None else ~inputs.attend_mask
            )
        },
        r"batch 3, length 1, masks all: output differs from formula by 0\.\d+" + ALLOWED,
    ),
    "pairs ignored": (
        {"ask": lambda inputs: replace(inputs, pair_mask=None)},
        r"batch 1, length \d, masks (pair|empty row): output differs from formula by 0\.\d+"
        + ALLOWED,
    ),
    "pairs of the first head for all": (
        {
            "ask": lambda inputs: replace(
                inputs, pair_mask=None if inputs.pair_mask is None else inputs.pair_mask[:, :1]
            )
        },
        r"batch \d, length \d, masks pair: output differs from formula by 0\.\d+" + ALLOWED,
    ),
    "empty row averaged": (
        {"answer": _mean_of_values},
        r"batch 1, length 1, masks empty row: attention_weights differs from formula by 1"
        + ALLOWED,
    ),
    "other output where no weights are asked for": (
        {
            "answer": _where(
                lambda inputs, outputs: outputs.attention_weights is None,
                lambda output: output + 0.001,
            )
        },
        FIRST + r"output differs from formula by 0\.001" + ALLOWED,
    ),
    "other output in a batch": (
        {
            "answer": _where(
                lambda inputs, outputs: len(inputs.embeddings) > 1, lambda output: output + 0.001
            )
        },
        r"batch 3, length 1, masks none: output differs from formula by 0\.001" + ALLOWED,
    ),
    "batch in another order": (
        {
            "answer": _where(
                lambda inputs, outputs: len(inputs.embeddings) > 1, lambda output: output[::-1]
            )
        },
        r"batch 3, length 1, masks none: output differs from formula by 0\.\d+" + ALLOWED,
    ),
    "long sequences off": (
        {
            "answer": _where(
                lambda inputs, outputs: inputs.key_length > 500, lambda output: output + 0.001
            )
        },
        r"batch 1, length 512, masks none: output differs from formula by 0\.001" + ALLOWED,
    ),
}


@only_self
@pytest.mark.parametrize(("fault", "message"), VALUE_FAULTS.values(), ids=VALUE_FAULTS)
def test_gate_wrong_values_fail_with_place_and_size(
    exported: Exported, fault: dict[str, Any], message: str
) -> None:
    """The message says in which cell, which tensor, from what, how far and what is allowed."""
    engine = FaultyEngine(exported.engine, **fault)

    with pytest.raises(ValuesDiffer, match=f"^{message}$"):
        pass_gate(engine, exported.source)


@only_self
def test_gate_batch_and_single_apart_fail_though_each_is_near_enough(exported: Exported) -> None:
    """A caller's answer must not move with its company by more than the tolerance."""
    nearly = np.float32(0.8 * TOLERANCE)

    def lean(inputs: Inputs, outputs: Outputs) -> Outputs:
        side = nearly if len(inputs.embeddings) > 1 else -nearly
        return replace(outputs, output=outputs.output + side)

    engine = FaultyEngine(exported.engine, answer=lean)

    message = r"^batch 3, length 1, masks none: output differs from alone by 1\.[56]\d*e-05" + (
        ALLOWED + "$"
    )
    with pytest.raises(ValuesDiffer, match=message):
        pass_gate(engine, exported.source)


def _with(source: Source, **derived: nn.Module) -> Source:
    """Return the source with another layer or reference than its weights give."""
    changed = replace(source)
    vars(changed).update(derived)  # where they are kept once they are made
    return changed


@only_self
def test_gate_layer_that_strayed_from_its_weights_fails(exported: Exported) -> None:
    """The exported layer itself is a reference, not only where its weights came from."""
    other = _source(LAYERS["self"], SEED + 1).layer
    source = _with(exported.source, layer=other)

    with pytest.raises(ValuesDiffer, match=FIRST + r"output differs from layer by 0\.\d+"):
        pass_gate(exported.engine, source)


class _OtherAttention(nn.MultiheadAttention):
    """PyTorch's own layer, should a new version of it compute something else."""

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """See `nn.MultiheadAttention.forward`."""
        output, weights = super().forward(*args, **options)
        return output + 0.5, weights


@only_self
def test_gate_pytorch_that_answers_otherwise_fails(exported: Exported) -> None:
    """PyTorch's own layer is asked, not only read."""
    reference = _OtherAttention(8, 2, batch_first=True)
    assert exported.source.reference is not None
    reference.load_state_dict(exported.source.reference.state_dict())
    source = _with(exported.source, reference=reference.eval())

    with pytest.raises(ValuesDiffer, match=FIRST + r"output differs from torch by 0\.\d+"):
        pass_gate(exported.engine, source)


CELL = r"Cell\(batch=1, length=1, key_length=1, masks='none'\): "

SHAPE_FAULTS: dict[str, tuple[Callable[[Inputs, Outputs], Outputs], str]] = {
    "output too narrow": (
        _output(lambda output: output[..., :-1]),
        CELL + r"output: expected shape \[1, 1, 8\], got \[1, 1, 7\]",
    ),
    "output without its batch": (
        _output(lambda output: output[0]),
        CELL + r"output: expected shape \[1, 1, 8\], got \[1, 8\]",
    ),
    "output too narrow where no weights are asked for": (
        lambda inputs, outputs: (
            replace(outputs, output=outputs.output[..., :1])
            if outputs.attention_weights is None
            else outputs
        ),
        CELL + r"output: expected shape \[1, 1, 8\], got \[1, 1, 1\]",
    ),
    "heads averaged away": (
        _weights(lambda weights: weights.mean(axis=1)),
        CELL + r"attention_weights: expected shape \[1, 2, 1, 1\], got \[1, 1, 1\]",
    ),
    "one head of two": (
        _weights(lambda weights: weights[:, :1]),
        CELL + r"attention_weights: expected shape \[1, 2, 1, 1\], got \[1, 1, 1, 1\]",
    ),
    "no weights": (
        _weights(lambda weights: None),
        CELL + r"expected attention weights, got none",
    ),
}


@only_self
@pytest.mark.parametrize(("answer", "message"), SHAPE_FAULTS.values(), ids=SHAPE_FAULTS)
def test_gate_wrong_shape_fails_before_any_value(
    exported: Exported, answer: Callable[[Inputs, Outputs], Outputs], message: str
) -> None:
    """A shape that numpy would stretch to fit is a failure of its own."""
    engine = FaultyEngine(exported.engine, answer=answer)

    with pytest.raises(ShapesDiffer, match=f"^{message}$"):
        pass_gate(engine, exported.source)


@only_self
def test_gate_engine_that_refuses_a_batch_is_not_hidden(exported: Exported) -> None:
    """What the engine raises reaches whoever exports."""
    wide = np.zeros((1, 1, 9), np.float32)
    engine = FaultyEngine(exported.engine, ask=lambda inputs: replace(inputs, embeddings=wide))

    with pytest.raises(InferenceFailed, match=r"^the runtime refused a batch$"):
        pass_gate(engine, exported.source)


@dataclass(frozen=True)
class Mutant:
    """A graph with one error planted."""

    node: str
    """The operator that is changed."""
    where: str
    """In which branch: "plain", "long" or "masked"; "" = outside of them."""
    change: Callable[[onnx.NodeProto], object]


def _attribute(name: str, value: object) -> Callable[[onnx.NodeProto], object]:
    def change(node: onnx.NodeProto) -> None:
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def _attributes(**values: object) -> Callable[[onnx.NodeProto], object]:
    return lambda node: [_attribute(name, value)(node) for name, value in values.items()]


def _branches_swapped(node: onnx.NodeProto) -> None:
    then, other = node.attribute
    then.name, other.name = other.name, then.name


def _inputs_swapped(one: int, other: int) -> Callable[[onnx.NodeProto], object]:
    def change(node: onnx.NodeProto) -> None:
        node.input[one], node.input[other] = node.input[other], node.input[one]

    return change


def _passed_on(node: onnx.NodeProto) -> None:
    """Make a node hand on its first input that is no constant."""
    first = next(name for name in node.input if "weight" not in name and "bias" not in name)
    del node.input[:]
    del node.attribute[:]
    node.input.append(first)
    node.op_type = "Identity"


ATTENTIONS = {"plain": "Attention", "long": "MultiHeadAttention", "masked": "Attention"}

MUTANTS: dict[str, Mutant] = {
    **{
        f"scale in the {where} branch": Mutant(node, where, _attribute("scale", 0.52))
        for where, node in ATTENTIONS.items()
    },
    **{
        f"queries and keys swapped in the {where} branch": Mutant(
            node, where, _inputs_swapped(0, 1)
        )
        for where, node in ATTENTIONS.items()
    },
    **{
        f"keys and values swapped in the {where} branch": Mutant(node, where, _inputs_swapped(1, 2))
        for where, node in ATTENTIONS.items()
    },
    "causal in the plain branch": Mutant("Attention", "plain", _attribute("is_causal", 1)),
    "causal in the long branch": Mutant(
        "MultiHeadAttention", "long", _attribute("unidirectional", 1)
    ),
    "causal in the masked branch": Mutant("Attention", "masked", _attribute("is_causal", 1)),
    "other heads in the long branch": Mutant(
        "MultiHeadAttention", "long", _attribute("num_heads", 4)
    ),
    "mask ignored": Mutant("Attention", "masked", lambda node: node.input.pop(3)),
    "softcap": Mutant("Attention", "masked", _attribute("softcap", 1.0)),
    "weights before the softmax": Mutant(
        "Attention", "masked", _attribute("qk_matmul_output_mode", 0)
    ),
    "weights before the mask": Mutant(
        "Attention", "masked", _attribute("qk_matmul_output_mode", 2)
    ),
    "head mask ignored": Mutant("Mul", "masked", _passed_on),
    "a bias missing": Mutant("Add", "", _passed_on),
    "the other branch": Mutant("If", "", lambda node: _branches_swapped(node)),
    "heads of another width": Mutant(
        "Attention", "masked", _attributes(q_num_heads=4, kv_num_heads=4)
    ),
}


def _branches(graph: onnx.GraphProto) -> dict[str, onnx.GraphProto]:
    """Return the graph ("") and its three branches by name."""

    def of(node: onnx.NodeProto) -> dict[str, onnx.GraphProto]:
        return {attribute.name: attribute.g for attribute in node.attribute}

    outer = of(next(node for node in graph.node if node.op_type == "If"))
    inner = of(next(node for node in outer["then_branch"].node if node.op_type == "If"))
    return {
        "": graph,
        "masked": outer["else_branch"],
        "long": inner["then_branch"],
        "plain": inner["else_branch"],
    }


@pytest.fixture(scope="module")
def good_graph(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Graph]:
    """Return a layer and its graph, in which errors are planted."""
    source = _source(LAYERS["self"])
    path = tmp_path_factory.mktemp("good") / "layer.onnx"
    write_graph(source.spec, path)
    return source, read_graph(path)


@pytest.mark.fault("E3")
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_gate_finds_every_error_planted_in_the_graph(
    good_graph: tuple[Source, Graph], mutant: Mutant
) -> None:
    """The grid is small, but reaches each operator of each branch at a size that shows it."""
    source, graph = good_graph
    model = onnx.load_model_from_string(graph.model)
    nodes = _branches(model.graph)[mutant.where].node
    mutant.change(next(node for node in nodes if node.op_type == mutant.node))
    planted = replace(graph, model=model.SerializeToString())

    with pytest.raises((GateFailed, InferenceFailed, ArtifactUnreadable)):
        pass_gate(OnnxEngine(planted, source.config), source)


@pytest.mark.fault("E3")
@pytest.mark.parametrize(
    ("name", "change"),
    {
        "query transposed": ("query.weight", lambda w: w.T),
        "key transposed": ("key.weight", lambda w: w.T),
        "value transposed": ("value.weight", lambda w: w.T),
        "output transposed": ("output.weight", lambda w: w.T),
        "heads of the query swapped": ("query.weight", lambda w: w.roll(4, 0)),
        "heads of the values swapped": ("value.weight", lambda w: w.roll(4, 0)),
        "heads of the output swapped": ("output.weight", lambda w: w.roll(4, 1)),
        "one weight": ("query.weight", lambda w: w + 1e-3 * torch.eye(8)),
        "bias of the queries' heads swapped": ("query.bias", lambda b: b.roll(4)),
        "bias of the values left out": ("value.bias", torch.zeros_like),
    }.values(),
)
def test_gate_finds_weights_that_are_not_the_layers(
    good_graph: tuple[Source, Graph],
    tmp_path: Path,
    name: str,
    change: Callable[[Tensor], Tensor],
) -> None:
    """A graph of almost the same weights is not the layer's."""
    source, _ = good_graph
    tensors = source.spec.tensors
    changed = {**tensors, name: change(tensors[name])}
    other = _export(Source(LayerSpec(source.config, changed), {}), tmp_path)

    with pytest.raises(ValuesDiffer):
        pass_gate(other.engine, source)


def test_good_graph_passes(good_graph: tuple[Source, Graph]) -> None:
    """The failures above are of their one error each."""
    source, graph = good_graph

    assert pass_gate(OnnxEngine(graph, source.config), source).rows


def test_gate_failures_are_of_one_family() -> None:
    """Who only wants to know whether it passed catches one class."""
    assert issubclass(ShapesDiffer, GateFailed)
    assert issubclass(ValuesDiffer, GateFailed)
    assert Report((), 1.0).rows == ()


CONFIG = LayerConfig(8, 2)
INPUTS, OUTPUTS = graph_inputs(CONFIG), graph_outputs(CONFIG)
ELEMENT_TYPES = {"float32": TensorProto.FLOAT, "bool": TensorProto.BOOL}


def _small_graph(path: Path, inputs: Sequence[GraphTensor], outputs: Sequence[GraphTensor]) -> None:
    """Write a graph that takes and gives these tensors, whatever it may compute."""
    nodes = [
        # A shape that no one can infer leaves the declared axes as they are.
        helper.make_node("Shape", [inputs[0].name], ["shape"]),
        helper.make_node("NonZero", ["shape"], ["places"]),
        helper.make_node("Reshape", ["places", "flat"], ["unknown"]),
        *(helper.make_node("ConstantOfShape", ["unknown"], [tensor.name]) for tensor in outputs),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info(t.name, ELEMENT_TYPES[t.dtype], t.axes) for t in inputs],
        [helper.make_tensor_value_info(t.name, ELEMENT_TYPES[t.dtype], t.axes) for t in outputs],
        [helper.make_tensor("flat", TensorProto.INT64, [1], [-1])],
    )
    opset = [helper.make_opsetid("", 23)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)


def _one_changed(tensors: Sequence[GraphTensor], at: int, **change: Any) -> list[GraphTensor]:
    return [replace(t, **change) if i == at else t for i, t in enumerate(tensors)]


INPUT_NAMES = "['embeddings', 'pair_mask', 'head_mask', 'plain']"

SIGNATURES: dict[str, tuple[Sequence[GraphTensor], Sequence[GraphTensor], str]] = {
    "input misspelt": (
        _one_changed(INPUTS, 0, name="embedings"),
        OUTPUTS,
        f"input names: expected {INPUT_NAMES},"
        " found ['embedings', 'pair_mask', 'head_mask', 'plain']",
    ),
    "input missing": (
        INPUTS[:-1],
        OUTPUTS,
        f"input names: expected {INPUT_NAMES}, found ['embeddings', 'pair_mask', 'head_mask']",
    ),
    "inputs in another order": (
        INPUTS[::-1],
        OUTPUTS,
        f"input names: expected {INPUT_NAMES},"
        " found ['plain', 'head_mask', 'pair_mask', 'embeddings']",
    ),
    "memory of cross-attention": (
        graph_inputs(LayerConfig(8, 2, memory_dim=6)),
        OUTPUTS,
        f"input names: expected {INPUT_NAMES},"
        " found ['embeddings', 'memory', 'pair_mask', 'head_mask', 'plain']",
    ),
    "output missing": (
        INPUTS,
        OUTPUTS[:1],
        "output names: expected ['output', 'attention_weights'], found ['output']",
    ),
    "batch baked in": (
        _one_changed(INPUTS, 0, axes=(2, "length", 8)),
        OUTPUTS,
        "input embeddings axes: expected ['batch', 'length', 8], found [2, 'length', 8]",
    ),
    "length baked in": (
        _one_changed(INPUTS, 0, axes=("batch", 3, 8)),
        OUTPUTS,
        "input embeddings axes: expected ['batch', 'length', 8], found ['batch', 3, 8]",
    ),
    "another width": (
        _one_changed(INPUTS, 0, axes=("batch", "length", 16)),
        OUTPUTS,
        "input embeddings axes: expected ['batch', 'length', 8], found ['batch', 'length', 16]",
    ),
    "another number of heads": (
        _one_changed(INPUTS, 2, axes=("mask_rows", 4)),
        OUTPUTS,
        "input head_mask axes: expected ['mask_rows', 2], found ['mask_rows', 4]",
    ),
    "a mask of numbers": (
        _one_changed(INPUTS, 1, dtype="float32"),
        OUTPUTS,
        "input pair_mask: expected bool, found float32",
    ),
    "weights of one head": (
        INPUTS,
        _one_changed(OUTPUTS, 1, axes=("batch", 1, "length", "length")),
        "output attention_weights axes: expected ['batch', 2, 'length', 'length'],"
        " found ['batch', 1, 'length', 'length']",
    ),
    "weights without heads": (
        INPUTS,
        _one_changed(OUTPUTS, 1, axes=("batch", "length", "length")),
        "output attention_weights axes: expected ['batch', 2, 'length', 'length'],"
        " found ['batch', 'length', 'length']",
    ),
}


@pytest.mark.parametrize(("inputs", "outputs", "message"), SIGNATURES.values(), ids=SIGNATURES)
def test_engine_graph_of_another_signature_is_refused(
    inputs: Sequence[GraphTensor], outputs: Sequence[GraphTensor], message: str, tmp_path: Path
) -> None:
    """Names fail first, then types, then axes; the message names what was expected and found."""
    path = tmp_path / "layer.onnx"
    _small_graph(path, inputs, outputs)

    with pytest.raises(ArtifactUnreadable) as caught:
        OnnxEngine(Graph(path, path.read_bytes(), b""), CONFIG)

    assert str(caught.value) == f"{path}: {message}"


def test_engine_graph_of_the_right_signature_is_taken(tmp_path: Path) -> None:
    """The refusals above are of their one fault each."""
    path = tmp_path / "layer.onnx"
    _small_graph(path, INPUTS, OUTPUTS)

    engine = OnnxEngine(Graph(path, path.read_bytes(), b""), CONFIG)

    assert [tensor.name for tensor in engine.inputs()] == [tensor.name for tensor in INPUTS]


def _branch_that_reads(name: str, where: str) -> Graph:
    """Return a graph with a branch that keeps a constant in the external file `name`."""
    far = onnx.TensorProto(
        name="far",
        data_type=onnx.TensorProto.FLOAT,
        dims=[8],
        data_location=onnx.TensorProto.EXTERNAL,
    )
    for key, value in {"location": name, "length": "32"}.items():
        far.external_data.add(key=key, value=value)
    result = onnx.helper.make_tensor_value_info("result", onnx.TensorProto.FLOAT, [8])
    if where == "initializer":
        node = onnx.helper.make_node("Identity", ["far"], ["result"])
        branch = onnx.helper.make_graph([node], "branch", [], [result], [far])
    else:
        node = onnx.helper.make_node("Constant", [], ["result"], value=far)
        branch = onnx.helper.make_graph([node], "branch", [], [result])
    choice = onnx.helper.make_node(
        "If", ["plain"], ["output"], then_branch=branch, else_branch=branch
    )
    graph = onnx.helper.make_graph(
        [choice],
        "graph",
        [onnx.helper.make_tensor_value_info("plain", onnx.TensorProto.BOOL, [])],
        [onnx.helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, [8])],
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10
    )
    return Graph(Path("layer.onnx"), model.SerializeToString(), bytes(32))


@pytest.mark.parametrize("name", ["secret", "layer.weights"])
@pytest.mark.parametrize("where", ["initializer", "constant"])
def test_engine_branch_with_a_file_of_its_own_is_refused(
    where: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime looks for those on disk, whatever it was given in memory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(bytes(32))

    with pytest.raises(ArtifactUnreadable, match=f"should be stored in /dev/null/{name}"):
        OnnxEngine(_branch_that_reads(name, where), CONFIG)


def test_publish_layer_whose_weights_were_written_wrong_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof reads the weights back, so that what was written must be what was read."""
    source = _source(LAYERS["self"])
    changed = dict(source.spec.tensors)
    changed["key.weight"] = changed["key.weight"].nextafter(torch.tensor(torch.inf))
    wrong = LayerSpec(source.config, changed)
    monkeypatch.setattr("export.publish.write_graph", lambda spec, path: write_graph(wrong, path))

    with pytest.raises(GateFailed, match=r"key\.weight was not written as it is$"):
        publish(source, tmp_path, "wrong")

    assert not list(tmp_path.iterdir())


def test_grid_of_large_weights_is_reduced() -> None:
    """Above 1 GB fewer cells are left: vectors, every mask at once, and more keys than `LONG`."""
    large = LayerConfig(16384, 128, num_kv_heads=1, biases=(), causal=True)

    cells = grid(large)

    assert proof_of(large) == "reduced"
    assert proof_of(LayerConfig(8192, 64, biases=())) == "whole"  # 2^30 bytes
    assert len(cells) == sum(len(masks) for _, _, masks in REDUCED_GRID) < len(grid(LAYERS["self"]))
    assert {"none", "not causal", "empty row", "all"} == {cell.masks for cell in cells}
    assert {cell.batch > 1 for cell in cells} == {True, False}
    assert max(cell.key_length for cell in cells) >= LONG


def test_publish_layer_whose_graph_has_another_width_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that the contract does not know never reaches the repository."""
    narrow = _source(LayerConfig(6, 2)).spec
    monkeypatch.setattr("export.publish.write_graph", lambda spec, path: write_graph(narrow, path))

    with pytest.raises(GateFailed) as caught:
        publish(_source(LAYERS["self"]), tmp_path, "wide")

    assert str(caught.value).endswith(
        "layer.onnx: graph: query_key_value.weight: expected 24 columns, found 18"
    )
    assert not list(tmp_path.iterdir())
