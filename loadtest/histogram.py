"""
Times counted in buckets: memory that does not grow with the calls, and a known error.

The buckets are those of an HDR histogram of three digits, in microseconds up to an hour: a time
below 2 048 us is kept to the microsecond, any other to less than one thousandth of itself.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from hdrh.histogram import HdrHistogram

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

_MOST_US: Final = 3_600_000_000
"""An hour: no call may take longer."""
_DIGITS: Final = 3
_HALF: Final = 1024
"""Buckets between a power of two and the next."""
_HALF_BITS: Final = 10
BUCKETS: Final = 23 * _HALF


def _values_us() -> tuple[Indices, Indices]:
    """Return the lowest value of each bucket, and how many values are in it."""
    index = np.arange(BUCKETS)
    shift = np.maximum((index >> _HALF_BITS) - 1, 0)
    return (index - _HALF * shift) << shift, np.int64(1) << shift


_LOWEST_US, _WIDTH_US = _values_us()


def buckets_of(times_s: Floats) -> Indices:
    """Return the bucket of each time; what is below 0 or above an hour is counted as that."""
    whole = np.clip(np.rint(times_s * 1e6), 0, _MOST_US).astype(np.int64)
    shift = np.frexp((whole | (2 * _HALF - 1)).astype(np.float64))[1] - (_HALF_BITS + 1)
    found: Indices = shift * _HALF + (whole >> shift)
    return found


class Histogram:
    """How many times fell into each bucket."""

    def __init__(self, counts: npt.NDArray[Any] | None = None) -> None:
        self.counts = np.zeros(BUCKETS, np.int64) if counts is None else counts.astype(np.int64)

    def add(self, times_s: Floats) -> None:
        """Count times, in seconds."""
        np.add.at(self.counts, buckets_of(times_s), 1)

    @property
    def total(self) -> int:
        """How many times were counted."""
        return int(self.counts.sum())

    def mean_ms(self) -> float | None:
        """Return the mean, each time taken for the middle of its bucket; None without any."""
        total = self.total
        if not total:
            return None
        return float((self.counts * (_LOWEST_US + _WIDTH_US // 2)).sum()) / total / 1e3

    def percentile_ms(self, share: float) -> float | None:
        """
        Return the time of rank round(share / 100 * total), but 1 at least; None without any.

        It is the highest value of its bucket, so never below the true one.
        """
        total = self.total
        if not total:
            return None
        rank = max(1, int(share * total / 100 + 0.5))
        index = int(np.searchsorted(np.cumsum(self.counts), rank))
        return float(_LOWEST_US[index] + _WIDTH_US[index] - 1) / 1e3

    def max_ms(self) -> float | None:
        """Return the longest time; None without any."""
        return self.percentile_ms(100.0)

    def encode(self) -> str:
        """Return it as HDR histograms travel: V2, compressed, in base64."""
        made = HdrHistogram(1, _MOST_US, _DIGITS)
        used = np.flatnonzero(self.counts)
        if used.size:
            np.frombuffer(made.counts, np.int64)[:] = self.counts
            made.set_internal_tacking_values(int(used[0]), int(used[-1]), self.total)
        return str(made.encode().decode())
