"""Qwen2: as LLaMA with biases of query, key and value, upper layers within a window."""

from export.checkpoint import Checkpoint
from export.families import decoder
from export.families.config import Config
from export.families.family import Found, Place
from export.families.rotary import read_rotary, rope_parameters

_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096}

num_layers = decoder.num_layers


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """Return one layer; see `Family`."""
    config = decoder.with_defaults(config, _DEFAULTS)
    turn = read_rotary(config, rope_parameters(config), decoder.head_dim(config))
    layer = decoder.decoder_layer(
        config,
        rotary=turn.rotary,
        biases=("query", "key", "value"),
        window=window(config, place.layer),
    )
    location = decoder.locate(checkpoint, config, place)
    module = location.module(layer)
    return decoder.found(layer, module, turn.tensors)


def window(config: Config, layer: int) -> int | None:
    """Return a layer's window; without `layer_types`, those from `max_window_layers` on have it."""
    is_windowed = config.boolean("use_sliding_window", False) and config.has("sliding_window")
    first = config.values.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise config.error("max_window_layers", "a number of layers")
    is_local = is_windowed and layer >= first
    default: decoder.LayerType = "sliding_attention" if is_local else "full_attention"
    found = decoder.window(config, layer, default)
    if found is not None and not is_windowed:
        raise config.error("use_sliding_window", f"true, for layer_types has layer {layer} sliding")
    return found
