"""
Take admitted calls to the engine, many in one run, and bring each its own answer back.

Calls that wait while the engine is busy are joined into its next run; there is
no timer, so a lone call never waits.  One thread runs the engine and copies
tensors; the event loop only decides who goes next.
"""

import asyncio
import itertools
import math
import time
from bisect import insort
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from service.calls import Answer, Call, Floats, Outputs, Run, Stages
from service.engine import Engine, Stop
from service.errors import DeadlineExceeded, Draining, QueueFull
from service.joining import Group, Piece, RunLimits, joined_inputs, outputs_of, pieces_of

MAX_RUNS_PASSED = 32
"""After so many runs without it, a piece goes before every priority."""

_SCANNED = 256
"""Waiting pieces that are looked at for one run; more would cost more than they save."""

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

    def queue(self, calls: int, tokens: int) -> None:
        """So many calls and tokens wait now."""
        ...

    def run(self, run: Run) -> None:
        """The engine has run."""
        ...

    def dropped(self, where: Drop) -> None:
        """A call's caller left, or its time limit passed, while it was there."""
        ...


@dataclass(eq=False)
class _Pending:
    """A call that was let in and is not answered yet."""

    call: Call
    future: "asyncio.Future[Answer]"
    tokens: int
    queued_at: float
    pieces_left: int
    output: Floats | None = None
    weights: Floats | None = None
    started_at: float = 0.0
    assembly_s: float = 0.0
    compute_s: float = 0.0

    @property
    def is_left(self) -> bool:
        """True when nobody waits for the answer any more."""
        return self.future.done()

    def answer(self) -> Answer:
        """Return the answer, once every piece is in it."""
        if self.output is None:
            raise ValueError("no piece of the answer is there")
        return Answer(
            self.output,
            self.weights,
            self.call.lengths,
            self.call.key_lengths,
            Stages(self.started_at - self.queued_at, self.assembly_s, self.compute_s),
        )


@dataclass(order=True)
class _Ticket:
    """A waiting piece, ordered by priority, its place in its call, and arrival."""

    rank: tuple[int, int, int]
    piece: Piece = field(compare=False)
    pending: _Pending = field(compare=False)
    runs_before: int = field(compare=False)
    """How many runs the engine had made when this came."""


