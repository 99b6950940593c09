"""
The self-attention of a BERT-family checkpoint, as Hugging Face transformers lays it out.

Read from the folder's config.json and safetensors files, without transformers.  A folder is
refused when the two contradict each other, or when either says that the layer computes more
than the formula does.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from export.checkpoint import Checkpoint, open_folder
from export.errors import SourceInvalid
from export.families import read_config, shortened
from export.refusals import is_adapters, is_shared

_PROJECTIONS = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
_OUTPUT = "attention.output.dense"
_USED = tuple(
    f"{part}.{kind}" for part, kind in product((*_PROJECTIONS, _OUTPUT), ("weight", "bias"))
)
_HARMLESS = frozenset(
    # What the layer does after its attention, or, in a decoder, in a second attention.
    f"{part}.{kind}"
    for part, kinds in {
        "attention.output.LayerNorm": ("weight", "bias", "gamma", "beta"),
        "intermediate.dense": ("weight", "bias"),
        "output.dense": ("weight", "bias"),
        "output.LayerNorm": ("weight", "bias", "gamma", "beta"),
        "crossattention.self.query": ("weight", "bias"),
        "crossattention.self.key": ("weight", "bias"),
        "crossattention.self.value": ("weight", "bias"),
        "crossattention.output.dense": ("weight", "bias"),
        "crossattention.output.LayerNorm": ("weight", "bias", "gamma", "beta"),
    }.items()
    for kind in kinds
)

_ROWS_OF = {
    "intermediate_size": "encoder.layer.{layer}.intermediate.dense.weight",
    "vocab_size": "embeddings.word_embeddings.weight",
    "max_position_embeddings": "embeddings.position_embeddings.weight",
    "type_vocab_size": "embeddings.token_type_embeddings.weight",
}
"""Keys of config.json that say how many rows a tensor has, to recognise another model's file."""


@dataclass(frozen=True)
class BertAttention:
    """What a checkpoint says of one self-attention layer."""

    state: dict[str, Tensor]
    """As a state dict of `nn.MultiheadAttention`, in FP32."""
    num_heads: int
    checkpoint_name: str


def read_attention(directory: Path, layer: int) -> BertAttention:
    """
    Return one layer's attention; its output is that of `attention.output.dense`.

    Raises:
        SourceInvalid: a file is missing or damaged, the checkpoint is not of this family, or
            its configuration and weights contradict each other or hold more than the layer uses.
    """
    config = read_config(directory)
    num_layers = config["num_hidden_layers"]
    if not 0 <= layer < num_layers:
        raise SourceInvalid(f"layer: expected 0 to {num_layers - 1}, got {layer}")
    checkpoint = open_folder(directory)
    checkpoint.refuse_if_any("", is_adapters)
    root = _root(checkpoint, layer)
    checkpoint.refuse_if_any(f"{root}encoder.", is_shared)
    prefix = f"{root}encoder.layer.{layer}."
    tensors = checkpoint.take(prefix, _USED, harmless=_HARMLESS)
    width = tensors[f"{_OUTPUT}.bias"].numel()
    for name, tensor in tensors.items():
        expected = [width, width] if name.endswith("weight") else [width]
        if list(tensor.shape) != expected:
            raise SourceInvalid(
                f"{checkpoint.where}: {prefix}{name}: expected shape {expected},"
                f" got {list(tensor.shape)}"
            )
    num_heads = config["num_attention_heads"]
    facts = _facts(checkpoint, root, layer, width=width, num_heads=num_heads)
    _refuse_contradictions(directory / "config.json", config, facts)
    name = str(config.get("_name_or_path") or directory.name)
    return BertAttention(_state(tensors), num_heads, name)


def _root(checkpoint: Checkpoint, layer: int) -> str:
    """Return what stands before `encoder.layer.N.` in the names of the layer's tensors."""
    part = rf"encoder\.layer\.{layer}"
    prefixes = checkpoint.prefixes(part)
    if not prefixes:
        raise SourceInvalid(
            f"{checkpoint.where}: expected tensors encoder.layer.{layer}.…, got none"
        )
    if len(prefixes) > 1:
        raise SourceInvalid(
            f"{checkpoint.where}: ambiguous: layer {layer} is there as {' and as '.join(prefixes)};"
            " save the encoder that is meant as a checkpoint of its own"
        )
    return re.sub(rf"{part}\.$", "", prefixes[0])


def _refuse_contradictions(
    file: Path, config: Mapping[str, Any], weights: Mapping[str, tuple[int, str]]
) -> None:
    """Refuse a config.json that is not of these weights: its number of heads would be wrong."""
    for key, (value, meaning) in weights.items():
        stated = config.get(key)
        if stated is not None and stated != value:
            raise SourceInvalid(
                f"{file}: {key} is {shortened(stated)}, but the weights say {value} ({meaning});"
                " expected the config.json that belongs to these weights"
            )


def _facts(
    checkpoint: Checkpoint, root: str, layer: int, *, width: int, num_heads: int
) -> dict[str, tuple[int, str]]:
    """Return what the weights say of keys of config.json, each with the place where they do."""
    layers = {
        int(match[1])
        for name in checkpoint.below(f"{root}encoder.layer.")
        if (match := re.match(r"(\d+)\.", name))
    }
    facts = {
        "hidden_size": (width, f"the width of layer {layer}"),
        "num_hidden_layers": (len(layers), f"layers below {root}encoder.layer"),
        "num_key_value_heads": (num_heads, "one key and value each for num_attention_heads"),
    }
    if num_heads > 0 and width % num_heads == 0:
        head_dim = (width // num_heads, f"width {width} over {num_heads} heads")
        facts |= {"attention_head_size": head_dim, "head_dim": head_dim}
    for key, name in _ROWS_OF.items():
        stored = checkpoint.tensors.get(root + name.format(layer=layer))
        if stored is not None and stored.shape:
            facts[key] = (stored.shape[0], f"rows of {root}{name.format(layer=layer)}")
    return facts


def _state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"in_proj_{kind}": torch.cat([tensors[f"{part}.{kind}"] for part in _PROJECTIONS])
        for kind in ("weight", "bias")
    } | {f"out_proj.{kind}": tensors[f"{_OUTPUT}.{kind}"] for kind in ("weight", "bias")}
