"""Layers of every kind with random weights."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch

from export.layer_spec import LayerSpec, tensor_shapes
from export.sources import Source
from service.contract import LAYER_METADATA
from service.inference.artifact import Graph
from service.layer_config import LayerConfig, Norm, PositionBias, Rotary

KINDS: dict[str, LayerConfig] = {
    "grouped": LayerConfig(8, 4, num_kv_heads=2, head_dim=6, biases=("query", "value")),
    "halves": LayerConfig(12, 4, num_kv_heads=2, head_dim=6, rotary=Rotary(100.0, 4), causal=True),
    "interleaved": LayerConfig(8, 2, rotary=Rotary(100.0, 4, interleaved=True, magnitude=1.2)),
    "dynamic": LayerConfig(
        8, 2, rotary=Rotary(100.0, 4, scaling="dynamic", factor=2.0, original_length=64)
    ),
    "longrope": LayerConfig(
        8, 2, rotary=Rotary(100.0, 4, scaling="longrope", original_length=64), causal=True
    ),
    "rms per head": LayerConfig(8, 2, norm=Norm("rms", 1e-2)),
    "norm of the projection": LayerConfig(
        8, 4, num_kv_heads=2, norm=Norm("layer", 1e-2, "projection")
    ),
    "norm and rotary": LayerConfig(8, 2, norm=Norm("rms", 1e-6), rotary=Rotary(100.0, 4)),
    "alibi": LayerConfig(8, 2, position_bias=PositionBias("alibi"), causal=True),
    "buckets": LayerConfig(8, 2, scale=1.0, position_bias=PositionBias("buckets", 5), biases=()),
    "soft-capped distances": LayerConfig(
        8, 2, softcap=2.0, position_bias=PositionBias("buckets", 5), causal=True
    ),
    "soft-capped window": LayerConfig(8, 2, softcap=2.0, window=5, causal=True),
    "window both ways": LayerConfig(8, 2, window=3),
    "learned and zero keys": LayerConfig(8, 2, extra_keys=("learned", "zero")),
    "sinks": LayerConfig(8, 4, num_kv_heads=2, extra_keys=("sink",), window=6, causal=True),
    "two memories": LayerConfig(8, 2, memory_dim=6, value_memory_dim=5),
    "sinusoidal": LayerConfig(8, 2, positional="sinusoidal"),
    "learned positions": LayerConfig(8, 2, positional="learned", max_positions=9),
}
"""Each option of a layer at least once, and those that meet on the same path together."""


def random_source(config: LayerConfig, seed: int) -> Source:
    """Return a layer of this configuration with weights from a seed."""
    return Source(random_spec(config, seed), {"kind": "test", "seed": seed})


def random_spec(config: LayerConfig, seed: int) -> LayerSpec:
    """Return weights in which every number counts, with logits of a few units."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        numbers: npt.NDArray[Any] = random.standard_normal(shape)
        if name.startswith("rotary."):
            # Slower for each pair, as trained ones are; none so slow that it could be left out.
            numbers = 0.9 ** np.arange(*shape) * (0.5 if "long" in name else 1.0)
        elif name == "position_bias.slopes":
            numbers = 2.0 ** -np.arange(1, 1 + shape[0])
        elif name.endswith("_norm.weight"):
            numbers = 1 + numbers / 4
        elif name.endswith(".weight"):
            numbers /= np.sqrt(shape[-1])
        tensors[name] = torch.from_numpy(numbers.astype(np.float32))
    return LayerSpec(config, tensors)


def said_to_be(layer: LayerConfig, graph: Graph) -> Graph:
    """Return a graph with another description of itself: what it computes must show the error."""
    model = onnx.load_model_from_string(graph.model)
    onnx.helper.set_model_props(model, {LAYER_METADATA: layer.to_json()})
    return replace(graph, model=model.SerializeToString())
