"""
Run admitted calls on an engine, several in one batch, and deliver each call its own answer.

Calls that arrive while the engine is busy share its next run; there is no timer, so a call
that is alone never waits.  Each concurrent run has a thread, which takes a batch from the
schedule, stacks the tensors, runs the engine and splits the outputs for as long as calls
wait, without waiting for the event loop in between.  A small batch that is the only work runs
inline on the event loop; handing it to a thread would cost more (bench/NOTES.md, "Concurrent
runs").
"""

import asyncio
import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Protocol

from service.errors import DeadlineExceeded, InferenceFailed
from service.inference.batches import BatchLimits, outputs_of, slices_of, stacked_inputs
from service.inference.calls import Answer, Call, Run
from service.inference.engine import Engine, Stop
from service.inference.queued_call import Deliver, QueuedCall, copy_outputs
from service.inference.schedule import Admission, QueueLimits, Schedule, ScheduledRun, Throughput
from service.threads import all_started

INLINE_S = 0.01
"""A batch that is the only work runs inline on the event loop if it takes no longer than this."""

_MAX_DEFERRALS = 32
"""
Turns of the event loop for which a run is deferred at most, while calls keep arriving.  Without
deferral, calls of many callers that connect at once would run one by one (bench/NOTES.md,
"The fast path").
"""

_NICE = 5
"""Niceness of the engine's threads relative to the event loop: see nice(2)."""


Drop = Literal["queued", "running"]


class Observer(Protocol):
    """Receives what happens in the queue, on the event loop."""

    def on_queue_change(self, calls: int, tokens: int) -> None:
        """So many calls, with so many queries and keys, are waiting or running now."""
        ...

    def on_run(self, run: Run) -> None:
        """A run has ended successfully."""
        ...

    def on_drop(self, where: Drop) -> None:
        """A call's caller left, or its time limit passed, while it was there."""
        ...


_QueuedRun = ScheduledRun[QueuedCall]


