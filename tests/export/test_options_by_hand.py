"""
Every option of a layer against arithmetic on paper: formula, PyTorch layer and engine alike.

All layers here have matrices that can be seen through: queries, keys and values are the
embeddings themselves, or nothing, so that what is left is the option.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from export.attention import AttentionLayer
from export.formula import Formula
from export.gate import ask_layer
from export.layer_spec import LayerSpec, tensor_shapes
from service.contract import FP32_TOLERANCE
from service.inference.calls import Inputs
from service.layer_config import LayerConfig, Norm, PositionBias, Rotary
from tests.support.attention_cases import engine_of

Array = npt.NDArray[Any]
Asked = Callable[[LayerSpec, Inputs], tuple[Array, Array]]


def _formula(spec: LayerSpec, inputs: Inputs) -> tuple[Array, Array]:
    formula = Formula(spec.config, {name: tensor.numpy() for name, tensor in spec.tensors.items()})
    answer = formula(
        inputs.embeddings,
        inputs.memory,
        inputs.value_memory,
        causal=inputs.causal,
        positions=inputs.positions,
    )
    return answer.output, np.concatenate((answer.weights, answer.extra_weights), -1)


def _layer(spec: LayerSpec, inputs: Inputs) -> tuple[Array, Array]:
    return ask_layer(AttentionLayer(spec), inputs)


def _engine(spec: LayerSpec, inputs: Inputs) -> tuple[Array, Array]:
    engine = engine_of(spec)
    answer = engine.run(inputs, weights=True)
    assert answer.attention_weights is not None
    parts = [answer.attention_weights, answer.extra_weights]
    without = engine.run(inputs, weights=False)
    np.testing.assert_allclose(without.output, answer.output, rtol=0, atol=FP32_TOLERANCE)
    return answer.output, np.concatenate([part for part in parts if part is not None], -1)


by_each = pytest.mark.parametrize("ask", [_formula, _layer, _engine])


def _spec(config: LayerConfig, **tensors: Array) -> LayerSpec:
    """Return a layer whose matrices are identities; `__` in a name stands for its dot."""
    found = {}
    for name, shape in tensor_shapes(config).items():
        value: Array | None = tensors.pop(name.replace(".", "__"), None)
        if value is None:
            value = np.eye(shape[0], shape[-1]) if name.endswith(".weight") else np.zeros(shape)
        found[name] = torch.tensor(value, dtype=torch.float32).reshape(shape)
    assert not tensors
    return LayerSpec(config, found)


def _tokens(*rows: Sequence[float]) -> Array:
    return np.array([rows], np.float32)


def _softmax(*logits: float) -> list[float]:
    powers = [math.exp(logit) for logit in logits]
    return [power / sum(powers) for power in powers]


def _close(found: Array, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=FP32_TOLERANCE)


ALIKE = _tokens([1, 0], [1, 0], [1, 0])
"""Three tokens that only their positions tell apart."""

NO_QUERIES = {"query__weight": np.zeros((2, 2))}
"""All logits are 0, but for what is added to them."""


@by_each
def test_rotary_positions_turn_by_position_times_frequency(ask: Asked) -> None:
    """A query and a key of length 1, n steps apart, have the logit cos(n * frequency)."""
    config = LayerConfig(2, 1, rotary=Rotary(base=1.0, dims=2), scale=1.0)
    spec = _spec(config, rotary__frequencies=np.array([0.3]))

    _, weights = ask(spec, Inputs(ALIKE))
    _, apart = ask(spec, Inputs(ALIKE, positions=np.array([[10, 11, 14]])))

    _close(weights[0, 0, 0], _softmax(1, math.cos(0.3), math.cos(0.6)))
    _close(apart[0, 0, 0], _softmax(1, math.cos(0.3), math.cos(1.2)))


@by_each
@pytest.mark.parametrize(("interleaved", "pairs"), [(False, (0, 2)), (True, (0, 1))])
def test_rotary_pairs_are_neighbours_or_halves(
    ask: Asked, interleaved: bool, pairs: tuple[int, int]
) -> None:
    """A token along the first number of the first pair is turned into that pair's other one."""
    rotary = Rotary(base=1.0, dims=4, interleaved=interleaved)
    config = LayerConfig(4, 1, rotary=rotary, scale=1.0)
    first, second = np.eye(4, dtype=np.float32)[list(pairs)]
    # A quarter turn a step: key 1 along `first` lies along `second` where query 0 looks.
    spec = _spec(config, rotary__frequencies=np.array([math.pi / 2, 0.1]))

    _, weights = ask(spec, Inputs(np.stack([second, first])[None]))

    _close(weights[0, 0, 0], _softmax(1, 1))
    _close(weights[0, 0, 1], _softmax(1, 1))


