"""BLOOM: one matrix, query, key and value of every head in turn; ALiBi."""

import math

import torch
from torch import Tensor

from export.checkpoint import Checkpoint
from export.families import decoder
from export.families.config import Config
from export.families.decoder import FUSED
from export.families.family import Found, Place
from export.families.fused import taken_apart
from service.layer_config import PROJECTIONS, PositionBias


def num_layers(config: Config, place: Place) -> int:
    """Return how many layers there are; see `Family`."""
    return decoder.num_layers(_renamed(config), place)


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """
    Return one layer; see `Family`.

    BLOOM adds slope * position of the key; the position of the query, which the contract
    subtracts, is the same for all keys and does not change the softmax.
    """
    config = _renamed(config)
    if config.boolean("slow_but_exact", False) and config.integer("pretraining_tp", 1) > 1:
        config.refuse(
            slow_but_exact="with pretraining_tp above 1 transformers leaves out the bias of the"
            " output; set it to false to have the layer as it was trained"
        )
    layer = decoder.decoder_layer(
        config, biases=PROJECTIONS, position_bias=PositionBias("alibi"), num_kv_heads=0
    )
    location = decoder.locate(checkpoint, config, place, layers="h", attention="self_attention")
    module = location.module(layer, {FUSED: "query_key_value", "output": "dense"})
    module = taken_apart(layer, module, by_group=True)
    slopes = {"position_bias.slopes": alibi_slopes(layer.num_heads)}
    return decoder.found(layer, module, slopes)


def alibi_slopes(heads: int) -> Tensor:
    """
    Return the slope of every head, [H] (Press et al. 2022, and their code for other numbers).

    For a power of two they are 2^(-8/H), 2^(-16/H), …; else those of the next lower power of two,
    and then every other one of twice that power.  In FP32, as BLOOM computes them.
    """
    power = 2 ** math.floor(math.log2(heads))

    def first(count: int) -> Tensor:
        return torch.tensor(2 ** -(2 ** -(math.log2(count) - 3)), dtype=torch.float32)

    slopes = first(power) ** torch.arange(1, power + 1, dtype=torch.int32)
    others = torch.arange(1, 2 * (heads - power) + 1, 2, dtype=torch.int32)
    return torch.cat([slopes, first(2 * power) ** others])


def _renamed(config: Config) -> Config:
    """Return the configuration by the names that other families use."""
    names = {
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embed": "hidden_size",
    }
    values = {name: config.values[key] for key, name in names.items() if config.has(key)}
    for key, name in names.items():
        if config.has(name) and config.values[name] != values.get(name, config.values[name]):
            raise config.error(key, f"the same as {name}, {config.values[name]}")
    return Config(config.where, {**config.values, **values})
