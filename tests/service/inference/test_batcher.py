"""The event loop and the threads around a schedule: delivery, deadlines, stopping, closing."""

import asyncio
import math
import threading

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from service.errors import (
    DeadlineExceeded,
    Draining,
    InferenceFailed,
    QueueFull,
    ThreadsUnavailable,
)
from service.inference.artifact import read_graph
from service.inference.batcher import Batcher
from service.inference.batches import BatchLimits
from service.inference.calls import Answer, Call, Inputs
from service.inference.engine import Engine, OnnxEngine
from service.inference.schedule import QueueLimits
from tests.support.doubles import HeldEngine, PromptEngine, RaisingEngine, RecordingObserver
from tests.support.layers import ALL, Layers


def make(
    engine: Engine,
    *,
    max_calls: int = 99,
    max_batch_tokens: int = 1,
    observer: RecordingObserver | None = None,
    inline_s: float = 0.0,
) -> Batcher:
    """Return a batcher whose batches hold one token unless the arguments allow more."""
    queue = QueueLimits(max_calls, 9999, timeout_s=30)
    limits = BatchLimits(max_batch_tokens, 10**6, 0.25)
    return Batcher(engine, queue, limits, observer or RecordingObserver(), inline_s=inline_s)


def call(mark: float, *, rows: int = 1, length: int = 1, **options: object) -> Call:
    """Return a call that holds its mark in every number."""
    block = np.full((rows, length, 1), mark, np.float32)
    return Call(Inputs(block), **options)  # type: ignore[arg-type]


async def first_runs(batcher: Batcher, engine: HeldEngine) -> "asyncio.Task[Answer]":
    """Return a call that the engine is already busy with, so that all others must wait."""
    task = asyncio.create_task(batcher.submit(call(0)))
    await asyncio.to_thread(engine.started.wait, 30)
    return task


def start(batcher: Batcher, *calls: Call) -> "list[asyncio.Task[Answer]]":
    """Submit calls in this order."""
    return [asyncio.create_task(batcher.submit(call)) for call in calls]


def test_waiting_calls_share_the_next_run() -> None:
    """Calls that arrive while the engine is busy form one batch; each gets its own answer."""
    observer = RecordingObserver()

    async def scenario() -> tuple[list[list[float]], list[Answer]]:
        engine = HeldEngine()
        batcher = make(engine, max_batch_tokens=8, observer=observer)
        first = await first_runs(batcher, engine)
        tasks = start(batcher, *(call(mark, rows=2) for mark in (1, 2, 3)))
        await asyncio.sleep(0)
        engine.free.set()
        answers = await asyncio.gather(*tasks)
        await first
        await batcher.close()
        return engine.ran, list(answers)

    ran, answers = asyncio.run(scenario())
    assert ran == [[0], [1, 1, 2, 2, 3, 3]]
    assert [answer.output[:, 0, 0].tolist() for answer in answers] == [[1, 1], [2, 2], [3, 3]]
    assert [(run.calls, run.rows) for run in observer.runs] == [(1, 1), (3, 6)]
    assert all(answer.stages.queue_s > 0 for answer in answers)


def test_call_without_weights_never_shares_a_run_with_one_that_wants_them() -> None:
    """A call without weights does not pay for those of another."""

    async def scenario() -> list[list[float]]:
        engine = HeldEngine()
        batcher = make(engine, max_batch_tokens=8)
        tasks = [await first_runs(batcher, engine)]
        tasks += start(batcher, call(1), call(2, weights=True), call(3), call(4, weights=True))
        await asyncio.sleep(0)
        engine.free.set()
        answers = await asyncio.gather(*tasks)
        await batcher.close()
        assert [a.attention_weights is None for a in answers] == [True, True, False, True, False]
        return engine.ran

    assert asyncio.run(scenario()) == [[0], [1, 3], [2, 4]]


@pytest.mark.parametrize("max_batch_tokens", [4, 99])
@pytest.mark.parametrize("lengths", [None, [1, 3, 2]])
def test_extra_weights_of_a_call_in_slices_are_those_of_its_heads(
    layers: Layers, max_batch_tokens: int, lengths: list[int] | None
) -> None:
    """However many runs it takes, and whatever its lengths."""
    x = np.random.default_rng(5).standard_normal((3, 3, 8)).astype(np.float32)
    sizes = lengths or [3] * 3
    wanted = [layers.formula("extra")(x[[i], :n]) for i, n in enumerate(sizes)]
    if lengths is not None:
        x[np.arange(3) >= np.array(lengths)[:, None]] = 0

    async def scenario() -> Answer:
        graph = read_graph(layers.artifact("extra") / "layer.onnx")
        batcher = make(OnnxEngine(graph, ALL["extra"]), max_batch_tokens=max_batch_tokens)
        true_lengths = None if lengths is None else np.array(lengths)
        answer = await batcher.submit(Call(Inputs(x), true_lengths, weights=True, heads=(1,)))
        await batcher.close()
        return answer

    answer = asyncio.run(scenario())

    assert answer.extra_weights is not None
    assert answer.extra_weights.shape == (3, 1, 3, 2)
    for found, want in zip(answer.weights_of_extra_keys(), wanted, strict=True):
        np.testing.assert_allclose(found, want.extra_weights[0, 1:], atol=1e-5)


