"""When calls are due: at a constant rate, or as independent callers come (Poisson)."""

import itertools
from collections.abc import Iterator
from typing import Final, Literal

import numpy as np

Arrivals = Literal["poisson", "constant"]

_CHUNK: Final = 4096
"""Moments drawn at a time: a number of numpy's own costs more than the call that it times."""


def moments(rate: float, arrivals: Arrivals, *, seed: int = 0) -> Iterator[float]:
    """Give, without end, the seconds after the start at which calls are due, ascending."""
    if arrivals == "constant":
        # Multiplied, not summed up: a million rounded steps would drift.
        yield from (number / rate for number in itertools.count())
    random = np.random.default_rng(seed)
    last = 0.0
    while True:
        chunk = last + np.cumsum(random.exponential(1 / rate, _CHUNK))
        last = float(chunk[-1])
        yield from chunk.tolist()
