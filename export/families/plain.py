"""Plain multi-head attention, of which many families have nothing but the names of their own."""

from collections.abc import Mapping

from export.families.checks import Facts, refuse_contradictions, row_facts
from export.families.config import Config
from export.families.family import Found, Module, check_shapes, layer_config
from export.families.stack import Stack
from export.layer_spec import LayerSpec, tensor_shapes
from service.layer_config import LayerConfig


def plain_layer(
    stack: Stack,
    layer: int,
    config: Config,
    module: Module,
    *,
    heads: str = "num_attention_heads",
    width: str = "hidden_size",
    layers: str = "num_hidden_layers",
    rows: Mapping[str, str],
    causal: bool = False,
    is_cross: bool = False,
) -> Found:
    """
    Return the layer of this module, whose output projection has a bias.

    `heads`, `width` and `layers` are keys of config.json, the first of them needed.  `rows` are
    more keys, each with the tensor that has so many rows.

    Raises:
        SourceInvalid: a tensor has another shape, or the configuration is not of these weights.
    """
    num_heads = config.integer(heads)
    embed_dim = module.tensors["output.bias"].numel()
    found = layer_config(
        config,
        lambda: LayerConfig(
            embed_dim,
            num_heads,
            memory_dim=embed_dim if is_cross else None,
            biases=module.biases,
            causal=causal,
        ),
    )
    check_shapes(stack.checkpoint, module, tensor_shapes(found))
    facts: Facts = {
        width: (embed_dim, f"the width of layer {layer}"),
        layers: (stack.count, f"layers below {stack.root}{stack.name}"),
    }
    refuse_contradictions(
        config,
        {**facts, **head_facts(embed_dim, num_heads, heads), **row_facts(stack.checkpoint, rows)},
    )
    return Found(LayerSpec(found, module.tensors), module.names)


def head_facts(embed_dim: int, num_heads: int, key: str = "num_attention_heads") -> Facts:
    """Return what the weights of plain attention say of heads, whose number `key` gives."""
    head_dim = (embed_dim // num_heads, f"width {embed_dim} over {num_heads} heads")
    return {
        "num_key_value_heads": (num_heads, f"one key and value each for {key}"),
        "attention_head_size": head_dim,
        "head_dim": head_dim,
    }
