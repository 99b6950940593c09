"""Calls that have ended, a row each: what the figures are made of, and then let go."""

from array import array
from dataclasses import dataclass, field, fields
from typing import Final

import numpy as np
import numpy.typing as npt

GOOD: Final = 200

CONNECTION_LOST: Final = -1
TIMED_OUT: Final = -2
NOT_SENT: Final = -3
INTERRUPTED: Final = -4

FAILURES: Final = {
    CONNECTION_LOST: "connection lost",
    TIMED_OUT: "timed out",
    NOT_SENT: "no connection free in time",
    INTERRUPTED: "interrupted",
}
"""Outcomes that are no status of HTTP, in words: the calls that were lost."""


def _moments() -> "array[float]":
    return array("d")


@dataclass
class Calls:
    """
    Calls in the order in which they ended.

    Moments are in seconds since the load began; a call that was never sent has NaN there.
    """

    due: "array[float]" = field(default_factory=_moments)
    """When it should have been sent; in a closed load, when it was."""
    sent: "array[float]" = field(default_factory=_moments)
    done: "array[float]" = field(default_factory=_moments)
    """When the last byte of its answer had come, by the kernel's stamp; else as `read`."""
    read: "array[float]" = field(default_factory=_moments)
    """When its answer was read, or when it failed."""
    total_s: "array[float]" = field(default_factory=_moments)
    """How long the server says it took (`total` of `Server-Timing`); NaN = it does not say."""
    outcome: "array[int]" = field(default_factory=lambda: array("h"))
    """A status of HTTP, or one of `FAILURES`."""

    def __len__(self) -> int:
        return len(self.outcome)

    def add(
        self, due: float, sent: float, done: float, read: float, total_s: float, outcome: int
    ) -> None:
        """Add one call."""
        self.due.append(due)
        self.sent.append(sent)
        self.done.append(done)
        self.read.append(read)
        self.total_s.append(total_s)
        self.outcome.append(outcome)

    def extend(self, others: "Calls") -> None:
        """Add other calls."""
        for one in fields(self):
            getattr(self, one.name).extend(getattr(others, one.name))

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """Return a copy of one column."""
        return np.array(getattr(self, name), np.float64)

    def latencies_s(self, *, since: str = "due", of: int = GOOD) -> npt.NDArray[np.float64]:
        """Return how long answers `of` one outcome took since their calls were `due`, or `sent`."""
        took = self.column("done") - self.column(since)
        found: npt.NDArray[np.float64] = took[np.array(self.outcome) == of]
        return found