def test_large_call_runs_in_slices_and_is_answered_as_one() -> None:
    """A call of any size occupies the engine for one slice at a time."""

    async def scenario() -> tuple[list[int], list[Answer]]:
        engine = HeldEngine()
        batcher = make(engine, max_batch_tokens=4)
        first = await first_runs(batcher, engine)
        large = Inputs(np.arange(10, dtype=np.float32).reshape(10, 1, 1))
        mixed = np.zeros((3, 4, 1), np.float32)
        mixed[0, :1], mixed[1, :4], mixed[2, :2] = 1, 2, 3
        tasks = start(
            batcher,
            Call(large, weights=True),
            Call(Inputs(mixed), lengths=np.array([1, 4, 2]), weights=True),
        )
        await asyncio.sleep(0)
        engine.free.set()
        answers = await asyncio.gather(*tasks)
        await first
        await batcher.close()
        return [len(marks) for marks in engine.ran], list(answers)

    sizes, (large, mixed) = asyncio.run(scenario())
    assert max(sizes) <= 4
    assert large.output.ravel().tolist() == list(range(10))
    assert [output.ravel().tolist() for output in mixed.outputs()] == [[1], [2] * 4, [3] * 2]
    assert [weights.shape for weights in mixed.weights()] == [(1, 1, 1), (1, 4, 4), (1, 2, 2)]


def test_submit_beyond_the_queue_is_refused_at_once() -> None:
    """A refused call does not wait and is not counted; admitted calls are still answered."""
    observer = RecordingObserver()

    async def scenario() -> int:
        engine = HeldEngine()
        batcher = make(engine, observer=observer, max_calls=3)
        tasks = [await first_runs(batcher, engine), *start(batcher, call(1), call(2))]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="at most 3 calls may be in it") as caught:
            await batcher.submit(call(3))
        engine.free.set()
        await asyncio.gather(*tasks)
        await batcher.submit(call(4))
        await batcher.close()
        return caught.value.retry_after_s or 0

    assert asyncio.run(scenario()) == 1
    assert max(observer.depths) == (3, 6)
    assert observer.depths[-1] == (0, 0)


def test_retry_after_follows_from_the_measured_runs() -> None:
    """The throughput is that of the engine's own runs, not a guess."""
    observer = RecordingObserver()

    async def scenario() -> int:
        engine = HeldEngine()
        batcher = make(engine, observer=observer, max_calls=2)
        first = await first_runs(batcher, engine)
        await asyncio.sleep(0.5)  # so slow that the queue takes more than the least, one second
        engine.free.set()
        await first
        engine.free.clear()
        tasks = start(batcher, call(1, rows=5), call(2, rows=3))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as caught:
            await batcher.submit(call(3))
        engine.free.set()
        await asyncio.gather(*tasks)
        await batcher.close()
        return caught.value.retry_after_s or 0

    retry_after_s = asyncio.run(scenario())
    run = observer.runs[0]
    assert retry_after_s == min(60, math.ceil(16 / (run.tokens / (run.assembly_s + run.compute_s))))
    assert retry_after_s > 1


def test_submit_past_its_deadline_fails_and_never_runs() -> None:
    """A call that waited too long costs the engine nothing."""
    observer = RecordingObserver()

    async def scenario() -> list[list[float]]:
        engine = HeldEngine()
        batcher = make(engine, observer=observer)
        first = await first_runs(batcher, engine)
        with pytest.raises(DeadlineExceeded, match=r"limit of 0\.01 s passed"):
            await batcher.submit(call(1, timeout_s=0.01))
        engine.free.set()
        await first
        await batcher.close()
        return engine.ran

    assert asyncio.run(scenario()) == [[0]]
    assert observer.drops == ["queued"]


def test_submit_whose_caller_left_is_never_run() -> None:
    """A waiting call is dropped when its caller leaves."""
    observer = RecordingObserver()

    async def scenario() -> list[list[float]]:
        engine = HeldEngine()
        batcher = make(engine, observer=observer)
        first = await first_runs(batcher, engine)
        [left] = start(batcher, call(1))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])  # the engine's thread takes the next run without the loop
        engine.free.set()
        await first
        await batcher.close()
        return engine.ran

    assert asyncio.run(scenario()) == [[0]]
    assert observer.drops == ["queued"]
    assert observer.depths[-1] == (0, 0)


