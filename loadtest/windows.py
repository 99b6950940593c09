"""How a load went over time, in bounded memory: slices that double when there are too many."""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from loadtest.histogram import BUCKETS, Floats, Histogram, Indices

_SLICES: Final = 128
_SHORTEST_S: Final = 2.0**-10
_LEAST_WINDOWS, _MOST_WINDOWS = 5, 60


@dataclass(frozen=True)
class Window:
    """A part of the measured time; seconds since the measured part began."""

    at_s: float
    seconds: float
    answered: int
    """Good answers that came in it."""
    latency: Histogram
    """Of the good calls that were due in it."""


class Windows:
    """
    Good calls by when they were due, and good answers by when they came.

    Slices begin at 1 ms and double whenever 128 of them do not reach the latest call.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        """Where the measured part ends: answers from then on are in no window."""
        self._width_s = _SHORTEST_S
        self._latency = np.zeros((_SLICES, BUCKETS), np.int32)
        self._answered = np.zeros(_SLICES, np.int64)
        self._used = 0
        """Buckets below which all counts are."""

    def add(self, due_s: Floats, done_s: Floats, buckets: Indices) -> None:
        """Count good calls, due and answered then; those due before the measured part are first."""
        if not due_s.size:
            return
        in_time = done_s[done_s < self.limit_s]
        latest = max(float(due_s.max()), float(in_time.max(initial=0.0)))
        while latest >= self._width_s * _SLICES:
            self._double()
        self._used = max(self._used, int(buckets.max()) + 1)
        # One flat index and the same type: numpy takes ten times as long for anything else.
        flat = self._slice_of(due_s) * BUCKETS + buckets
        np.add.at(self._latency.reshape(-1), flat, np.int32(1))
        np.add.at(self._answered, self._slice_of(in_time), 1)

    def windows(self, seconds: float) -> list[Window]:
        """Return windows of a second or more, but 5 at least and 60 at most, over that time."""
        if seconds <= 0:
            return []
        slices = max(1, math.ceil(seconds / self._width_s))
        group = math.ceil(slices / min(_MOST_WINDOWS, max(_LEAST_WINDOWS, int(seconds))))
        starts = list(range(0, slices, group))
        if len(starts) > 1 and seconds - starts[-1] * self._width_s < group * self._width_s / 2:
            starts.pop()  # a stub at the end belongs to the window before
        ends = [*starts[1:], _SLICES]
        found = []
        for first, after in zip(starts, ends, strict=True):
            at_s = first * self._width_s
            until_s = seconds if after == _SLICES else after * self._width_s
            answered = int(self._answered[first:after].sum())
            latency = Histogram(self._latency[first:after].sum(axis=0))
            found.append(Window(at_s, until_s - at_s, answered, latency))
        return found

    def _slice_of(self, moments_s: Floats) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = np.maximum(moments_s / self._width_s, 0).astype(np.int64)
        return found

    def _double(self) -> None:
        half, latency = _SLICES // 2, self._latency[:, : self._used]
        latency[:half] = latency[0::2] + latency[1::2]
        latency[half:] = 0
        self._answered[:half] = self._answered[0::2] + self._answered[1::2]
        self._answered[half:] = 0
        self._width_s *= 2
