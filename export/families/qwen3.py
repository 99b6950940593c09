"""Qwen3: as Qwen2, each head's queries and keys normalised, biases of all projections or none."""

from export.checkpoint import Checkpoint
from export.families import decoder, qwen2
from export.families.config import Config
from export.families.family import Found, Place
from export.families.rotary import read_rotary, rope_parameters
from service.layer_config import Norm

_DEFAULTS = {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-6,
}

num_layers = decoder.num_layers


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """Return one layer; see `Family`."""
    config = decoder.with_defaults(config, _DEFAULTS)
    turn = read_rotary(config, rope_parameters(config), decoder.head_dim(config))
    layer = decoder.decoder_layer(
        config,
        rotary=turn.rotary,
        norm=Norm("rms", config.number("rms_norm_eps")),
        biases=decoder.biases(config, default=False),
        window=qwen2.window(config, place.layer),
    )
    location = decoder.locate(checkpoint, config, place)
    module = location.module(layer, exact=decoder.HEAD_NORMS)
    return decoder.found(layer, module, turn.tensors)
