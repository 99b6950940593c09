"""Batches: which slices may share one, and that no answer depends on it."""

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.inference.artifact import read_graph
from service.inference.batches import Batch, BatchLimits, outputs_of, slices_of, stacked_inputs
from service.inference.calls import Call, Inputs, Outputs
from service.inference.engine import OnnxEngine
from service.layer_config import LayerConfig, Rotary
from tests.support.layers import ALL, CONFIGS, WIDE, Layers

TOLERANCE = 1e-5
"""Rule 2 of the contract, for FP32."""

PLAIN = LayerConfig(1, 1)

NO_LIMITS = BatchLimits(10**9, 10**9, 0.999)

many = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def uniform(rows: int, length: int, **options: Any) -> Call:
    """Return a call of equal lengths, of width 1."""
    return Call(Inputs(np.ones((rows, length, 1), np.float32)), **options)


def ragged(*lengths: int, **options: Any) -> Call:
    """Return a call of these lengths, of width 1."""
    block = np.zeros((len(lengths), max(lengths), 1), np.float32)
    return Call(Inputs(block), lengths=np.array(lengths), **options)


def test_slices_of_a_call_that_fits_is_one_without_a_copy() -> None:
    """The common case is passed to the engine as it came."""
    call = uniform(4, 8)

    [slice_] = slices_of(call, BatchLimits(32, 256, 0.25))

    assert slice_.is_whole
    assert stacked_inputs(Batch.of(slice_), PLAIN) is call.inputs


@pytest.mark.parametrize(
    ("limits", "counts"),
    [
        (BatchLimits(16, 10**9, 0.25), [2, 2, 1]),
        (BatchLimits(10**9, 64 * 3, 0.25), [3, 2]),
        (BatchLimits(1, 1, 0.25), [1] * 5),
    ],
    ids=["tokens", "cells", "a row is never split"],
)
def test_slices_of_a_large_call_fit_the_limits(limits: BatchLimits, counts: list[int]) -> None:
    """Memory is bounded by the run, not by the call."""
    slices = slices_of(uniform(5, 8), limits)

    assert [slice_.count for slice_ in slices] == counts


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    max_tokens=st.integers(1, 200),
    max_waste=st.sampled_from([0.0, 0.1, 0.25, 0.5]),
)
def test_slices_of_mixed_lengths_hold_each_row_once_within_the_waste(
    lengths: list[int], max_tokens: int, max_waste: float
) -> None:
    """No row is lost or run twice, and padding stays below its share."""
    limits = BatchLimits(max_tokens, 10**9, max_waste)

    slices = slices_of(ragged(*lengths), limits)

    rows = [int(row) for slice_ in slices for row in np.arange(len(lengths))[slice_.rows]]
    assert sorted(rows) == list(range(len(lengths)))
    for slice_ in slices:
        assert slice_.tokens == 2 * sum(np.array(lengths)[slice_.rows])
        if slice_.count > 1:
            assert slice_.count * slice_.length <= max_tokens
            assert slice_.tokens >= (1 - max_waste) * slice_.count * 2 * slice_.length


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [
        (uniform(2, 8), uniform(1, 8), True),
        (uniform(2, 8), uniform(3, 8), False),
        (uniform(1, 8), uniform(1, 4), True),
        (uniform(1, 8), uniform(1, 2), False),
        (uniform(1, 8), uniform(1, 8, weights=True), False),
        (uniform(1, 8), ragged(7, 8), True),
    ],
    ids=["equal", "too many tokens", "25 % padding", "37 % padding", "weights", "mixed"],
)
def test_try_add_accepts_only_what_fits_and_slows_no_other_slice(
    first: Call, second: Call, fits: bool
) -> None:
    """The share of padding, the cost of a run and the kind of call all count."""
    limits = BatchLimits(32, 10**9, 0.25)
    [one], [two] = slices_of(first, limits), slices_of(second, limits)

    assert Batch.of(one).try_add(two, limits) is fits


def test_try_add_refuses_a_mask_of_each_head_beside_none() -> None:
    """A mask of each head would cost every row of the batch H times the memory."""
    mask = np.ones((1, 3, 2, 2), bool)
    masked = Call(Inputs(np.ones((1, 2, 1), np.float32), pair_mask=mask))
    [one], [two] = slices_of(uniform(1, 2), NO_LIMITS), slices_of(masked, NO_LIMITS)

    assert not Batch.of(one).try_add(two, NO_LIMITS)


