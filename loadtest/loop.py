"""
What open and closed loads share: connections, the loop, the record of each call.

One thread, many connections.  It is no asyncio: that sleeps in whole milliseconds, and calls
here are due between them.
"""

import contextlib
import gc
import select
import selectors
import time
from collections import deque
from collections.abc import Sequence
from math import nan
from typing import Final

import numpy as np

from loadtest.calls import CONNECTION_LOST, INTERRUPTED, TIMED_OUT
from loadtest.connection import Connection, ConnectionLost, resolve
from loadtest.endpoint import Endpoint, reason_of
from loadtest.errors import Unreachable
from loadtest.plan import Live, Observer, Plan, RequestsOf
from loadtest.recorder import Recorder
from loadtest.records import Records
from loadtest.slot import Slot
from loadtest.timestamps import clock_flaw
from loadtest.urgency import allow_files, sharpen_timers

_LOOK_S: Final = 0.05
"""How often time limits are looked at."""
_TELL_S: Final = 0.25
"""How often it is told how the load goes, and calls that have ended are counted and let go."""
_RETRY_S: Final = 0.1
_OPEN_LIMIT_S: Final = 15.0
_LAST_ANSWERS_S: Final = 1.0
"""After an interruption, time for the answers that are under way."""
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

clock = time.perf_counter


