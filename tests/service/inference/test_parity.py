"""The parity rule: one measure of how far an answer is from the expected one."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from service.inference.parity import absolute_error, is_close, relative_error

Floats = npt.NDArray[np.float64]

ANY = arrays(np.float64, st.integers(0, 5), elements=st.floats(width=32))
FINITE = arrays(np.float64, st.integers(1, 5), elements=st.floats(-1e6, 1e6))


@pytest.mark.parametrize(
    ("found", "expected", "absolute", "relative"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0, 0),
        ([1.0, 2.5], [1.0, 2.0], 0.5, 0.25),
        ([0.25], [0.0], 0.25, 0.25),
        ([-3.0], [1.0], 4, 4),
        ([8.0], [-10.0], 18, 1.8),
        ([], [], 0, 0),
        ([math.nan, 0.0], [0.0, 0.0], math.inf, math.inf),
        ([0.0, 0.0], [0.0, math.nan], math.inf, math.inf),
        ([math.nan], [math.nan], math.inf, math.inf),
        ([math.inf], [1.0], math.inf, math.inf),
        ([1.0], [math.inf], math.inf, math.inf),
        ([math.inf], [math.inf], math.inf, math.inf),
        ([1.0, math.nan], [math.inf, 0.0], math.inf, math.inf),
    ],
)
def test_errors_measure_the_largest_difference(
    found: Sequence[float], expected: Sequence[float], absolute: float, relative: float
) -> None:
    """Relative to max(1, max|expected|); what is not finite is infinitely far from everything."""
    assert absolute_error(found, expected) == pytest.approx(absolute)
    assert relative_error(found, expected) == pytest.approx(relative)


def test_missing_answer_and_other_shape_are_infinitely_far() -> None:
    """Nothing is broadcast: one number never stands for a whole tensor."""
    assert relative_error(None, [1.0]) == math.inf
    assert relative_error([1.0], [1.0, 1.0]) == math.inf
    assert absolute_error([[1.0]], [1.0]) == math.inf
    assert not is_close([1.0], [1.0, 1.0])


@given(ANY)
def test_answer_is_close_to_itself_whatever_it_holds(values: Floats) -> None:
    """NaN and infinity are equal where both sides hold the same."""
    assert is_close(values, values.copy(), 0)


@given(FINITE, st.floats(0, 3), st.data())
def test_answer_is_close_up_to_the_tolerance_times_the_largest_expected(
    expected: Floats, share: float, data: st.DataObject
) -> None:
    """A single value off by a share of the bound decides, wherever it stands."""
    bound = 1e-5 * max(1.0, float(np.abs(expected).max()))
    found = expected.copy()
    found[data.draw(st.integers(0, found.size - 1))] += share * bound

    if abs(share - 1) > 1e-3:
        assert is_close(found, expected) == (share < 1)
        assert (relative_error(found, expected) <= 1e-5) == (share < 1)
    if share * bound > 1.001e-5:
        assert not is_close(found, expected, absolute=True)


@given(FINITE, st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_non_finite_value_is_close_to_nothing_else(
    expected: Floats, value: float, data: st.DataObject
) -> None:
    """Neither on the side that was found nor on the side that was expected."""
    found = expected.copy()
    found[data.draw(st.integers(0, found.size - 1))] = value

    assert not is_close(found, expected, 1e9)
    assert not is_close(expected, found, 1e9)
    assert relative_error(found, expected) == math.inf
