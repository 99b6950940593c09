"""
Take admitted calls to the engine, many in one run, and bring each its own answer back.

Calls that wait while the engine is busy are joined into its next run; there is
no timer, so a lone call never waits.  Each lane of the engine has a thread, which
takes what goes next, runs it and copies tensors as long as anything waits: it
never waits for the event loop.  What is little and all there is, is run by the
loop itself: handing it over and back would take longer (bench/NOTES.md, "lanes").
"""

import asyncio
import contextlib
import itertools
import math
import os
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final, Literal, Protocol

import numpy as np

from service.batches import (
    RUN_OVERHEAD_TOKENS,
    Batch,
    BatchLimits,
    Slice,
    outputs_of,
    slices_of,
    stacked_inputs,
)
from service.calls import Answer, Call, Floats, Outputs, Run, Stages
from service.engine import Engine, Stop
from service.errors import DeadlineExceeded, Draining, QueueFull

MAX_RUNS_PASSED = 32
"""After so many runs without it, a slice goes before every priority."""

INLINE_S = 0.01
"""What is expected to take less, when nothing else is to be done, is run on the event loop."""

MIN_SHARE = 128
"""Queries below which a run is not made smaller for the sake of another lane: some 3 ms."""

_TURNS = 32
"""
How many turns of the loop a run is put off at most while calls keep coming in: many callers
that connect at once would else be run one by one (bench/NOTES.md, "the express way").
"""

_NICE = 5
"""How far the engine's threads stand behind the event loop: see nice(2)."""

_SCANNED = 128
"""Waiting slices that are looked at for one run; more would cost more than they save."""

_MAKING: Final = threading.Lock()
"""Held while the memory of an answer in slices is made: two lanes may have slices of one call."""

Drop = Literal["queued", "running"]


@dataclass(frozen=True)
class QueueLimits:
    """How much may wait, and for how long by default."""

    max_calls: int
    max_tokens: int
    """Queries and keys of all waiting calls."""
    timeout_s: float


class Observer(Protocol):
    """Is told what happens in the queue, on the event loop."""

    def on_queue_change(self, calls: int, tokens: int) -> None:
        """So many calls and tokens wait now."""
        ...

    def on_run(self, run: Run) -> None:
        """The engine has run."""
        ...

    def on_drop(self, where: Drop) -> None:
        """A call's caller left, or its time limit passed, while it was there."""
        ...


Deliver = Callable[[Answer | Exception], None]
"""Takes what became of a call, on the event loop; it must not raise."""


@dataclass(eq=False, slots=True)
class QueuedCall:
    """A call that was let in and is not answered yet; the batcher's own but for `leave`."""

    call: Call
    deliver: Deliver
    tokens: int
    queued_at: float
    deadline: float
    """When it must be in the engine, as `queued_at` on the monotonic clock."""
    slices_left: int
    on_run: Callable[[Run], None] | None
    is_over: bool = False
    """Nobody waits for the answer any more."""
    output: Floats | None = None
    weights: Floats | None = None
    started_at: float = 0.0
    assembly_s: float = 0.0
    compute_s: float = 0.0
    splitting_s: float = 0.0

    def answer(self) -> Answer:
        """Return the answer, once every slice is in it."""
        if self.output is None:
            raise ValueError("no slice_ of the answer is there")
        return Answer(
            self.output,
            self.weights,
            self.call.lengths,
            self.call.key_lengths,
            Stages(
                self.started_at - self.queued_at,
                self.assembly_s,
                self.compute_s,
                self.splitting_s,
            ),
        )


@dataclass(eq=False, slots=True)
class _Ticket:
    """A waiting slice."""

    rank: tuple[int, int, int]
    """Priority, place in its call, arrival: the least goes first."""
    slice_: Slice
    queued: QueuedCall
    runs_before: int
    """How many runs the engine had made when this came."""


_RANK: Final = attrgetter("rank")