def test_stacked_inputs_of_equal_calls_without_masks_have_no_mask() -> None:
    """Equal lengths stay on the graph's cheaper path."""
    batch = Batch.of(slices_of(uniform(1, 2), NO_LIMITS)[0])
    assert batch.try_add(slices_of(uniform(2, 2), NO_LIMITS)[0], NO_LIMITS)

    inputs = stacked_inputs(batch, PLAIN)

    assert inputs.embeddings.shape == (3, 2, 1)
    assert (inputs.attend_mask, inputs.pair_mask, inputs.head_mask) == (None, None, None)


@st.composite
def calls(draw: st.DrawFn, model: str) -> Call:
    """Draw a call with any options; some hold NaN or huge values."""
    layer = ALL[model]
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    keys = draw(st.integers(1, 6)) if layer.is_cross else length
    random = np.random.default_rng(draw(st.integers(0, 2**32)))

    def maybe(value: Any) -> Any:
        return value if draw(st.booleans()) else None

    lengths = maybe(random.integers(1, length + 1, rows))
    memory_lengths = maybe(random.integers(1, keys + 1, rows)) if layer.is_cross else None
    embeddings = random.standard_normal((rows, length, layer.embed_dim)).astype(np.float32)
    match draw(st.sampled_from(["plain", "plain", "nan", "huge", "infinite"])):
        case "nan":
            embeddings[0, 0] = np.nan
        case "huge":
            embeddings[-1] *= 1e30
        case "infinite":
            embeddings[0, -1, 0] = np.inf
    memory, value_memory = (
        None if width is None else random.standard_normal((rows, keys, width)).astype(np.float32)
        for width in (layer.memory_dim, layer.value_memory_dim)
    )
    positions = None
    if layer.takes_positions:
        positions = maybe(random.integers(0, layer.max_positions or 30, (rows, length)))
    for block, true_lengths in (
        (embeddings, lengths),
        (positions, lengths),
        (memory, memory_lengths),
        (value_memory, memory_lengths),
    ):
        if block is not None and true_lengths is not None:
            block[np.arange(block.shape[1]) >= true_lengths[:, None]] = 0
    shape = draw(st.sampled_from([(1, 1), (rows, 1), (rows, layer.num_heads)]))
    factors = draw(st.sampled_from([(layer.num_heads,), (rows, layer.num_heads)]))
    inputs = Inputs(
        embeddings,
        memory,
        attend_mask=maybe(random.random((rows, keys)) < 0.7),
        pair_mask=maybe(random.random((*shape, length, keys)) < 0.7),
        head_mask=maybe(random.integers(0, 3, factors).astype(np.float32)),
        causal=not layer.is_cross and draw(st.booleans()),
        value_memory=value_memory,
        positions=positions,
    )
    return Call(inputs, lengths, memory_lengths, weights=draw(st.booleans()))


@pytest.fixture(scope="module")
def engines(layers: Layers) -> dict[str, OnnxEngine]:
    """Return the real engine of each layer."""
    return {
        name: OnnxEngine(read_graph(layers.artifact(name) / "layer.onnx"), config)
        for name, config in ALL.items()
    }


def run_alone(engine: OnnxEngine, call: Call) -> list[Outputs]:
    """Return each row's answer, run alone at its own length."""
    answers = []
    for row in range(len(call.inputs.embeddings)):
        length = None if call.lengths is None else int(call.lengths[row])
        keys = None if call.key_lengths is None else int(call.key_lengths[row])
        inputs = call.inputs
        pair_mask = inputs.pair_mask
        if pair_mask is not None:
            pair_mask = pair_mask[row if len(pair_mask) > 1 else 0][None, :, :length, :keys]
        head_mask = inputs.head_mask
        if head_mask is not None and head_mask.ndim == 2:
            head_mask = head_mask[[row]]
        single = Inputs(
            inputs.embeddings[[row], :length],
            None if inputs.memory is None else inputs.memory[[row], :keys],
            None if inputs.attend_mask is None else inputs.attend_mask[[row], :keys],
            pair_mask,
            head_mask,
            inputs.causal,
            None if inputs.value_memory is None else inputs.value_memory[[row], :keys],
            None if inputs.positions is None else inputs.positions[[row], :length],
        )
        answers.append(engine.run(single, weights=call.weights))
    return answers


