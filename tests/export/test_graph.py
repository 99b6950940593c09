"""The written graph: the contract's names and axes, nothing baked in, every weight beside it."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper
from onnx.numpy_helper import to_array
from torch import Tensor

import export
from export.attention import MultiHeadAttention
from export.gate import formula_of
from export.graph import LONG, OPSET, read_state, write_graph
from export.sources import Source, random_layer
from service.contract import WEIGHTS_FILE, LayerConfig, graph_inputs, graph_outputs
from service.errors import ArtifactUnreadable
from service.inference.artifact import read_graph
from service.inference.calls import Inputs
from service.inference.engine import Engine, OnnxEngine
from service.inference.parity import relative_error

SEED = 3
"""Any: the graph does not depend on the weights."""

TOLERANCE = 1e-5
"""The contract's promise for FP32."""

LAYERS: dict[str, dict[str, Any]] = {
    "self": {"embed_dim": 8, "num_heads": 2},
    "self without bias": {"embed_dim": 12, "num_heads": 3, "bias": False},
    "one head": {"embed_dim": 8, "num_heads": 1},
    "cross": {"embed_dim": 8, "num_heads": 2, "memory_dim": 6},
    "cross without bias": {"embed_dim": 12, "num_heads": 3, "memory_dim": 5, "bias": False},
    "cross of equal widths": {"embed_dim": 8, "num_heads": 2, "memory_dim": 8},
}

PLAIN_BRANCH = ["Shape", "Constant", "GreaterOrEqual", "If", "Shape", "ConstantOfShape"]
LONG_BRANCH = ["MultiHeadAttention"]
SHORT_BRANCH = ["Attention"]
FULL_BRANCH = [
    *["Attention", "Constant", "Reshape", "Constant", "Unsqueeze"],
    *["Mul", "Constant", "Reshape"],
]
OPERATORS = {
    "self": ["MatMul", "Add", "Split", "If", "MatMul", "Add"],
    "self without bias": ["MatMul", "Split", "If", "MatMul"],
    "one head": ["MatMul", "Add", "Split", "If", "MatMul", "Add"],
    "cross": ["MatMul", "Add", "MatMul", "Add", "Split", "If", "MatMul", "Add"],
    "cross without bias": ["MatMul", "MatMul", "Split", "If", "MatMul"],
    "cross of equal widths": ["MatMul", "Add", "MatMul", "Add", "Split", "If", "MatMul", "Add"],
}
"""Every operator outside the branches, in order; more would be time lost in each call."""

SMALLEST_FP16 = -65504
"""A mask written as a constant below this is no number in FP16."""

ELEMENT_TYPES = {"float32": TensorProto.FLOAT, "bool": TensorProto.BOOL}


@dataclass(frozen=True)
class Written:
    """One layer and the graph that was written of it."""

    name: str
    source: Source
    path: Path
    warnings: list[str]

    @property
    def model(self) -> ModelProto:
        """The graph as ONNX, its weights not loaded."""
        return onnx.load(self.path, load_external_data=False)

    def engine(self) -> Engine:
        """Return the engine that serves it."""
        return OnnxEngine(read_graph(self.path), self.source.config)


def _write(name: str, directory: Path) -> Written:
    source, path = random_layer(**LAYERS[name], seed=SEED), directory / "layer.onnx"
    return Written(name, source, path, write_graph(source.layer, path))