class Batcher:
    """The queue in front of one engine, and the thread behind it."""

    def __init__(
        self, engine: Engine, queue: QueueLimits, run: RunLimits, observer: Observer
    ) -> None:
        self._engine = engine
        self._queue_limits = queue
        self._run_limits = run
        self._observer = observer
        self._waiting: list[_Ticket] = []
        self._calls = 0
        self._tokens = 0
        self._arrivals = itertools.count()
        self._runs = 0
        self._tokens_per_s = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._running: list[_Ticket] = []
        self._run: asyncio.Future[Run]
        """The run of what is in `_running`, while there is any."""
        self._stop = Stop()
        self._closed = False

    async def submit(self, call: Call) -> Answer:
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
        pieces = pieces_of(call, self._run_limits)
        tokens = sum(piece.tokens for piece in pieces)
        self._check_room(tokens)
        loop = asyncio.get_running_loop()
        pending = _Pending(call, loop.create_future(), tokens, time.monotonic(), len(pieces))
        timeout_s = self._queue_limits.timeout_s if call.timeout_s is None else call.timeout_s
        timer = loop.call_later(timeout_s, self._expire, pending, timeout_s)
        self._count(1, tokens)
        arrival = next(self._arrivals)
        for i, piece in enumerate(pieces):
            # A call's later pieces stand behind the first ones of calls that came after it.
            rank = (call.priority or 2**32, i, arrival)
            insort(self._waiting, _Ticket(rank, piece, pending, self._runs))
        if not self._running:
            self._run_next()
        try:
            return await pending.future
        finally:
            timer.cancel()
            self._count(-1, -tokens)
            if pending.future.cancelled():
                self._leave(pending)

    async def close(self) -> None:
        """Finish what waits, then end the thread; later calls are refused."""
        self._closed = True
        while self._running:
            await asyncio.wait({self._run})
        self._thread.shutdown()

    def _check_room(self, tokens: int) -> None:
        if self._closed:
            raise Draining("the server is stopping", retry_after_s=1)
        limits = self._queue_limits
        retry_after_s = self._seconds_to_run(self._tokens)
        if self._calls >= limits.max_calls:
            raise QueueFull(
                f"queue: at most {limits.max_calls} calls may be in it, and so many are",
                retry_after_s=retry_after_s,
            )
        # An empty queue takes any call that passed the limits of one call.
        if self._calls and self._tokens + tokens > limits.max_tokens:
            raise QueueFull(
                f"queue: at most {limits.max_tokens} tokens may be in it: it holds"
                f" {self._tokens}, this call has {tokens}",
                retry_after_s=retry_after_s,
            )

    def _seconds_to_run(self, tokens: int) -> int:
        """Return how long the engine will take for so many tokens, from its own last runs."""
        rate = self._tokens_per_s
        return max(1, min(60, math.ceil(tokens / rate))) if rate else 1

    def _count(self, calls: int, tokens: int) -> None:
        self._calls += calls
        self._tokens += tokens
        self._observer.queue(self._calls, self._tokens)

    def _leave(self, pending: _Pending) -> None:
        """Forget a call nobody waits for; end the run if nobody waits for any of it."""
        running = any(ticket.pending is pending for ticket in self._running)
        self._observer.dropped("running" if running else "queued")
        if running and all(ticket.pending.is_left for ticket in self._running):
            self._stop.set()

    def _expire(self, pending: _Pending, timeout_s: float) -> None:
        if not pending.is_left:
            pending.future.set_exception(
                DeadlineExceeded(f"the call's limit of {timeout_s:g} s passed")
            )
            self._leave(pending)

    def _run_next(self) -> None:
        """Hand what goes next to the engine's thread, unless nothing waits."""
        self._waiting = [ticket for ticket in self._waiting if not ticket.pending.is_left]
        if not self._waiting:
            return
        self._running, group = self._next_group()
        self._runs += 1
        self._stop = Stop()
        self._run = asyncio.get_running_loop().run_in_executor(
            self._thread, _run_group, self._engine, self._running, group, self._stop
        )
        self._run.add_done_callback(self._finish)

    def _finish(self, run: "asyncio.Future[Run]") -> None:
        """Answer every call that the run has made whole, and start the next run."""
        error = run.exception()
        if error is None:
            self._deliver(run.result())
        else:
            for ticket in self._running:
                if not ticket.pending.is_left:
                    ticket.pending.future.set_exception(error)
        self._running = []
        self._run_next()

    def _next_group(self) -> tuple[list[_Ticket], Group]:
        """Take the most urgent piece out of the queue, and every other that fits beside it."""
        oldest = min(self._waiting, key=lambda ticket: ticket.rank[2])
        overdue = self._runs - oldest.runs_before >= MAX_RUNS_PASSED
        first = oldest if overdue else self._waiting[0]
        taken, group = [first], Group.of(first.piece)
        for ticket in itertools.islice(self._waiting, _SCANNED):
            wider = None if ticket is first else group.joined(ticket.piece, self._run_limits)
            if wider is not None:
                taken.append(ticket)
                group = wider
        chosen = set(map(id, taken))
        self._waiting = [ticket for ticket in self._waiting if id(ticket) not in chosen]
        return taken, group

    def _deliver(self, run: Run) -> None:
        self._observer.run(run)
        seconds = run.assembly_s + run.compute_s
        rate = run.tokens / max(seconds, 1e-9)
        self._tokens_per_s += (0.2 if self._tokens_per_s else 1.0) * (rate - self._tokens_per_s)
        started_at = time.monotonic() - seconds
        for ticket in self._running:
            pending = ticket.pending
            pending.started_at = pending.started_at or started_at
            pending.assembly_s += run.assembly_s
            pending.compute_s += run.compute_s
            pending.pieces_left -= 1
            if pending.pieces_left == 0 and not pending.is_left:
                pending.future.set_result(pending.answer())


def _run_group(engine: Engine, tickets: list[_Ticket], group: Group, stop: Stop) -> Run:
    """
    Run the group, and put each piece's outputs into its call's answer; in the engine's thread.

    Raises:
        InferenceFailed: see `Engine.run`.
    """
    started = time.monotonic()
    inputs = joined_inputs(group)
    assembled = time.monotonic()
    outputs = engine.run(inputs, weights=group.pieces[0].call.weights, stop=stop)
    computed = time.monotonic()
    for ticket, part in zip(tickets, outputs_of(group, outputs), strict=True):
        if not ticket.pending.is_left:
            _put(ticket.pending, ticket.piece, part, is_alone=len(tickets) == 1)
    return Run(
        calls=len({id(ticket.pending) for ticket in tickets}),
        rows=group.rows,
        tokens=group.tokens,
        padded_tokens=group.padded_tokens,
        assembly_s=assembled - started + time.monotonic() - computed,
        compute_s=computed - assembled,
    )


def _put(pending: _Pending, piece: Piece, outputs: Outputs, *, is_alone: bool) -> None:
    """Put one piece's outputs into its call's answer, keeping no other call's memory alive."""
    weights = outputs.attention_weights
    if piece.is_whole:
        pending.output = outputs.output if is_alone else outputs.output.copy()
        pending.weights = weights if is_alone or weights is None else weights.copy()
        return
    inputs = piece.call.inputs
    if pending.output is None:
        pending.output = np.zeros(inputs.embeddings.shape, np.float32)
    pending.output[piece.rows, : piece.length] = outputs.output
    if weights is None:
        return
    if pending.weights is None:
        rows, length = inputs.embeddings.shape[:2]
        pending.weights = np.zeros((rows, weights.shape[1], length, inputs.key_length), np.float32)
    pending.weights[piece.rows, :, : piece.length, : piece.key_length] = weights
