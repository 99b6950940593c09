"""What was seen of every call of one load: three moments and an outcome each."""

from array import array
from collections import Counter
from dataclasses import dataclass, field
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
"""Outcomes that are no status of HTTP, in words."""


@dataclass
class Records:
    """
    Every call of the measured part, in the order in which the calls ended.

    Moments are in seconds since the load began; a call that was never sent has NaN there.
    """

    due: "array[float]" = field(default_factory=lambda: array("d"))
    """When it should have been sent; in a closed load, when it was."""
    sent: "array[float]" = field(default_factory=lambda: array("d"))
    done: "array[float]" = field(default_factory=lambda: array("d"))
    """When the last byte of its answer had come to this machine, or when it failed."""
    outcome: "array[int]" = field(default_factory=lambda: array("h"))
    """A status of HTTP, or one of `FAILURES`."""
    lag: "array[float]" = field(default_factory=lambda: array("d"))
    """How late the generator sent what it could have sent at once."""
    timings: list[bytes] = field(default_factory=list)
    """`Server-Timing` of the good answers that had it."""
    codes: Counter[str] = field(default_factory=Counter)
    """The word in the body of answers other than 200."""
    bodies: list[tuple[int, bytes, int | None]] = field(default_factory=list)
    """Answers that were kept: which request, body, length of its JSON part."""
    waited: int = 0
    """Calls that were due when no connection was free."""
    checked: int = 0
    wrong: int = 0
    warmup_s: float = 0.0
    seconds: float = 0.0
    """How long the measured part was, without what came in after its end."""
    cpu_share: float = 0.0
    """Cores that the generator's process used in it."""
    interrupted: bool = False
    address: str = ""
    """Of the server: the one of its name's addresses that took the connections."""

    @property
    def offered(self) -> int:
        """Calls that were due."""
        return len(self.outcome)

    def is_good(self) -> npt.NDArray[np.bool_]:
        """Return which calls were answered with 200."""
        good: npt.NDArray[np.bool_] = np.array(self.outcome) == GOOD
        return good

    def latencies_s(self, *, since: str = "due", of: int = GOOD) -> npt.NDArray[np.float64]:
        """Return how long answers `of` one outcome took since their calls were `due`, or `sent`."""
        start = np.array(self.due if since == "due" else self.sent)
        took: npt.NDArray[np.float64] = (np.array(self.done) - start)[np.array(self.outcome) == of]
        return took

    @property
    def rate(self) -> float:
        """Good answers a second of the measured part."""
        done = np.array(self.done)[self.is_good()]
        if self.seconds <= 0:
            return 0.0
        # What came in after the end belongs to no second of it.
        return float((done < self.warmup_s + self.seconds).sum()) / self.seconds
