"""
gpt-oss: as LLaMA with biases and a sink for each head, every other layer within a window.

Its experts, which are no part of the attention, may be quantised (MXFP4).
"""

from export.checkpoint import Checkpoint
from export.families import decoder
from export.families.config import Config
from export.families.family import Found, Place
from export.families.rotary import read_rotary, rope_parameters

_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

num_layers = decoder.num_layers


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """Return one layer; see `Family`."""
    config = decoder.with_defaults(config, _DEFAULTS)
    if not config.has("rope_scaling") and not config.has("rope_parameters"):
        config = Config(config.where, {**config.values, "rope_parameters": _YARN})
    parameters = rope_parameters(config, default_base=150000.0)
    turn = read_rotary(config, parameters, decoder.head_dim(config))
    layer = decoder.decoder_layer(
        config,
        rotary=turn.rotary,
        biases=decoder.biases(config, default=True),
        window=decoder.window(config, place.layer, decoder.every(2, place.layer)),
        extra_keys=("sink",),
    )
    location = decoder.locate(checkpoint, config, place)
    module = location.module(layer, exact={"extra.sinks": "sinks"})
    return decoder.found(layer, module, turn.tensors)