def test_run_that_nobody_waits_for_is_stopped() -> None:
    """The engine is free for the next call at once."""
    observer = RecordingObserver()

    async def scenario() -> HeldEngine:
        engine = HeldEngine()
        batcher = make(engine, observer=observer)
        first = await first_runs(batcher, engine)
        tasks = start(batcher, call(1))
        first.cancel()
        await asyncio.to_thread(engine.ended.wait, 30)
        engine.free.set()
        await asyncio.gather(*tasks)
        await batcher.close()
        return engine

    engine = asyncio.run(scenario())
    assert engine.stopped == 1
    assert engine.ran == [[1]]
    assert observer.drops == ["running"]


def test_run_that_somebody_still_waits_for_goes_on() -> None:
    """A caller that leaves does not stop a run that others share."""

    async def scenario() -> tuple[int, Answer]:
        engine = HeldEngine()
        batcher = make(engine, max_batch_tokens=8)
        first = await first_runs(batcher, engine)
        engine.started.clear()
        left, stays = start(batcher, call(1), call(2))
        await asyncio.sleep(0)
        engine.free.set()
        await first
        engine.free.clear()
        await asyncio.to_thread(engine.started.wait, 30)
        left.cancel()
        await asyncio.sleep(0.05)
        engine.free.set()
        answer = await stays
        await batcher.close()
        return engine.stopped, answer

    stopped, answer = asyncio.run(scenario())
    assert stopped == 0
    assert answer.output.tolist() == [[[2]]]


def test_submit_failed_run_fails_its_own_calls_only() -> None:
    """The engine's error reaches the calls of that run, and no later one."""

    async def scenario() -> list[object]:
        engine = HeldEngine()
        engine.free.set()
        batcher = make(engine)
        answers = await asyncio.gather(*start(batcher, call(-1), call(1)), return_exceptions=True)
        await batcher.close()
        return list(answers)

    bad, good = asyncio.run(scenario())
    assert isinstance(bad, InferenceFailed)
    assert isinstance(good, Answer)


def test_close_finishes_what_waits_and_refuses_what_comes() -> None:
    """Admitted calls are answered; a later one is refused as draining."""

    async def scenario() -> list[list[float]]:
        engine = HeldEngine()
        batcher = make(engine)
        tasks = [await first_runs(batcher, engine), *start(batcher, call(1))]
        await asyncio.sleep(0)
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0)
        with pytest.raises(Draining, match="the server is stopping"):
            await batcher.submit(call(2))
        engine.free.set()
        await asyncio.gather(closing, *tasks)
        return engine.ran

    assert asyncio.run(scenario()) == [[0], [1]]


def test_close_of_an_unused_batcher_is_quiet() -> None:
    """Nothing to finish, nothing to wait for."""
    asyncio.run(make(HeldEngine()).close())


def test_small_batch_that_is_alone_runs_inline_on_the_loop() -> None:
    """Once the throughput is known; a large batch goes to a thread."""

    async def scenario() -> list[tuple[list[float], bool, bool]]:
        engine = PromptEngine()
        batcher = make(engine, max_batch_tokens=10**6, inline_s=0.5)
        for _ in range(99):  # the thread may be quick enough to take the next one, too
            await batcher.submit(call(1))
            await asyncio.sleep(0.001)
        await batcher.submit(call(2, rows=10**6))  # at the throughput of one row, far above 0.5 s
        await batcher.close()
        return engine.ran

    first, *others, last = asyncio.run(scenario())
    assert not first[2]  # its duration cannot be estimated yet
    assert any(on_main for _, _, on_main in others)
    assert not last[2]
    assert not any(concurrent for _, concurrent, _ in (first, *others, last))


def test_calls_of_one_turn_of_the_loop_share_a_run() -> None:
    """The first of them waits for those that the loop has received with it."""

    async def scenario() -> list[tuple[list[float], bool, bool]]:
        engine = PromptEngine()
        batcher = make(engine, max_batch_tokens=8, inline_s=1)
        await batcher.submit(call(0))
        await asyncio.gather(*start(batcher, call(1), call(2), call(3)))
        await batcher.close()
        return engine.ran

    ran = asyncio.run(scenario())
    assert [marks for marks, _, _ in ran] == [[0], [1, 2, 3]]


def test_concurrent_runs_overlap_and_are_marked() -> None:
    """Two calls that cannot share a batch are in the engine together; each is right."""

    async def scenario() -> tuple[HeldEngine, list[Answer]]:
        engine = HeldEngine(concurrent_runs=2)
        batcher = make(engine)
        tasks = [await first_runs(batcher, engine)]
        engine.started.clear()
        tasks += start(batcher, call(1), call(2))
        await asyncio.to_thread(engine.started.wait, 30)  # while the first is still held
        assert not engine.ran
        engine.free.set()
        answers = await asyncio.gather(*tasks)
        await batcher.close()
        return engine, list(answers)

    engine, answers = asyncio.run(scenario())
    assert sorted(engine.ran) == [[0], [1], [2]]
    assert (engine.concurrent[0], engine.concurrent[1]) == (False, True)
    assert [answer.output.item() for answer in answers] == [0, 1, 2]


