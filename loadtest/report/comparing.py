"""Two measurements side by side: which points match, their ratios, and what clouds them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.report.measurement import Measurement, Point, Work
from loadtest.report.verdict import Verdict, verdict
from loadtest.report.words import plural, printable

STATISTICS = ("p50", "p90", "p99", "max")


@dataclass(frozen=True)
class Pair:
    """One point of each measurement, with the same work under the same load."""

    a: Point
    b: Point

    def ratio(self, statistic: str) -> float | None:
        """Return A's latency over B's; None where one has none."""
        return _over(self.a.latency_at(statistic), self.b.latency_at(statistic))

    @property
    def rate_ratio(self) -> float | None:
        """A's good answers a second over B's."""
        return _over(self.a.good_rate, self.b.good_rate)

    def is_clear(self, statistic: str) -> bool | None:
        """
        Whether every window of the one lies above every window of the other.

        Where not, the points differ by no more than each differs from itself.  None =
        a side has fewer than two windows, or no such statistic in them.
        """
        ranges = [_range(point, statistic) for point in (self.a, self.b)]
        if None in ranges:
            return None
        (low_a, high_a), (low_b, high_b) = (found for found in ranges if found)
        return high_a < low_b or high_b < low_a

    @property
    def is_saturated(self) -> bool:
        """Whether a side could not keep up, so that its latency says little."""
        return self.a.is_saturated or self.b.is_saturated


@dataclass(frozen=True)
class Comparison:
    """Two measurements, matched point by point."""

    a: Measurement
    b: Measurement
    pairs: Sequence[Pair]
    only_a: Sequence[Point]
    only_b: Sequence[Point]


def compare(a: Measurement, b: Measurement) -> Comparison:
    """
    Return the points that both have, in A's order, and those that one has alone.

    What was measured several times is matched in turn: the first try with the first.
    """
    keyed_a, keyed_b = _keyed(a.points), _keyed(b.points)
    return Comparison(
        a,
        b,
        [Pair(point, keyed_b[key]) for key, point in keyed_a.items() if key in keyed_b],
        [point for key, point in keyed_a.items() if key not in keyed_b],
        [point for key, point in keyed_b.items() if key not in keyed_a],
    )


def typical(comparison: Comparison, statistic: str) -> float | None:
    """Return the geometric mean of the ratios of points that both sides kept up with."""
    ratios = [p.ratio(statistic) for p in comparison.pairs if not p.is_saturated]
    known = [math.log(ratio) for ratio in ratios if ratio]
    return math.exp(sum(known) / len(known)) if known else None


def joint_verdict(comparison: Comparison) -> Verdict:
    """Return what has to be said before any ratio is believed."""
    found = []
    for side, measurement in (("A", comparison.a), ("B", comparison.b)):
        found += [f"{side}: {doubt}" for doubt in verdict(measurement).doubts]
    found += _unlike(comparison.a, comparison.b)
    unmatched = len(comparison.only_a) + len(comparison.only_b)
    if unmatched:
        found.append(f"{plural(unmatched, 'point')} of one side alone: listed, not compared.")
    if not comparison.pairs:
        return Verdict(False, "No point of A matches one of B.", found)
    if found:
        return Verdict(False, "Read the ratios with care.", found)
    return Verdict(True, "Nothing speaks against these ratios.", [])


def _unlike(a: Measurement, b: Measurement) -> list[str]:
    """Return what differs on the side that asked, where nothing should."""
    found = [
        f"A and B were not asked from the same {name}: {printable(str(x))} against"
        f" {printable(str(y))}."
        for name, x, y in (
            ("processor", a.client.cpu, b.client.cpu),
            ("number of cores", a.client.cores, b.client.cores),
            ("kernel", a.client.kernel, b.client.kernel),
            ("Python", a.client.python, b.client.python),
            ("load tester", a.tool, b.tool),
        )
        if x != y
    ]
    speed = _over(a.generator.null_calls_per_s, b.generator.null_calls_per_s)
    if speed is not None and not 1 / _SAME_SPEED < speed < _SAME_SPEED:
        found.append(
            f"The load tester itself was {speed:.2f} times as fast for A as for B: the machine"
            " was not the same, or not as free."
        )
    return found


_SAME_SPEED = 1.25
"""Shared machines drift by about so much; beyond it the sides were not asked alike."""


_Key = tuple[str, str | None, float | None, int | None, Work, int]


def _keyed(points: Sequence[Point]) -> dict[_Key, Point]:
    """Return points by what was asked of them, and how many times it had been asked before."""
    times: Counter[tuple[object, ...]] = Counter()
    found: dict[_Key, Point] = {}
    for point in points:
        asked = (point.model, point.arrivals, point.rate, point.clients, point.work)
        found[(*asked, times[asked])] = point
        times[asked] += 1
    return found


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _range(point: Point, statistic: str) -> tuple[float, float] | None:
    known = [
        value for window in point.windows if (value := getattr(window, statistic, None)) is not None
    ]
    return (min(known), max(known)) if len(known) > 1 else None
