"""
BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA; MiniLM is a BERT.

Names of tensors as in transformers.models.bert.modeling_bert.  A decoder's self-attention is
causal, and it may have a cross-attention beside it, whose memory is as wide as the layer.
"""

from export.checkpoint import Checkpoint
from export.families.checks import choose, refuse_part, refuse_relative_positions
from export.families.config import Config
from export.families.family import Found, Place, read_module, weights_and_biases
from export.families.plain import plain_layer
from export.families.stack import find_stack
from service.layer_config import PROJECTIONS

_LINEAR = {
    attention: {
        "query": f"{module}.self.query",
        "key": f"{module}.self.key",
        "value": f"{module}.self.value",
        "output": f"{module}.output.dense",
    }
    for attention, module in (("self", "attention"), ("cross", "crossattention"))
}
_NORMS = ("attention.output.LayerNorm", "crossattention.output.LayerNorm", "output.LayerNorm")
_HARMLESS = frozenset(
    # What the layer does after this attention, and its other attention.
    weights_and_biases(
        *_LINEAR["self"].values(),
        *_LINEAR["cross"].values(),
        *("intermediate.dense", "output.dense", *_NORMS),
    )
    # Old checkpoints have these names for the weight and bias of a norm.
    | {f"{norm}.{kind}" for norm in _NORMS for kind in ("gamma", "beta")}
)


def num_layers(config: Config, place: Place) -> int:
    """See `Family`."""
    _attention(config, place)
    return config.integer("num_hidden_layers")


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """See `Family`; the output is that of `attention.output.dense`."""
    attention = _attention(config, place)
    refuse_relative_positions(config)
    stack = find_stack(checkpoint, ["encoder.layer"], place.layer)
    prefix = stack.prefix(place.layer)
    embeddings = f"{stack.root}embeddings"
    return plain_layer(
        stack,
        place.layer,
        config,
        read_module(checkpoint, prefix, _LINEAR[attention], harmless=_HARMLESS, biases=PROJECTIONS),
        rows={
            "intermediate_size": f"{prefix}intermediate.dense.weight",
            "vocab_size": f"{embeddings}.word_embeddings.weight",
            "max_position_embeddings": f"{embeddings}.position_embeddings.weight",
            "type_vocab_size": f"{embeddings}.token_type_embeddings.weight",
        },
        # transformers lets decoders attend in both directions by the second key.
        causal=attention == "self"
        and config.boolean("is_decoder", False)
        and config.boolean("is_causal", True),
        is_cross=attention == "cross",
    )


def _attention(config: Config, place: Place) -> str:
    """Return which attention of a layer is meant."""
    refuse_part(config, place)
    has_cross = config.boolean("add_cross_attention", False)
    if has_cross and not config.boolean("is_decoder", False):
        raise config.error(
            "add_cross_attention", "false", "only a decoder (is_decoder) has cross-attention"
        )
    choices = ("self", "cross") if has_cross else ("self",)
    return choose(config, "--attention", place.attention, choices)
