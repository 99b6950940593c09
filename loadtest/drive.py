"""
The generator itself: calls that are due at given moments, and clients that wait.

An open load sends when calls are due, whatever the server does, and a call that finds no
connection free waits for one: its latency counts from when it was due, so a server that
stalls shows.  A closed load has clients of which each sends its next call when its last is
answered: a server that stalls is simply asked less, which hides the stall.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from math import inf
from typing import Final

from loadtest.arrivals import Arrivals, moments
from loadtest.calls import CONNECTION_LOST, INTERRUPTED, NOT_SENT
from loadtest.endpoint import Endpoint
from loadtest.loop import Load
from loadtest.plan import DEFAULT_PLAN, Examine, Observer, Plan, RequestsOf, Watch
from loadtest.records import Records
from loadtest.slot import Slot
from loadtest.urgency import ahead_of_others

_AWAKE_S: Final = 0.0008
"""
So long before a call is due the generator no longer sleeps, for it might wake too late: on a
virtual machine whose cores are idle it wakes 0.3 ms late once in ten times, 0.65 ms late once
in a hundred (2026-11-30).
"""
_AWAKE_SHARE: Final = 0.1
"""Share of the time that it may stay awake for that; of many calls a second, less for each."""
_BURST: Final = 32
"""Calls that are sent in one go when the generator is late: answers must be read as well."""


def open_load(
    endpoint: Endpoint,
    requests: Sequence[bytes] | RequestsOf,
    *,
    rate: float,
    arrivals: Arrivals = "poisson",
    connections: int | None = None,
    plan: Plan = DEFAULT_PLAN,
    seed: int = 0,
    watch: Watch | None = None,
    keep: int = 0,
    examine: Examine | None = None,
    every: bool = False,
    keep_calls: bool = False,
) -> Records:
    """
    Return what came of calls sent at a rate, whatever the server does.

    At most `connections` calls are under way; by default as many as are due in a second.
    The first `keep` good answers are kept, and shown to `examine`; with `every`, all are shown.
    With `keep_calls` the row of every call is kept, too: memory then grows with their number.

    Raises:
        Unreachable: the connections cannot be opened.
    """
    number = connections or default_connections(rate)
    observer = Observer(watch, keep, examine, every, keep_calls)
    due = moments(rate, arrivals, seed=seed)
    return _Open(endpoint, requests, number, plan, observer, rate, due).run()


def closed_load(
    endpoint: Endpoint,
    requests: Sequence[bytes] | RequestsOf,
    *,
    clients: int,
    plan: Plan = DEFAULT_PLAN,
    watch: Watch | None = None,
    keep: int = 0,
    examine: Examine | None = None,
    every: bool = False,
    keep_calls: bool = False,
) -> Records:
    """
    Return what so many clients saw that each wait for their answers.

    Raises:
        Unreachable: the connections cannot be opened.
    """
    observer = Observer(watch, keep, examine, every, keep_calls)
    return _Closed(endpoint, requests, clients, plan, observer).run()


def default_connections(rate: float) -> int:
    """Return how many connections an open load has unless it is told: a second's calls."""
    return max(32, min(512, round(rate)))


class _Open(Load):
    """Calls that are due at given moments."""

    def __init__(
        self,
        endpoint: Endpoint,
        requests: Sequence[bytes] | RequestsOf,
        connections: int,
        plan: Plan,
        observer: Observer,
        rate: float,
        moments_due: Iterator[float],
    ) -> None:
        super().__init__(endpoint, requests, connections, plan, observer)
        self._awake_s = min(_AWAKE_S, _AWAKE_SHARE / rate)
        self._moments = moments_due
        self._next = inf
        self._free: deque[Slot] = deque()
        self._waiting: deque[tuple[float, int]] = deque()

    def run(self) -> Records:
        """See `Load.run`."""
        with ahead_of_others():
            return super().run()

    def begin(self) -> None:
        for slot in self._slots:
            self.freed(slot)
        self._next = self._moment_after()

    def send_due(self, now: float) -> float:
        for _ in range(_BURST):
            if self._next > now:
                break
            self._offer(self._next)
            self._next = self._moment_after()
        return self._next

    def _moment_after(self) -> float:
        moment = next(self._moments)
        is_last = self.plan.count is not None and self._offered >= self.plan.count
        return inf if is_last or moment >= self._end else moment

    def _offer(self, due: float) -> None:
        self._offered += self._recorder.is_measuring
        index = self._next_index()
        while self._free:
            slot = self._free.popleft()
            slot.is_listed = False
            if slot.connection.is_free:
                sent = self._begin(slot, due, index)
                self._recorder.add_lag(sent - due)
                return
        self.records.waited += self._recorder.is_measuring
        self._waiting.append((due, index))

    def freed(self, slot: Slot) -> None:
        if self._waiting:
            self._begin(slot, *self._waiting.popleft())
        elif not slot.is_listed:
            slot.is_listed = True
            # In turn, so that none lies idle until the server closes it.
            self._free.append(slot)

    def look(self, now: float) -> None:
        while self._waiting and now - self._waiting[0][0] > self.plan.timeout_s:
            self._record_unsent(self._waiting.popleft()[0], NOT_SENT)

    def is_sending(self, now: float) -> bool:
        return self._next < inf or (self.plan.count is None and now < self._end)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def stop(self) -> None:
        self._next = inf
        while self._waiting:
            self._record_unsent(self._waiting.popleft()[0], INTERRUPTED)


class _Closed(Load):
    """Clients that each wait for their answer."""

    def begin(self) -> None:
        for slot in self._slots:
            self.freed(slot)

    def send_due(self, now: float) -> float:
        return inf

    def freed(self, slot: Slot) -> None:
        if self._stopped_at is not None or not self.is_sending(self.now):
            return
        self._offered += self._recorder.is_measuring
        sent = self._begin(slot, None, self._next_index())
        if slot.read:
            self._recorder.add_lag(sent - slot.read)

    def failed_to_open(self, slot: Slot) -> None:
        """A client that finds nobody has made a call in vain."""
        if self._stopped_at is None or slot.sent < self._stopped_at:
            self._offered += self._recorder.is_measuring
            self._record_unsent(slot.sent, CONNECTION_LOST)

    @property
    def is_waiting(self) -> bool:
        """True while clients that lost their connections before the end are finding the server."""
        end = self._stopped_at
        if end is None or self.records.interrupted:
            return False
        return any(slot.sent < end for slot in self._opening)

    def is_sending(self, now: float) -> bool:
        if self.records.interrupted or now >= self._end:
            return False
        return self.plan.count is None or self._offered < self.plan.count