@by_each
def test_rotary_leaves_the_numbers_beyond_its_dims(ask: Asked) -> None:
    """Of four numbers the last two are not turned, and the magnitude is not theirs."""
    rotary = Rotary(base=1.0, dims=2, magnitude=2.0)
    spec = _spec(LayerConfig(4, 1, rotary=rotary, scale=1.0), rotary__frequencies=np.array([0.3]))
    tokens = _tokens([1, 0, 1, 0], [1, 0, 1, 0])

    _, weights = ask(spec, Inputs(tokens))

    _close(weights[0, 0, 0], _softmax(4 + 1, 4 * math.cos(0.3) + 1))


@by_each
@pytest.mark.parametrize(("last", "frequency"), [(3, 0.5), (4, 0.25)])
def test_longrope_takes_the_long_frequencies_beyond_the_length_of_the_training(
    ask: Asked, last: int, frequency: float
) -> None:
    """Position 3 is the fourth: a length of 4, that of the training; position 4 is beyond it."""
    rotary = Rotary(base=1.0, dims=2, scaling="longrope", original_length=4)
    spec = _spec(
        LayerConfig(2, 1, rotary=rotary, scale=1.0),
        rotary__frequencies=np.array([0.5]),
        rotary__long_frequencies=np.array([0.25]),
    )

    _, weights = ask(spec, Inputs(ALIKE, positions=np.array([[0, 1, last]])))

    _close(weights[0, 0, 0], _softmax(1, math.cos(frequency), math.cos(frequency * last)))


@by_each
def test_dynamic_scaling_raises_the_base_beyond_the_length_of_the_training(ask: Asked) -> None:
    """
    At twice the length of the training and factor 2 the base grows 3^(dims / (dims - 2)) times.

    For base 16 and four dimensions that is 144, whose second frequency is 1/12 in place of 1/4.
    """
    rotary = Rotary(base=16.0, dims=4, scaling="dynamic", factor=2.0, original_length=4)
    spec = _spec(
        LayerConfig(4, 1, rotary=rotary, scale=1.0), rotary__frequencies=np.array([1, 1 / 4])
    )
    tokens = _tokens(*[[0, 1, 0, 0]] * 2)  # along the second pair of the halves

    short = ask(spec, Inputs(tokens, positions=np.array([[0, 3]])))[1]
    long = ask(spec, Inputs(tokens, positions=np.array([[0, 7]])))[1]

    _close(short[0, 0, 0], _softmax(1, math.cos(3 / 4)))
    _close(long[0, 0, 0], _softmax(1, math.cos(7 / 12)))


@by_each
def test_alibi_adds_a_slope_for_each_step_between_key_and_query(ask: Asked) -> None:
    """Keys before the query lose, keys after it win, and the slope is the head's."""
    config = LayerConfig(4, 2, position_bias=PositionBias("alibi"))
    spec = _spec(
        config, query__weight=np.zeros((4, 4)), position_bias__slopes=np.array([0.5, 0.25])
    )
    tokens = _tokens(*[[1, 0, 1, 0]] * 3)

    _, weights = ask(spec, Inputs(tokens))
    _, apart = ask(spec, Inputs(tokens, positions=np.array([[0, 2, 7]])))

    _close(weights[0, 0, 1], _softmax(-0.5, 0, 0.5))
    _close(weights[0, 1, 1], _softmax(-0.25, 0, 0.25))
    _close(apart[0, 0, 1], _softmax(-1.0, 0, 2.5))


@by_each
def test_buckets_add_a_number_for_each_distance_within_reach(ask: Asked) -> None:
    """Row `reach` of the table is distance 0; what is farther counts as the farthest."""
    config = LayerConfig(2, 1, position_bias=PositionBias("buckets", 1))
    spec = _spec(config, **NO_QUERIES, position_bias__table=np.array([0.1, 0.2, 0.7]))

    _, weights = ask(spec, Inputs(ALIKE))

    _close(weights[0, 0, 0], _softmax(0.2, 0.7, 0.7))
    _close(weights[0, 0, 2], _softmax(0.1, 0.1, 0.2))


