"""
Turn our layer into an ONNX graph that answers every kind of call.

The projections come from PyTorch's exporter.  What lies between them is one
`If`: without masks and without weights wanted it is the bare `Attention` operator, or,
where there are many keys, onnxruntime's own `MultiHeadAttention`, which never holds all
weights at once; else it takes the masks and hands out the weights.  One graph, one copy
of the layer, and asking for nothing extra costs nothing (bench/NOTES.md, "one graph or
several" and "long sequences").
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx
import onnx.inliner
import torch
from onnx.external_data_helper import ExternalDataInfo, uses_external_data
from onnx.numpy_helper import to_array
from onnxscript import opset23, script, values
from torch import Tensor, nn

from export.attention import MultiHeadAttention
from service.contract import (
    ATTENTION_WEIGHTS,
    EMBEDDINGS,
    HEAD_MASK,
    MEMORY,
    OUTPUT,
    PAIR_MASK,
    PLAIN,
    WEIGHTS_FILE,
    LayerConfig,
    graph_inputs,
)
from service.inference.artifact import Graph

OPSET = 23
"""The first with the `Attention` operator."""

LONG = 384
"""Keys from which the runtime's operator is used: as fast here, and faster the more there are."""

op: Any = opset23
_runtime: Any = values.Opset("com.microsoft", 1)
"""onnxruntime's operators: https://onnxruntime.ai/docs/reference/operators/ContribOperators.html"""

_DOMAIN = values.Opset("headwise", 1)


def write_graph(layer: MultiHeadAttention, path: Path) -> list[str]:
    """
    Write the layer's graph to `path` and its weights beside it; return the exporter's warnings.

    Inputs, outputs and their axes are those of `service.contract`.
    """
    with _captured_warnings() as messages, torch.no_grad():
        model = _export(layer)
    weights = _take_weights(model.graph)
    model.functions.append(_attend_function(layer.config.num_heads).to_function_proto())
    model.opset_import.append(onnx.helper.make_opsetid("headwise", 1))
    # The exporter knew no shapes inside the function; the runtime infers its own.
    del model.graph.value_info[:]
    model = onnx.inliner.inline_local_functions(model)
    del model.opset_import[:]
    model.opset_import.extend(
        [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(_runtime.domain, 1)]
    )
    _declare_branches(model.graph)
    for node in model.graph.node:
        # Stack traces with the paths of this machine.
        del node.metadata_props[:]
    with path.with_name(WEIGHTS_FILE).open("wb") as file:
        file.writelines(weights)
    del weights
    path.write_bytes(model.SerializeToString())
    onnx.checker.check_model(path, full_check=True)
    return messages


def _take_weights(graph: onnx.GraphProto) -> list[bytes]:
    """
    Return the numbers of all constants, and leave in the graph where the file will have them.

    Before anything serialises the graph: protobuf takes no message of more than 2 GiB.
    """
    weights, offset = [], 0
    for tensor in graph.initializer:
        content = tensor.raw_data
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (
            ("location", WEIGHTS_FILE),
            ("offset", offset),
            ("length", len(content)),
        ):
            tensor.external_data.add(key=key, value=str(value))
        weights.append(content)
        offset += len(content)
    return weights


def read_state(graph: Graph, config: LayerConfig) -> dict[str, Tensor]:
    """
    Return the weights in a graph of `write_graph`, as an `nn.MultiheadAttention` state dict.

    Raises:
        ValueError: the graph is not laid out as `write_graph` does.
    """
    model = onnx.load_model_from_string(graph.model)
    constants = {tensor.name: _constant(tensor, graph) for tensor in model.graph.initializer}
    matrices, biases = [], []
    for node in model.graph.node:
        name = next((name for name in node.input if name in constants), None)
        if name is not None and node.op_type == "MatMul":
            matrices.append(torch.tensor(constants[name]).T)
        if name is not None and node.op_type == "Add":
            biases.append(torch.tensor(constants[name]))
    layers = 3 if config.is_cross else 2
    if len(matrices) != layers or len(biases) != (layers if config.bias else 0):
        raise ValueError(
            f"graph: expected {layers} projections, found {len(matrices)} matrices"
            f" and {len(biases)} biases"
        )
    if config.is_cross:
        query, key_value = matrices[:-1]
        key, value = key_value.chunk(2)
        state = {"q_proj_weight": query, "k_proj_weight": key, "v_proj_weight": value}
    else:
        state = {"in_proj_weight": matrices[0]}
    state["out_proj.weight"] = matrices[-1]
    if config.bias:
        state |= {"in_proj_bias": torch.cat(biases[:-1]), "out_proj.bias": biases[-1]}
    return state


def _constant(tensor: onnx.TensorProto, graph: Graph) -> npt.NDArray[Any]:
    """Return a constant's values; those of an external one from the graph's own weights."""
    if uses_external_data(tensor):
        info = ExternalDataInfo(tensor)
        if info.location != WEIGHTS_FILE:
            raise ValueError(f"graph: expected weights in {WEIGHTS_FILE} only")
        start, length = info.offset or 0, info.length or 0
        tensor.raw_data = graph.weights[start : start + length]
        tensor.data_location = onnx.TensorProto.DEFAULT
    return to_array(tensor)


