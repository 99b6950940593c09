"""What was seen of all calls of one load, in memory that does not grow with their number."""

import re
from array import array
from collections import Counter
from math import nan
from typing import Final

import numpy as np

from loadtest.calls import GOOD, Calls
from loadtest.histogram import Floats, Histogram, buckets_of
from loadtest.timestamps import TOLERANCE_S
from loadtest.windows import Windows

_STAGE = re.compile(rb"([A-Za-z][\w-]{0,31});dur=(\d+(?:\.\d+)?)")
_TOTAL: Final = b"total"
_MOST_STAGES: Final = 32
_MOST_CODES: Final = 100
"""Different words of a server that are counted apart; the rest is `other`."""
_LONGER: Final = 1.01
"""A server that says a call took longer than this much of all its time speaks of another clock."""


class Times:
    """Latencies of the good calls, and when they came, by one way to tell when an answer came."""

    def __init__(self, warmup_s: float, seconds: float) -> None:
        self.latency = Histogram()
        """Since calls were due."""
        self.since_sent = Histogram()
        self.windows = Windows(seconds)
        self.silence_s = 0.0
        """The longest time in which a call was waiting and no answer came, good or not."""
        self.silence_at_s = 0.0
        """When that began, since the measured part did."""
        self._warmup_s = self._last_answer = warmup_s

    def add(self, due: Floats, sent: Floats, done: Floats, outcome: Floats) -> None:
        """Count calls that ended at `done`; what came of them is their outcome."""
        good = outcome == GOOD
        latency = buckets_of(done[good] - due[good])
        np.add.at(self.latency.counts, latency, 1)
        self.since_sent.add(done[good] - sent[good])
        self.windows.add(due[good] - self._warmup_s, done[good] - self._warmup_s, latency)
        self._note_silence(due[outcome > 0], done[outcome > 0])

    def _note_silence(self, due: Floats, done: Floats) -> None:
        if not done.size:
            return
        order = np.argsort(done)
        due, done = due[order], done[order]
        before = np.concatenate(([self._last_answer], done[:-1]))
        began = np.maximum(due, before)
        worst = int(np.argmax(done - began))
        if done[worst] - began[worst] > self.silence_s:
            self.silence_s = float(done[worst] - began[worst])
            self.silence_at_s = float(began[worst]) - self._warmup_s
        self._last_answer = max(self._last_answer, float(done[-1]))


class Records:
    """
    Every call of the measured part, counted: outcomes exactly, times in histograms.

    Calls come as rows, by `fold`, and are let go; with `keep_calls` they are kept as well.
    """

    def __init__(self, warmup_s: float, seconds: float, *, keep_calls: bool = False) -> None:
        self.warmup_s = warmup_s
        self.seconds = 0.0
        """How long the measured part was, without what came in after its end."""
        self.outcomes: Counter[int] = Counter()
        """Calls by status of HTTP, or by one of `FAILURES`."""
        self.codes: Counter[str] = Counter()
        """The word in the body of answers other than 200."""
        self.lag = Histogram()
        """How late the generator sent what it could have sent at once."""
        self.stages: dict[bytes, Histogram] = {}
        """What the server told of good answers (`Server-Timing`), by stage."""
        self.bodies: list[tuple[int, bytes, int | None]] = []
        """Answers that were kept: which request, body, length of its JSON part."""
        self.calls = Calls()
        """Every call, with `keep_calls`; else none."""
        self.waited = 0
        """Calls that were due when no connection was free."""
        self.address = ""
        """Of the server: the one of its name's addresses that took the connections."""
        self.checked = 0
        self.wrong = 0
        self.cpu_share = 0.0
        """Cores that the generator's process used in it."""
        self.interrupted = False
        self.timestamp_flaw: str | None = None
        """Why the kernel's time stamps cannot be true; None = nothing speaks against them."""
        self.contradicted = 0
        """Calls that took longer, as the server says, than from being sent to being read."""
        self.unread_s = 0.0
        """How long an answer lay unread, at most."""
        self.last_end = 0.0
        """When the last call ended, by this process."""
        self._by_stamp = Times(warmup_s, seconds)
        self._by_reading = Times(warmup_s, seconds)
        self._keep_calls = keep_calls
        self._timings: dict[bytes, array[float]] = {}

    @property
    def offered(self) -> int:
        """Calls that were due."""
        return sum(self.outcomes.values())

    @property
    def times(self) -> Times:
        """The times that hold: by the kernel's stamps, where nothing says that they are false."""
        return self._by_stamp if self.timestamp_flaw is None else self._by_reading

    @property
    def rate(self) -> float:
        """Good answers a second of the measured part; what came in after its end is not in it."""
        if self.seconds <= 0:
            return 0.0
        return sum(w.answered for w in self.times.windows.windows(self.seconds)) / self.seconds

    def end_at(self, seconds: float) -> None:
        """Count no answer from then on as one of the measured part, which ended early."""
        self._by_stamp.windows.limit_s = self._by_reading.windows.limit_s = seconds

    def add_code(self, code: str) -> None:
        """Count the word of an answer that was not good."""
        self.codes[code if code in self.codes or len(self.codes) < _MOST_CODES else "other"] += 1

    def add_timing(self, timing: bytes) -> float:
        """Take note of a `Server-Timing`; return its `total` in seconds, or NaN."""
        total = nan
        for name, duration in _STAGE.findall(timing):
            took_s = float(duration) / 1e3
            values = self._timings.get(name)
            if values is None:
                if len(self._timings) >= _MOST_STAGES:
                    continue
                values = self._timings[name] = array("d")
            values.append(took_s)
            if name == _TOTAL:
                total = took_s
        return total

    def fold(self, calls: Calls, lags: "array[float]") -> None:
        """Count calls that have ended, and how late calls were sent."""
        self.lag.add(np.array(lags))
        for name, values in self._timings.items():
            self.stages.setdefault(name, Histogram()).add(np.array(values))
            del values[:]
        if not len(calls):
            return
        outcome = calls.column("outcome")
        due, sent, done, read = (calls.column(name) for name in ("due", "sent", "done", "read"))
        self._by_stamp.add(due, sent, np.maximum(done, sent), outcome)
        self._by_reading.add(due, sent, read, outcome)
        self.outcomes.update(calls.outcome)
        self.last_end = max(self.last_end, float(read.max()))
        self.unread_s = max(self.unread_s, float((read - done).max()))
        self._look_at_clocks(sent, done, read, calls.column("total_s"))
        if self._keep_calls:
            self.calls.extend(calls)

    def _look_at_clocks(self, sent: Floats, done: Floats, read: Floats, total_s: Floats) -> None:
        """Find time stamps that cannot be true; comparisons with NaN are false."""
        told_s = total_s - TOLERANCE_S
        self.contradicted += int((told_s > _LONGER * (read - sent)).sum())
        if self.timestamp_flaw is not None:
            return
        if early := int((done < sent - TOLERANCE_S).sum()):
            self.timestamp_flaw = f"by them {early} answers came before their calls were sent"
        elif late := int((done > read + TOLERANCE_S).sum()):
            self.timestamp_flaw = f"by them {late} answers came after they had been read"
        elif short := int(((told_s > done - sent) & (total_s <= read - sent)).sum()):
            self.timestamp_flaw = f"by them {short} calls took less than the server's own time"
