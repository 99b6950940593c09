"""Falcon: one matrix, group by group; one key for all heads, one a group, or one a head."""

from export.checkpoint import Checkpoint
from export.families import decoder
from export.families.config import Config
from export.families.decoder import FUSED
from export.families.family import Found, Place
from export.families.fused import taken_apart
from export.families.rotary import read_rotary, rope_parameters

num_layers = decoder.num_layers


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """Return one layer; see `Family`."""
    config.refuse(
        alibi="Falcon rounds its position bias to bfloat16, which no other computation reproduces;"
        " a layer with it cannot be exported"
    )
    turn = read_rotary(config, rope_parameters(config), decoder.head_dim(config))
    layer = decoder.decoder_layer(
        config,
        rotary=turn.rotary,
        biases=decoder.biases(config, default=False, key="bias"),
        num_kv_heads=_kv_heads(config),
    )
    location = decoder.locate(checkpoint, config, place, layers="h", attention="self_attention")
    linear = {FUSED: "query_key_value", "output": "dense"}
    module = location.module(layer, linear)
    module = taken_apart(layer, module, by_group=True)
    return decoder.found(layer, module, turn.tensors)


def _kv_heads(config: Config) -> int:
    """Return how many keys and values there are: FalconAttention of transformers."""
    heads = config.integer("num_attention_heads")
    if config.boolean("new_decoder_architecture", False):
        return config.integer("num_kv_heads", heads)
    return 1 if config.boolean("multi_query", True) else heads
