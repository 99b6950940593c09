"""Read the weights of artifacts of manifest format 1, whose graphs PyTorch's exporter wrote."""

from typing import Any

import numpy.typing as npt
import onnx
import torch
from onnx.external_data_helper import ExternalDataInfo, uses_external_data
from onnx.numpy_helper import to_array

from export.layer_spec import LayerSpec
from service.contract import WEIGHTS_FILE
from service.inference.artifact import Graph
from service.layer_config import LayerConfig


def read_spec(graph: Graph, config: LayerConfig) -> LayerSpec:
    """
    Return the layer in a graph of format 1.

    Raises:
        ValueError: the graph is not laid out as those are.
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
    if len(matrices) != layers or len(biases) != (layers if config.biases else 0):
        raise ValueError(
            f"graph: expected {layers} projections, found {len(matrices)} matrices"
            f" and {len(biases)} biases"
        )
    names = ("query", "key", "value")
    packed = [[matrices[0]], matrices[1].chunk(2)] if config.is_cross else [matrices[0].chunk(3)]
    parts = [part for matrix in packed for part in matrix]
    tensors = {f"{name}.weight": part for name, part in zip(names, parts, strict=True)}
    tensors["output.weight"] = matrices[-1]
    if config.biases:
        vectors = torch.cat(biases[:-1]).chunk(3)
        tensors |= {f"{name}.bias": part for name, part in zip(names, vectors, strict=True)}
        tensors["output.bias"] = biases[-1]
    return LayerSpec(config, tensors)


def _constant(tensor: onnx.TensorProto, graph: Graph) -> npt.NDArray[Any]:
    """Return a constant's values; those of an external one are in the graph's weights."""
    if uses_external_data(tensor):
        info = ExternalDataInfo(tensor)
        if info.location != WEIGHTS_FILE:
            raise ValueError(f"graph: expected weights in {WEIGHTS_FILE} only")
        start, length = info.offset or 0, info.length or 0
        tensor.raw_data = graph.weights[start : start + length]
        tensor.data_location = onnx.TensorProto.DEFAULT
    return to_array(tensor)
