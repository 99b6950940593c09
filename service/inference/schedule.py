"""
The order of the queue: which waiting slices form the next run, and how much may wait.

Pure bookkeeping without thread, lock, event loop or clock: the current time is an argument,
and the caller serialises access to each object (see `batcher`).
"""

import itertools
import math
from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final, Generic, Protocol, TypeVar

from service.errors import Draining, QueueFull
from service.inference.batches import RUN_OVERHEAD_TOKENS, Batch, BatchLimits, Slice

MAX_RUNS_PASSED = 32
"""The oldest call that has waited for this many runs goes next, whatever its priority."""

MIN_SHARE = 128
"""
Queries, about 3 ms of work; a batch that is no larger is not split among concurrent runs
(bench/NOTES.md, "The fast path").
"""

_MAX_CANDIDATES = 128
"""Waiting slices that are considered for one batch; more would cost more time than they save."""

_DEFAULT_RANK: Final = 2**32
"""Rank of priority 0, after all others."""


class Waiting(Protocol):
    """What a schedule needs to know of a call."""

    deadline: float
    """The call is not started at or after this time, in seconds on the clock of `now`."""
    is_over: bool
    """True once no answer is expected any more."""


QueuedT = TypeVar("QueuedT", bound=Waiting)


@dataclass(eq=False, slots=True)
class Ticket(Generic[QueuedT]):
    """A waiting slice of a call."""

    rank: tuple[int, int, int]
    """Priority, index of the slice in its call, arrival of the call: the lowest goes first."""
    arrival: int
    slice_: Slice
    queued: QueuedT
    runs_before: int
    """Runs that had been scheduled when the call arrived."""


_RANK: Final = attrgetter("rank")
_ARRIVAL: Final = attrgetter("arrival")


@dataclass(eq=False, slots=True)
class ScheduledRun(Generic[QueuedT]):
    """Slices that go through the engine together; `batch` holds them in the tickets' order."""

    tickets: list[Ticket[QueuedT]]
    batch: Batch
    is_alone: bool
    """True if nothing else waited or ran when it was taken."""

    @property
    def is_abandoned(self) -> bool:
        """True when no call in it expects an answer any more."""
        return all(ticket.queued.is_over for ticket in self.tickets)

    def holds(self, queued: QueuedT) -> bool:
        """Say whether a slice of that call is in it."""
        return any(ticket.queued is queued for ticket in self.tickets)


