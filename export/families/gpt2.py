"""
GPT-2: a causal decoder whose matrices multiply rows, queries, keys and values in one tensor.

Names and the scaling of logits as in transformers.models.gpt2.modeling_gpt2:

    h.N.attn.c_attn.weight            [E, 3E], queries, keys and values in turn
    h.N.attn.c_proj.weight            [E, E]
    h.N.crossattention.q_attn.weight  [E, E], where the model has cross-attention
    h.N.crossattention.c_attn.weight  [E, 2E], keys and values in turn
"""

import dataclasses
from itertools import product

from torch import Tensor

from export.checkpoint import Checkpoint
from export.errors import SourceInvalid
from export.families.checks import choose, refuse_aliases
from export.families.config import Config
from export.families.family import Found, Module, Place
from export.families.plain import plain_layer
from export.families.stack import find_stack
from export.layer_spec import LayerSpec

_FUSED = {
    "self": {
        "attn.c_attn": ("query", "key", "value"),
        "attn.c_proj": ("output",),
    },
    "cross": {
        "crossattention.q_attn": ("query",),
        "crossattention.c_attn": ("key", "value"),
        "crossattention.c_proj": ("output",),
    },
}
"""What the linear layers of an attention make, in order."""

_HARMLESS = frozenset(
    f"{part}.{kind}"
    for part, kind in product(
        (
            *(*_FUSED["self"], *_FUSED["cross"]),
            *("ln_1", "ln_2", "ln_cross_attn", "mlp.c_fc", "mlp.c_proj"),
        ),
        ("weight", "bias"),
    )
)
_BUFFERS = frozenset(
    f"{part}.{name}" for part, name in product(("attn", "crossattention"), ("bias", "masked_bias"))
)
"""The causal mask and what hidden logits became, which older versions saved."""


def num_layers(config: Config, place: Place) -> int:
    """See `Family`."""
    _attention(config, place)
    return config.integer("n_layer")


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """See `Family`; the output is that of `c_proj`."""
    attention = _attention(config, place)
    refuse_aliases(config, n_head="num_attention_heads", n_embd="hidden_size")
    stack = find_stack(checkpoint, ["h"], place.layer)
    prefix = stack.prefix(place.layer)
    plain = plain_layer(
        stack,
        place.layer,
        config,
        _read_fused(checkpoint, prefix, _FUSED[attention]),
        heads="n_head",
        width="n_embd",
        layers="n_layer",
        rows={
            "n_inner": f"{prefix}mlp.c_fc.bias",
            "n_positions": f"{stack.root}wpe.weight",
            "vocab_size": f"{stack.root}wte.weight",
        },
        # transformers lets decoders attend in both directions by this key.
        causal=attention == "self" and config.boolean("is_causal", True),
        is_cross=attention == "cross",
    )
    scale = _scale(config, place.layer, plain.spec.config.head_dim)
    layer = dataclasses.replace(plain.spec.config, scale=scale)
    return Found(LayerSpec(layer, plain.spec.tensors), tuple(dict.fromkeys(plain.tensors)))


def _attention(config: Config, place: Place) -> str:
    """Return which attention of a layer is meant."""
    if place.part is not None:
        choose(config, "--part", place.part, ("decoder",))
    has_cross = config.boolean("add_cross_attention", False)
    choices = ("self", "cross") if has_cross else ("self",)
    return choose(config, "--attention", place.attention, choices)


def _read_fused(checkpoint: Checkpoint, prefix: str, fused: dict[str, tuple[str, ...]]) -> Module:
    """Return one attention's tensors, as matrices that multiply columns; each with its source."""
    names = [f"{theirs}.{kind}" for theirs in fused for kind in ("weight", "bias")]
    taken = checkpoint.take(prefix, names, harmless=_HARMLESS, buffers=_BUFFERS)
    tensors: dict[str, Tensor] = {}
    sources: list[str] = []
    for theirs, ours in fused.items():
        weight, bias = taken[f"{theirs}.weight"], taken[f"{theirs}.bias"]
        count = len(ours)
        width = bias.numel() // count
        if weight.shape != (width, count * width) or bias.shape != (count * width,):
            raise SourceInvalid(
                f"{checkpoint.where}: {prefix}{theirs}: expected a weight [E, {count}*E] and a bias"
                f" [{count}*E], got {list(weight.shape)} and {list(bias.shape)}"
            )
        for name, rows, numbers in zip(ours, weight.T.chunk(count), bias.chunk(count), strict=True):
            tensors |= {f"{name}.weight": rows.contiguous(), f"{name}.bias": numbers}
            sources += [f"{prefix}{theirs}.weight", f"{prefix}{theirs}.bias"]
    return Module(tensors, tuple(sources))


def _scale(config: Config, layer: int, head_dim: int) -> float | None:
    """Return what multiplies Q K^T in this layer; None = 1/sqrt(D)."""
    is_scaled = config.boolean("scale_attn_weights", True)
    if not config.boolean("scale_attn_by_inverse_layer_idx", False):
        return None if is_scaled else 1.0
    return (head_dim**-0.5 if is_scaled else 1.0) / (layer + 1)