@pytest.fixture(scope="module", params=LAYERS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Return each kind of layer, written once."""
    return _write(request.param, tmp_path_factory.mktemp("graph"))


def _all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """Give every node, those inside branches too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _all_nodes(attribute.g)


def _constants(graph: GraphProto) -> list[np.ndarray]:
    """Return the value of every Constant node, in whichever attribute it is."""
    return [
        np.asarray(value if not isinstance(value, TensorProto) else to_array(value))
        for node in _all_nodes(graph)
        if node.op_type == "Constant"
        for value in map(helper.get_attribute_value, node.attribute)
    ]


def test_graph_has_the_contracts_names_types_and_axes(written: Written) -> None:
    """What is free is free by name, so that one graph serves every batch and length."""
    graph, config = written.model.graph, written.source.config

    found = [
        (value.name, value.type.tensor_type.elem_type, tuple(_axes(value)))
        for value in [*graph.input, *graph.output]
    ]

    assert found == [
        (tensor.name, ELEMENT_TYPES[tensor.dtype], tensor.axes)
        for tensor in [*graph_inputs(config), *graph_outputs(config)]
    ]


def _axes(value: onnx.ValueInfoProto) -> list[str | int]:
    return [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]


def test_graph_consists_of_these_operators(written: Written) -> None:
    """One attention for each kind of call and nothing that a layer in training has."""
    graph = written.model.graph

    branches = _branches(graph)
    lengths = _branches(branches["then_branch"])

    assert _operators(graph) == OPERATORS[written.name]
    assert _operators(branches["then_branch"]) == PLAIN_BRANCH
    assert _operators(branches["else_branch"]) == FULL_BRANCH
    assert _operators(lengths["then_branch"]) == LONG_BRANCH
    assert _operators(lengths["else_branch"]) == SHORT_BRANCH


def _branches(graph: GraphProto) -> dict[str, GraphProto]:
    return {
        attribute.name: attribute.g
        for node in graph.node
        for attribute in node.attribute
        if attribute.type == AttributeProto.GRAPH
    }


def _operators(graph: GraphProto) -> list[str]:
    return [node.op_type for node in graph.node]


def test_graph_asks_the_standard_operators_and_one_of_the_runtimes(written: Written) -> None:
    """The runtime needs to know nothing of ours."""
    model = written.model

    others = [node.op_type for node in _all_nodes(model.graph) if node.domain]

    opsets = [(entry.domain, entry.version) for entry in model.opset_import]
    assert opsets == [("", OPSET), ("com.microsoft", 1)]
    assert OPSET == 23
    assert others == LONG_BRANCH
    assert not model.functions


def test_graph_constants_hold_no_size_of_the_example(written: Written) -> None:
    """The number of heads and what is long are written down; the rest is taken from the input."""
    constants = _constants(written.model.graph)

    values = [constant.tolist() for constant in constants]

    assert values == [[LONG], [0, 0, written.source.config.num_heads, -1], [1, 3], [0, 0, -1]]


def test_graph_constants_fit_any_float(written: Written) -> None:
    """A hidden key is no large negative number."""
    constants = _constants(written.model.graph)

    smallest = min(constant.min() for constant in constants)

    assert smallest >= SMALLEST_FP16


def test_graph_weights_all_lie_in_one_plainly_named_file(written: Written) -> None:
    """Every weight is in the file beside the graph, which is named without any path."""
    model, config = written.model, written.source.config

    places = {
        (tensor.data_location, entry.value)
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }

    numbers = sum(tensor.numel() for tensor in written.source.layer.parameters())
    assert places == {(TensorProto.EXTERNAL, WEIGHTS_FILE)}
    assert not any(tensor.raw_data or tensor.float_data for tensor in model.graph.initializer)
    assert len(model.graph.initializer) == (2 + config.is_cross) * (1 + config.bias)
    assert {file.name for file in written.path.parent.iterdir()} == {"layer.onnx", WEIGHTS_FILE}
    assert (written.path.parent / WEIGHTS_FILE).stat().st_size == 4 * numbers


def test_graph_without_its_weights_is_refused_by_name(written: Written, tmp_path: Path) -> None:
    """Who copies the graph alone is told which file is missing."""
    path = tmp_path / "layer.onnx"
    path.write_bytes(written.path.read_bytes())

    with pytest.raises(ArtifactUnreadable, match=WEIGHTS_FILE):
        OnnxEngine(read_graph(path), written.source.config)


def test_graph_tells_nothing_of_the_machine_that_wrote_it(written: Written) -> None:
    """An artifact goes out into the world without its author's paths."""
    content = written.path.read_bytes()

    places = [str(Path(module.__path__[0]).parent) for module in (export, onnx)]

    assert not [place for place in places if place.encode() in content]
    assert b".py" not in content


@pytest.mark.parametrize("written", ["self"], indirect=True)
def test_graph_written_twice_is_the_same_to_the_byte(written: Written, tmp_path: Path) -> None:
    """Checksums tell layers apart, not exports."""
    again = _write("self", tmp_path)

    assert again.path.read_bytes() == written.path.read_bytes()
    weights = [graph.path.parent / WEIGHTS_FILE for graph in (again, written)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_write_graph_of_a_good_layer_warns_of_nothing(written: Written) -> None:
    """Who exports an ordinary layer has nothing to read."""
    assert written.warnings == []


@pytest.mark.parametrize("length", [1, 2, 7, 9, 33])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_graph_answers_every_batch_and_length(written: Written, batch: int, length: int) -> None:
    """The sizes of the example that it was traced with are forgotten, on both paths."""
    random, config = np.random.default_rng(SEED), written.source.config
    keys = length + 2 if config.is_cross else length
    embeddings = random.standard_normal((batch, length, config.embed_dim)).astype(np.float32)
    memory = None
    if config.memory_dim is not None:
        memory = random.standard_normal((batch, keys, config.memory_dim)).astype(np.float32)
    attend_mask = np.ones((batch, keys), bool)
    attend_mask[0, keys // 2 :] = False
    engine = written.engine()

    plain = engine.run(Inputs(embeddings, memory), weights=False)
    full = engine.run(Inputs(embeddings, memory, attend_mask), weights=True)

    formula = formula_of(written.source)
    expected = formula(embeddings, memory, attend_mask=attend_mask)
    assert full.attention_weights is not None
    assert full.attention_weights.shape == (batch, config.num_heads, length, keys)
    assert relative_error(plain.output, formula(embeddings, memory).output) < TOLERANCE
    assert relative_error(full.output, expected.output) < TOLERANCE
    assert np.abs(full.attention_weights - expected.weights).max() < TOLERANCE


def test_graph_query_without_keys_answers_the_output_bias(written: Written) -> None:
    """The runtime's own operator keeps the rule that every layer here has."""
    config = written.source.config
    embeddings = np.ones((2, 4, config.embed_dim), np.float32)
    memory = None
    if config.memory_dim is not None:
        memory = np.ones((2, 4, config.memory_dim), np.float32)
    attend_mask = np.array([[True] * 4, [False] * 4])

    answer = written.engine().run(Inputs(embeddings, memory, attend_mask), weights=True)

    bias = written.source.layer.out.bias
    expected = np.zeros(config.embed_dim) if bias is None else bias.detach().numpy()
    assert answer.attention_weights is not None
    assert (answer.output[1] == expected).all()
    assert not answer.attention_weights[1].any()


def test_read_state_gives_back_the_weights_to_the_bit(written: Written) -> None:
    """An artifact alone is enough to prove it again."""
    state = read_state(read_graph(written.path), written.source.config)

    expected = dict(written.source.reference.state_dict())
    if written.source.config.is_cross and "in_proj_weight" in expected:
        query, key, value = expected.pop("in_proj_weight").chunk(3)
        expected |= {"q_proj_weight": query, "k_proj_weight": key, "v_proj_weight": value}
    assert state.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())


@pytest.mark.parametrize("written", ["self"], indirect=True)
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LayerConfig(8, 2, memory_dim=6),
            "graph: expected 3 projections, found 2 matrices and 2 biases",
        ),
        (
            LayerConfig(8, 2, bias=False),
            "graph: expected 2 projections, found 2 matrices and 2 biases",
        ),
    ],
    ids=["cross", "no bias"],
)
def test_read_state_of_another_layer_is_refused(
    written: Written, config: LayerConfig, message: str
) -> None:
    """The message says how many projections were expected and what came."""
    with pytest.raises(ValueError, match=f"^{message}$"):
        read_state(read_graph(written.path), config)


class _WarningLayer(MultiHeadAttention):
    """A layer that warns while it is exported, of several things, some of them twice."""

    def project(self, embeddings: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """See `MultiHeadAttention.project`."""
        for _ in range(2):
            warnings.warn("the semantics changed\nand more on that", stacklevel=1)
        warnings.warn("a size was taken for a constant", RuntimeWarning, stacklevel=1)
        warnings.warn("PyTorch will not call this so any more", FutureWarning, stacklevel=1)
        warnings.warn("PyTorch does not call this so any more", DeprecationWarning, stacklevel=1)
        print("a word on standard output")  # noqa: T201 (as the exporter does)
        return super().project(embeddings, memory)


def test_write_graph_hands_out_what_the_exporter_warns_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warning is one line, told once and never lost; PyTorch's own ageing is no warning."""
    layer = _WarningLayer(LayerConfig(8, 2))

    messages = write_graph(layer, tmp_path / "layer.onnx")

    assert messages == ["the semantics changed", "a size was taken for a constant"]
    assert capsys.readouterr() == ("", "")
