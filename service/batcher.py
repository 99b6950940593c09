"""
Take admitted calls to the engine and bring each one's own answer back.

One worker thread runs the engine, one call at a time, the most urgent first;
the event loop never computes.  A call whose sequences differ in length is
padded for the run, the padding is hidden from every query, and the answer is
cut back exactly.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from service.engine import Bools, Engine, Floats, Inputs
from service.errors import DeadlineExceeded, Draining, QueueFull

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Call:
    """
    One caller's batch.

    Shapes:
        lengths         [B], each sequence's true query length; None = all are S
        memory_lengths  [B], each sequence's true key length; None = all are T

    What lies beyond a true length is padding: any values, never seen by a query.
    For self-attention `lengths` counts queries and keys alike.
    """

    inputs: Inputs
    lengths: Lengths | None = None
    memory_lengths: Lengths | None = None
    weights: bool = False
    priority: int = 0
    """1 = highest; 0 = default, after all others."""
    timeout_s: float | None = None
    """None = the batcher's own default."""

    @property
    def key_lengths(self) -> Lengths | None:
        """[B], each sequence's true key length; None = all are T."""
        return self.lengths if self.inputs.memory is None else self.memory_lengths


@dataclass(frozen=True)
class Answer:
    """
    The answer to one call; rows beyond a true length are padding of no meaning.

    Shapes: as `engine.Outputs`; `lengths` and `key_lengths` as in the call.
    """

    output: Floats
    attention_weights: Floats | None
    lengths: Lengths | None
    key_lengths: Lengths | None
    queue_s: float
    compute_s: float

    def outputs(self) -> list[Floats]:
        """Return each sequence's output [S_i, E]."""
        return [
            output if self.lengths is None else output[: self.lengths[i]]
            for i, output in enumerate(self.output)
        ]

    def weights(self) -> list[Floats]:
        """Return each sequence's weights [H, S_i, T_i]; none when they were not asked for."""
        if self.attention_weights is None:
            return []
        return [
            weights[
                :,
                slice(None if self.lengths is None else self.lengths[i]),
                slice(None if self.key_lengths is None else self.key_lengths[i]),
            ]
            for i, weights in enumerate(self.attention_weights)
        ]


@dataclass(order=True)
class _Waiting:
    rank: tuple[int, int]
    call: Call = field(compare=False)
    future: "asyncio.Future[Answer]" = field(compare=False)
    queued_at: float = field(compare=False)
    deadline: float = field(compare=False)


class Batcher:
    """
    The queue in front of one engine, and the thread behind it.

    `on_queue` is told the number of waiting calls whenever it changes.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_queue_calls: int,
        timeout_s: float,
        on_queue: Callable[[int], None] = lambda waiting: None,
    ) -> None:
        self._engine = engine
        self._max_queue_calls = max_queue_calls
        self._timeout_s = timeout_s
        self._on_queue = on_queue
        self._heap: list[_Waiting] = []
        self._counter = itertools.count()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._running: asyncio.Task[None] | None = None
        self._closed = False

    async def submit(self, call: Call) -> Answer:
        """
        Return the call's answer once the engine has given it.

        Raises:
            QueueFull: as many calls wait as may wait.
            DeadlineExceeded: the call's time limit passed before it was run.
            Draining: after `close`.
            InferenceFailed: the runtime refused the batch.

        """
        if self._closed:
            raise Draining("the server is stopping", retry_after_s=1)
        if len(self._heap) >= self._max_queue_calls:
            raise QueueFull(
                f"queue: {len(self._heap)} calls wait already, at most {self._max_queue_calls} may",
                retry_after_s=1,
            )
        now = time.monotonic()
        timeout_s = self._timeout_s if call.timeout_s is None else call.timeout_s
        waiting = _Waiting(
            (call.priority or 2**32, next(self._counter)),
            call,
            asyncio.get_running_loop().create_future(),
            now,
            now + timeout_s,
        )
        heapq.heappush(self._heap, waiting)
        self._on_queue(len(self._heap))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._work())
        try:
            async with asyncio.timeout(timeout_s):
                return await waiting.future
        except TimeoutError:
            raise DeadlineExceeded(f"the call's limit of {timeout_s:g} s passed") from None

    async def close(self) -> None:
        """Finish what waits, then end the thread; later calls are refused."""
        self._closed = True
        if self._running is not None:
            await self._running
        self._thread.shutdown()

    async def _work(self) -> None:
        """Run waiting calls until none is left."""
        loop = asyncio.get_running_loop()
        while self._heap:
            waiting = heapq.heappop(self._heap)
            self._on_queue(len(self._heap))
            if waiting.future.done():  # its caller left, or its deadline passed
                continue
            try:
                answer = await loop.run_in_executor(
                    self._thread, run_call, self._engine, waiting.call, waiting.queued_at
                )
            except Exception as error:
                if not waiting.future.done():
                    waiting.future.set_exception(error)
            else:
                if not waiting.future.done():
                    waiting.future.set_result(answer)


def run_call(engine: Engine, call: Call, queued_at: float) -> Answer:
    """
    Return the engine's answer to one call, its padding hidden.

    Raises:
        InferenceFailed: see `Engine.run`.

    """
    started = time.monotonic()
    outputs = engine.run(_hide_padding(call), weights=call.weights)
    return Answer(
        outputs.output,
        outputs.attention_weights,
        call.lengths,
        call.key_lengths,
        queue_s=started - queued_at,
        compute_s=time.monotonic() - started,
    )


def _hide_padding(call: Call) -> Inputs:
    lengths, inputs = call.key_lengths, call.inputs
    if lengths is None:
        return inputs
    real: Bools = np.arange(inputs.key_length) < lengths[:, None]  # [B, T]
    if inputs.attend_mask is not None:
        real &= inputs.attend_mask
    return replace(inputs, attend_mask=real)