class Batcher:
    """
    The queue in front of one engine, and the threads that run it.

    Its methods are called on one event loop.  A batch that is expected to take `inline_s`
    seconds at most runs inline on that loop if it is the only work.

    Raises:
        ThreadsUnavailable: the system starts no more threads.
    """

    def __init__(
        self,
        engine: Engine,
        queue: QueueLimits,
        batch: BatchLimits,
        observer: Observer,
        *,
        inline_s: float = INLINE_S,
    ) -> None:
        self._engine = engine
        self._batch_limits = batch
        self._default_timeout_s = queue.timeout_s
        self._observer = observer
        self._inline_s = inline_s
        self._throughput = Throughput()
        self._admission = Admission(queue, self._throughput)
        runs = engine.concurrent_runs
        self._threads = all_started(ThreadPoolExecutor(runs, "engine", _yield_to_the_loop), runs)
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_beginning = False
        self._queued: set[QueuedCall] = set()
        self._alarm: asyncio.TimerHandle | None = None
        """Rings at the earliest deadline of all queued calls, or before it."""
        self._alarm_at = math.inf
        self._lock = threading.Lock()
        """Held for what the event loop and the threads share: all below."""
        self._schedule: Schedule[QueuedCall] = Schedule(batch, engine.concurrent_runs)
        self._stops: dict[_QueuedRun, Stop] = {}
        """Ends each run in progress."""

    async def submit(self, call: Call, *, on_run: Callable[[Run], None] | None = None) -> Answer:
        """
        Return the call's answer once the engine has computed it.

        When the awaiting task is cancelled the call leaves the queue, and its run is stopped
        unless other calls share it.

        Raises:
            QueueFull: a limit of the queue would be exceeded.
            DeadlineExceeded: the call's time limit passed.
            Draining: after `close`.
            InferenceFailed: the call's run failed; cause attached.
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
        Admit a call; its outcome is delivered later, exactly once, unless it leaves before.

        The outcome is the answer, `DeadlineExceeded` or `InferenceFailed`.  `on_run` is
        called for each successful run that the call is part of, once a run even where several
        of its calls name the same function.

        Raises:
            QueueFull: a limit of the queue would be exceeded.
            Draining: after `close`.
        """
        slices = slices_of(call, self._batch_limits)
        tokens = 0
        for slice_ in slices:
            tokens += slice_.tokens
        loop = asyncio.get_running_loop()
        self._admission.add(tokens)
        timeout_s = self._default_timeout_s if call.timeout_s is None else call.timeout_s
        now = time.monotonic()
        queued = QueuedCall(call, deliver, tokens, now, now + timeout_s, len(slices), on_run)
        self._queued.add(queued)
        self._observer.on_queue_change(self._admission.calls, self._admission.tokens)
        self._set_alarm(queued.deadline, loop)
        with self._lock:
            self._schedule.add(queued, slices)
        self._idle.clear()
        if self._schedule.free_runs and not self._is_beginning:
            # Not at once: what the loop has already received shall share the run.
            self._is_beginning = True
            loop.call_soon(self._begin, loop, self._schedule.arrived, 0)
        return queued

    def leave(self, queued: QueuedCall) -> None:
        """
        Drop a call whose answer is not wanted any more; nothing happens if it is over.

        A run is stopped when all of its calls have left.
        """
        if queued.is_over:
            return
        self._finish(queued)
        with self._lock:
            runs = self._schedule.runs_of(queued)
            for run in runs:
                if run.is_abandoned:
                    self._stops[run].set()
        self._observer.on_drop("running" if runs else "queued")

    def check_room(self, tokens: int = 0) -> None:
        """Return when a call of so many queries and keys may enter: see `Admission.check`."""
        self._admission.check(tokens)

    async def close(self) -> None:
        """Finish all admitted calls, then end the threads; later calls are refused."""
        self._admission.close()
        await self._idle.wait()
        self._threads.shutdown()

    def _finish(self, queued: QueuedCall) -> None:
        """Remove a call from the queue's count and from those with a deadline."""
        queued.is_over = True
        self._queued.discard(queued)
        self._admission.remove(queued.tokens)
        self._observer.on_queue_change(self._admission.calls, self._admission.tokens)

    def _set_alarm(self, deadline: float, loop: asyncio.AbstractEventLoop) -> None:
        """Make sure that `_expire` is called at that time or before: one timer serves all calls."""
        if self._alarm is not None:
            if self._alarm_at <= deadline:
                return
            self._alarm.cancel()
        self._alarm_at = deadline
        left_s = max(0.0, deadline - time.monotonic())
        # The loop keeps it until then; a batcher that nobody uses any more must not stay as long.
        self._alarm = loop.call_later(left_s, _expire, weakref.ref(self), loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fail every call whose deadline has passed, and set the alarm for the next one."""
        self._alarm = None
        now = time.monotonic()
        for queued in [queued for queued in self._queued if queued.deadline <= now]:
            self.leave(queued)
            limit_s = queued.deadline - queued.queued_at
            queued.deliver(DeadlineExceeded(f"the call's limit of {limit_s:g} s passed"))
        if self._queued:
            self._set_alarm(min(queued.deadline for queued in self._queued), loop)

    def _begin(self, loop: asyncio.AbstractEventLoop, arrived: int, deferrals: int) -> None:
        """
        Run what waits: inline if it is small and the only work, else in the threads.

        Deferred while more calls than the first `arrived` have come since the turn before.
        """
        if self._schedule.arrived > arrived and deferrals < _MAX_DEFERRALS:
            loop.call_soon(self._begin, loop, self._schedule.arrived, deferrals + 1)
            return
        self._is_beginning = False
        run = self._take()
        while run is not None:
            if run.is_alone and self._throughput.seconds_of(run.batch) <= self._inline_s:
                self._deliver(run, _outcome(self._engine, run, self._stops[run]))
                run = self._take(ended=run)
            else:
                self._threads.submit(self._work, loop, run)  # all of them are there
                run = self._take()
        self._rest()

    def _work(self, loop: asyncio.AbstractEventLoop, run: _QueuedRun | None) -> None:
        """Run one batch after the other until nothing waits; in a thread."""
        while run is not None:
            outcome = _outcome(self._engine, run, self._stops[run])
            loop.call_soon_threadsafe(self._deliver, run, outcome)
            run = self._take(ended=run)
        loop.call_soon_threadsafe(self._rest)

    def _rest(self) -> None:
        """Become idle if nothing waits or runs."""
        with self._lock:
            if self._schedule.is_idle:
                self._idle.set()

    def _take(self, *, ended: _QueuedRun | None = None) -> _QueuedRun | None:
        """Take the next run from the schedule: see `Schedule.take`; any thread."""
        with self._lock:
            if ended is not None:
                del self._stops[ended]
            # Calls past their deadline are not run; the alarm fails them, maybe a moment later.
            run = self._schedule.take(time.monotonic(), ended=ended)
            if run is not None:
                self._stops[run] = Stop()
            return run

    def _deliver(self, run: _QueuedRun, outcome: Run | InferenceFailed) -> None:
        """Record the run, and answer every call that it has completed."""
        if isinstance(outcome, InferenceFailed):
            for ticket in run.tickets:
                if not ticket.queued.is_over:
                    self._finish(ticket.queued)
                    ticket.queued.deliver(outcome)
            return
        self._observer.on_run(outcome)
        for on_run in {ticket.queued.on_run for ticket in run.tickets}:
            if on_run is not None:
                on_run(outcome)
        self._throughput.record(run.batch, outcome.assembly_s + outcome.compute_s)
        for ticket in run.tickets:
            queued = ticket.queued
            queued.started_at = queued.started_at or outcome.started_at
            queued.assembly_s += outcome.assembly_s
            queued.compute_s += outcome.compute_s
            queued.splitting_s += outcome.splitting_s
            queued.slices_left -= 1
            if queued.slices_left == 0 and not queued.is_over:
                self._finish(queued)
                queued.deliver(queued.answer())


def _expire(batcher: "weakref.ref[Batcher]", loop: asyncio.AbstractEventLoop) -> None:
    """Call `Batcher._expire` unless the batcher is gone."""
    if (there := batcher()) is not None:
        there._expire(loop)


def _yield_to_the_loop() -> None:
    """Lower this thread's priority: the event loop has little to do, but must do it at once."""
    with contextlib.suppress(AttributeError, OSError):  # only Linux has priorities of threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _outcome(engine: Engine, run: _QueuedRun, stop: Stop) -> Run | InferenceFailed:
    """
    Return how the run went; on success its outputs are in the answers of its calls.

    Whatever is raised fails this run's calls only, as `InferenceFailed`: an exception of
    another class may mean something to the event loop (`StopIteration`, `CancelledError`), or
    end it (`SystemExit`).
    """
    try:
        return _run(engine, run, stop)
    except InferenceFailed as failure:
        return failure
    except BaseException as error:  # whatever it is, the next batch must run
        return _failed("a run failed; the log has the cause under the request id", error)


def _failed(message: str, cause: BaseException) -> InferenceFailed:
    """Return the error of a run's calls, its cause attached."""
    failure = InferenceFailed(message)
    failure.__cause__ = cause
    return failure


def _run(engine: Engine, run: _QueuedRun, stop: Stop) -> Run:
    """
    Run the batch, and copy each slice's outputs into its call's answer.

    Raises:
        InferenceFailed: see `Engine.run`.
    """
    tickets, batch = run.tickets, run.batch
    started = time.monotonic()
    inputs = stacked_inputs(batch, engine.layer)
    assembled = time.monotonic()
    weights = batch.slices[0].call.weights
    outputs = engine.run(inputs, weights=weights, stop=stop, concurrent=not run.is_alone)
    computed = time.monotonic()
    for ticket, part in zip(tickets, outputs_of(batch, outputs), strict=True):
        if not ticket.queued.is_over:
            copy_outputs(ticket.queued, ticket.slice_, part, is_alone=len(tickets) == 1)
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
