"""Weights from a seed: for every configuration, and those of PyTorch where it has such a layer."""

import pytest
import torch
from torch import nn

from export.errors import SourceInvalid
from export.layer_spec import tensor_shapes
from export.random_weights import random_spec
from export.sources import random_layer
from service.layer_config import LayerConfig, Norm, PositionBias, Rotary

SEED = 4
"""Any but 0."""

WIDE = {
    "LLaMA-like": LayerConfig(
        8, 4, num_kv_heads=2, head_dim=6, biases=(), causal=True, rotary=Rotary(5e5, 6), window=9
    ),
    "one bias": LayerConfig(8, 2, biases=("query",)),
    "norms": LayerConfig(8, 2, norm=Norm("layer", 1e-5)),
    "a norm of all heads": LayerConfig(8, 2, norm=Norm("rms", 1e-5, "projection")),
    "ALiBi": LayerConfig(8, 4, position_bias=PositionBias("alibi")),
    "buckets": LayerConfig(8, 2, position_bias=PositionBias("buckets", 5), scale=1.0),
    "extra keys": LayerConfig(8, 2, extra_keys=("learned", "zero", "sink")),
    "two lengths": LayerConfig(
        8, 2, rotary=Rotary(1e4, 4, scaling="longrope", factor=4.0, original_length=16)
    ),
    "two memories": LayerConfig(8, 2, 6, 3),
    "a table": LayerConfig(8, 2, positional="learned", max_positions=7),
}


@pytest.mark.parametrize("config", WIDE.values(), ids=WIDE)
def test_random_spec_draws_every_tensor_of_the_configuration(config: LayerConfig) -> None:
    """Each is there, none is constant, and the seed decides all that is drawn."""
    spec, again, other = (random_spec(config, seed) for seed in (SEED, SEED, SEED + 1))

    assert set(spec.tensors) == set(tensor_shapes(config))
    for name, tensor in spec.tensors.items():
        assert tensor.min() < tensor.max(), name
        assert torch.equal(tensor, again.tensors[name])
        is_formula = name.endswith("frequencies") or name.endswith("slopes")
        assert torch.equal(tensor, other.tensors[name]) == is_formula, name


def test_random_spec_rotary_frequencies_are_those_of_the_base() -> None:
    """base^(-2i/dims), from 1 radian a position down."""
    frequencies = random_spec(WIDE["LLaMA-like"], SEED).tensors["rotary.frequencies"]

    expected = [1.0, 5e5 ** (-2 / 6), 5e5 ** (-4 / 6)]
    assert frequencies.tolist() == pytest.approx(expected, rel=1e-6)


def test_random_spec_slopes_are_those_of_alibi() -> None:
    """Four heads have 1/4, 1/16, 1/64, 1/256 (Press et al. 2022, section 3)."""
    slopes = random_spec(WIDE["ALiBi"], SEED).tensors["position_bias.slopes"]

    assert slopes.tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256]


def test_random_spec_positions_leave_the_other_weights_as_they_are() -> None:
    """The layer with positions is the layer without them, and a table."""
    without = random_spec(LayerConfig(8, 2), SEED).tensors
    table = random_spec(WIDE["a table"], SEED).tensors

    assert all(torch.equal(tensor, table[name]) for name, tensor in without.items())
    assert set(table) - set(without) == {"positional.table"}


def test_random_spec_of_two_memories_is_what_pytorch_draws() -> None:
    """Whoever knows the seed can make the same layer with PyTorch alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = nn.MultiheadAttention(8, 2, kdim=6, vdim=3)

    tensors = random_spec(WIDE["two memories"], SEED).tensors

    assert torch.equal(tensors["key.weight"], module.k_proj_weight)
    assert torch.equal(tensors["value.weight"], module.v_proj_weight)


def test_random_layer_takes_every_field_of_a_configuration() -> None:
    """Layers of the shape of large models need no checkpoint."""
    source = random_layer(
        8,
        4,
        seed=SEED,
        bias=False,
        rotary_base=5e5,
        num_kv_heads=2,
        head_dim=6,
        causal=True,
        window=9,
    )

    assert source.config == WIDE["LLaMA-like"]
    assert source.reference is None
    assert source.tensors == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor of num_heads 4, got 3"),
        (
            {"head_dim": 3, "rotary_base": 1e4},
            "rotary.dims: expected a positive even number, got 3",
        ),
        ({"rotary_base": -1.0}, "rotary.base: expected a positive number, got -1.0"),
        ({"window": 0}, "window: expected a positive integer, got 0"),
        (
            {"positional": "learned", "max_positions": 2**24 + 1},
            "max_positions: expected at most 16777216, got 16777217",
        ),
        (
            {"memory_dim": 8, "causal": True},
            "memory_dim: cross-attention has no positions, causal default or window",
        ),
    ],
    ids=str,
)
def test_random_layer_contradicting_numbers_are_refused(
    options: dict[str, float], message: str
) -> None:
    """The message names the number that is wrong."""
    with pytest.raises(SourceInvalid) as caught:
        random_layer(8, 4, seed=SEED, **options)  # type: ignore[arg-type]

    assert str(caught.value) == message