@by_each
def test_soft_cap_comes_after_the_scale_and_before_masks_and_bias(ask: Asked) -> None:
    """A logit of 8 becomes 2 tanh(4); ALiBi is added to that, and hidden keys stay hidden."""
    config = LayerConfig(
        2, 1, scale=4.0, softcap=2.0, position_bias=PositionBias("alibi"), causal=True
    )
    spec = _spec(config, position_bias__slopes=np.array([3.0]))

    _, weights = ask(spec, Inputs(_tokens([1, 0], [2, 0]), causal=True))

    capped = 2 * math.tanh(4 * 2 / 2) - 3, 2 * math.tanh(4 * 4 / 2)
    _close(weights[0, 0], [[1, 0], _softmax(*capped)])


@by_each
def test_scale_takes_the_place_of_the_root_of_the_head_dim(ask: Asked) -> None:
    """Without one it is 1/sqrt(D), D the width of a head, whatever the embeddings' width is."""
    tokens = _tokens([1, 0, 0, 0], [2, 0, 0, 0])

    _, default = ask(_spec(LayerConfig(4, 1, head_dim=9)), Inputs(tokens))
    _, scaled = ask(_spec(LayerConfig(4, 1, head_dim=9, scale=0.5)), Inputs(tokens))

    _close(default[0, 0, 0], _softmax(1 / 3, 2 / 3))
    _close(scaled[0, 0, 0], _softmax(0.5, 1))


@by_each
def test_grouped_heads_share_keys_and_values_in_their_order(ask: Asked) -> None:
    """Of four heads the first two have the first keys and values, the last two the second."""
    config = LayerConfig(4, 4, num_kv_heads=2, head_dim=1, scale=1.0)
    spec = _spec(
        config,
        query__weight=np.array([[1, 0, 0, 0]] * 4),
        key__weight=np.array([[0, 1, 0, 0], [0, 0, 1, 0]]),
        value__weight=np.array([[1, 0, 0, 0], [2, 0, 0, 0]]),
    )

    output, weights = ask(spec, Inputs(_tokens([0, 0, 0, 0], [1, 1, 0, 0])))

    seen, level = _softmax(0, 1), [0.5, 0.5]
    _close(weights[0, :, 1], [seen, seen, level, level])
    _close(output[0, 1], [seen[1], seen[1], 1, 1])


@by_each
@pytest.mark.parametrize(
    ("norm", "logits"),
    [
        # Token (3, 4), mean square 12.5, and token (0, 2), mean square 2.
        (Norm("rms", 0.0), (2.0, 8 / 5)),
        (Norm("rms", 12.5), (1.0, 8 / math.sqrt(25 * 14.5))),
        # Means 3.5 and 1, variances 1/4 and 1: both become (-1, 1).
        (Norm("layer", 0.0), (2.0, 2.0)),
        (Norm("layer", 1.0), (0.4, 0.2 * math.sqrt(10))),
    ],
    ids=str,
)
def test_norm_of_queries_and_keys(ask: Asked, norm: Norm, logits: tuple[float, float]) -> None:
    """Epsilon is added below the root; layer norm takes the mean away first."""
    config = LayerConfig(2, 1, norm=norm, scale=1.0)
    ones = {"query_norm__weight": np.ones(2), "key_norm__weight": np.ones(2)}

    _, weights = ask(_spec(config, **ones), Inputs(_tokens([3, 4], [0, 2])))

    _close(weights[0, 0, 0], _softmax(*logits))


@by_each
@pytest.mark.parametrize(("span", "logits"), [("head", (1, 1)), ("projection", (0.4, 0.8))])
def test_norm_spans_a_head_or_the_projection(
    ask: Asked, span: Any, logits: tuple[float, float]
) -> None:
    """Of token (1, 2) each of two heads of width 1 has one number; the mean square is 5/2."""
    norm = Norm("rms", 0.0, span)
    config = LayerConfig(2, 2, norm=norm, scale=1.0)
    width = 1 if span == "head" else 2
    ones = {"query_norm__weight": np.ones(width), "key_norm__weight": np.ones(width)}
    tokens = _tokens([1, 2], [-1, 2])

    _, weights = ask(_spec(config, **ones), Inputs(tokens))

    first, second = (logits[0], -logits[0]), (4 * logits[0], 4 * logits[0])
    if span == "head":
        second = (1, 1)
    _close(weights[0, 0, 0], _softmax(*first))
    _close(weights[0, 1, 0], _softmax(*second))


