"""
What an attention layer is made of: its configuration, and its weights by name.

Every source of weights ends in a `LayerSpec`, and everything that is computed from weights (the
PyTorch layer, the float64 formula, the graph) begins with one.

    query.weight   [H*D, E]      query.bias   [H*D]
    key.weight     [K*D, M]      key.bias     [K*D]       M = E for self-attention
    value.weight   [K*D, M_v]    value.bias   [K*D]       M_v = M without a value memory
    output.weight  [E, H*D]      output.bias  [E]
    query_norm.weight, key_norm.weight (and .bias for kind layer)
                                 [D], or [H*D] and [K*D] where the norm spans the projection
    rotary.frequencies [dims/2]  radians a position; with longrope also rotary.long_frequencies
    position_bias.slopes [H]     for alibi
    position_bias.table          [2*reach + 1, H] for buckets
    extra.key, extra.value       [K*D] for the learned key
    extra.sinks                  [H], logits
    positional.table             [max_positions, E] for learned positions

Letters as in `service.layer_config`.  A matrix multiplies columns: y = W x + b, as in nn.Linear.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from export.errors import SourceInvalid
from service.inference.artifact import as_read
from service.layer_config import LayerConfig


@dataclass(frozen=True)
class LayerSpec:
    """
    One attention layer.

    Raises:
        SourceInvalid: a value of the configuration is of another type; a tensor is missing, is not
            one of this configuration, or is no plain, dense one of finite FP32 numbers in the
            right shape.
    """

    config: LayerConfig
    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "config", as_read(self.config))
        except ValueError as error:
            raise SourceInvalid(f"LayerConfig: {error}") from None
        expected = tensor_shapes(self.config)
        for name in [*expected, *self.tensors]:
            if name not in self.tensors:
                raise SourceInvalid(f"{name}: expected a tensor {list(expected[name])}, got none")
            if name not in expected:
                raise SourceInvalid(f"{name}: expected none for this configuration, got a tensor")
            found = self.tensors[name]
            # A subclass may hold quantised or distributed numbers and call itself float32.
            if type(found) not in (Tensor, nn.Parameter):
                raise SourceInvalid(f"{name}: expected a plain tensor, got {type(found).__name__}")
            if found.is_meta or found.layout != torch.strided:
                got = "one on the meta device" if found.is_meta else str(found.layout)
                raise SourceInvalid(f"{name}: expected a dense tensor with its numbers, got {got}")
            if tuple(found.shape) != expected[name]:
                raise SourceInvalid(
                    f"{name}: expected shape {list(expected[name])}, got {list(found.shape)}"
                )
            if found.dtype != torch.float32:
                raise SourceInvalid(f"{name}: expected float32, got {found.dtype}")
            if not bool(torch.isfinite(found).all()):
                raise SourceInvalid(f"{name}: expected finite numbers, got NaN or infinity")


def tensor_shapes(config: LayerConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a layer of this configuration has, by its name."""
    e, d = config.embed_dim, config.head_dim
    queries, keys = config.num_heads * d, config.num_kv_heads * d
    memory = config.memory_dim or e
    shapes: dict[str, tuple[int, ...]] = {
        "query.weight": (queries, e),
        "key.weight": (keys, memory),
        "value.weight": (keys, config.value_memory_dim or memory),
        "output.weight": (e, queries),
    }
    shapes |= {f"{name}.bias": (shapes[f"{name}.weight"][0],) for name in config.biases}
    if (norm := config.norm) is not None:
        for name, width in (("query_norm", queries), ("key_norm", keys)):
            for kind in ("weight", "bias") if norm.kind == "layer" else ("weight",):
                shapes[f"{name}.{kind}"] = (d if norm.span == "head" else width,)
    if (rotary := config.rotary) is not None:
        shapes["rotary.frequencies"] = (rotary.dims // 2,)
        if rotary.scaling == "longrope":
            shapes["rotary.long_frequencies"] = (rotary.dims // 2,)
    if (bias := config.position_bias) is not None:
        if bias.kind == "alibi":
            shapes["position_bias.slopes"] = (config.num_heads,)
        else:
            shapes["position_bias.table"] = (2 * bias.reach + 1, config.num_heads)
    if "learned" in config.extra_keys:
        shapes |= {"extra.key": (keys,), "extra.value": (keys,)}
    if "sink" in config.extra_keys:
        shapes["extra.sinks"] = (config.num_heads,)
    if config.max_positions is not None:
        shapes["positional.table"] = (config.max_positions, e)
    return shapes
