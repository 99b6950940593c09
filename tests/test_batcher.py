"""The queue in front of an engine."""

import asyncio
import threading

import numpy as np
import pytest

from service.batcher import Batcher, Call, run_call
from service.contract import LayerConfig
from service.engine import Inputs, Outputs, Provider
from service.errors import DeadlineExceeded, Draining, InferenceFailed, QueueFull


class HeldEngine:
    """An engine that holds each call until it is let go, and remembers what it ran."""

    layer = LayerConfig(1, 1)
    provider: Provider = "cpu"

    def __init__(self) -> None:
        self.free = threading.Event()
        self.started = threading.Event()
        self.ran: list[float] = []

    def run(self, inputs: Inputs, *, weights: bool) -> Outputs:
        """Answer with the embeddings once let go; a negative number fails."""
        self.started.set()
        assert self.free.wait(30)
        mark = float(inputs.embeddings[0, 0, 0])
        self.ran.append(mark)
        if mark < 0:
            raise InferenceFailed("refused")
        return Outputs(inputs.embeddings, None)


def call(mark: float, **options: object) -> Call:
    """Return a call that can be told from others."""
    return Call(Inputs(np.full((1, 1, 1), mark, np.float32)), **options)  # type: ignore[arg-type]


async def first_runs(batcher: Batcher, engine: HeldEngine) -> "asyncio.Task[object]":
    """Return a call that the engine is already busy with, so that all others must wait."""
    task: asyncio.Task[object] = asyncio.create_task(batcher.submit(call(0)))
    await asyncio.to_thread(engine.started.wait, 30)
    return task


def test_submit_serves_urgent_calls_first_and_equals_in_turn() -> None:
    """1 is the highest priority, 0 the default after all others."""

    async def scenario() -> list[float]:
        engine = HeldEngine()
        batcher = Batcher(engine, max_queue_calls=9, timeout_s=30)
        tasks = [await first_runs(batcher, engine)]
        for mark, priority in ((1, 0), (2, 0), (3, 7), (4, 1)):
            tasks.append(asyncio.create_task(batcher.submit(call(mark, priority=priority))))
            await asyncio.sleep(0)
        engine.free.set()
        await asyncio.gather(*tasks)
        await batcher.close()
        return engine.ran

    assert asyncio.run(scenario()) == [0, 4, 3, 1, 2]


def test_submit_beyond_the_queue_is_refused_at_once() -> None:
    """Nobody waits for a place to wait; what waits is not lost."""
    depths: list[int] = []

    async def scenario() -> int:
        engine = HeldEngine()
        batcher = Batcher(engine, max_queue_calls=2, timeout_s=30, on_queue=depths.append)
        tasks = [await first_runs(batcher, engine)]
        tasks += [asyncio.create_task(batcher.submit(call(mark))) for mark in (1, 2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="2 calls wait already, at most 2 may") as caught:
            await batcher.submit(call(3))
        engine.free.set()
        await asyncio.gather(*tasks)
        await batcher.close()
        return caught.value.retry_after_s or 0

    assert asyncio.run(scenario()) == 1
    assert max(depths) == 2
    assert depths[-1] == 0


def test_submit_past_its_deadline_is_told_and_never_run() -> None:
    """A call that waited too long costs the engine nothing."""

    async def scenario() -> list[float]:
        engine = HeldEngine()
        batcher = Batcher(engine, max_queue_calls=9, timeout_s=30)
        first = await first_runs(batcher, engine)
        with pytest.raises(DeadlineExceeded, match=r"limit of 0\.01 s passed"):
            await batcher.submit(call(1, timeout_s=0.01))
        engine.free.set()
        await first
        await batcher.close()
        return engine.ran

    assert asyncio.run(scenario()) == [0]


def test_submit_whose_caller_left_is_never_run() -> None:
    """A queued call ends with its caller."""

    async def scenario() -> list[float]:
        engine = HeldEngine()
        batcher = Batcher(engine, max_queue_calls=9, timeout_s=30)
        first = await first_runs(batcher, engine)
        left = asyncio.create_task(batcher.submit(call(1)))
        await asyncio.sleep(0)
        left.cancel()
        engine.free.set()
        await first
        await batcher.close()
        return engine.ran

    assert asyncio.run(scenario()) == [0]


def test_submit_whose_caller_left_during_the_run_harms_nobody() -> None:
    """Its answer is dropped, the next call is served."""

    async def scenario(mark: float) -> list[float]:
        engine = HeldEngine()
        batcher = Batcher(engine, max_queue_calls=9, timeout_s=30)
        left = asyncio.create_task(batcher.submit(call(mark)))
        await asyncio.to_thread(engine.started.wait, 30)
        left.cancel()
        after = asyncio.create_task(batcher.submit(call(1)))
        await asyncio.sleep(0)
        engine.free.set()
        await after
        await batcher.close()
        return engine.ran

    assert asyncio.run(scenario(0)) == [0, 1]
    assert asyncio.run(scenario(-1)) == [-1, 1]


def test_submit_failed_run_fails_its_own_call_only() -> None:
    """The engine's refusal reaches who caused it."""

    async def scenario() -> list[object]:
        engine = HeldEngine()
        engine.free.set()
        batcher = Batcher(engine, max_queue_calls=9, timeout_s=30)
        answers = await asyncio.gather(
            *(batcher.submit(call(mark)) for mark in (-1, 1)), return_exceptions=True
        )
        await batcher.close()
        return list(answers)

    bad, good = asyncio.run(scenario())
    assert isinstance(bad, InferenceFailed)
    assert not isinstance(good, BaseException)


def test_close_finishes_what_waits_and_refuses_what_comes() -> None:
    """Accepted is answered; a late call is told to come back."""

    async def scenario() -> list[float]:
        engine = HeldEngine()
        batcher = Batcher(engine, max_queue_calls=9, timeout_s=30)
        tasks = [await first_runs(batcher, engine)]
        tasks.append(asyncio.create_task(batcher.submit(call(1))))
        await asyncio.sleep(0)
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0)
        with pytest.raises(Draining, match="the server is stopping"):
            await batcher.submit(call(2))
        engine.free.set()
        await asyncio.gather(closing, *tasks)
        return engine.ran

    assert asyncio.run(scenario()) == [0, 1]


def test_close_of_an_unused_batcher_is_quiet() -> None:
    """Nothing to finish, nothing to wait for."""
    asyncio.run(Batcher(HeldEngine(), max_queue_calls=1, timeout_s=1).close())


def test_answer_of_mixed_lengths_is_cut_back_exactly() -> None:
    """Padding is never the caller's business."""

    class Cells:
        layer = LayerConfig(1, 1)
        provider: Provider = "cpu"

        def run(self, inputs: Inputs, *, weights: bool) -> Outputs:
            assert inputs.attend_mask is not None
            assert inputs.attend_mask.tolist() == [[True, False, False], [False, True, True]]
            return Outputs(inputs.embeddings, np.zeros((2, 1, 3, 3), np.float32))

    inputs = Inputs(
        np.zeros((2, 3, 1), np.float32), attend_mask=np.array([[True] * 3, [False, True, True]])
    )

    answer = run_call(Cells(), Call(inputs, lengths=np.array([1, 3]), weights=True), 0.0)

    assert [output.shape for output in answer.outputs()] == [(1, 1), (3, 1)]
    assert [weights.shape for weights in answer.weights()] == [(1, 1, 1), (1, 3, 3)]
