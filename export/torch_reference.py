"""PyTorch's own layer as an independent reference, for the layers that it computes."""

import torch
from torch import Tensor, nn

from export.layer_spec import LayerSpec
from service.layer_config import PROJECTIONS, LayerConfig


def torch_layer(spec: LayerSpec) -> nn.MultiheadAttention | None:
    """
    Return `nn.MultiheadAttention` (batch_first, eval) with these weights; None = it is another.

    A causal default is no part of it: a call gives its mask.
    """
    config = spec.config
    if not _is_expressible(config):
        return None
    with torch.device("meta"):
        layer = nn.MultiheadAttention(
            config.embed_dim,
            config.num_heads,
            bias=bool(config.biases),
            add_zero_attn="zero" in config.extra_keys,
            kdim=config.memory_dim,
            vdim=config.value_memory_dim or config.memory_dim,
            batch_first=True,
        )
    tensors = spec.tensors
    names = ("query", "key", "value")
    state = {"out_proj.weight": tensors["output.weight"]}
    if "in_proj_weight" in layer.state_dict():
        state["in_proj_weight"] = _joined([tensors[f"{name}.weight"] for name in names])
    else:
        state |= {f"{name[0]}_proj_weight": tensors[f"{name}.weight"] for name in names}
    if config.biases:
        state["in_proj_bias"] = torch.cat([tensors[f"{name}.bias"] for name in names])
        state["out_proj.bias"] = tensors["output.bias"]
    layer.load_state_dict(state, assign=True)
    if "learned" in config.extra_keys:
        # Set here since `add_bias_kv` draws them, for which PyTorch imports for seconds.
        layer.bias_k = nn.Parameter(tensors["extra.key"][None, None])
        layer.bias_v = nn.Parameter(tensors["extra.value"][None, None])
    return layer.eval()


def _joined(matrices: list[Tensor]) -> Tensor:
    """Return matrices below each other, without a copy where they lie so in memory already."""
    first, rows = matrices[0], sum(map(len, matrices))
    strides, start = first.stride(), first.storage_offset()
    for matrix in matrices:
        is_next = (
            matrix.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and matrix.stride() == strides
            and matrix.storage_offset() == start
        )
        if not is_next:
            return torch.cat(matrices)
        start += len(matrix) * strides[0]
    return first.as_strided((rows, first.shape[1]), strides)


def _is_expressible(config: LayerConfig) -> bool:
    textbook = LayerConfig(
        config.embed_dim,
        config.num_heads,
        config.memory_dim,
        config.value_memory_dim,
        biases=config.biases,
        causal=config.causal,
        extra_keys=config.extra_keys,
    )
    return (
        config == textbook
        and config.biases in (PROJECTIONS, ())
        # In the order in which PyTorch appends them.
        and config.extra_keys in ((), ("learned",), ("zero",), ("learned", "zero"))
    )
