"""Weights from a seed, for a layer of any configuration."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from export.errors import SourceInvalid
from export.layer_spec import LayerSpec, tensor_shapes
from export.torch_layers import spec_tensors
from service.layer_config import PROJECTIONS, LayerConfig, Rotary

_BIAS_STD = 0.02
"""PyTorch starts biases at zero; they are drawn, so that leaving one out would show."""


def random_spec(config: LayerConfig, seed: int) -> LayerSpec:
    """
    Return a layer as PyTorch initialises it after `torch.manual_seed(seed)`, but for biases.

    Where nn.MultiheadAttention has layers of this shape the projections are those that it draws,
    so that the layer can be made again with PyTorch alone; else those of an nn.Linear each, in the
    order of `PROJECTIONS`.  What else the configuration asks for is drawn after them.

    Raises:
        SourceInvalid: the seed has more than 64 bits.
    """
    if not -(2**63) <= seed < 2**64:
        raise SourceInvalid(f"seed: expected a number of 64 bits, got {seed}")
    with _seeded(seed), torch.no_grad():
        tensors = _projections(config)
        shapes = tensor_shapes(config)
        tensors |= {
            name: _further(config, name, shape)
            for name, shape in shapes.items()
            if name not in tensors
        }
    return LayerSpec(config, tensors)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _projections(config: LayerConfig) -> dict[str, Tensor]:
    is_torchs = (
        config.head_dim * config.num_heads == config.embed_dim
        and config.num_kv_heads == config.num_heads
        and config.biases in (PROJECTIONS, ())
    )
    if is_torchs:
        module = nn.MultiheadAttention(
            config.embed_dim,
            config.num_heads,
            bias=bool(config.biases),
            kdim=config.memory_dim,
            vdim=config.value_memory_dim or config.memory_dim,
        )
        state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
        for name, tensor in state.items():
            if name.endswith("bias"):
                tensor.normal_(std=_BIAS_STD)
        return spec_tensors(state)
    tensors = {}
    shapes = tensor_shapes(config)
    for name in PROJECTIONS:
        width_out, width_in = shapes[f"{name}.weight"]
        linear = nn.Linear(width_in, width_out, bias=False)
        tensors[f"{name}.weight"] = linear.weight.detach()
        if name in config.biases:
            tensors[f"{name}.bias"] = torch.randn(width_out) * _BIAS_STD
    return tensors


def _further(config: LayerConfig, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return one tensor that is no projection's; see `export.layer_spec` for their names."""
    if config.rotary is not None and name == "rotary.frequencies":
        return _frequencies(config.rotary)
    if config.rotary is not None and name == "rotary.long_frequencies":
        return _frequencies(config.rotary) / config.rotary.factor
    if name == "position_bias.slopes":
        # Press et al. 2022: a geometric sequence that begins with its own ratio.
        heads = config.num_heads
        return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * torch.randn(shape)
    if name.endswith("norm.bias"):
        return torch.randn(shape) * _BIAS_STD
    return torch.randn(shape)


def _frequencies(rotary: Rotary) -> Tensor:
    """Return base^(-2i/dims), radians a position (Su et al. 2021, section 3.2.2)."""
    exponents = torch.arange(0, rotary.dims, 2, dtype=torch.float64) / rotary.dims
    return torch.pow(rotary.base, -exponents).to(torch.float32)
