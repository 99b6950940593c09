"""Phi-3: one matrix of all queries, all keys and all values; rotary positions of a part."""

from export.checkpoint import Checkpoint
from export.families import decoder
from export.families.config import Config
from export.families.decoder import FUSED
from export.families.family import Found, Place
from export.families.fused import taken_apart
from export.families.rotary import read_rotary, rope_parameters

_DEFAULTS = {"original_max_position_embeddings": 4096}

num_layers = decoder.num_layers


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """Return one layer; see `Family`."""
    config = decoder.with_defaults(config, _DEFAULTS)
    turn = read_rotary(config, _rope_parameters(config), decoder.head_dim(config), is_partial=True)
    layer = decoder.decoder_layer(
        config,
        rotary=turn.rotary,
        biases=(),
        window=config.integer("sliding_window") if config.has("sliding_window") else None,
    )
    location = decoder.locate(checkpoint, config, place)
    linear = {FUSED: "qkv_proj", "output": "o_proj"}
    module = location.module(layer, linear)
    module = taken_apart(layer, module, by_group=False)
    return decoder.found(layer, module, turn.tensors)


def _rope_parameters(config: Config) -> Config:
    """Return the rotary parameters; longrope, the only scaling of Phi-3, had two other names."""
    parameters = rope_parameters(config)
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if kind in ("su", "yarn"):
        kind = "longrope"
    if kind not in ("default", "longrope"):
        raise parameters.error("rope_type", "default or longrope")
    return Config(parameters.where, {**parameters.values, "rope_type": kind})
