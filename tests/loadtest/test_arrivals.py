"""When the load tester's calls are due."""

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from loadtest.arrivals import moments

COUNT = 20_000


def first(count: int, due: Iterator[float]) -> npt.NDArray[np.float64]:
    """Return the first moments."""
    return np.array(list(itertools.islice(due, count)))


def test_constant_arrivals_do_not_drift() -> None:
    """The millionth call is due exactly when arithmetic says."""
    [last] = itertools.islice(moments(300, "constant"), 999_999, 1_000_000)

    assert last == pytest.approx(999_999 / 300, abs=1e-9)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_independent_callers() -> None:
    """Gaps are exponential: mean and deviation are one, and 63 % are below the mean."""
    gaps = np.diff(first(COUNT, moments(200, "poisson", seed=3)))

    assert gaps.min() > 0
    # Five deviations of a mean of so many: no seed misses it but by error.
    assert gaps.mean() == pytest.approx(1 / 200, rel=5 / COUNT**0.5)
    assert gaps.std() == pytest.approx(1 / 200, rel=0.05)
    assert (gaps < 1 / 200).mean() == pytest.approx(1 - np.exp(-1), abs=0.02)


def test_poisson_gaps_are_independent_where_chunks_meet() -> None:
    """Moments are drawn in chunks, of which nothing is to be seen."""
    gaps = np.diff(first(COUNT, moments(1, "poisson")))

    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 5 / COUNT**0.5
    assert gaps[4090:4100].min() > 0


def test_same_seed_gives_the_same_arrivals() -> None:
    """Two tests of two servers meet the same load."""
    same, other = (first(100, moments(5, "poisson", seed=seed)) for seed in (1, 2))

    np.testing.assert_array_equal(same, first(100, moments(5, "poisson", seed=1)))
    assert not np.array_equal(same, other)
