"""
CLIP and SigLIP: the text and the vision model of either, or one of them alone.

Names as in transformers.models.clip.modeling_clip and transformers.models.siglip.modeling_siglip.
CLIP's text is causal; SigLIP's is not.
"""

from export.checkpoint import Checkpoint
from export.families.checks import choose
from export.families.config import Config
from export.families.family import Found, Place, read_module, weights_and_biases
from export.families.plain import plain_layer
from export.families.stack import find_stack
from service.layer_config import PROJECTIONS

_LINEAR = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.out_proj",
}
_HARMLESS = weights_and_biases("layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2")

_DEFAULTS = {
    ("clip", "text"): {
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "vocab_size": 49408,
        "max_position_embeddings": 77,
    },
    ("clip", "vision"): {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    ("siglip", "text"): {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 32000,
        "max_position_embeddings": 64,
    },
    ("siglip", "vision"): {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
}
"""What the configuration of a part means where it is silent: parts are saved without defaults."""


def num_layers(config: Config, place: Place) -> int:
    """See `Family`."""
    return _part(config, place)[1].integer("num_hidden_layers")


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """See `Family`; the output is that of `self_attn.out_proj`."""
    part, values = _part(config, place)
    is_whole = config.model_type in ("clip", "siglip")
    stack = find_stack(
        checkpoint, [f"{part}_model.encoder.layers" if is_whole else "encoder.layers"], place.layer
    )
    prefix = stack.prefix(place.layer)
    embeddings = f"{stack.root}{stack.name}".removesuffix("encoder.layers") + "embeddings"
    rows = {"intermediate_size": f"{prefix}mlp.fc1.weight"}
    if part == "text":
        rows["vocab_size"] = f"{embeddings}.token_embedding.weight"
        rows["max_position_embeddings"] = f"{embeddings}.position_embedding.weight"
    return plain_layer(
        stack,
        place.layer,
        values,
        read_module(checkpoint, prefix, _LINEAR, harmless=_HARMLESS, biases=PROJECTIONS),
        rows=rows,
        # transformers lets text attend in both directions by this key.
        causal=config.model_type.startswith("clip")
        and part == "text"
        and values.boolean("is_causal", True),
    )


def _part(config: Config, place: Place) -> tuple[str, Config]:
    """Return which part is meant, and its configuration."""
    choose(config, "--attention", place.attention, ("self",))
    family, _, alone = config.model_type.removesuffix("_model").partition("_")
    part = choose(config, "--part", place.part, (alone,) if alone else ("text", "vision"))
    values = config
    if not alone:
        # Old CLIP checkpoints have both, of which transformers uses the longer name.
        old = f"{part}_config_dict"
        values = config.part(old if family == "clip" and config.has(old) else f"{part}_config")
    return part, values.with_defaults(_DEFAULTS[family, part])
