"""
ViT and DeiT, whose attention is the same.

Names as in transformers.models.vit.modeling_vit: those of the checkpoints, which
`save_pretrained` writes, too, and those that the modules have since transformers 5.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from export.checkpoint import Checkpoint
from export.families.checks import expect_self_attention
from export.families.config import Config
from export.families.family import Found, Place, read_module, weights_and_biases
from export.families.plain import plain_layer
from export.families.stack import find_stack
from service.layer_config import PROJECTIONS


@dataclass(frozen=True)
class _Names:
    """What the modules of a layer are called."""

    linear: Mapping[str, str]
    widening: str
    narrowing: str
    """The two linear layers after the attention."""


_NAMES = {
    "encoder.layer": _Names(
        {
            "query": "attention.attention.query",
            "key": "attention.attention.key",
            "value": "attention.attention.value",
            "output": "attention.output.dense",
        },
        "intermediate.dense",
        "output.dense",
    ),
    "layers": _Names(
        {
            "query": "attention.q_proj",
            "key": "attention.k_proj",
            "value": "attention.v_proj",
            "output": "attention.o_proj",
        },
        "mlp.fc1",
        "mlp.fc2",
    ),
}
"""By what the layers are called."""


def num_layers(config: Config, place: Place) -> int:
    """See `Family`."""
    expect_self_attention(config, place)
    return config.integer("num_hidden_layers")


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """See `Family`; the output is that of `attention.output.dense`, or `attention.o_proj`."""
    expect_self_attention(config, place)
    stack = find_stack(checkpoint, _NAMES, place.layer)
    prefix, names = stack.prefix(place.layer), _NAMES[stack.name]
    module = read_module(
        checkpoint,
        prefix,
        names.linear,
        harmless=weights_and_biases(
            "layernorm_before", "layernorm_after", names.widening, names.narrowing
        ),
        biases=PROJECTIONS if config.boolean("qkv_bias", True) else ("output",),
    )
    return plain_layer(
        stack,
        place.layer,
        config,
        module,
        rows={"intermediate_size": f"{prefix}{names.widening}.weight"},
    )
