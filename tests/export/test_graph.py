"""The written graph: the contract's names and axes, nothing baked in, every weight beside it."""

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper
from onnx.external_data_helper import ExternalDataInfo
from onnx.numpy_helper import to_array

import export
from export.gate import formula_of
from export.graph import LONG, OPSET, write_graph
from export.sources import Source
from export.weights_file import read_spec, stored_names
from service.contract import WEIGHTS_FILE, graph_inputs, graph_outputs
from service.errors import ArtifactUnreadable
from service.inference.artifact import Graph, read_graph
from service.inference.calls import Inputs
from service.inference.engine import Engine, OnnxEngine
from service.inference.parity import relative_error
from service.layer_config import LayerConfig
from tests.support.specs import KINDS, random_source

SEED = 3
"""Any: the graph does not depend on the weights."""

TOLERANCE = 1e-5
"""The contract's promise for FP32."""

LAYERS: dict[str, LayerConfig] = {
    "self": LayerConfig(8, 2),
    "self without bias": LayerConfig(12, 3, biases=()),
    "one head": LayerConfig(8, 1),
    "cross": LayerConfig(8, 2, memory_dim=6),
    "cross without bias": LayerConfig(12, 3, memory_dim=5, biases=()),
    "cross of equal widths": LayerConfig(8, 2, memory_dim=8),
}

PLAIN_BRANCH = [
    *["Shape", "Constant", "GreaterOrEqual", "If"],
    *["Shape", "ConstantOfShape"],
]
LONG_BRANCH = ["MultiHeadAttention"]
SHORT_BRANCH = ["Attention"]
FULL_BRANCH = [
    *["Attention", "Constant", "Reshape", "Constant", "Unsqueeze"],
    *["Mul", "Constant", "Reshape"],
]
SPLIT = ["Constant", "Split"]
CROSS = ["MatMul", "Add", "MatMul", "Add", *SPLIT, "If", "MatMul", "Add"]
OPERATORS = {
    "self": ["MatMul", "Add", *SPLIT, "If", "MatMul", "Add"],
    "self without bias": ["MatMul", *SPLIT, "If", "MatMul"],
    "one head": ["MatMul", "Add", *SPLIT, "If", "MatMul", "Add"],
    "cross": CROSS,
    "cross without bias": ["MatMul", "MatMul", *SPLIT, "If", "MatMul"],
    "cross of equal widths": CROSS,
}
"""Every operator outside the branches, in order; more would be time lost in each call."""

SMALLEST_FP16 = -65504
"""A mask written as a constant below this is no number in FP16."""

ELEMENT_TYPES = {
    "float32": TensorProto.FLOAT,
    "bool": TensorProto.BOOL,
    "int64": TensorProto.INT64,
}


@dataclass(frozen=True)
class Written:
    """One layer and the graph that was written of it."""

    name: str
    source: Source
    path: Path

    @property
    def model(self) -> ModelProto:
        """The graph as ONNX, its weights not loaded."""
        return onnx.load(self.path, load_external_data=False)

    def engine(self) -> Engine:
        """Return the engine that serves it."""
        return OnnxEngine(read_graph(self.path), self.source.config)


def _write(name: str, directory: Path) -> Written:
    source, path = random_source((LAYERS | KINDS)[name], SEED), directory / "layer.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # who exports an ordinary layer has nothing to read
        write_graph(source.spec, path)
    return Written(name, source, path)


