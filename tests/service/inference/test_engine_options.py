"""The engine for layers with windows, a causal default, positions and extra keys."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from export.gate import formula_of
from service.contract import FP32_TOLERANCE
from service.inference.calls import Inputs, Outputs
from service.inference.engine import OnnxEngine, full_mask
from service.inference.parity import absolute_error, relative_error
from tests.support.attention_cases import engine_of
from tests.support.specs import KINDS, random_source

SEED = 4
"""Any."""

source_of = cache(lambda kind: random_source(KINDS[kind], SEED))
engine_for = cache(lambda kind: engine_of(source_of(kind).spec))


def _inputs(kind: str, rows: int, length: int, **more: Any) -> Inputs:
    """Return a call to a layer of this kind, its default one unless `more` says otherwise."""
    config, random = KINDS[kind], np.random.default_rng((SEED, rows, length))

    def tokens(count: int, width: int | None) -> Any:
        if width is None:
            return None
        return random.standard_normal((rows, count, width)).astype(np.float32)

    x = tokens(length, config.embed_dim)
    memory, values = (tokens(length + 3, w) for w in (config.memory_dim, config.value_memory_dim))
    if config.max_positions is not None and length > config.max_positions:
        more.setdefault("positions", np.arange(length)[None] % config.max_positions)
    return replace(Inputs(x, memory, causal=config.causal, value_memory=values), **more)


def _check(kind: str, inputs: Inputs, found: Outputs) -> None:
    """Return when the answer is the formula's."""
    exact = formula_of(source_of(kind))(
        inputs.embeddings,
        inputs.memory,
        inputs.value_memory,
        attend_mask=inputs.attend_mask,
        causal=inputs.causal,
        positions=inputs.positions,
    )
    assert relative_error(found.output, exact.output) <= FP32_TOLERANCE
    if found.attention_weights is not None:
        assert absolute_error(found.attention_weights, exact.weights) <= FP32_TOLERANCE
    if found.extra_weights is not None:
        assert absolute_error(found.extra_weights, exact.extra_weights) <= FP32_TOLERANCE


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_run_above_the_length_of_the_runtimes_operator_equals_the_formula(
    kind: str, weights: bool
) -> None:
    """Many keys take another way through the graph, where the layer has one."""
    inputs = _inputs(kind, 1, 400)

    found = engine_for(kind).run(inputs, weights=weights)

    _check(kind, inputs, found)
    assert (found.attention_weights is not None) == weights
    assert (found.extra_weights is not None) == (weights and bool(KINDS[kind].extra_keys))


class _Watched:
    """A session of the runtime that keeps what it was fed last."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.feed: dict[str, npt.NDArray[Any]] = {}

    def run(self, names: list[str], feed: dict[str, npt.NDArray[Any]], options: Any) -> Any:
        self.feed = feed
        return self.session.run(names, feed, options)


def _nan_at(x: npt.NDArray[np.float32], *place: int) -> npt.NDArray[np.float32]:
    x = x.copy()
    x[place] = np.nan
    return x


PLAIN: dict[str, tuple[str, dict[str, Any], bool]] = {
    "the default of a layer": ("grouped", {}, True),
    "the default of a causal layer": ("halves", {}, True),
    "a causal layer that shall not be": ("halves", {"causal": False}, False),
    "a layer that shall be causal": ("grouped", {"causal": True}, False),
    "positions": ("halves", {"positions": np.arange(5)[None] * 2}, True),
    "a window as long as the sequence": ("soft-capped window", {}, True),
    "a window one shorter": ("window both ways", {}, False),
    "padding": ("halves", {"attend_mask": np.ones((1, 5), bool)}, False),
    "pairs": ("halves", {"pair_mask": np.ones((1, 1, 5, 5), bool)}, False),
    "a head mask": ("halves", {"head_mask": np.ones(4, np.float32)}, False),
    "extra keys": ("learned and zero keys", {}, True),
    "two memories": ("two memories", {}, True),
}


@pytest.mark.parametrize(("kind", "more", "is_plain"), PLAIN.values(), ids=PLAIN)
def test_run_takes_the_plain_path_for_the_default_call_alone(
    kind: str, more: dict[str, Any], is_plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes no mask and is right; what it would not see goes the other way."""
    engine, inputs = engine_for(kind), _inputs(kind, 1, 5, **more)
    watched = _Watched(engine._session)
    monkeypatch.setattr(engine, "_session", watched)

    found = engine.run(inputs, weights=False)

    assert bool(watched.feed["plain"]) == is_plain
    assert watched.feed["pair_mask"].shape == ((1,) * 4 if is_plain else (1, 1, 5, 5))
    if inputs.head_mask is None:
        _check(kind, inputs, found)
    engine.run(inputs, weights=True)
    assert not watched.feed["plain"]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["soft-capped window", "window both ways", "sinks"])
def test_run_of_lengths_around_the_window_equals_the_formula(
    kind: str, causal: bool, weights: bool
) -> None:
    """Shorter than the window, as long, one longer, and far longer."""
    window = KINDS[kind].window or 0
    for length in {1, window - 1, window, window + 1, 3 * window}:
        inputs = _inputs(kind, 2, length, causal=causal)

        found = engine_for(kind).run(inputs, weights=weights)

        _check(kind, inputs, found)