class Schedule(Generic[QueuedT]):
    """
    Waiting slices, ordered by priority and arrival, and the runs in progress.

    A call's second slice ranks behind the first slices of calls of its priority that came
    later, so a large call does not hold up small ones.
    """

    def __init__(self, limits: BatchLimits, concurrent_runs: int) -> None:
        self._limits = limits
        self._concurrent_runs = concurrent_runs
        self._runs = 0
        self._running: list[ScheduledRun[QueuedT]] = []
        self._waiting: list[Ticket[QueuedT]] = []
        self.arrived = 0
        """Calls that were ever added."""
        self.free_runs = concurrent_runs
        """How many more runs may be in progress at once."""

    @property
    def is_idle(self) -> bool:
        """True when nothing waits or runs."""
        return not self._waiting and not self._running

    def add(self, queued: QueuedT, slices: list[Slice]) -> None:
        """Let the slices of one call wait."""
        self.arrived += 1
        priority = slices[0].call.priority or _DEFAULT_RANK
        for i, slice_ in enumerate(slices):
            rank = (priority, i, self.arrived)
            insort(self._waiting, Ticket(rank, self.arrived, slice_, queued, self._runs), key=_RANK)

    def take(
        self, now: float, *, ended: ScheduledRun[QueuedT] | None = None
    ) -> ScheduledRun[QueuedT] | None:
        """
        Start the next run; None = nothing waits, or no more runs may be in progress.

        `ended` is a run that is no longer in progress.  Slices of calls that are over or past
        their deadline are dropped.
        """
        if ended is not None:
            self._running.remove(ended)
            self.free_runs += 1
        waiting = self._waiting = [
            ticket
            for ticket in self._waiting
            if not ticket.queued.is_over and now < ticket.queued.deadline
        ]
        if not waiting or not self.free_runs:
            return None
        if len(waiting) == 1:
            tickets, batch = waiting, Batch.of(waiting[0].slice_)
            self._waiting = []
        else:
            tickets, batch = _gather(self._first(), waiting, self._share())
            chosen = set(map(id, tickets))
            self._waiting = [ticket for ticket in waiting if id(ticket) not in chosen]
        run = ScheduledRun(tickets, batch, not self._waiting and not self._running)
        self._running.append(run)
        self.free_runs -= 1
        self._runs += 1
        return run

    def runs_of(self, queued: QueuedT) -> list[ScheduledRun[QueuedT]]:
        """Return the runs in progress that hold a slice of that call."""
        return [run for run in self._running if run.holds(queued)]

    def _first(self) -> Ticket[QueuedT]:
        """Return the slice that the next run must hold."""
        oldest = min(self._waiting, key=_ARRIVAL)
        is_overdue = self._runs - oldest.runs_before >= MAX_RUNS_PASSED
        return oldest if is_overdue else self._waiting[0]

    def _share(self) -> BatchLimits:
        """Return the limits of one batch that leaves work for the other concurrent runs."""
        if self._concurrent_runs == 1:
            return self._limits
        queries = sum(ticket.slice_.tokens for ticket in self._waiting) // 2  # tokens: and keys
        share = max(MIN_SHARE, queries // self._concurrent_runs)
        return replace(self._limits, max_tokens=min(self._limits.max_tokens, share))


@dataclass
class Throughput:
    """How fast the engine is: moving averages over its runs; 0 before the first one."""

    tokens_per_s: float = 0.0
    cost_per_s: float = 0.0
    """In the unit of `Batch.cost`."""

    def record(self, batch: Batch, seconds: float) -> None:
        """Take a run into account."""
        weight = 0.2 if self.tokens_per_s else 1.0
        seconds = max(seconds, 1e-9)
        self.tokens_per_s += weight * (batch.tokens / seconds - self.tokens_per_s)
        self.cost_per_s += weight * (batch.cost / seconds - self.cost_per_s)

    def seconds_of(self, batch: Batch) -> float:
        """Return how long a run will take; infinity before the first one."""
        return batch.cost / self.cost_per_s if self.cost_per_s else math.inf

    def retry_after_s(self, tokens: int) -> int:
        """Return in how many whole seconds so many tokens will be done, from 1 to 60."""
        rate = self.tokens_per_s
        return max(1, min(60, math.ceil(tokens / rate))) if rate else 1


@dataclass(frozen=True)
class QueueLimits:
    """How many calls a model may hold, waiting and running, and for how long by default."""

    max_calls: int
    max_tokens: int
    """Queries and keys of all these calls."""
    timeout_s: float


class Admission:
    """Counts the calls that a model holds, waiting and running, and refuses those above limits."""

    def __init__(self, limits: QueueLimits, throughput: Throughput) -> None:
        self._limits = limits
        self._throughput = throughput
        self._is_closed = False
        self.calls = 0
        self.tokens = 0
        """Queries and keys of these calls."""

    def check(self, tokens: int = 0) -> None:
        """
        Return when a call of so many queries and keys may be added.

        Raises:
            QueueFull: a limit would be exceeded; says when to retry.
            Draining: after `close`.
        """
        if self._is_closed:
            raise Draining("the server is stopping", retry_after_s=1)
        limits = self._limits
        if self.calls >= limits.max_calls:
            raise QueueFull(
                f"queue: at most {limits.max_calls} calls may be in it, and so many are",
                retry_after_s=self._throughput.retry_after_s(self.tokens),
            )
        # An empty queue takes any call that passed the limits of one call.
        if self.calls and self.tokens + tokens > limits.max_tokens:
            raise QueueFull(
                f"queue: at most {limits.max_tokens} tokens may be in it: it holds"
                f" {self.tokens}, this call has {tokens}",
                retry_after_s=self._throughput.retry_after_s(self.tokens),
            )

    def add(self, tokens: int) -> None:
        """
        Count one more call.

        Raises:
            QueueFull, Draining: see `check`; nothing is counted then.
        """
        self.check(tokens)
        self.calls += 1
        self.tokens += tokens

    def remove(self, tokens: int) -> None:
        """Count one call less."""
        self.calls -= 1
        self.tokens -= tokens

    def close(self) -> None:
        """Refuse every later call."""
        self._is_closed = True


def _gather(
    first: Ticket[QueuedT], waiting: list[Ticket[QueuedT]], limits: BatchLimits
) -> tuple[list[Ticket[QueuedT]], Batch]:
    """
    Return `first` with the slices that are best run with it, by priority and similar length.

    A slice that overtakes others delays each of them by its own run time.  It may do so only
    where that is no more than the fixed cost of a run, saved once for all that wait
    (bench/NOTES.md, "Batching").
    """
    length, keys = first.slice_.length, first.slice_.key_length
    nearest = sorted(
        (
            ticket.rank[0],
            abs(ticket.slice_.length - length) + abs(ticket.slice_.key_length - keys),
            place,
        )
        for place, ticket in enumerate(itertools.islice(waiting, _MAX_CANDIDATES))
    )
    tickets, batch = [first], Batch.of(first.slice_)
    places = [waiting.index(first)]
    saved = RUN_OVERHEAD_TOKENS * len(waiting)
    full_at: int | None = None
    for priority, _, place in nearest:
        ticket = waiting[place]
        overtaken = place - bisect_left(places, place)
        if ticket is first or priority == full_at or overtaken * ticket.slice_.tokens > saved:
            continue
        if batch.try_add(ticket.slice_, limits):
            tickets.append(ticket)
            insort(places, place)
        elif ticket.slice_.kind == first.slice_.kind:
            full_at = priority  # slices of less similar length fit even less
    return tickets, batch
