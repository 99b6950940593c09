"""
MPNet: a BERT whose layers share one relative position bias, T5's.

Names as in transformers.models.mpnet.modeling_mpnet.
"""

import dataclasses

from export.checkpoint import Checkpoint
from export.families.buckets import bucket_table
from export.families.checks import expect_self_attention
from export.families.config import Config
from export.families.family import Found, Place, check_shapes, read_module, weights_and_biases
from export.families.plain import plain_layer
from export.families.stack import find_stack
from export.layer_spec import LayerSpec
from service.layer_config import PROJECTIONS, PositionBias

_LINEAR = {
    "query": "attention.attn.q",
    "key": "attention.attn.k",
    "value": "attention.attn.v",
    "output": "attention.attn.o",
}
_HARMLESS = weights_and_biases(
    "attention.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm"
)
_BIAS = "relative_attention_bias"
_BUCKETS, _REACH = 32, 128
"""The model counts on these whatever config.json says (MPNetEncoder.compute_position_bias)."""


def num_layers(config: Config, place: Place) -> int:
    """See `Family`."""
    expect_self_attention(config, place)
    return config.integer("num_hidden_layers")


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """See `Family`; the output is that of `attention.attn.o`."""
    expect_self_attention(config, place)
    if config.integer("relative_attention_num_buckets", _BUCKETS) != _BUCKETS:
        raise config.error(
            "relative_attention_num_buckets",
            str(_BUCKETS),
            "transformers computes MPNet with no other number",
        )
    stack = find_stack(checkpoint, ["encoder.layer"], place.layer, understood=[f"{_BIAS}.weight"])
    prefix = stack.prefix(place.layer)
    plain = plain_layer(
        stack,
        place.layer,
        config,
        read_module(checkpoint, prefix, _LINEAR, harmless=_HARMLESS, biases=PROJECTIONS),
        rows={
            "intermediate_size": f"{prefix}intermediate.dense.weight",
            "vocab_size": f"{stack.root}embeddings.word_embeddings.weight",
            "max_position_embeddings": f"{stack.root}embeddings.position_embeddings.weight",
        },
    )
    shared = read_module(checkpoint, f"{stack.root}encoder.{_BIAS}.", {}, exact={_BIAS: "weight"})
    layer = dataclasses.replace(plain.spec.config, position_bias=PositionBias("buckets", _REACH))
    check_shapes(checkpoint, shared, {_BIAS: (_BUCKETS, layer.num_heads)})
    table = bucket_table(shared.tensors[_BIAS], is_bidirectional=True, max_distance=_REACH)
    tensors = {**plain.spec.tensors, "position_bias.table": table}
    return Found(LayerSpec(layer, tensors), (*plain.tensors, *shared.names))