@by_each
@pytest.mark.parametrize(
    ("causal", "window", "row"),
    [
        (False, 1, [0, 0, 1, 0]),
        (False, 2, [0, 1 / 3, 1 / 3, 1 / 3]),
        (True, 2, [0, 1 / 2, 1 / 2, 0]),
        (True, 3, [1 / 3, 1 / 3, 1 / 3, 0]),
        (False, 4, [1 / 4] * 4),
    ],
)
def test_window_keeps_keys_nearer_than_itself(
    ask: Asked, causal: bool, window: int, row: list[float]
) -> None:
    """The key at the query's place counts as one of them."""
    spec = _spec(LayerConfig(2, 1, window=window), **NO_QUERIES)

    _, weights = ask(spec, Inputs(_tokens(*[[1, 0]] * 4), causal=causal))

    _close(weights[0, 0, 2], row)


@by_each
def test_extra_keys_take_their_share_in_their_order(ask: Asked) -> None:
    """A sink's logit is its weight, a zero key's is 0, and only the learned one has a value."""
    config = LayerConfig(2, 1, scale=1.0, extra_keys=("sink", "learned", "zero"))
    spec = _spec(
        config,
        extra__sinks=np.array([0.5]),
        extra__key=np.array([2.0, 0]),
        extra__value=np.array([0, 5.0]),
    )

    output, weights = ask(spec, Inputs(_tokens([1, 0])))

    expected = _softmax(1, 0.5, 2, 0)
    _close(weights[0, 0, 0], expected)
    _close(output[0, 0], [expected[0], 5 * expected[2]])


@by_each
def test_value_memory_is_the_source_of_values(ask: Asked) -> None:
    """Keys are made of the one memory, values of the other."""
    config = LayerConfig(2, 1, memory_dim=1, value_memory_dim=3, scale=1.0)
    spec = _spec(
        config, key__weight=np.array([[1], [0]]), value__weight=np.array([[0, 0, 1], [0, 1, 0]])
    )
    memory, values = _tokens([1], [2]), _tokens([7, 0, 1], [7, 1, 0])

    output, weights = ask(spec, Inputs(_tokens([1, 0]), memory, value_memory=values))

    expected = _softmax(1, 2)
    _close(weights[0, 0, 0], expected)
    _close(output[0, 0], expected)


@by_each
@pytest.mark.parametrize("positions", [None, np.array([[2, 0]])])
def test_positions_are_added_to_the_embeddings(ask: Asked, positions: Array | None) -> None:
    """Sines and cosines in turn, the second pair a hundred times slower; keys and values alike."""
    config = LayerConfig(4, 1, positional="sinusoidal")
    spec = _spec(config, query__weight=np.zeros((4, 4)))

    output, _ = ask(spec, Inputs(np.zeros((1, 2, 4), np.float32), positions=positions))

    steps = (0, 1) if positions is None else (2, 0)
    rows = [[math.sin(n), math.cos(n), math.sin(n / 100), math.cos(n / 100)] for n in steps]
    _close(output[0], np.tile(np.mean(rows, axis=0), (2, 1)))


@by_each
def test_learned_positions_are_rows_of_the_table(ask: Asked) -> None:
    """The same row for the same position, wherever it stands."""
    config = LayerConfig(2, 1, positional="learned", max_positions=3)
    table = np.array([[1.0, 0], [0, 2], [0, 8]])
    spec = _spec(config, **NO_QUERIES, positional__table=table)
    nothing = np.zeros((1, 2, 2), np.float32)

    first, _ = ask(spec, Inputs(nothing))
    third, _ = ask(spec, Inputs(nothing, positions=np.array([[2, 2]])))

    _close(first[0, 0], [0.5, 1])
    _close(third[0, 0], [0, 8])


@by_each
def test_bias_of_each_projection_alone(ask: Asked) -> None:
    """A bias is added, to that projection and to no other."""
    tokens = _tokens([1, 0], [0, 0])
    plain = LayerConfig(2, 1, scale=1.0, biases=())

    def biased(name: Any) -> tuple[Array, Array]:
        config = dataclasses.replace(plain, biases=(name,))
        return ask(_spec(config, **{f"{name}__bias": np.array([1.0, 3.0])}), Inputs(tokens))

    level, seen = [0.5, 0.5], _softmax(1, 0)
    _close(biased("query")[1][0, 0], [_softmax(2, 0), seen])
    _close(biased("key")[1][0, 0], [_softmax(2, 1), level])
    _close(biased("value")[0][0, 1], [1.5, 3])
    _close(biased("output")[0][0, 1], [1.5, 3])
