"""What a load is to do, and what is shown of it while it goes on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

RequestsOf = Callable[[int], Sequence[bytes]]
"""The whole requests that a connection sends in turn, by the connection's number."""
Examine = Callable[[int, int, bytes, int | None], bytes | None]
"""
Is shown good answers: request, connection, body, length of its JSON part; returns what stands
for the body where that lies elsewhere, None where it need not be kept.
"""


@dataclass(frozen=True)
class Plan:
    """How long a load goes on: for some seconds, or until so many calls are measured."""

    seconds: float = 10.0
    count: int | None = None
    """Calls that are measured; `seconds` then only bounds the load."""
    warmup_s: float = 1.0
    timeout_s: float = 30.0
    """Time a call may take once it is sent, and may wait for a connection."""


DEFAULT_PLAN: Final = Plan()


@dataclass(frozen=True)
class Live:
    """How a load is going; figures are of the time since the last one."""

    elapsed_s: float
    is_warmup: bool
    offered: int
    good: int
    rate: float
    p50_ms: float
    p99_ms: float


Watch = Callable[[Live], bool]
"""Is told how the load goes, a few times a second; returns whether it shall go on."""


@dataclass(frozen=True)
class Observer:
    """Who is told what, and what is kept."""

    watch: Watch | None
    keep: int
    """Good answers that are kept, the first ones."""
    examine: Examine | None
    every: bool
    """Whether all good answers are examined, not only those that are kept."""
    keep_calls: bool = False