@pytest.fixture(scope="module", params=LAYERS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Return each layer of the formula itself, written once."""
    return _write(request.param, tmp_path_factory.mktemp("graph"))


@pytest.fixture(scope="module", params=[*LAYERS, *KINDS])
def any_written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Written:
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


def test_graph_has_the_contracts_names_types_and_axes(any_written: Written) -> None:
    """What is free is free by name, so that one graph serves every batch and length."""
    graph, config = any_written.model.graph, any_written.source.config

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
    """Heads, widths and what is long are written down; the rest is taken from the input."""
    constants = _constants(written.model.graph)

    values = [constant.tolist() for constant in constants]

    config = written.source.config
    parts = [config.embed_dim] * (2 if config.is_cross else 3)
    assert values == [parts, [LONG], [0, 0, config.num_heads, -1], [1, 3], [0, 0, -1]]


def test_graph_constants_fit_any_float(any_written: Written) -> None:
    """A hidden key is minus infinity, which every float has, and no large negative number."""
    constants = _constants(any_written.model.graph)

    finite = [value for constant in constants for value in constant.flat if np.isfinite(value)]

    assert min(finite) >= SMALLEST_FP16


def test_graph_weights_all_lie_in_one_plainly_named_file(any_written: Written) -> None:
    """Every weight is in the file beside the graph, which is named without any path."""
    model = any_written.model

    places = {
        (tensor.data_location, entry.value)
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }

    tensors = [(tensor.name, ExternalDataInfo(tensor)) for tensor in model.graph.initializer]
    assert places == {(TensorProto.EXTERNAL, WEIGHTS_FILE)}
    assert not any(tensor.raw_data or tensor.float_data for tensor in model.graph.initializer)
    assert [name for name, _ in tensors] == stored_names(any_written.source.config)
    begins = [info.offset or 0 for _, info in tensors]
    ends = [begin + (info.length or 0) for begin, (_, info) in zip(begins, tensors, strict=True)]
    assert begins == [0, *(-(-end // 64) * 64 for end in ends[:-1])], "cache lines of 64 bytes"
    directory = any_written.path.parent
    assert {file.name for file in directory.iterdir()} == {"layer.onnx", WEIGHTS_FILE}
    assert (directory / WEIGHTS_FILE).stat().st_size == ends[-1]


def test_graph_without_its_weights_is_refused_by_name(any_written: Written, tmp_path: Path) -> None:
    """Who copies the graph alone is told which file is missing."""
    path = tmp_path / "layer.onnx"
    path.write_bytes(any_written.path.read_bytes())

    with pytest.raises(ArtifactUnreadable, match=WEIGHTS_FILE):
        OnnxEngine(read_graph(path), any_written.source.config)


def test_graph_tells_nothing_of_the_machine_that_wrote_it(any_written: Written) -> None:
    """An artifact goes out into the world without its author's paths."""
    content = any_written.path.read_bytes()

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

    bias = written.source.spec.tensors.get("output.bias")
    expected = np.zeros(config.embed_dim) if bias is None else bias.numpy()
    assert answer.attention_weights is not None
    assert (answer.output[1] == expected).all()
    assert not answer.attention_weights[1].any()


def test_stored_names_are_one_matrix_for_what_reads_the_same() -> None:
    """Three in one for self-attention, two in one for a memory, none with two memories."""
    own, cross, two = (
        [name for name in stored_names(config) if name.endswith(".weight")]
        for config in (LAYERS["self"], LAYERS["cross"], KINDS["two memories"])
    )

    assert own == ["query_key_value.weight", "output.weight"]
    assert cross == ["query.weight", "key_value.weight", "output.weight"]
    assert two == ["query.weight", "key.weight", "value.weight", "output.weight"]


def test_read_spec_gives_back_the_weights_to_the_bit(any_written: Written) -> None:
    """An artifact alone is enough to prove it again."""
    spec = read_spec(read_graph(any_written.path), any_written.source.config)

    expected = any_written.source.spec.tensors
    assert [*spec.tensors] == [*expected]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in spec.tensors.items())


SELF = "query_key_value.weight, query_key_value.bias, output.weight, output.bias"


@pytest.mark.parametrize("written", ["self"], indirect=True)
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LayerConfig(8, 2, memory_dim=6),
            "graph: expected the weights query.weight, query.bias, key_value.weight,"
            f" key_value.bias, output.weight, output.bias, found {SELF}",
        ),
        (
            LayerConfig(8, 2, biases=()),
            f"graph: expected the weights query_key_value.weight, output.weight, found {SELF}",
        ),
        (
            LayerConfig(8, 2, extra_keys=("sink",)),
            f"graph: expected the weights {SELF}, extra.sinks, found {SELF}",
        ),
        (
            LayerConfig(8, 4, num_kv_heads=2),
            "graph: query_key_value.weight: expected 16 columns, found 24",
        ),
        (LayerConfig(6, 2, head_dim=4), "graph: output.weight: expected 6 columns, found 8"),
    ],
    ids=["cross", "no bias", "sinks", "grouped", "another width"],
)
def test_read_spec_of_another_layer_is_refused(
    written: Written, config: LayerConfig, message: str
) -> None:
    """The message says which weights were expected and what came."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_spec(read_graph(written.path), config)


def _in_the_graph(tensor: TensorProto) -> None:
    del tensor.external_data[:]
    tensor.data_location = TensorProto.DEFAULT
    tensor.raw_data = bytes(4 * int(np.prod(tensor.dims)))


def _of_another_type(tensor: TensorProto) -> None:
    tensor.data_type = TensorProto.FLOAT16


def _entry(key: str, value: str) -> Callable[[TensorProto], None]:
    def change(tensor: TensorProto) -> None:
        next(entry for entry in tensor.external_data if entry.key == key).value = value

    return change


@pytest.mark.parametrize("written", ["self"], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    {
        "in the graph itself": (_in_the_graph, f"expected float32 in {WEIGHTS_FILE}"),
        "of another type": (_of_another_type, f"expected float32 in {WEIGHTS_FILE}"),
        "in another file": (
            _entry("location", "other"),
            f"expected weights in {WEIGHTS_FILE} only",
        ),
        "beyond the end": (_entry("offset", "1156"), "lies beyond the end of layer.weights"),
    }.values(),
)
def test_read_spec_of_weights_that_lie_elsewhere_is_refused(
    written: Written, change: Callable[[TensorProto], None], message: str
) -> None:
    """Only what the weights file holds is the layer's."""
    model, graph = written.model, read_graph(written.path)
    change(model.graph.initializer[-1])  # eight numbers, the last 32 of 1184 bytes

    with pytest.raises(ValueError, match=f"^graph: (output.bias: )?{re.escape(message)}$"):
        read_spec(Graph(graph.path, model.SerializeToString(), graph.weights), LAYERS["self"])
