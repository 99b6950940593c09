"""The layer's configuration: what follows from what is said, and what contradicts itself."""

from collections.abc import Callable
from typing import Any

import pytest

from service.contract import graph_inputs, graph_outputs
from service.inference.artifact import as_read
from service.layer_config import MAX_POSITION, LayerConfig, Norm, PositionBias, Rotary

PLAIN_INPUTS = ["embeddings", "pair_mask", "head_mask", "plain"]


def test_config_of_two_numbers_is_that_of_the_formula() -> None:
    """As many key as query heads, each E/H wide, scaled by the root of that, all with a bias."""
    config = LayerConfig(12, 3)

    assert (config.num_kv_heads, config.head_dim) == (3, 4)
    assert config.logit_scale == 0.5
    assert config.biases == ("query", "key", "value", "output")
    assert (config.is_cross, config.causal, config.takes_positions) == (False, False, False)
    assert config == LayerConfig(12, 3, num_kv_heads=3, head_dim=4)


def test_config_with_a_scale_has_that_one() -> None:
    """Whatever the width of a head is."""
    assert LayerConfig(12, 3, scale=2.0).logit_scale == 2.0
    assert LayerConfig(12, 3, head_dim=16).logit_scale == 0.25


INPUTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "none": ({}, []),
    "norm": ({"norm": Norm("rms", 1e-6)}, []),
    "window": ({"window": 4}, []),
    "rotary": ({"rotary": Rotary(1e4, 4)}, ["positions"]),
    "alibi": ({"position_bias": PositionBias("alibi")}, ["positions"]),
    "buckets": ({"position_bias": PositionBias("buckets", 3)}, ["positions"]),
    "sinusoidal": ({"positional": "sinusoidal"}, ["positions"]),
    "learned": ({"positional": "learned", "max_positions": 9}, ["positions"]),
    "memory": ({"memory_dim": 5}, ["memory"]),
    "two memories": ({"memory_dim": 5, "value_memory_dim": 7}, ["memory", "value_memory"]),
}


@pytest.mark.parametrize(("options", "further"), INPUTS.values(), ids=INPUTS)
def test_graph_inputs_are_what_the_layer_needs(options: dict[str, Any], further: list[str]) -> None:
    """Behind the embeddings, before the masks, in one order."""
    config = LayerConfig(8, 2, **options)

    names = [tensor.name for tensor in graph_inputs(config)]

    assert names == ["embeddings", *further, *PLAIN_INPUTS[1:]]
    assert config.takes_positions == ("positions" in further)


def test_graph_outputs_have_the_weights_of_extra_keys_apart() -> None:
    """As many as there are, behind those of the sequence."""
    config = LayerConfig(8, 2, extra_keys=("zero", "sink"))

    output, weights, extra = graph_outputs(config)

    assert (output.name, weights.name) == ("output", "attention_weights")
    assert (extra.name, extra.axes) == ("extra_weights", ("batch", 2, "length", 2))
    assert len(graph_outputs(LayerConfig(8, 2))) == 2


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"embed_dim": 0}, "embed_dim and num_heads: expected positive integers, got 0 and 2"),
    ({"num_heads": 3}, "embed_dim: expected a multiple of num_heads 3, got 8"),
    ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor of num_heads 2, got 3"),
    ({"num_kv_heads": -1}, "num_kv_heads: expected a positive integer, got -1"),
    ({"head_dim": -4}, "head_dim: expected a positive integer, got -4"),
    ({"memory_dim": 0}, "memory_dim: expected a positive integer, got 0"),
    ({"window": 0}, "window: expected a positive integer, got 0"),
    ({"scale": 0.0}, "scale: expected a positive number, got 0.0"),
    ({"scale": float("nan")}, "scale: expected a positive number, got nan"),
    ({"softcap": float("inf")}, "softcap: expected a positive number, got inf"),
    ({"window": 2**31}, "window: expected at most 2147483647, got 2147483648"),
    ({"embed_dim": 2**40}, "embed_dim: expected at most 2147483647, got 1099511627776"),
    (
        {"value_memory_dim": 4},
        "value_memory_dim: expected none for self-attention, which has no memory",
    ),
    (
        {"rotary": Rotary(1e4, 6)},
        "rotary.dims: expected at most head_dim 4, got 6",
    ),
    ({"max_positions": 4}, "max_positions: expected with positional learned, and only there"),
    (
        {"positional": "learned"},
        "max_positions: expected with positional learned, and only there",
    ),
    (
        {"positional": "learned", "max_positions": MAX_POSITION + 2},
        f"max_positions: expected at most {MAX_POSITION + 1}, got {MAX_POSITION + 2}",
    ),
    (
        {"biases": ("query", "query")},
        "biases: expected each projection once, got ['query', 'query']",
    ),
    (
        {"extra_keys": ("sink", "sink")},
        "extra_keys: expected each kind once, got ['sink', 'sink']",
    ),
    *(
        (
            {"memory_dim": 8, **options},
            "memory_dim: cross-attention has no positions, causal default or window",
        )
        for options in (
            {"causal": True},
            {"window": 3},
            {"rotary": Rotary(1e4, 4)},
            {"position_bias": PositionBias("alibi")},
            {"positional": "sinusoidal"},
        )
    ),
]


