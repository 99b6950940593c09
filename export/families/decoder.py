"""What decoder-only families share: which layer is meant, where it lies, and what it must hold."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from export.checkpoint import Checkpoint
from export.errors import SourceInvalid
from export.families.checks import expect_self_attention, refuse_contradictions
from export.families.config import Config, shortened
from export.families.family import (
    Found,
    Module,
    Place,
    check_shapes,
    layer_config,
    read_module,
)
from export.families.stack import find_stack
from export.layer_spec import LayerSpec, tensor_shapes
from service.layer_config import PROJECTIONS, LayerConfig, Projection

SEPARATE = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
"""What LLaMA, and most families after it, call their projections."""

HEAD_NORMS = {"query_norm.weight": "q_norm.weight", "key_norm.weight": "k_norm.weight"}
"""The weights of the norms of each head's queries and keys, where there are such."""

FUSED = "fused"
"""What a linear layer of queries, keys and values in one is called until it is taken apart."""

_BUFFERS = (".rotary_emb.inv_freq.",)
"""Old checkpoints keep the frequencies, which config.json gives."""

_BESIDE = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    *("ln_attn", "ln_mlp", "mlp"),
)
"""What a layer of a decoder holds beside its attention: the norms around it, and what follows."""

_WIDEST_HEAD = 2**16
"""No head is as wide; a slip in config.json must not take memory for its frequencies."""

LayerType = Literal["full_attention", "sliding_attention"]


def with_defaults(config: Config, defaults: Mapping[str, Any]) -> Config:
    """Return the configuration with its family's values for keys that are absent, not null."""
    return Config(config.where, {**defaults, **config.values})


def num_layers(config: Config, place: Place) -> int:
    """Return how many layers there are, all of them self-attention; see `Family`."""
    expect_self_attention(config, place)
    return config.integer("num_hidden_layers")


def decoder_layer(config: Config, **options: Any) -> LayerConfig:
    """
    Return what the layer computes; width and heads are those of config.json unless given.

    Raises:
        SourceInvalid: the numbers contradict each other, or layers are configured one by one.
    """
    config.refuse(per_layer_config="layers are configured one by one, which is not read")
    # transformers lets every decoder attend in both directions by this key.
    is_causal = config.boolean("is_causal", True)
    if options.get("window") is not None and not is_causal:
        raise config.error(
            "is_causal", "true", "a window in both directions is not read for this family"
        )
    heads = config.integer("num_attention_heads")
    facts: dict[str, Any] = {
        "embed_dim": config.integer("hidden_size"),
        "num_heads": heads,
        "num_kv_heads": config.integer("num_key_value_heads", heads),
        "head_dim": head_dim(config),
        "causal": is_causal,
        **options,
    }
    return layer_config(config, lambda: LayerConfig(**facts))


def head_dim(config: Config) -> int:
    """Return the width of one head: `head_dim`, or an equal share of the model's width."""
    if config.has("head_dim"):
        key, found = "head_dim", config.integer("head_dim")
    else:
        key, heads = "hidden_size", config.integer("num_attention_heads")
        if config.integer(key) % heads:
            raise config.error(key, f"a multiple of num_attention_heads {heads}")
        found = config.integer(key) // heads
    if found > _WIDEST_HEAD:
        raise config.error(key, f"heads of at most {_WIDEST_HEAD} numbers")
    return found


def biases(config: Config, *, default: bool, key: str = "attention_bias") -> tuple[Projection, ...]:
    """Return the projections that have a bias in families where all have one, or none."""
    return PROJECTIONS if config.boolean(key, default) else ()


def layer_type(config: Config, layer: int, default: LayerType) -> LayerType:
    """
    Return whether a layer is local, by `layer_types` or, where there is none, by `default`.

    Raises:
        SourceInvalid: the layer is of another type, or `layer_types` is not one a layer.
    """
    types = config.values.get("layer_types")
    if types is None:
        return default
    count = config.integer("num_hidden_layers")
    if not isinstance(types, list) or len(types) != count:
        raise config.error("layer_types", f"a type for each of {count} layers")
    found = types[layer]
    if found == "full_attention":
        return "full_attention"
    if found == "sliding_attention":
        return "sliding_attention"
    raise SourceInvalid(
        f"{config.where}: layer_types: layer {layer}: expected full_attention or"
        f" sliding_attention, got {shortened(found)}; such a layer cannot be exported"
    )