class Load:
    """What open and closed loads share: connections, the loop, the record of each call."""

    def __init__(
        self,
        endpoint: Endpoint,
        requests: Sequence[bytes] | RequestsOf,
        connections: int,
        plan: Plan,
        observer: Observer,
    ) -> None:
        self._observer = observer
        self.plan = plan
        self.records = Records(plan.warmup_s, plan.seconds, keep_calls=observer.keep_calls)
        self._recorder = Recorder(self.records, observer)
        self._endpoint = endpoint
        self._tls = endpoint.tls()
        self._selector = selectors.DefaultSelector()
        of_slot = requests if callable(requests) else lambda _: requests
        self._slots = [Slot(number, of_slot(number)) for number in range(connections)]
        self._turn = 0
        self._offered = 0
        """Calls of the measured part that were begun, or wait."""
        self._busy: set[Slot] = set()
        self._opening: set[Slot] = set()
        """Slots whose connections are being made."""
        self._retry: deque[tuple[float, Slot]] = deque()
        self._epoch = 0.0
        self._end = plan.warmup_s + plan.seconds
        self._cpu_at_start = 0.0
        self._measured_from = 0.0
        self._stopped_at: float | None = None
        self._told_at = 0.0
        self._awake_s = 0.0

    # The loop.

    def run(self) -> Records:
        """Make the load; once, for one object."""
        allow_files(len(self._slots) + 64)
        sharpen_timers()
        try:
            self._open_all()
            self.records.timestamp_flaw = clock_flaw()
            gc.collect()
            gc.freeze()
            gc.disable()
            self._epoch = clock()
            if not self.plan.warmup_s:
                self._begin_to_measure(0.0)
            self.begin()
            self._loop()
            self._recorder.count()
        finally:
            gc.enable()
            gc.unfreeze()
            for slot in self._slots:
                if hasattr(slot, "connection"):
                    slot.connection.close()
            self._selector.close()
        records = self.records
        if records.timestamp_flaw is None:
            records.timestamp_flaw = clock_flaw()  # a clock may be set meanwhile
        if self.plan.count is not None and records.offered:
            # As long as it took, to the last answer.
            records.seconds = records.last_end - self.plan.warmup_s
        return records

    def begin(self) -> None:
        """Do what there is to do at the very start."""

    def send_due(self, now: float) -> float:
        """Send what is due; return when to be called again at the latest."""
        raise NotImplementedError

    def freed(self, slot: Slot) -> None:
        """Use a connection that is free."""
        raise NotImplementedError

    def is_sending(self, now: float) -> bool:
        """Return whether calls are still to be begun."""
        raise NotImplementedError

    def failed_to_open(self, slot: Slot) -> None:
        """Take note of a connection that was lost and could not be made anew."""

    def look(self, now: float) -> None:
        """Let go of what has waited for too long."""

    def stop(self) -> None:
        """Begin no more calls, and give up those that were not sent."""

    @property
    def now(self) -> float:
        """Seconds since the load began."""
        return clock() - self._epoch

    def _loop(self) -> None:
        next_look = 0.0
        while True:
            now = self.now
            if not self._recorder.is_measuring and now >= self.plan.warmup_s:
                self._begin_to_measure(now)
            wake = self.send_due(now)
            if now >= next_look:
                next_look = now + _LOOK_S
                self._look(now)
                if self._stopped_at is None and not self.is_sending(now):
                    self._measured_until(now)
            if self._stopped_at is not None and not self._busy and not self.is_waiting:
                return
            precisely = wake < next_look
            for key, events in self._wait(min(wake, next_look) - self.now, precisely=precisely):
                self._serve(key.data, events)

    def _begin_to_measure(self, now: float) -> None:
        """End the warm-up; calls of it that have no answer yet are measured from here on."""
        self._recorder.is_measuring = True
        self._offered = len(self._busy) + self.waiting
        self._cpu_at_start, self._measured_from = time.process_time(), now

    @property
    def waiting(self) -> int:
        """Calls that are due and were not sent."""
        return 0

    @property
    def is_waiting(self) -> bool:
        """True while something may still become of calls that are not under way."""
        return self.waiting > 0

    def _wait(self, seconds: float, *, precisely: bool) -> list[tuple[selectors.SelectorKey, int]]:
        if seconds > 0 and precisely:
            if seconds > self._awake_s:
                # select() counts in microseconds where epoll counts in milliseconds.
                select.select([self._selector.fileno()], [], [], seconds - self._awake_s)
            seconds = 0.0
        return self._selector.select(max(0.0, seconds))

    def _serve(self, slot: Slot, events: int) -> None:
        connection = slot.connection
        try:
            if connection.is_connecting:
                connection.advance()
                self._register(slot)
                if connection.is_free:
                    self._opening.discard(slot)
                    self.freed(slot)
                return
            if events & _WRITE:
                connection.flush()
                self._register(slot)
            if not events & _READ or not connection.receive():
                return
        except OSError:
            self._drop(slot, retry=True)
            self.failed_to_open(slot)
            return
        except ConnectionLost:
            if slot in self._busy:
                self._record(slot, CONNECTION_LOST)
            self._reopen(slot)
            return
        self._record(slot, connection.status)
        if connection.is_free:
            self.freed(slot)
        else:
            self._reopen(slot)

    def _look(self, now: float) -> None:
        limit = self.plan.timeout_s
        for slot in [slot for slot in self._busy if now - slot.sent > limit]:
            self._record(slot, TIMED_OUT)
            self._reopen(slot)
        for slot in [slot for slot in self._opening if now - slot.sent > limit]:
            self._drop(slot, retry=True)
            self.failed_to_open(slot)
        while self._retry and self._retry[0][0] <= now:
            self._open(self._retry.popleft()[1])
        self.look(now)
        if self._stopped_at is not None and self.records.interrupted:
            if now > self._stopped_at + _LAST_ANSWERS_S:
                for slot in list(self._busy):
                    self._record(slot, INTERRUPTED)
            return
        if now - self._told_at < _TELL_S:
            return
        watch = self._observer.watch
        going_on = watch is None or watch(self._live(now))
        self._told_at = now
        self._recorder.count()
        if not going_on and not self.records.interrupted:
            self.records.interrupted = True
            self.stop()
            if self._stopped_at is None:
                self._measured_until(now)

    def _measured_until(self, now: float) -> None:
        """Close the measured part."""
        self._stopped_at = now
        if self._recorder.is_measuring and now > self._measured_from:
            used = time.process_time() - self._cpu_at_start
            self.records.cpu_share = used / (now - self._measured_from)
        self.records.seconds = max(0.0, min(now, self._end) - self.plan.warmup_s)
        if self.plan.count is None:
            self.records.end_at(self.records.seconds)

    def _live(self, now: float) -> Live:
        latency = self._recorder.latencies_s() * 1e3
        p50, p99 = np.percentile(latency, (50, 99)) if latency.size else (nan, nan)
        return Live(
            elapsed_s=now,
            is_warmup=now < self.plan.warmup_s,
            offered=self._offered,
            good=latency.size,
            rate=latency.size / (now - self._told_at) if now > self._told_at else 0.0,
            p50_ms=float(p50),
            p99_ms=float(p99),
        )

    # Calls.

    def _begin(self, slot: Slot, due: float | None, index: int) -> float:
        """Send a call on a free connection; return when, which is also when it was due if None."""
        slot.sent = sent = self.now
        slot.due = sent if due is None else due
        slot.index = index
        self._busy.add(slot)
        keep = self._recorder.wants_body
        try:
            slot.connection.send(slot.requests[index], keep=keep)
        except ConnectionLost:
            self._record(slot, CONNECTION_LOST)
            self._reopen(slot)
            return sent
        if slot.connection.wish == "write":
            self._register(slot)
        return sent

    def _next_index(self) -> int:
        index = self._turn
        self._turn = (index + 1) % len(self._slots[0].requests)
        return index

    def _record(self, slot: Slot, outcome: int) -> None:
        slot.read = self.now
        self._busy.discard(slot)
        self._recorder.add(slot, outcome)

    def _record_unsent(self, due: float, outcome: int) -> None:
        self._recorder.add_unsent(due, self.now, outcome)

    # Connections.

    def _open_all(self) -> None:
        self._epoch = clock()
        try:
            self._address = resolve(self._endpoint, limit_s=_OPEN_LIMIT_S)
            self.records.address = str(self._address[1][0])
            for slot in self._slots:
                self._open(slot, strict=True)
            while waiting := [s for s in self._slots if not s.connection.is_free]:
                if self.now > _OPEN_LIMIT_S:
                    raise TimeoutError(
                        f"{len(waiting)} of {len(self._slots)} connections could not be opened"
                        f" within {_OPEN_LIMIT_S:g} s"
                    )
                for key, _ in self._wait(_LOOK_S, precisely=False):
                    key.data.connection.advance()
                    self._register(key.data)
            self._opening.clear()
        except OSError as error:
            raise Unreachable(f"{self._endpoint.url}: {reason_of(error)}") from None

    def _open(self, slot: Slot, *, strict: bool = False) -> None:
        slot.connection = Connection(self._address, self._tls, self._endpoint.host)
        slot.fd, slot.events, slot.sent = slot.connection.socket.fileno(), 0, self.now
        try:
            slot.connection.advance()
        except OSError:
            if strict:
                raise
            self._drop(slot, retry=True)
            self.failed_to_open(slot)
            return
        if slot.connection.is_connecting:
            self._opening.add(slot)
        self._register(slot)

    def _register(self, slot: Slot) -> None:
        wish = slot.connection.wish
        connecting = slot.connection.is_connecting
        events = (_WRITE if wish == "write" else 0) | (
            _READ if wish == "read" or not connecting else 0
        )
        if events == slot.events:
            return
        if slot.events:
            self._selector.modify(slot.fd, events, slot)
        else:
            self._selector.register(slot.fd, events, slot)
        slot.events = events

    def _drop(self, slot: Slot, *, retry: bool) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(slot.fd)
        slot.events = 0
        self._opening.discard(slot)
        slot.connection.close()
        if retry:
            self._retry.append((self.now + _RETRY_S, slot))

    def _reopen(self, slot: Slot) -> None:
        self._drop(slot, retry=False)
        self._open(slot)
