"""DistilBERT; names as in transformers.models.distilbert.modeling_distilbert."""

from export.checkpoint import Checkpoint
from export.families.checks import expect_self_attention, refuse_aliases
from export.families.config import Config
from export.families.family import Found, Place, read_module, weights_and_biases
from export.families.plain import plain_layer
from export.families.stack import find_stack
from service.layer_config import PROJECTIONS

_LINEAR = {
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "output": "attention.out_lin",
}
_HARMLESS = weights_and_biases("sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm")


def num_layers(config: Config, place: Place) -> int:
    """See `Family`."""
    expect_self_attention(config, place)
    refuse_aliases(
        config, n_layers="num_hidden_layers", n_heads="num_attention_heads", dim="hidden_size"
    )
    return config.integer("n_layers")


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """See `Family`; the output is that of `attention.out_lin`."""
    num_layers(config, place)
    stack = find_stack(checkpoint, ["transformer.layer"], place.layer)
    prefix = stack.prefix(place.layer)
    return plain_layer(
        stack,
        place.layer,
        config,
        read_module(checkpoint, prefix, _LINEAR, harmless=_HARMLESS, biases=PROJECTIONS),
        heads="n_heads",
        width="dim",
        layers="n_layers",
        rows={
            "hidden_dim": f"{prefix}ffn.lin1.weight",
            "vocab_size": f"{stack.root}embeddings.word_embeddings.weight",
            "max_position_embeddings": f"{stack.root}embeddings.position_embeddings.weight",
        },
    )