@pytest.mark.fault("E13")
@pytest.mark.parametrize("length", [6, 400])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("kind", ["halves", "alibi", "longrope", "sinks", "soft-capped window"])
def test_nan_in_a_later_token_of_a_causal_layer_leaves_the_earlier_alone(
    kind: str, weights: bool, length: int
) -> None:
    """By default, without any mask; where a window ends, those behind it are answered again."""
    inputs = _inputs(kind, 2, length)
    at, window = 3, KINDS[kind].window or length
    spoilt = replace(inputs, embeddings=_nan_at(inputs.embeddings, 1, at, 0))

    found = engine_for(kind).run(spoilt, weights=weights)

    clean = engine_for(kind).run(inputs, weights=weights)
    reached = np.zeros((2, length), bool)
    reached[1, at : at + window] = True
    assert np.isnan(found.output[reached]).all()
    assert relative_error(found.output[~reached], clean.output[~reached]) <= FP32_TOLERANCE
    if weights:
        pairs = (found.attention_weights, clean.attention_weights)
        mine, theirs = (np.moveaxis(w, 1, 2)[~reached] for w in pairs if w is not None)
        assert absolute_error(mine, theirs) <= FP32_TOLERANCE


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("kind", [name for name, layer in KINDS.items() if layer.takes_positions])
def test_positions_are_counted_from_0_unless_given(kind: str, weights: bool) -> None:
    """A row for all sequences means the same as one for each."""
    engine, inputs = engine_for(kind), _inputs(kind, 3, 7)
    counted = np.arange(7)[None]
    # With a gap of two, elsewhere in each row.
    spread = np.array([[0, 1, 2, 3, 4, 5, 8], [0, 3, 4, 5, 6, 7, 8], [0, 1, 2, 5, 6, 7, 8]])

    default = engine.run(inputs, weights=weights)
    one_row = engine.run(replace(inputs, positions=counted), weights=weights)
    rows = engine.run(replace(inputs, positions=counted.repeat(3, axis=0)), weights=weights)
    apart = replace(inputs, positions=spread)
    others = engine.run(apart, weights=weights)

    assert (one_row.output == default.output).all()
    assert relative_error(rows.output, default.output) <= FP32_TOLERANCE
    assert relative_error(others.output, default.output) > 100 * FP32_TOLERANCE
    _check(kind, inputs, default)
    _check(kind, apart, others)


def test_causal_and_window_follow_the_order_of_tokens_not_their_positions() -> None:
    """Positions that fall do not turn the mask round."""
    falling = {"positions": np.array([[6, 5, 4, 3, 2, 1, 0]])}
    inputs = _inputs("halves", 1, 7, **falling)

    answer = engine_for("halves").run(inputs, weights=True)

    assert answer.attention_weights is not None
    assert not np.triu(answer.attention_weights, 1).any()
    _check("halves", inputs, engine_for("halves").run(inputs, weights=False))


@pytest.mark.parametrize("kind", ["learned and zero keys", "sinks"])
def test_row_with_nothing_to_attend_to_attends_to_the_extra_keys(kind: str) -> None:
    """Both weights of a row sum to 1, and all of it lies on the extra keys where all is hidden."""
    hidden = np.ones((2, 4), bool)
    hidden[1] = False
    inputs = _inputs(kind, 2, 4, attend_mask=hidden)

    found = engine_for(kind).run(inputs, weights=True)

    _check(kind, inputs, found)
    assert found.attention_weights is not None
    assert found.extra_weights is not None
    sums = found.attention_weights.sum(-1) + found.extra_weights.sum(-1)
    np.testing.assert_allclose(sums, 1, atol=FP32_TOLERANCE)
    assert not found.attention_weights[1].any()


def test_full_mask_of_a_window_keeps_near_keys() -> None:
    """On both sides, or behind alone where the call is causal; nothing if all are near."""
    x = np.zeros((1, 4, 1), np.float32)

    both, behind = (full_mask(Inputs(x, causal=causal), 2) for causal in (False, True))

    assert both is not None
    assert behind is not None
    assert both[0, 0].tolist() == [
        [True, True, False, False],
        [True, True, True, False],
        [False, True, True, True],
        [False, False, True, True],
    ]
    assert (behind == np.tril(both)).all()
    assert full_mask(Inputs(x), 4) is None
    assert full_mask(Inputs(x), None) is None


def test_full_mask_of_a_window_intersects_with_the_others() -> None:
    """Padding hides a key within the window as well."""
    attend = np.array([[True, False, True], [True, True, True]])

    mask = full_mask(Inputs(np.zeros((2, 3, 1), np.float32), attend_mask=attend), 2)

    assert mask is not None
    assert mask.shape == (2, 1, 3, 3)
    assert mask[0, 0].tolist() == [
        [True, False, False],
        [True, False, True],
        [False, False, True],
    ]


def test_engines_of_all_kinds_take_what_their_layer_says() -> None:
    """Names and order of inputs and outputs are the contract's: the engine checked them."""
    engines: dict[str, OnnxEngine] = {kind: engine_for(kind) for kind in KINDS}

    names = {kind: [t.name for t in engine.inputs()] for kind, engine in engines.items()}

    for kind, config in KINDS.items():
        assert ("positions" in names[kind]) == config.takes_positions
        assert ("value_memory" in names[kind]) == (config.value_memory_dim is not None)
        outputs = [tensor.name for tensor in engines[kind].outputs()]
        assert ("extra_weights" in outputs) == bool(config.extra_keys)
