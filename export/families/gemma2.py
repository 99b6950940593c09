"""Gemma 2: a scale apart from the head size, capped logits, every other layer within a window."""

from export.checkpoint import Checkpoint
from export.families import decoder
from export.families.config import Config
from export.families.family import Found, Place
from export.families.rotary import read_rotary, rope_parameters

_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "query_pre_attn_scalar": 256,
}

num_layers = decoder.num_layers


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """Return one layer; see `Family`."""
    config = decoder.with_defaults(config, _DEFAULTS)
    config.refuse(
        use_bidirectional_attention="transformers masks as if it were false, and marks the layer as"
        " if it were true; which is meant is not known"
    )
    softcap = "attn_logit_softcapping"
    turn = read_rotary(config, rope_parameters(config), decoder.head_dim(config))
    layer = decoder.decoder_layer(
        config,
        rotary=turn.rotary,
        biases=decoder.biases(config, default=False),
        scale=decoder.inverse_root(config, "query_pre_attn_scalar"),
        softcap=config.number(softcap) if config.has(softcap) else None,
        window=decoder.window(config, place.layer, decoder.every(2, place.layer)),
    )
    location = decoder.locate(checkpoint, config, place)
    module = location.module(layer)
    return decoder.found(layer, module, turn.tensors)
