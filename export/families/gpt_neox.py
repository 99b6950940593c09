"""GPT-NeoX: one matrix, query, key and value of every head in turn; rotary positions of a part."""

from export.checkpoint import Checkpoint
from export.families import decoder
from export.families.config import Config
from export.families.decoder import FUSED
from export.families.family import Found, Place
from export.families.fused import taken_apart
from export.families.rotary import read_rotary, rope_parameters

_MASKS = (".attention.bias.", ".attention.masked_bias.")
"""Old checkpoints keep the causal mask, and what hidden logits became."""

num_layers = decoder.num_layers


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """Return one layer; see `Family`."""
    parameters = rope_parameters(
        config, base_key="rotary_emb_base", share_key="rotary_pct", default_share=0.25
    )
    turn = read_rotary(config, parameters, decoder.head_dim(config), is_partial=True)
    layer = decoder.decoder_layer(
        config,
        rotary=turn.rotary,
        biases=decoder.biases(config, default=True),
        num_kv_heads=0,
    )
    location = decoder.locate(checkpoint, config, place, attention="attention", other_than=_MASKS)
    linear = {FUSED: "query_key_value", "output": "dense"}
    module = location.module(layer, linear)
    module = taken_apart(layer, module, by_group=True)
    return decoder.found(layer, module, turn.tensors)