class Batcher:
    """
    The queue in front of one engine, and the threads behind it.

    Used on one event loop.  `inline_s` is how long a run on the loop may be expected to take.
    """

    def __init__(
        self,
        engine: Engine,
        queue: QueueLimits,
        run: BatchLimits,
        observer: Observer,
        *,
        inline_s: float = INLINE_S,
    ) -> None:
        self._engine = engine
        self._queue_limits = queue
        self._run_limits = run
        self._observer = observer
        self._inline_s = inline_s
        self._calls = 0
        self._tokens = 0
        self._arrived = 0
        self._pace = _Pace()
        self._threads = ThreadPoolExecutor(
            engine.concurrent_runs, thread_name_prefix="engine", initializer=_let_the_loop_pass
        )
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_beginning = False
        self._queued: set[QueuedCall] = set()
        self._rings_at = math.inf
        self._alarm: asyncio.TimerHandle | None = None
        """Rings at the earliest deadline of all queued_calls, or before it."""
        self._lock = threading.Lock()
        """Held for whatever the loop and the threads share: all below."""
        self._waiting: list[_Ticket] = []
        self._runs = 0
        self._running: list[_Taken] = []
        self._free_runs = engine.concurrent_runs

    async def submit(self, call: Call, *, on_run: Callable[[Run], None] | None = None) -> Answer:
        """
        Return the call's answer once the engine has given it.

        A caller that leaves takes its call along: out of the queue, and out of
        the engine when no other call is in that run.

        Raises:
            QueueFull: as much waits as may wait.
            DeadlineExceeded: the call's time limit passed.
            Draining: after `close`.
            InferenceFailed: the runtime refused the batch.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def deliver(outcome: Answer | Exception) -> None:
            if future.done():
                return
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        queued = self.enter(call, deliver, on_run=on_run)
        try:
            return await future
        finally:
            self.leave(queued)

    def enter(
        self, call: Call, deliver: Deliver, *, on_run: Callable[[Run], None] | None = None
    ) -> QueuedCall:
        """
        Let a call in; what becomes of it is delivered later, once, unless it leaves before.

        That is its answer, `DeadlineExceeded`, or what the engine raised.  Of each run
        that the call takes part in `on_run` is told, once a run, however many of its calls
        name it.

        Raises:
            QueueFull: as much waits as may wait.
            Draining: after `close`.
        """
        slices = slices_of(call, self._run_limits)
        tokens = sum([slice_.tokens for slice_ in slices])
        self.check_room(tokens)
        loop = asyncio.get_running_loop()
        timeout_s = self._queue_limits.timeout_s if call.timeout_s is None else call.timeout_s
        now = time.monotonic()
        queued = QueuedCall(call, deliver, tokens, now, now + timeout_s, len(slices), on_run)
        self._queued.add(queued)
        self._count(1, tokens)
        self._ring_by(queued.deadline, loop)
        self._enqueue(queued, slices, loop)
        return queued

    def leave(self, queued: QueuedCall) -> None:
        """
        Forget a call that nobody waits for; nothing happens when it is over already.

        A run of the engine is ended when nobody waits for any of it.
        """
        if queued.is_over:
            return
        self._finish(queued)
        with self._lock:
            concerned = [taken for taken in self._running if taken.holds(queued)]
        for taken in concerned:
            if taken.is_left:
                taken.stop.set()
        self._observer.on_drop("running" if concerned else "queued")

    def check_room(self, tokens: int = 0) -> None:
        """
        Return when a call of so many queries and keys may wait.

        Raises:
            QueueFull: as much waits as may wait.
            Draining: after `close`.
        """
        if self._closed:
            raise Draining("the server is stopping", retry_after_s=1)
        limits = self._queue_limits
        if self._calls >= limits.max_calls:
            raise QueueFull(
                f"queue: at most {limits.max_calls} calls may be in it, and so many are",
                retry_after_s=self._pace.whole_seconds(self._tokens),
            )
        # An empty queue takes any call that passed the limits of one call.
        if self._calls and self._tokens + tokens > limits.max_tokens:
            raise QueueFull(
                f"queue: at most {limits.max_tokens} tokens may be in it: it holds"
                f" {self._tokens}, this call has {tokens}",
                retry_after_s=self._pace.whole_seconds(self._tokens),
            )

    async def close(self) -> None:
        """Finish what waits, then end the thread; later calls are refused."""
        self._closed = True
        await self._idle.wait()
        self._threads.shutdown()

    def _count(self, calls: int, tokens: int) -> None:
        self._calls += calls
        self._tokens += tokens
        self._observer.on_queue_change(self._calls, self._tokens)

    def _enqueue(
        self, queued: QueuedCall, slices: list[Slice], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._arrived += 1
        with self._lock:
            for i, slice_ in enumerate(slices):
                # A call's later slices stand behind the first ones of calls that came after it.
                rank = (queued.call.priority or 2**32, i, self._arrived)
                insort(self._waiting, _Ticket(rank, slice_, queued, self._runs), key=_RANK)
        self._idle.clear()
        if self._free_runs and not self._is_beginning:
            # Not at once: what else the loop has already received shall be in the same run.
            self._is_beginning = True
            loop.call_soon(self._begin, loop, self._arrived, 0)

    def _finish(self, queued: QueuedCall) -> None:
        """Take a call off the books."""
        queued.is_over = True
        self._queued.discard(queued)
        self._count(-1, -queued.tokens)

    def _ring_by(self, deadline: float, loop: asyncio.AbstractEventLoop) -> None:
        """See to it that somebody looks when the deadline has passed: one alarm serves all."""
        if self._alarm is not None:
            if self._rings_at <= deadline:
                return
            self._alarm.cancel()
        self._rings_at = deadline
        left_s = max(0.0, deadline - time.monotonic())
        self._alarm = loop.call_later(left_s, self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell every call whose deadline has passed, and set the alarm for the next one."""
        self._alarm = None
        now = time.monotonic()
        for queued in [queued for queued in self._queued if queued.deadline <= now]:
            self.leave(queued)
            limit_s = queued.deadline - queued.queued_at
            queued.deliver(DeadlineExceeded(f"the call's limit of {limit_s:g} s passed"))
        if self._queued:
            self._ring_by(min(queued.deadline for queued in self._queued), loop)

    def _begin(self, loop: asyncio.AbstractEventLoop, seen: int, turns: int) -> None:
        """
        Run what waits: here, if it is little and all there is; else in the free lanes.

        While each turn of the loop brings more calls than were `seen`, that is put off.
        """
        if self._arrived > seen and turns < _TURNS:
            loop.call_soon(self._begin, loop, self._arrived, turns + 1)
            return
        self._is_beginning = False
        taken = self._take()
        while taken is not None:
            if taken.is_alone and self._pace.seconds(taken.batch) <= self._inline_s:
                self._deliver(taken, _outcome(self._engine, taken))
                taken = self._take(after=taken)
            else:
                self._threads.submit(self._work, loop, taken)
                taken = self._take()
        self._rest()

    def _work(self, loop: asyncio.AbstractEventLoop, taken: "_Taken | None") -> None:
        """Run one batch after the other until nothing waits; in a lane's thread."""
        while taken is not None:
            outcome = _outcome(self._engine, taken)
            loop.call_soon_threadsafe(self._deliver, taken, outcome)
            taken = self._take(after=taken)
        loop.call_soon_threadsafe(self._rest)

    def _rest(self) -> None:
        """Be idle when nothing waits and nothing runs."""
        with self._lock:
            if not self._waiting and not self._running:
                self._idle.set()

    def _take(self, *, after: "_Taken | None" = None) -> "_Taken | None":
        """
        Take the most urgent slice out of the queue, and every other that fits beside it.

        A lane that comes back with what it has run keeps its place or gives it up;
        without, one must be free.
        """
        with self._lock:
            if after is not None:
                self._running.remove(after)
                self._free_runs += 1
            now = time.monotonic()
            # Who is past the deadline is told by the alarm, which may be a moment late.
            self._waiting = [
                ticket
                for ticket in self._waiting
                if not ticket.queued.is_over and now < ticket.queued.deadline
            ]
            if not self._waiting or not self._free_runs:
                return None
            tickets, batch = self._next()
            is_alone = not self._waiting and not self._running
            taken = _Taken(tickets, batch, is_alone, Stop())
            self._running.append(taken)
            self._free_runs -= 1
            self._runs += 1
            return taken

    def _next(self) -> tuple[list[_Ticket], Batch]:
        """Take the tickets of the next run from those that wait, at least one of which does."""
        waiting = self._waiting
        if len(waiting) == 1:
            self._waiting = []
            return waiting, Batch.of(waiting[0].slice_)
        oldest = min(waiting, key=lambda ticket: ticket.rank[2])
        overdue = self._runs - oldest.runs_before >= MAX_RUNS_PASSED
        first = oldest if overdue else waiting[0]
        tickets, batch = _joined(first, waiting, self._share())
        chosen = set(map(id, tickets))
        self._waiting = [ticket for ticket in waiting if id(ticket) not in chosen]
        return tickets, batch

    def _share(self) -> BatchLimits:
        """Return the limits of one run that leaves the other lanes something to do."""
        limits = self._run_limits
        if self._engine.concurrent_runs == 1:
            return limits
        tokens = sum(ticket.slice_.tokens for ticket in self._waiting) // 2  # queries and keys
        share = max(MIN_SHARE, tokens // self._engine.concurrent_runs)
        return replace(limits, max_tokens=min(limits.max_tokens, share))

    def _deliver(self, taken: "_Taken", outcome: Run | Exception) -> None:
        """Answer every call that the run has made whole."""
        if isinstance(outcome, Exception):
            for ticket in taken.tickets:
                if not ticket.queued.is_over:
                    self._finish(ticket.queued)
                    ticket.queued.deliver(outcome)
            return
        self._observer.on_run(outcome)
        told = {ticket.queued.on_run for ticket in taken.tickets}
        for tell in told:
            if tell is not None:
                tell(outcome)
        self._pace.note(taken.batch, outcome.assembly_s + outcome.compute_s)
        for ticket in taken.tickets:
            queued = ticket.queued
            queued.started_at = queued.started_at or outcome.started_at
            queued.assembly_s += outcome.assembly_s
            queued.compute_s += outcome.compute_s
            queued.splitting_s += outcome.splitting_s
            queued.slices_left -= 1
            if queued.slices_left == 0 and not queued.is_over:
                self._finish(queued)
                queued.deliver(queued.answer())


@dataclass(eq=False, slots=True)
class _Taken:
    """What goes through the engine together."""

    tickets: list[_Ticket]
    batch: Batch
    is_alone: bool
    """Nothing else waited or ran when it was taken."""
    stop: Stop
    """Ends the run."""

    @property
    def is_left(self) -> bool:
        """True when nobody waits for any of it any more."""
        return all(ticket.queued.is_over for ticket in self.tickets)

    def holds(self, queued: QueuedCall) -> bool:
        """Say whether a slice of that call is in it."""
        return any(ticket.queued is queued for ticket in self.tickets)


@dataclass
class _Pace:
    """How fast the engine is, from its own last runs."""

    tokens_per_s: float = 0.0
    cost_per_s: float = 0.0

    def note(self, batch: Batch, seconds: float) -> None:
        """Take a run into account."""
        share = 0.2 if self.tokens_per_s else 1.0
        seconds = max(seconds, 1e-9)
        self.tokens_per_s += share * (batch.tokens / seconds - self.tokens_per_s)
        self.cost_per_s += share * (batch.cost / seconds - self.cost_per_s)

    def seconds(self, batch: Batch) -> float:
        """Return how long a run will take; infinity before the first one."""
        return batch.cost / self.cost_per_s if self.cost_per_s else math.inf

    def whole_seconds(self, tokens: int) -> int:
        """Return how long a queue will take, from 1 to 60 s."""
        rate = self.tokens_per_s
        return max(1, min(60, math.ceil(tokens / rate))) if rate else 1


def _let_the_loop_pass() -> None:
    """Put this thread behind the event loop, which has little to do and must do it at once."""
    with contextlib.suppress(AttributeError, OSError):  # a thread's own priority is Linux's
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _joined(
    first: _Ticket, waiting: list[_Ticket], limits: BatchLimits
) -> tuple[list[_Ticket], Batch]:
    """
    Return a slice with every other that is better run beside it than later, nearest first.

    What goes before others that came earlier makes each of them wait as long as it takes
    itself.  That must not be more than what all that wait save: one start of a run.
    """
    length, keys = first.slice_.length, first.slice_.key_length
    nearest = sorted(
        (
            ticket.rank[0],
            abs(ticket.slice_.length - length) + abs(ticket.slice_.key_length - keys),
            place,
        )
        for place, ticket in enumerate(itertools.islice(waiting, _SCANNED))
    )
    tickets, batch = [first], Batch.of(first.slice_)
    places = [waiting.index(first)]
    saved = RUN_OVERHEAD_TOKENS * len(waiting)
    full_at: int | None = None
    for priority, _, place in nearest:
        ticket = waiting[place]
        passed = place - bisect_left(places, place)
        if ticket is first or priority == full_at or passed * ticket.slice_.tokens > saved:
            continue
        if batch.try_add(ticket.slice_, limits):
            tickets.append(ticket)
            insort(places, place)
        elif ticket.slice_.kind == first.slice_.kind:
            full_at = priority  # what is farther will fit still less
    return tickets, batch


def _outcome(engine: Engine, taken: _Taken) -> Run | Exception:
    """Return how the run went; each slice's outputs are in its call's answer then."""
    try:
        return _run(engine, taken)
    except Exception as failure:  # whatever it is, the next batch must run
        return failure


def _run(engine: Engine, taken: _Taken) -> Run:
    """
    Run the batch, and put each slice's outputs into its call's answer.

    Raises:
        InferenceFailed: see `Engine.run`.
    """
    tickets, batch = taken.tickets, taken.batch
    started = time.monotonic()
    inputs = stacked_inputs(batch)
    assembled = time.monotonic()
    outputs = engine.run(
        inputs,
        weights=batch.slices[0].call.weights,
        stop=taken.stop,
        concurrent=not taken.is_alone,
    )
    computed = time.monotonic()
    for ticket, part in zip(tickets, outputs_of(batch, outputs), strict=True):
        if not ticket.queued.is_over:
            _put(ticket.queued, ticket.slice_, part, is_alone=len(tickets) == 1)
    splitting_s = time.monotonic() - computed
    return Run(
        calls=len({id(ticket.queued) for ticket in tickets}),
        rows=batch.rows,
        tokens=batch.tokens,
        padded_tokens=batch.padded_tokens,
        started_at=started,
        assembly_s=assembled - started + splitting_s,
        compute_s=computed - assembled,
        splitting_s=splitting_s,
    )


def _put(queued: QueuedCall, slice_: Slice, outputs: Outputs, *, is_alone: bool) -> None:
    """Put one slice's outputs into its call's answer, keeping no other call's memory alive."""
    weights = outputs.attention_weights
    if weights is not None and queued.call.heads is not None:
        weights = weights[:, queued.call.heads]
    if slice_.is_whole:
        queued.output = outputs.output if is_alone else outputs.output.copy()
        queued.weights = weights if is_alone or weights is None else weights.copy()
        return
    inputs = slice_.call.inputs
    with _MAKING:
        if queued.output is None:
            queued.output = np.zeros(inputs.embeddings.shape, np.float32)
        if weights is not None and queued.weights is None:
            rows, length = inputs.embeddings.shape[:2]
            shape = (rows, weights.shape[1], length, inputs.key_length)
            queued.weights = np.zeros(shape, np.float32)
    queued.output[slice_.rows, : slice_.length] = outputs.output
    if weights is not None and queued.weights is not None:
        queued.weights[slice_.rows, :, : slice_.length, : slice_.key_length] = weights
