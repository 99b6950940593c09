"""
Gemma 3, the text model: each head's queries and keys normalised, local layers with another base.

In a model with a vision tower, the tokens of an image see each other whatever comes first; that is
a mask of the model (`pair_mask`), not of the layer.
"""

from typing import Any

from export.checkpoint import Checkpoint
from export.families import decoder
from export.families.checks import choose
from export.families.config import Config
from export.families.family import Found, Place
from export.families.rotary import read_rotary
from service.layer_config import Norm

_DEFAULTS = {
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 2304,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
}
"""Published checkpoints leave out what is the same in all of them."""

_BASES: dict[decoder.LayerType, tuple[str, float]] = {
    "full_attention": ("rope_theta", 1e6),
    "sliding_attention": ("rope_local_base_freq", 1e4),
}
"""By type of layer, the key of the base before transformers 5, and its default."""


def num_layers(config: Config, place: Place) -> int:
    """Return how many layers the text model has; see `Family`."""
    if place.part is not None:
        choose(config, "--part", place.part, ("text",))
    return decoder.num_layers(_text(config), Place(place.layer, place.attention))


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """Return one layer of the text model; see `Family`."""
    config = _text(config)
    config.refuse(
        attn_logit_softcapping="transformers does not cap the logits of Gemma 3, and other programs"
        " may; remove it if they are not capped"
    )
    is_bidirectional = config.boolean("use_bidirectional_attention", False)
    pattern = config.integer("sliding_window_pattern", 6)
    default = decoder.every(pattern, place.layer)
    window = decoder.window(config, place.layer, default)
    if window is not None and is_bidirectional:
        window = window // 2 + 1  # on each side, as in Gemma3TextConfig
    parameters = _rope_parameters(config, decoder.layer_type(config, place.layer, default))
    turn = read_rotary(config, parameters, decoder.head_dim(config))
    layer = decoder.decoder_layer(
        config,
        rotary=turn.rotary,
        norm=Norm("rms", config.number("rms_norm_eps")),
        biases=decoder.biases(config, default=False),
        scale=decoder.inverse_root(config, "query_pre_attn_scalar"),
        window=window,
        causal=config.boolean("is_causal", True) and not is_bidirectional,
    )
    location = decoder.locate(checkpoint, config, place, other_than=(".vision_tower.",))
    module = location.module(layer, exact=decoder.HEAD_NORMS)
    module = decoder.plus_one(module, *decoder.HEAD_NORMS)
    return decoder.found(layer, module, turn.tensors)


def _text(config: Config) -> Config:
    """Return the configuration of the text model."""
    if config.model_type == "gemma3":
        config = decoder.with_defaults(config.part("text_config"), {"model_type": "gemma3_text"})
    return decoder.with_defaults(config, _DEFAULTS)


def _rope_parameters(config: Config, kind: decoder.LayerType) -> Config:
    """
    Return the rotary parameters of layers of that kind, by the names of transformers 5.

    Since that version each kind has an object; before, `rope_scaling` was of the global layers.
    """
    values: dict[str, Any] = {}
    where = f"{config.where}: rope_parameters"
    if config.has("rope_parameters"):
        each = config.part("rope_parameters")
        unknown = sorted(each.values.keys() - _BASES)
        if unknown:
            raise each.error(unknown[0], f"only {' and '.join(_BASES)}")
        if each.has(kind):
            values, where = dict(each.part(kind).values), each.part(kind).where
    if kind == "full_attention" and config.has("rope_scaling"):
        values |= config.part("rope_scaling").values
    if "truncate" in values:
        raise Config(where, values).error(
            "truncate", "none", "transformers reads it for all layers alike, and never here"
        )
    key, default = _BASES[kind]
    values.setdefault("rope_theta", config.number(key, default))
    return Config(where, values)
