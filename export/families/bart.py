"""
BART and the families laid out as it: an encoder, and a decoder with two attentions.

They are mBART, Marian, M2M-100 (of which NLLB is one), Pegasus, Blenderbot and PLBart.  Names as in
transformers.models.bart.modeling_bart.  The self-attention of the decoder is causal; its other
attention, `encoder_attn`, has the encoder's output for memory.
"""

from collections.abc import Collection
from itertools import product

from export.checkpoint import Checkpoint
from export.families.checks import refuse_aliases
from export.families.config import Config
from export.families.encoder_decoder import is_causal, part_of
from export.families.family import Found, Place, read_module
from export.families.plain import plain_layer
from export.families.stack import find_stack
from service.layer_config import PROJECTIONS, Projection

_LINEAR = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}

_BESIDE = frozenset(
    f"{part}.{kind}"
    for part, kind in product(
        ("self_attn_layer_norm", "encoder_attn_layer_norm", "fc1", "fc2", "final_layer_norm"),
        ("weight", "bias"),
    )
)

_POSITIONS = ("embed_positions.weight", "embed_positions.weights")
"""What is added to the embeddings, before the first layer."""


def num_layers(config: Config, place: Place) -> int:
    """See `Family`."""
    return config.integer(f"{part_of(config, place)}_layers")


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """See `Family`; the output is that of `out_proj`."""
    return read_layer(checkpoint, config, place, biases=PROJECTIONS)


def read_layer(
    checkpoint: Checkpoint, config: Config, place: Place, *, biases: Collection[Projection]
) -> Found:
    """Return an attention layer of this layout, in which these projections have a bias."""
    part, is_cross = part_of(config, place), place.attention == "cross"
    refuse_aliases(config, d_model="hidden_size")
    if part == "encoder":
        refuse_aliases(config, encoder_attention_heads="num_attention_heads")
    stack = find_stack(checkpoint, [f"{part}.layers"], place.layer, understood=_POSITIONS)
    prefix = stack.prefix(place.layer)
    this, other = ("encoder_attn", "self_attn") if is_cross else ("self_attn", "encoder_attn")
    return plain_layer(
        stack,
        place.layer,
        config,
        read_module(
            checkpoint,
            prefix,
            {ours: f"{this}.{theirs}" for ours, theirs in _LINEAR.items()},
            harmless=_BESIDE | _names(other, biases),
            biases=biases,
        ),
        heads=f"{part}_attention_heads",
        width="d_model",
        layers=f"{part}_layers",
        rows={
            f"{part}_ffn_dim": f"{prefix}fc1.weight",
            "vocab_size": f"{stack.root}shared.weight",
        },
        causal=is_causal(config, place),
        is_cross=is_cross,
    )


def _names(module: str, biases: Collection[Projection]) -> frozenset[str]:
    """Return what the tensors of an attention module are called."""
    weights = {f"{module}.{theirs}.weight" for theirs in _LINEAR.values()}
    return frozenset(weights | {f"{module}.{_LINEAR[ours]}.bias" for ours in biases})
