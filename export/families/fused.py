"""Queries, keys and values that a checkpoint keeps as one matrix."""

from dataclasses import replace

from torch import Tensor

from export.families.decoder import FUSED
from export.families.family import Module
from service.layer_config import LayerConfig


def taken_apart(layer: LayerConfig, module: Module, *, by_group: bool) -> Module:
    """
    Return the module with queries, keys and values apart.

    By group, the rows are each group's queries, then its key and its value: with a key for each
    head that is query, key and value of every head in turn, with one key for all heads all queries,
    the key, the value.  Else they are all queries, all keys, all values.
    """
    tensors = dict(module.tensors)
    for kind in ("weight", "bias"):
        if (fused := tensors.pop(f"{FUSED}.{kind}", None)) is not None:
            parts = _by_group(fused, layer) if by_group else _stacked(fused, layer)
            tensors |= zip((f"query.{kind}", f"key.{kind}", f"value.{kind}"), parts, strict=True)
    return replace(module, tensors=tensors)


def _by_group(fused: Tensor, layer: LayerConfig) -> tuple[Tensor, ...]:
    # [K, H/K + 2, D] rows
    groups = fused.reshape(layer.num_kv_heads, -1, layer.head_dim, *fused.shape[1:])
    return (
        groups[:, :-2].flatten(0, 2),
        groups[:, -2].flatten(0, 1),
        groups[:, -1].flatten(0, 1),
    )


def _stacked(fused: Tensor, layer: LayerConfig) -> tuple[Tensor, ...]:
    queries, keys = (count * layer.head_dim for count in (layer.num_heads, layer.num_kv_heads))
    return fused[:queries], fused[queries : queries + keys], fused[queries + keys :]