def every(pattern: int, layer: int) -> LayerType:
    """Return a layer's type where every `pattern`th layer is global, the others local."""
    return "sliding_attention" if (layer + 1) % pattern else "full_attention"


def window(config: Config, layer: int, default: LayerType) -> int | None:
    """
    Return a layer's window, None for one that is not local; `default` as for `layer_type`.

    Query s attends to the keys s - window < t <= s, as in transformers.masking_utils.
    """
    if layer_type(config, layer, default) == "full_attention":
        return None
    return config.integer("sliding_window")


def inverse_root(config: Config, key: str) -> float:
    """Return 1 / sqrt of a positive number of the configuration."""
    value = config.number(key)
    if not 0 < value < math.inf:
        raise config.error(key, "a positive number")
    return float(value**-0.5)


@dataclass(frozen=True)
class Location:
    """Where a layer's attention lies in a checkpoint."""

    checkpoint: Checkpoint
    prefix: str
    """With its dot at the end."""

    def module(
        self,
        layer: LayerConfig,
        linear: Mapping[str, str] = SEPARATE,
        *,
        exact: Mapping[str, str] | None = None,
    ) -> Module:
        """
        Return the tensors of the attention; see `read_module`.

        A linear layer `FUSED` makes queries, keys and values.

        Raises:
            SourceInvalid: they are not those that the layer's configuration asks for.
        """
        fused = {FUSED} & linear.keys() if "query" in layer.biases else set()
        module = read_module(
            self.checkpoint, self.prefix, linear, exact=exact, biases={*layer.biases, *fused}
        )
        rows = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
        shapes = {f"{FUSED}.weight": (rows, layer.embed_dim), f"{FUSED}.bias": (rows,)}
        check_shapes(self.checkpoint, module, {**tensor_shapes(layer), **shapes})
        return module


def locate(
    checkpoint: Checkpoint,
    config: Config,
    place: Place,
    *,
    layers: str = "layers",
    attention: str = "self_attn",
    other_than: Collection[str] = (),
) -> Location:
    """
    Return where the attention of a layer lies, whatever class of model was saved.

    Its names are `….<layers>.N.<attention>.…`.  Names with a part of `other_than` are none of them.

    Raises:
        SourceInvalid: it is not there, or in several places, the number of layers is not that of
            config.json, or the layer holds a module that no decoder has.
    """
    parts = (*_BUFFERS, *other_than)
    kept = {
        name: stored
        for name, stored in checkpoint.tensors.items()
        if not any(part in f".{name}." for part in parts)
    }
    checkpoint = replace(checkpoint, tensors=kept)
    stack = find_stack(checkpoint, [layers], place.layer)
    count = (stack.count, f"layers below {stack.root}{stack.name}")
    refuse_contradictions(config, {"num_hidden_layers": count})
    prefix = stack.prefix(place.layer)
    known = (attention, *_BESIDE)
    names = [name for name in checkpoint.below(prefix) if name.partition(".")[0] in known]
    checkpoint.refuse_unknown(prefix, names)
    return Location(checkpoint, f"{prefix}{attention}.")


def found(layer: LayerConfig, module: Module, others: Mapping[str, Tensor]) -> Found:
    """Return the layer, `others` being tensors that a checkpoint does not hold."""
    return Found(LayerSpec(layer, {**module.tensors, **others}), module.names)


def plus_one(module: Module, *names: str) -> Module:
    """Return the module with 1 added to the tensors named: Gemma's norms multiply by 1 + w."""
    changed = {name: 1.0 + module.tensors[name] for name in names}
    return replace(module, tensors={**module.tensors, **changed})