class _Exportable(nn.Module):
    """The layer with the function `headwise::attend` where the formula's core stands."""

    def __init__(self, layer: MultiHeadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, embeddings: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        *memory, pair_mask, head_mask, plain = rest
        q, k, v = self.layer.project(embeddings, memory[0] if memory else None)
        rows, length = embeddings.shape[:2]
        concat, weights = torch.onnx.ops.symbolic_multi_out(
            "headwise::attend",
            [q, k, v, pair_mask, head_mask, plain],
            dtypes=(q.dtype, q.dtype),
            shapes=(q.shape, (rows, self.layer.config.num_heads, length, k.shape[1])),
            version=1,
        )
        return self.layer.out(concat), weights


def _attend_function(num_heads: int) -> Any:
    """Return `headwise::attend` as an ONNX function, compiled from the body below."""

    @script(_DOMAIN, default_opset=op)  # pragma: no cover (its source is compiled, never run)
    def attend(q, k, v, pair_mask, head_mask, plain):  # type: ignore[no-untyped-def]
        if plain:
            if op.GreaterOrEqual(op.Shape(k, start=1, end=2), op.Constant(value_ints=[LONG])):
                concat = _runtime.MultiHeadAttention(q, k, v, num_heads=num_heads)
            else:
                concat = op.Attention(q, k, v, q_num_heads=num_heads, kv_num_heads=num_heads)
            # Never fetched; a constant shape here would be taken for that of the real weights.
            weights = op.ConstantOfShape(op.Shape(pair_mask))
        else:
            all_heads, _k, _v, weights = op.Attention(
                q,
                k,
                v,
                pair_mask,
                q_num_heads=num_heads,
                kv_num_heads=num_heads,
                qk_matmul_output_mode=3,  # after softmax
            )
            heads = op.Reshape(all_heads, op.Constant(value_ints=[0, 0, num_heads, -1]))
            factors = op.Unsqueeze(head_mask, op.Constant(value_ints=[1, 3]))
            concat = op.Reshape(op.Mul(heads, factors), op.Constant(value_ints=[0, 0, -1]))
        return concat, weights

    return attend


def _declare_branches(graph: onnx.GraphProto) -> None:
    """Write down the type of what the branches give: onnx does not know the runtime's operator."""
    for node in graph.node:
        for attribute in node.attribute:
            for output in attribute.g.output:
                output.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
            _declare_branches(attribute.g)


def _export(layer: MultiHeadAttention) -> onnx.ModelProto:
    config = layer.config
    example = _example(config)
    axes = {tensor.name: tensor.axes for tensor in graph_inputs(config)}
    program = torch.onnx.export(
        _Exportable(layer).eval(),
        tuple(example.values()),
        dynamo=True,
        opset_version=OPSET,
        input_names=list(example),
        output_names=[OUTPUT, ATTENTION_WEIGHTS],
        dynamic_shapes=_dynamic_shapes(axes),
        verbose=False,
    )
    if program is None:  # pragma: no cover (its type allows it; without a file it never is)
        raise RuntimeError("torch.onnx.export returned nothing")
    return program.model_proto


def _dynamic_shapes(axes: dict[str, tuple[str | int, ...]]) -> tuple[Any, ...]:
    """Name every free axis; the layer's `*rest` takes all but the first input as one tuple."""
    named = [
        {i: axis for i, axis in enumerate(own) if isinstance(axis, str)} for own in axes.values()
    ]
    return (named[0], tuple(named[1:]))


def _example(config: LayerConfig) -> dict[str, Tensor]:
    """Return one input of each kind; no two free axes share a size, and none is 0 or 1."""
    rows, length, keys = 2, 3, 5 if config.is_cross else 3
    memory = (
        {} if config.memory_dim is None else {MEMORY: torch.zeros(rows, keys, config.memory_dim)}
    )
    return {
        EMBEDDINGS: torch.zeros(rows, length, config.embed_dim),
        **memory,
        PAIR_MASK: torch.ones(4, 6, 7, 8, dtype=torch.bool),
        HEAD_MASK: torch.ones(9, config.num_heads),
        PLAIN: torch.tensor(True),
    }


@contextlib.contextmanager
def _captured_warnings() -> Iterator[list[str]]:
    """Collect what the exporter warns of, so that it is shown and not lost."""
    messages: list[str] = []
    # It reports every torchvision operator that it does without; none is used here.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        # torch's own use of what torch deprecates says nothing about the layer.
        warnings.simplefilter("ignore", category=FutureWarning)
        warnings.simplefilter("ignore", category=DeprecationWarning)
        yield messages
    messages.extend(dict.fromkeys(str(entry.message).splitlines()[0] for entry in caught))
