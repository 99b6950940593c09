"""
T5, mT5 and UMT5: no biases, logits not divided by sqrt(D), a bias for the distance of two tokens.

Names as in transformers.models.t5.modeling_t5.  T5 and mT5 keep the bias for distances in the
first block of encoder and decoder, for all their blocks; UMT5 has one in each.  A decoder is
causal, and its cross-attention has no distances.
"""

from itertools import product

from torch import Tensor

from export.checkpoint import Checkpoint
from export.errors import SourceInvalid
from export.families.buckets import bucket_table
from export.families.checks import refuse_aliases, refuse_contradictions, row_facts
from export.families.config import Config
from export.families.encoder_decoder import Part, is_causal, part_of
from export.families.family import Found, Place, check_shapes, layer_config, read_module
from export.families.stack import Stack, find_stack
from export.layer_spec import LayerSpec, tensor_shapes
from service.layer_config import LayerConfig, PositionBias

_LINEAR = {"query": "q", "key": "k", "value": "v", "output": "o"}

_SELF, _CROSS = "layer.0.SelfAttention", "layer.1.EncDecAttention"

_BIAS = "relative_attention_bias"

_MAX_REACH = 100_000
"""Of the farthest distance: the layer has a row for each, where transformers computes them."""

_HARMLESS = frozenset(
    (
        *(f"{module}.{name}.weight" for module in (_SELF, _CROSS) for name in _LINEAR.values()),
        *(f"layer.{i}.layer_norm.weight" for i in range(3)),
        *(
            f"layer.{i}.DenseReluDense.{name}.weight"
            for i, name in product((1, 2), ("wi", "wi_0", "wi_1", "wo"))
        ),
    )
)
"""What a block does besides; DenseReluDense is its layer 1 in an encoder, 2 in a decoder."""


def num_layers(config: Config, place: Place) -> int:
    """See `Family`."""
    return config.integer(_layers_key(config, part_of(config, place)))


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """See `Family`; the output is that of `o`."""
    part, is_cross = part_of(config, place), place.attention == "cross"
    if part == "encoder":
        # Beside a decoder transformers passes over it, alone not.
        config.refuse(is_decoder="an encoder that is computed as a decoder is not read")
    layer = _layer(config, place)
    biases = _biases(config, part)
    stack = find_stack(checkpoint, [f"{part}.block"], place.layer, understood=biases)
    prefix, module = stack.prefix(place.layer), _CROSS if is_cross else _SELF
    own = [name.removeprefix(f"block.{place.layer}.") for name in biases]
    found = read_module(
        checkpoint,
        prefix,
        {ours: f"{module}.{theirs}" for ours, theirs in _LINEAR.items()},
        harmless=_HARMLESS.union(own),
        biases=(),
    )
    check_shapes(checkpoint, found, tensor_shapes(layer))
    _refuse_contradictions(config, stack, part, prefix)
    if is_cross:
        return Found(LayerSpec(layer, found.tensors), found.names)
    table, name = _read_bias(config, stack, place, part)
    tensors = {**found.tensors, "position_bias.table": table}
    return Found(LayerSpec(layer, tensors), (*found.names, name))


def _read_bias(config: Config, stack: Stack, place: Place, part: Part) -> tuple[Tensor, str]:
    """Return the bias of each distance [2*reach + 1, H], and the tensor that it is made of."""
    count, reach = _buckets(config, part)
    block = place.layer if _has_bias_in_each(config) else 0
    below = f"{stack.prefix(block)}{_SELF}.{_BIAS}."
    trained = read_module(stack.checkpoint, below, {}, exact={_BIAS: "weight"})
    check_shapes(stack.checkpoint, trained, {_BIAS: (count, config.integer("num_heads"))})
    table = bucket_table(
        trained.tensors[_BIAS], is_bidirectional=part == "encoder", max_distance=reach
    )
    return table, trained.names[0]


def _layer(config: Config, place: Place) -> LayerConfig:
    is_cross = place.attention == "cross"
    width, heads = config.integer("d_model"), config.integer("num_heads")
    head_dim, (_, reach) = config.integer("d_kv"), _buckets(config, part_of(config, place))
    causal = is_causal(config, place)
    return layer_config(
        config,
        lambda: LayerConfig(
            width,
            heads,
            memory_dim=width if is_cross else None,
            head_dim=head_dim,
            biases=(),
            scale=1.0,
            causal=causal,
            position_bias=None if is_cross else PositionBias("buckets", reach),
        ),
    )


def _buckets(config: Config, part: Part) -> tuple[int, int]:
    """Return how many buckets there are, and the distance from which the last one holds."""
    count = config.integer("relative_attention_num_buckets")
    # Files of the time before it could be chosen do not say it.
    reach = config.integer("relative_attention_max_distance", 128)
    of_a_direction = count // 2 if part == "encoder" else count
    if not 1 <= of_a_direction // 2 < reach:
        raise SourceInvalid(
            f"{config.where}: expected relative_attention_num_buckets of 4 at least and a"
            f" relative_attention_max_distance above a half of them, got {count} and {reach}"
        )
    if reach > _MAX_REACH:
        raise config.error("relative_attention_max_distance", f"{_MAX_REACH} at most")
    return count, reach


def _layers_key(config: Config, part: Part) -> str:
    is_apart = part == "decoder" and config.has("num_decoder_layers")
    return "num_decoder_layers" if is_apart else "num_layers"


def _has_bias_in_each(config: Config) -> bool:
    return config.model_type == "umt5"


def _biases(config: Config, part: Part) -> list[str]:
    """List the biases for distances that a part may have, by their names below it."""
    blocks = config.integer(_layers_key(config, part)) if _has_bias_in_each(config) else 1
    return [
        *(f"block.{i}.{_SELF}.{_BIAS}.weight" for i in range(blocks)),
        # In old checkpoints; transformers passes over it.
        f"block.0.{_CROSS}.{_BIAS}.weight",
    ]


def _refuse_contradictions(config: Config, stack: Stack, part: Part, prefix: str) -> None:
    refuse_aliases(config, num_heads="num_attention_heads", d_model="hidden_size", d_kv="head_dim")
    dense = f"{prefix}layer.{1 if part == 'encoder' else 2}.DenseReluDense"
    is_gated = f"{dense}.wi_0.weight" in stack.checkpoint.tensors
    rows = {
        "d_ff": f"{dense}.{'wi_0' if is_gated else 'wi'}.weight",
        "vocab_size": f"{stack.root}shared.weight",
    }
    layers = (stack.count, f"layers below {stack.root}{stack.name}")
    refuse_contradictions(
        config, {_layers_key(config, part): layers, **row_facts(stack.checkpoint, rows)}
    )