def test_rows_of_one_call_in_concurrent_runs_come_back_in_one_answer() -> None:
    """Whichever run allocates the answer first."""

    async def scenario() -> Answer:
        engine = PromptEngine(concurrent_runs=2)
        batcher = make(engine, max_batch_tokens=4)
        rows = np.arange(400, dtype=np.float32).reshape(400, 1, 1)
        answer = await batcher.submit(Call(Inputs(rows)))
        await batcher.close()
        return answer

    assert asyncio.run(scenario()).output.ravel().tolist() == list(range(400))


def exception_classes() -> list[type[BaseException]]:
    """Return every class of exception that Python and Headwise have, those of asyncio included."""
    found: dict[type[BaseException], None] = {}
    waiting: list[type[BaseException]] = [BaseException]
    while waiting:
        kind = waiting.pop()
        if kind.__module__.split(".")[0] in ("builtins", "asyncio", "service", "concurrent"):
            found[kind] = None
        waiting += kind.__subclasses__()
    return sorted(found, key=lambda kind: kind.__qualname__)


def raised(kind: type[BaseException]) -> BaseException:
    """Return an instance without what its constructor may ask for; groups are never empty."""
    group = ("", [KeyError()]) if issubclass(kind, BaseExceptionGroup) else ()
    return kind.__new__(kind, *group)


CLASSES = exception_classes()


@pytest.mark.fault("C5")
@given(kind=st.sampled_from(CLASSES), sharing=st.integers(1, 3), inline=st.booleans())
@example(kind=StopIteration, sharing=2, inline=False)
@example(kind=StopIteration, sharing=2, inline=True)
@example(kind=SystemExit, sharing=1, inline=True)
@example(kind=KeyboardInterrupt, sharing=1, inline=False)
@example(kind=GeneratorExit, sharing=1, inline=False)
@example(kind=asyncio.CancelledError, sharing=3, inline=True)
@example(kind=MemoryError, sharing=1, inline=False)
@settings(max_examples=60)
def test_run_that_raises_anything_fails_its_own_calls_and_no_other(
    kind: type[BaseException], sharing: int, inline: bool
) -> None:
    """Each of them has the cause; the loop, the threads and the calls beside it go on."""

    async def scenario() -> list[Answer | BaseException]:
        engine = RaisingEngine(lambda: raised(kind))
        batcher = make(engine, max_batch_tokens=8, inline_s=1e9 if inline else 0.0)
        before = await batcher.submit(call(0))
        wrong = [call(-1, rows=2) for _ in range(sharing)]
        run = start(batcher, *wrong, call(1, weights=True))  # weights: a run of its own
        failed = await asyncio.gather(*run, return_exceptions=True)
        after = await batcher.submit(call(2))
        await batcher.close()
        return [before, *failed, after]

    before, *failed, beside, after = asyncio.run(asyncio.wait_for(scenario(), 60))

    assert [a.output.item() for a in (before, beside, after) if isinstance(a, Answer)] == [0, 1, 2]
    assert len(failed) == sharing
    for failure in failed:
        assert isinstance(failure, InferenceFailed)
        cause = failure if kind is InferenceFailed else failure.__cause__
        assert isinstance(cause, kind)


@pytest.mark.fault("C5", "A7")
def test_batcher_has_its_threads_before_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of processes or of memory refuses the batcher, never a run."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> list[Answer]:
        batcher = make(PromptEngine(concurrent_runs=2))
        with monkeypatch.context() as limited:
            limited.setattr(threading.Thread, "start", refused)
            with pytest.raises(ThreadsUnavailable, match="can't start new thread"):
                make(PromptEngine(concurrent_runs=2))
            answers = await asyncio.gather(*start(batcher, *(call(mark) for mark in range(5))))
        await batcher.close()
        return answers

    answers = asyncio.run(asyncio.wait_for(scenario(), 60))

    assert [answer.output.item() for answer in answers] == [0, 1, 2, 3, 4]


def test_call_past_its_deadline_at_dispatch_is_not_run() -> None:
    """Not even where the engine is free and the run would be short."""

    async def scenario() -> int:
        engine = PromptEngine()
        batcher = make(engine, inline_s=1)
        await batcher.submit(call(1))
        await asyncio.sleep(0.01)
        with pytest.raises(DeadlineExceeded):
            await batcher.submit(call(2, timeout_s=1e-9))
        await batcher.submit(call(3))
        await batcher.close()
        return len(engine.ran)

    assert asyncio.run(scenario()) == 2
