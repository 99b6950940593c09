"""
ALBERT, whose layers share their weights.

Names as in transformers.models.albert.modeling_albert.  There are `num_hidden_layers` repetitions
of `inner_group_num` layers each; layer N is layer N % inner_group_num of repetition N //
inner_group_num, and repetitions next to each other share the weights of a group.
"""

from export.checkpoint import Checkpoint
from export.families.checks import (
    expect_self_attention,
    refuse_contradictions,
    refuse_relative_positions,
)
from export.families.config import Config
from export.families.family import Found, Place, read_module, weights_and_biases
from export.families.plain import plain_layer
from export.families.stack import Stack, find_stack
from service.layer_config import PROJECTIONS

_LINEAR = {name: f"attention.{name}" for name in ("query", "key", "value")} | {
    "output": "attention.dense"
}
_HARMLESS = weights_and_biases("attention.LayerNorm", "full_layer_layer_norm", "ffn", "ffn_output")
_DEFAULTS = {"num_hidden_groups": 1, "inner_group_num": 1}


def num_layers(config: Config, place: Place) -> int:
    """See `Family`."""
    expect_self_attention(config, place)
    config = config.with_defaults(_DEFAULTS)
    return config.integer("num_hidden_layers") * config.integer("inner_group_num")


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """See `Family`; the output is that of `attention.dense`, before its LayerNorm."""
    expect_self_attention(config, place)
    refuse_relative_positions(config)
    config = config.with_defaults(_DEFAULTS)
    repetition, inner = divmod(place.layer, config.integer("inner_group_num"))
    # As transformers computes it, with its rounding where groups do not divide the layers.
    repetitions_per_group = config.integer("num_hidden_layers") / config.integer(
        "num_hidden_groups"
    )
    group = int(repetition / repetitions_per_group)
    groups = find_stack(checkpoint, ["encoder.albert_layer_groups"], 0)
    stack = Stack(checkpoint, groups.prefix(group), "albert_layers")
    refuse_contradictions(
        config,
        {
            "num_hidden_groups": (groups.count, f"groups below {groups.root}{groups.name}"),
            "inner_group_num": (stack.count, f"layers below {stack.root}{stack.name}"),
        },
    )
    prefix = stack.prefix(inner)
    return plain_layer(
        stack,
        inner,
        config,
        read_module(checkpoint, prefix, _LINEAR, harmless=_HARMLESS, biases=PROJECTIONS),
        layers="inner_group_num",
        rows={
            "intermediate_size": f"{prefix}ffn.weight",
            "vocab_size": f"{groups.root}embeddings.word_embeddings.weight",
            "max_position_embeddings": f"{groups.root}embeddings.position_embeddings.weight",
            "type_vocab_size": f"{groups.root}embeddings.token_type_embeddings.weight",
        },
    )
