"""The highest rate at which an objective holds: doubling until it breaks, then bisection."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MOST_PROBES: Final = 40


@dataclass(frozen=True)
class Found:
    """What a search ended with, in calls a second."""

    good: float | None
    """The highest rate at which the objective held; None = at none that was tried."""
    bad: float | None
    """The lowest at which it broke; None = it never did."""
    probes: int


def find(
    keeps: Callable[[float], bool],
    *,
    start: float,
    precision: float,
    most: float,
    least: float = 0.1,
) -> Found:
    """
    Return the highest rate for which `keeps` is true, to `precision` as a share of it.

    A rate that breaks the objective is tried once more before it is believed: a load that
    is too high breaks it every time, a disturbance does not.

    The search goes no higher than `most` and no lower than `least`, and makes at most 40
    probes; `keeps` is taken to be true up to some rate, and false above.
    """
    good: float | None = None
    bad: float | None = None
    rate, probes = min(start, most), 0
    while probes < MOST_PROBES:
        probes += 1
        holds = keeps(rate)
        if not holds and probes < MOST_PROBES:
            probes += 1
            holds = keeps(rate)
        if holds:
            good = rate
        else:
            bad = rate
        if good is not None and bad is None:
            if good >= most:
                break
            rate = min(2 * good, most)
        elif good is None and bad is not None:
            if bad <= least:
                break
            rate = max(bad / 2, least)
        elif good is not None and bad is not None:
            if bad - good <= precision * good:
                break
            rate = (good + bad) / 2
    return Found(good, bad, probes)
