"""
ModernBERT: rotary positions, and windows in most layers.

Names as in transformers.models.modernbert.modeling_modernbert.  A layer is global or local; the
two kinds have rotary positions of another base, and queries of a local layer attend to keys at
most local_attention // 2 tokens away (`sliding_window_bidirectional_overlay` in
transformers.masking_utils: that distance included).
"""

import torch
from torch import Tensor

from export.checkpoint import Checkpoint
from export.families.checks import expect_self_attention, refuse_contradictions, row_facts
from export.families.config import Config
from export.families.family import (
    Found,
    Module,
    Place,
    check_shapes,
    layer_config,
    read_module,
    weights_and_biases,
)
from export.families.plain import head_facts
from export.families.stack import find_stack
from export.layer_spec import LayerSpec, tensor_shapes
from service.layer_config import PROJECTIONS, LayerConfig, Rotary

_HARMLESS = weights_and_biases("attn_norm", "mlp_norm", "mlp.Wi", "mlp.Wo")
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_BASES = {_LOCAL: ("local_rope_theta", 10_000.0), _GLOBAL: ("global_rope_theta", 160_000.0)}
"""The key of config.json before transformers 5, and the default."""
_UNSCALED = "scaled rotary positions of this family are not read"


def num_layers(config: Config, place: Place) -> int:
    """See `Family`."""
    expect_self_attention(config, place)
    return config.integer("num_hidden_layers")


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """See `Family`; the output is that of `attn.Wo`."""
    expect_self_attention(config, place)
    kind = _kind(config, place.layer)
    base = _base(config, kind)
    width, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    has_bias = config.boolean("attention_bias", False)
    layer = layer_config(
        config,
        lambda: LayerConfig(
            width,
            num_heads,
            biases=PROJECTIONS if has_bias else (),
            window=config.integer("local_attention", 128) // 2 + 1 if kind == _LOCAL else None,
            rotary=Rotary(base, dims=width // num_heads),
        ),
    )
    stack = find_stack(checkpoint, ["layers"], place.layer)
    prefix = stack.prefix(place.layer)
    module = read_module(
        checkpoint,
        prefix,
        {"fused": "attn.Wqkv", "output": "attn.Wo"},
        harmless=_HARMLESS,
        biases=("fused", "output") if has_bias else (),
    )
    shapes = tensor_shapes(layer)
    check_shapes(
        checkpoint,
        module,
        {**shapes, "fused.weight": (3 * width, width), "fused.bias": (3 * width,)},
    )
    layers = (stack.count, f"layers below {stack.root}{stack.name}")
    vocabulary = f"{stack.root}embeddings.tok_embeddings.weight"
    refuse_contradictions(
        config,
        {
            "num_hidden_layers": layers,
            **head_facts(width, num_heads),
            **row_facts(checkpoint, {"vocab_size": vocabulary}),
        },
    )
    exponents = torch.arange(0, layer.head_dim, 2, dtype=torch.float32) / layer.head_dim
    frequencies = {"rotary.frequencies": 1.0 / base**exponents}
    return Found(LayerSpec(layer, _projections(module) | frequencies), module.names)


def _projections(module: Module) -> dict[str, Tensor]:
    """Return the projections one by one, as `LayerSpec` has them."""
    tensors = {}
    for name, tensor in module.tensors.items():
        projection, kind = name.split(".")
        if projection == "output":
            tensors[name] = tensor
        else:
            for part, rows in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                tensors[f"{part}.{kind}"] = rows.contiguous()
    return tensors


def _kind(config: Config, layer: int) -> str:
    """Say whether a layer is local or global."""
    if not config.has("layer_types"):
        every = config.integer("global_attn_every_n_layers", 3)
        return _LOCAL if layer % every else _GLOBAL
    kinds = config.values["layer_types"]
    num_layers = config.integer("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.error("layer_types", f"a list of {num_layers}")
    kind = kinds[layer]
    if kind not in (_LOCAL, _GLOBAL):
        raise config.error("layer_types", f"{_LOCAL} or {_GLOBAL} for layer {layer}")
    return str(kind)


def _base(config: Config, kind: str) -> float:
    """Return the base of the rotary positions of the layers of a kind."""
    config.refuse(rope_scaling=_UNSCALED)
    old_key, default = _BASES[kind]
    if config.has("rope_parameters"):
        both = config.part("rope_parameters")
        both.refuse_others((_LOCAL, _GLOBAL))
        if both.has(kind):
            parameters = both.part(kind)
            parameters.refuse_others(("rope_type", "rope_theta"))
            if parameters.text("rope_type", "default") != "default":
                raise parameters.error("rope_type", "default", _UNSCALED)
            if parameters.has("rope_theta"):
                return parameters.number("rope_theta")
    if old_key in config.values and not config.has(old_key):
        # Before transformers 5 null meant the other base, since then it fails.
        raise config.error(old_key, "a number")
    return config.number(old_key, default)
