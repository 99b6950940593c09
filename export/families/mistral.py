"""Mistral: as LLaMA without biases, every layer within a window."""

from export.checkpoint import Checkpoint
from export.families import decoder
from export.families.config import Config
from export.families.family import Found, Place
from export.families.rotary import read_rotary, rope_parameters

_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}

num_layers = decoder.num_layers


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """Return one layer; see `Family`."""
    config = decoder.with_defaults(config, _DEFAULTS)
    config.refuse(
        layer_types="transformers gives every layer of a Mistral model the same window, and other"
        " programs may not; remove it if that is what is meant"
    )
    turn = read_rotary(config, rope_parameters(config), decoder.head_dim(config))
    layer = decoder.decoder_layer(
        config,
        rotary=turn.rotary,
        biases=(),
        window=config.integer("sliding_window") if config.has("sliding_window") else None,
    )
    location = decoder.locate(checkpoint, config, place)
    module = location.module(layer)
    return decoder.found(layer, module, turn.tensors)
