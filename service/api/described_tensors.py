"""The inputs and outputs of a layer in words, as `/v1/models/{name}` lists them."""

from service.contract import (
    ATTEND_MASK,
    ATTENTION_WEIGHTS,
    EMBEDDINGS,
    EXTRA_WEIGHTS,
    HEAD_MASK,
    MEMORY,
    OUTPUT,
    PAIR_MASK,
    POSITIONS,
    VALUE_MEMORY,
)
from service.layer_config import MAX_POSITION, LayerConfig


def described_inputs(layer: LayerConfig) -> dict[str, str]:
    """Say what a call to this layer may hold: datatype, shape, meaning."""
    keys = "T" if layer.is_cross else "S"
    inputs = {EMBEDDINGS: f"FP32 [B, S, {layer.embed_dim}], required"}
    if layer.is_cross:
        inputs[MEMORY] = f"FP32 [B, T, {layer.memory_dim}], required"
    if layer.value_memory_dim is not None:
        inputs[VALUE_MEMORY] = (
            f"FP32 [B, T, {layer.value_memory_dim}], required: the source of values"
        )
    if layer.takes_positions:
        last = MAX_POSITION if layer.max_positions is None else layer.max_positions - 1
        inputs[POSITIONS] = f"INT64 [B, S], from 0 to {last}; default: 0, 1, 2, …"
    inputs |= {
        ATTEND_MASK: f"BOOL, or integers 0 and 1, [B, {keys}]: true = this key takes part",
        PAIR_MASK: f"BOOL, or integers 0 and 1, [B or 1, {layer.num_heads} or 1, S, {keys}]:"
        " true = this query may attend to this key",
        HEAD_MASK: f"FP32 [{layer.num_heads}] or [B, {layer.num_heads}]:"
        " multiplies each head's output",
    }
    if not layer.is_cross:
        default = "true" if layer.causal else "false"
        inputs["causal"] = f"boolean: attend to keys t <= s only; default: {default}"
    return inputs


def described_outputs(layer: LayerConfig) -> dict[str, str]:
    """Say what is answered: datatype, shape, meaning."""
    keys = "T" if layer.is_cross else "S"
    outputs = {
        OUTPUT: f"FP32 [B, S, {layer.embed_dim}]",
        ATTENTION_WEIGHTS: f"FP32 [B, {layer.num_heads}, S, {keys}], where weights are asked for",
    }
    if layer.extra_keys:
        kinds = ", ".join(layer.extra_keys)
        outputs[EXTRA_WEIGHTS] = (
            f"FP32 [B, {layer.num_heads}, S, {len(layer.extra_keys)}], beside them: the weights of"
            f" extra keys ({kinds}), with which rows sum to 1"
        )
    return outputs
