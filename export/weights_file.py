"""
The weights of an artifact in their file, laid out as the graph multiplies with them.

Matrices are stored transposed, since ONNX's MatMul takes columns, and the projections of one
source are stored as one: queries, keys and values of self-attention, keys and values of one memory
(bench/NOTES.md, "fused projection").  Other tensors are stored as they are, by their names in
`export.layer_spec`.
"""

import warnings
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import torch
from onnx.external_data_helper import ExternalDataInfo, uses_external_data
from torch import Tensor

from export.layer_spec import LayerSpec, tensor_shapes
from service.contract import WEIGHTS_FILE
from service.inference.artifact import Graph
from service.layer_config import LayerConfig, Projection

_ALIGNMENT = 64
"""Of each tensor in the file, in bytes: a line of the processor's cache."""

Floats = npt.NDArray[np.float32]


def groups(config: LayerConfig) -> list[tuple[Projection, ...]]:
    """List the projections that are stored as one, in the order of their columns."""
    if not config.is_cross:
        return [("query", "key", "value"), ("output",)]
    if config.value_memory_dim is None:
        return [("query",), ("key", "value"), ("output",)]
    return [("query",), ("key",), ("value",), ("output",)]


def group_name(group: tuple[Projection, ...]) -> str:
    """Return what the stored projection is called."""
    return "_".join(group)


def stored_names(config: LayerConfig) -> list[str]:
    """List the tensors that a weights file has, in their order."""
    names = []
    for group in groups(config):
        names.append(f"{group_name(group)}.weight")
        if set(group) & set(config.biases):
            names.append(f"{group_name(group)}.bias")
    projections = {
        f"{part}.{kind}"
        for group in groups(config)
        for part in group
        for kind in ("weight", "bias")
    }
    return names + [name for name in tensor_shapes(config) if name not in projections]


def write_weights(spec: LayerSpec, file: BinaryIO) -> dict[str, ir.ExternalTensor]:
    """Write all tensors of a layer; return, by name, where the graph finds each."""
    written = {}
    for name in stored_names(spec.config):
        array = _stored(spec, name)
        file.write(bytes(-file.tell() % _ALIGNMENT))
        written[name] = ir.ExternalTensor(
            WEIGHTS_FILE,
            file.tell(),
            array.nbytes,
            ir.DataType.FLOAT,
            shape=ir.Shape(array.shape),
            name=name,
        )
        file.write(array.data)
    return written


def _stored(spec: LayerSpec, name: str) -> Floats:
    stem, kind = name.rsplit(".", 1)
    group = next((group for group in groups(spec.config) if group_name(group) == stem), None)
    if group is None:
        return np.ascontiguousarray(spec.tensors[name].numpy())
    matrices = [spec.tensors[f"{part}.weight"] for part in group]
    if kind == "weight":
        # Side by side in place: a fused matrix that is then transposed would be two copies.
        stored = np.empty((matrices[0].shape[1], sum(map(len, matrices))), np.float32)
        np.concatenate([matrix.numpy().T for matrix in matrices], axis=1, out=stored)
        return stored
    biases = [
        spec.tensors[f"{part}.bias"].numpy()
        if part in spec.config.biases
        else np.zeros(len(matrix), np.float32)
        for part, matrix in zip(group, matrices, strict=True)
    ]
    return np.concatenate(biases)


def read_spec(graph: Graph, config: LayerConfig) -> LayerSpec:
    """
    Return the layer in a graph of `export.graph.write_graph`, as views of the graph's weights.

    Raises:
        ValueError: the graph does not hold the weights of such a layer.
        SourceInvalid: a tensor has another shape than the configuration says.
    """
    model = onnx.load_model_from_string(graph.model)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    if set(stored) != set(stored_names(config)):
        raise ValueError(
            f"graph: expected the weights {', '.join(stored_names(config))},"
            f" found {', '.join(stored) or 'none'}"
        )
    arrays = {name: _array(tensor, graph) for name, tensor in stored.items()}
    tensors = {name: arrays[name] for name in tensor_shapes(config) if name in arrays}
    for group in groups(config):
        stem = group_name(group)
        widths = [tensor_shapes(config)[f"{part}.weight"][0] for part in group]
        for kind in ("weight", "bias"):
            array = arrays.get(f"{stem}.{kind}")
            if array is None:
                continue
            if array.shape[-1] != sum(widths):
                raise ValueError(
                    f"graph: {stem}.{kind}: expected {sum(widths)} columns, found {array.shape[-1]}"
                )
            parts = torch.tensor_split(array, np.cumsum(widths)[:-1].tolist(), dim=-1)
            tensors |= {
                f"{name}.{kind}": part.T if kind == "weight" else part
                for name, part in zip(group, parts, strict=True)
                if kind == "weight" or name in config.biases
            }
    return LayerSpec(config, {name: tensors[name] for name in tensor_shapes(config)})


def _array(tensor: onnx.TensorProto, graph: Graph) -> Tensor:
    """Return the numbers of a constant that lies in the weights file."""
    if tensor.data_type != onnx.TensorProto.FLOAT or not uses_external_data(tensor):
        raise ValueError(f"graph: {tensor.name}: expected float32 in {WEIGHTS_FILE}")
    info = ExternalDataInfo(tensor)
    if info.location != WEIGHTS_FILE:
        raise ValueError(f"graph: expected weights in {WEIGHTS_FILE} only")
    count, start = int(np.prod(tensor.dims)), info.offset or 0
    if start + 4 * count > len(graph.weights):
        raise ValueError(f"graph: {tensor.name}: lies beyond the end of {WEIGHTS_FILE}")
    numbers = np.frombuffer(graph.weights, np.float32, count, start).reshape(tuple(tensor.dims))
    with warnings.catch_warnings():
        # PyTorch warns that the bytes cannot be written to; nothing writes to them.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(numbers)
