"""
Positions for a layer without any: what is added to the embeddings, in front of the attention.

Attention alone does not know order: it gives every permutation of a sequence the permuted answer.
The models around it add positions once, before their first layer; a layer that is served alone
may have them added to its own input.
"""

from dataclasses import replace
from typing import Literal

from torch import Tensor

from export.checkpoint import Checkpoint
from export.errors import SourceInvalid
from export.layer_spec import LayerSpec
from export.wrappers import unwrapped_prefix

Positional = Literal["sinusoidal", "learned"]


def with_positional(spec: LayerSpec, kind: Positional, table: Tensor | None = None) -> LayerSpec:
    """
    Return the layer with positions added to its embeddings.

    `table` [rows, E] has what is added at each position; for learned positions only.

    Raises:
        SourceInvalid: the layer has positions of another kind, is cross-attention, or the table
            does not fit it.
    """
    config = spec.config
    if config.takes_positions or config.is_cross:
        raise SourceInvalid(
            f"--positional {kind}: expected self-attention without positions inside, got"
            f" {'cross-attention' if config.is_cross else 'a layer that has its own'}"
        )
    if (kind == "learned") != (table is not None):
        raise SourceInvalid(f"--positional {kind}: expected a table for learned, and only there")
    if table is None:
        return LayerSpec(replace(config, positional=kind), spec.tensors)
    try:
        config = replace(config, positional=kind, max_positions=len(table))
    except ValueError as error:
        raise SourceInvalid(str(error)) from None
    return LayerSpec(config, {**spec.tensors, "positional.table": table})


def stored_table(checkpoint: Checkpoint, name: str, embed_dim: int) -> Tensor:
    """
    Return the table [rows, E] that a checkpoint holds under this name, or as [1, rows, E].

    Raises:
        SourceInvalid: there is no such tensor, or it is no table of this width.
    """
    plain = unwrapped_prefix(name, checkpoint.wrappers)
    if plain not in checkpoint.tensors:
        alike = [n for n in sorted(checkpoint.tensors) if "pos" in n.lower()][:8]
        there = f"; it has {', '.join(alike)}" if alike else ""
        raise SourceInvalid(f"{checkpoint.where}: expected a tensor {plain}, got none{there}")
    table = checkpoint.read(plain)
    if table.ndim == 3 and len(table) == 1:
        table = table[0]
    if table.ndim != 2 or table.shape[1] != embed_dim:
        raise SourceInvalid(
            f"{checkpoint.where}: {plain}: expected a table of positions [rows, {embed_dim}],"
            f" got {list(checkpoint.tensors[plain].shape)}"
        )
    return table
