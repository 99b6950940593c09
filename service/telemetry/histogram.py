"""
Counting that costs a call next to nothing: plain numbers, read only when somebody asks.

Used on one thread, the event loop's; the Prometheus library's own counters take
a lock for each number, and a call has a dozen.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """How often values fell at or below each bound, how many there were, and their sum."""

    __slots__ = ("_bounds", "_counts", "count", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.count += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return each upper bound with how many values do not exceed it."""
        named = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(named, map(float, accumulate(self._counts)), strict=True))
