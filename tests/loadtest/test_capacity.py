"""The search for the highest rate that keeps an objective, by itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.capacity import MOST_PROBES, find


@given(st.floats(0.2, 1e5), st.floats(0.1, 1e4))
def test_search_ends_within_its_precision(ceiling: float, start: float) -> None:
    """From wherever it begins, just below the true one, and with few probes."""
    found = find(lambda rate: rate <= ceiling, start=start, precision=0.03, most=1e6)

    assert found.good is not None
    assert found.bad is not None
    assert found.good <= ceiling < found.bad
    assert found.bad - found.good <= 0.03 * found.good
    assert found.probes <= MOST_PROBES


def test_one_disturbance_does_not_mislead() -> None:
    """A rate is given up only when it breaks the objective twice."""
    tried: list[float] = []

    def keeps(rate: float) -> bool:
        tried.append(rate)
        return rate <= 480 and len(tried) != 2  # the second probe meets a disturbance

    found = find(keeps, start=100, precision=0.05, most=1e6)

    assert found.good == pytest.approx(480, rel=0.05)


def test_objective_that_nothing_keeps_ends_the_search() -> None:
    """There is a lowest rate to be tried."""
    found = find(lambda _: False, start=50, precision=0.03, most=1e6, least=1)

    assert found.good is None
    assert found.bad == 1


def test_objective_that_everything_keeps_ends_the_search() -> None:
    """There is a highest one, too."""
    found = find(lambda _: True, start=50, precision=0.03, most=1000)

    assert (found.good, found.bad) == (1000, None)
