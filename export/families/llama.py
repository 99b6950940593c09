"""LLaMA: grouped keys and values, rotary positions."""

from export.checkpoint import Checkpoint
from export.families import decoder
from export.families.config import Config
from export.families.family import Found, Place
from export.families.rotary import read_rotary, rope_parameters

num_layers = decoder.num_layers


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """Return one layer; see `Family`."""
    turn = read_rotary(config, rope_parameters(config), decoder.head_dim(config))
    # pretraining_tp, which splits products without changing them, is ignored by transformers 5.
    layer = decoder.decoder_layer(
        config, rotary=turn.rotary, biases=decoder.biases(config, default=False)
    )
    location = decoder.locate(checkpoint, config, place)
    module = location.module(layer)
    return decoder.found(layer, module, turn.tensors)
