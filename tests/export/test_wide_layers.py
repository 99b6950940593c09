"""Every option of a layer, together with every other: formula, PyTorch layer and engine agree."""

from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from export.attention import AttentionLayer
from export.formula import Answer
from export.graph import LONG
from service.contract import FP32_TOLERANCE
from service.inference.parity import absolute_error, relative_error
from service.layer_config import MAX_POSITION, LayerConfig, PositionBias, Rotary
from tests.support.attention_cases import Case, batched, engine_of
from tests.support.specs import random_spec
from tests.support.wide_layers import answer_of, call_of, calls, specs


@settings(max_examples=50)
@given(st.data())
def test_layer_gives_the_formulas_answer(data: st.DataObject) -> None:
    """The layer in PyTorch gives output and weights of the formula, whatever its options."""
    spec = data.draw(specs())
    inputs = data.draw(calls(spec.config))

    found = AttentionLayer(spec)(
        *(_tensor(x) for x in (inputs.embeddings, inputs.memory, inputs.value_memory)),
        causal=inputs.causal,
        **{
            name: _tensor(getattr(inputs, name))
            for name in ("attend_mask", "pair_mask", "head_mask", "positions")
        },
    )

    check(answer_of(spec, inputs), found.output, found.weights, found.extra_weights)


@settings(max_examples=40)
@given(st.data())
def test_engine_gives_the_formulas_answer(data: st.DataObject) -> None:
    """So does the engine, with the exported graph, with weights and without, call after call."""
    spec = data.draw(specs())
    engine = engine_of(spec)

    for inputs in data.draw(st.lists(calls(spec.config), min_size=2, max_size=4)):
        expected = answer_of(spec, inputs)
        served = engine.run(inputs, weights=True)
        assert (served.extra_weights is not None) == bool(spec.config.extra_keys)
        check(expected, served.output, served.attention_weights, served.extra_weights)
        check(expected, engine.run(inputs, weights=False).output)


@settings(max_examples=30)
@given(st.data(), st.booleans())
def test_calls_of_a_batch_are_answered_as_if_alone(data: st.DataObject, weights: bool) -> None:
    """Calls with other lengths, masks and positions join exactly; some ask for causality."""
    spec = data.draw(specs())
    together = data.draw(st.lists(calls(spec.config), min_size=2, max_size=4))
    for inputs in together:
        if inputs.pair_mask is not None:
            inputs.pair_mask = inputs.pair_mask[:, :1]  # those of each head are joined apart

    expected = [answer_of(spec, inputs) for inputs in together]
    cases = [Case(*pair) for pair in zip(together, (e.output for e in expected), strict=True)]

    found = batched(engine_of(spec), cases, weights=weights)

    for answer, outputs in zip(expected, found, strict=True):
        assert (outputs.attention_weights is not None) == weights
        check(answer, outputs.output, outputs.attention_weights, outputs.extra_weights)


LONG_LAYERS = {
    "grouped": LayerConfig(8, 4, num_kv_heads=2),
    "scaled, of another head size": LayerConfig(6, 2, head_dim=4, scale=0.3, biases=("value",)),
    "learned and zero keys": LayerConfig(8, 2, extra_keys=("zero", "learned")),
    "causal, with a sink": LayerConfig(8, 2, causal=True, extra_keys=("sink",)),
    "rotary, causal": LayerConfig(8, 2, causal=True, rotary=Rotary(100.0, 4)),
    "ALiBi, causal": LayerConfig(8, 2, causal=True, position_bias=PositionBias("alibi")),
    "value memory": LayerConfig(8, 2, memory_dim=6, value_memory_dim=5),
}


@pytest.mark.parametrize("config", LONG_LAYERS.values(), ids=LONG_LAYERS)
def test_engine_gives_the_formulas_answer_to_a_long_sequence(config: LayerConfig) -> None:
    """The operators for short and for long sequences agree, with one key more or less."""
    spec = random_spec(config, seed=5)
    engine = engine_of(spec)

    for length in (LONG - 1, LONG, LONG + 1):
        inputs = call_of(config, rows=2, length=3 if config.is_cross else length, keys=length)
        check(answer_of(spec, inputs), engine.run(inputs, weights=False).output)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_frequencies_change_beyond_the_length_of_the_training(
    scaling: Literal["dynamic", "longrope"],
) -> None:
    """A sequence as long as those of the training still has their frequencies."""
    rotary = Rotary(100.0, 4, scaling=scaling, factor=2.0, original_length=5)
    spec = random_spec(LayerConfig(8, 2, rotary=rotary), seed=5)
    engine = engine_of(spec)

    for length in (4, 5, 6):
        inputs = call_of(spec.config, rows=2, length=length, keys=length)
        served = engine.run(inputs, weights=True)
        check(answer_of(spec, inputs), served.output, served.attention_weights)


@pytest.mark.parametrize("position", [1000, 10**5, MAX_POSITION])
@pytest.mark.parametrize(
    "config",
    [
        LayerConfig(16, 2, rotary=Rotary(10000.0, 8)),
        LayerConfig(16, 2, rotary=Rotary(100.0, 4, True, "dynamic", 2.0, original_length=16)),
        LayerConfig(16, 2, positional="sinusoidal"),
    ],
    ids=["rotary", "dynamic", "sinusoidal"],
)
def test_far_positions_are_as_exact_as_near_ones(config: LayerConfig, position: int) -> None:
    """Angles are FP32 everywhere, so that all round them alike."""
    spec = random_spec(config, seed=5)
    inputs = call_of(config, rows=2, length=6, keys=6)
    inputs.positions = position - np.random.default_rng(3).integers(0, 1000, (2, 6))

    served = engine_of(spec).run(inputs, weights=True)

    check(answer_of(spec, inputs), served.output, served.attention_weights)


def check(
    expected: Answer,
    output: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    extra_weights: npt.ArrayLike | None = None,
) -> None:
    """Return when an answer is the expected one within the contract's bound."""
    assert relative_error(output, expected.output) <= FP32_TOLERANCE
    if weights is not None:
        assert absolute_error(weights, expected.weights) <= FP32_TOLERANCE
    if extra_weights is not None:
        assert absolute_error(extra_weights, expected.extra_weights) <= FP32_TOLERANCE


def _tensor(array: object) -> Tensor | None:
    return None if array is None else torch.as_tensor(array)
