"""
How one quantity grows with another: as a power of it, or in a straight line.

A run of the engine has a fixed cost, a part that grows with the length and one that
grows with its square; no single power fits it everywhere.  So a power is told
with the range over which it holds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

Points = Sequence[tuple[float, float]]
"""Of (x, y)."""

TOLERANCE: Final = 0.1
"""By what share a point may be off its power law."""

_LEAST: Final = 3
"""Two points lie on a power law whatever they are."""


@dataclass(frozen=True)
class Power:
    """y = factor * x ** exponent for low <= x <= high."""

    exponent: float
    factor: float
    low: float
    high: float
    residual: float
    """The most that a point is off, as a share of the fitted value (0.1 = 10 %)."""
    count: int

    def at(self, x: float) -> float:
        """Return y."""
        return float(self.factor * x**self.exponent)


@dataclass(frozen=True)
class Line:
    """y = start + slope * x."""

    start: float
    slope: float
    residual: float
    """The most that a point is off, in the unit of y."""


def power(points: Points) -> Power:
    """
    Return the power law through all points, by least squares of the logarithms.

    Raises:
        ValueError: fewer than two different x, or a number that has no logarithm.
    """
    x, y = _columns(points)
    if not (x > 0).all() or not (y > 0).all():
        raise ValueError("power: expected numbers above 0")
    exponent, start = np.polyfit(np.log(x), np.log(y), 1)
    off = np.exp(np.abs(np.log(y) - (start + exponent * np.log(x)))) - 1
    return Power(
        float(exponent),
        math.exp(start),
        float(x[0]),
        float(x[-1]),
        float(off.max()),
        len(x),
    )


def power_range(points: Points) -> Power | None:
    """
    Return the power law of the longest run of neighbouring points that keeps to one.

    A run has at least three points, none further than `TOLERANCE` off; of two that are
    as long, the one of larger x is taken.  None = there is no such run.

    Raises:
        ValueError: a number has no logarithm.
    """
    ordered = sorted(points)
    for count in range(len(ordered), _LEAST - 1, -1):
        for first in range(len(ordered) - count, -1, -1):
            found = power(ordered[first : first + count])
            if found.residual <= TOLERANCE:
                return found
    return None


def line(points: Points) -> Line:
    """
    Return the straight line through all points, by least squares.

    Raises:
        ValueError: fewer than two different x.
    """
    x, y = _columns(points)
    slope, start = np.polyfit(x, y, 1)
    return Line(float(start), float(slope), float(np.abs(y - (start + slope * x)).max()))


def _columns(points: Points) -> tuple[np.ndarray, np.ndarray]:
    if len({x for x, _ in points}) < 2:
        raise ValueError(f"fit: expected at least two different x, got {len(points)} points")
    columns = np.array(sorted(points), np.float64)
    return columns[:, 0], columns[:, 1]