@pytest.mark.parametrize(("options", "message"), CONTRADICTIONS, ids=str)
def test_config_that_contradicts_itself_is_refused(options: dict[str, Any], message: str) -> None:
    """In one line that names the field, what was expected and what came."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is compared whole)
        LayerConfig(**{"embed_dim": 8, "num_heads": 2, **options})

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": 3}, "rotary.dims: expected a positive even number, got 3"),
        ({"dims": 0}, "rotary.dims: expected a positive even number, got 0"),
        (
            {"scaling": "longrope"},
            "rotary.original_length: expected one for longrope, got none",
        ),
        (
            {"dims": 2, "scaling": "dynamic", "original_length": 4},
            "rotary.dims: expected at least 4 for dynamic, got 2",
        ),
    ],
    ids=str,
)
def test_rotary_that_lacks_what_it_needs_is_refused(options: dict[str, Any], message: str) -> None:
    """Pairs make an even number; a scaling by length needs the length of the training."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is compared whole)
        Rotary(**{"base": 1e4, "dims": 4, **options})

    assert str(caught.value) == message


OUT_OF_RANGE: list[tuple[Callable[[], object], str]] = [
    (lambda: Rotary(float("nan"), 4), "rotary.base: expected a positive number, got nan"),
    (lambda: Rotary(-1.0, 4), "rotary.base: expected a positive number, got -1.0"),
    (lambda: Rotary(1e4, 4, factor=0.0), "rotary.factor: expected a positive number, got 0.0"),
    (
        lambda: Rotary(1e4, 4, magnitude=float("inf")),
        "rotary.magnitude: expected a positive number, got inf",
    ),
    (
        lambda: Rotary(1e4, 4, original_length=-8),
        "rotary.original_length: expected a positive integer, got -8",
    ),
    (
        lambda: Rotary(1e4, 4, original_length=10**20),
        "rotary.original_length: expected at most 2147483647, got 100000000000000000000",
    ),
    (lambda: Norm("rms", float("nan")), "norm.epsilon: expected 0 or more, got nan"),
    (lambda: Norm("rms", -1e-6), "norm.epsilon: expected 0 or more, got -1e-06"),
    (
        lambda: PositionBias("buckets", 2**31),
        "position_bias.reach: expected at most 2147483647, got 2147483648",
    ),
]


@pytest.mark.parametrize(("make", "message"), OUT_OF_RANGE, ids=[case[1] for case in OUT_OF_RANGE])
def test_numbers_that_no_layer_has_are_refused(make: Callable[[], object], message: str) -> None:
    """Neither a manifest nor a function of the caller's own can bring them in."""
    with pytest.raises(ValueError, match=r".") as caught:
        make()

    assert str(caught.value) == message


OF_ANOTHER_TYPE: list[tuple[LayerConfig, str]] = [
    (LayerConfig(8, 2, causal="no"), "causal: Input should be a valid boolean"),  # type: ignore[arg-type]
    (LayerConfig(8.0, 2.0), "embed_dim: Input should be a valid integer"),  # type: ignore[arg-type]
    (
        LayerConfig(8, 2, extra_keys=("bogus",)),  # type: ignore[arg-type]
        "extra_keys.0: Input should be 'learned', 'zero' or 'sink'",
    ),
    (
        LayerConfig(8, 2, rotary=Rotary(1e4, 4, scaling="bogus")),  # type: ignore[arg-type]
        "rotary.scaling: Input should be 'none', 'linear', 'dynamic', 'yarn', 'longrope' or"
        " 'llama3'",
    ),
    (LayerConfig(8, 2, norm=Norm("bogus", 1e-6)), "norm.kind: Input should be 'rms' or 'layer'"),  # type: ignore[arg-type]
    (LayerConfig(8, 2, window=2.5), "window: Input should be a valid integer"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(
    ("layer", "message"), OF_ANOTHER_TYPE, ids=[case[1] for case in OF_ANOTHER_TYPE]
)
def test_values_of_another_type_are_named(layer: LayerConfig, message: str) -> None:
    """Before anything is computed with them, in the words of the manifest's reader."""
    with pytest.raises(ValueError, match=r".") as caught:
        as_read(layer)

    assert str(caught.value) == message


def test_every_kind_of_layer_can_be_written_and_read_again() -> None:
    """What the exporter knows, the manifest's reader knows."""
    for layer in (LayerConfig(8, 2), LayerConfig(8, 2, rotary=Rotary(1e4, 4), norm=Norm("rms", 0))):
        assert as_read(layer) == layer


def test_whole_numbers_become_floats_where_fields_are() -> None:
    """As a manifest is read, so that graph and manifest describe a layer in the same words."""
    layer = as_read(LayerConfig(8, 2, scale=2, rotary=Rotary(10000, 4)))

    assert layer.to_json() == LayerConfig(8, 2, scale=2.0, rotary=Rotary(10000.0, 4)).to_json()