def is_huge(embeddings: np.ndarray) -> bool:
    """Say whether finite numbers are so large that FP32 may overflow, by the contract's guide."""
    return bool(np.isfinite(embeddings).all() and np.abs(embeddings).max() > 1e4)


def check_same(found: np.ndarray, wanted: np.ndarray) -> None:
    """Assert rule 2; what is not finite alone is not finite together."""
    assert found.shape == wanted.shape
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(np.isfinite(found), finite)
    scale = max(1.0, float(np.abs(wanted[finite]).max(initial=0)))
    np.testing.assert_allclose(found[finite], wanted[finite], atol=TOLERANCE * scale, rtol=0)


@pytest.mark.parametrize("models", [CONFIGS, WIDE], ids=["plain", "wide"])
@many
@given(data=st.data())
def test_outputs_of_a_batch_answer_every_call_as_if_alone(
    data: st.DataObject, engines: dict[str, OnnxEngine], models: dict[str, LayerConfig]
) -> None:
    """Rule 2, over mixes of lengths, masks, positions and options, with NaN and huge beside."""
    model = data.draw(st.sampled_from(sorted(models)))
    drawn = data.draw(st.lists(calls(model), min_size=2, max_size=5))
    limits = BatchLimits(data.draw(st.sampled_from([4, 16, 10**9])), 10**9, 0.9)
    waiting = [slice_ for call in drawn for slice_ in slices_of(call, limits)]

    while waiting:
        batch = Batch.of(waiting.pop(0))
        for slice_ in list(waiting):
            if batch.try_add(slice_, limits):
                waiting.remove(slice_)
        outputs = engines[model].run(
            stacked_inputs(batch, engines[model].layer), weights=batch.slices[0].call.weights
        )
        for slice_, part in zip(batch.slices, outputs_of(batch, outputs), strict=True):
            alone = run_alone(engines[model], slice_.call)
            rows = np.arange(len(alone))[slice_.rows]
            for i, row in enumerate(rows):
                if is_huge(slice_.call.inputs.embeddings[row]):
                    continue  # this row may overflow or not; no other row may
                wanted = alone[row]
                length, keys = wanted.output.shape[1], None
                check_same(part.output[i, :length], wanted.output[0])
                if wanted.attention_weights is not None:
                    assert part.attention_weights is not None
                    keys = wanted.attention_weights.shape[-1]
                    check_same(
                        part.attention_weights[i, :, :length, :keys], wanted.attention_weights[0]
                    )
                assert (part.extra_weights is None) == (wanted.extra_weights is None)
                if part.extra_weights is not None and wanted.extra_weights is not None:
                    check_same(part.extra_weights[i, :, :length], wanted.extra_weights[0])


def rotating(scaling: Literal["none", "dynamic"]) -> LayerConfig:
    """Return a layer with rotary positions."""
    return LayerConfig(8, 2, rotary=Rotary(100.0, 4, scaling=scaling, original_length=4))


def stacked_positions(layer: LayerConfig, *calls: Call) -> list[list[int]] | None:
    """Return the positions of a batch of these calls."""
    slices = [slice_ for call in calls for slice_ in slices_of(call, NO_LIMITS)]
    batch = Batch.of(slices[0])
    assert all(batch.try_add(slice_, NO_LIMITS) for slice_ in slices[1:])
    positions = stacked_inputs(batch, layer).positions
    return None if positions is None else positions.tolist()


def test_stacked_positions_are_absent_where_counting_from_0_is_the_same() -> None:
    """One row of positions for all sequences costs less than one for each."""
    calls = uniform(1, 3), ragged(1, 2)

    assert stacked_positions(rotating("none"), *calls) is None
    assert stacked_positions(rotating("dynamic"), uniform(1, 3), uniform(1, 3)) is None


def test_stacked_positions_of_padding_are_0_where_the_largest_counts() -> None:
    """A sequence's own length decides how it is scaled, whatever it shares its run with."""
    found = stacked_positions(rotating("dynamic"), uniform(1, 3), ragged(1, 2))

    assert found == [[0, 1, 2], [0, 0, 0], [0, 1, 0]]


def test_stacked_positions_of_a_call_without_any_count_from_0() -> None:
    """Beside a call that gives its own."""
    placed = uniform(1, 2)
    placed.inputs.positions = np.array([[7, 5]])

    found = stacked_positions(rotating("none"), placed, uniform(1, 3))

    assert found == [[7, 5, 0], [0, 1, 2]]
