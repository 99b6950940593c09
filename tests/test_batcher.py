"""The queue in front of an engine."""

import asyncio
import threading

import numpy as np
import pytest

from service.batcher import MAX_RUNS_PASSED, MIN_SHARE, Batcher, QueueLimits
from service.batches import BatchLimits
from service.calls import Answer, Call, Inputs, Outputs, Run
from service.contract import LayerConfig
from service.engine import Engine, Provider, Stop
from service.errors import DeadlineExceeded, Draining, InferenceFailed, QueueFull


class HeldEngine:
    """An engine that holds each run until it is let go, and remembers what it ran."""

    layer = LayerConfig(1, 1)
    provider: Provider = "cpu"

    def __init__(self, concurrent_runs: int = 1) -> None:
        self.concurrent_runs = concurrent_runs
        self.free = threading.Event()
        self.started = threading.Event()
        self.ended = threading.Event()
        self.ran: list[list[float]] = []
        self.stopped = 0

    def run(
        self, inputs: Inputs, *, weights: bool, stop: Stop | None = None, concurrent: bool = False
    ) -> Outputs:
        """Answer with the embeddings once let go; a negative number fails."""
        self.started.set()
        while not self.free.wait(0.005):
            if stop is not None and stop.options.terminate:
                self.stopped += 1
                self.ended.set()
                raise InferenceFailed("stopped")
        marks = inputs.embeddings[:, 0, 0].tolist()
        self.ran.append(marks)
        if min(marks) < 0:
            raise InferenceFailed("refused")
        rows, length, _ = inputs.embeddings.shape
        cells = np.ones((rows, 1, length, length), np.float32)
        return Outputs(inputs.embeddings, cells if weights else None)


class Seen:
    """An observer that keeps what it was told."""

    def __init__(self) -> None:
        self.depths: list[tuple[int, int]] = []
        self.runs: list[Run] = []
        self.drops: list[str] = []

    def on_queue_change(self, calls: int, tokens: int) -> None:
        """Keep it."""
        self.depths.append((calls, tokens))

    def on_run(self, run: Run) -> None:
        """Keep it."""
        self.runs.append(run)

    def on_drop(self, where: str) -> None:
        """Keep it."""
        self.drops.append(where)


def make(
    engine: Engine,
    *,
    max_calls: int = 99,
    max_tokens: int = 9999,
    max_batch_tokens: int = 1,
    max_waste: float = 0.25,
    seen: Seen | None = None,
    inline_s: float = 0.0,
) -> Batcher:
    """Return a batcher that joins nothing unless told to."""
    queue = QueueLimits(max_calls, max_tokens, timeout_s=30)
    limits = BatchLimits(max_batch_tokens, 10**6, max_waste)
    return Batcher(engine, queue, limits, seen or Seen(), inline_s=inline_s)


def call(mark: float, *, rows: int = 1, length: int = 1, **options: object) -> Call:
    """Return a call that can be told from others."""
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


def test_submit_serves_urgent_calls_first_and_equals_in_turn() -> None:
    """1 is the highest priority, 0 the default after all others."""

    async def scenario() -> list[list[float]]:
        engine = HeldEngine()
        batcher = make(engine)
        tasks = [await first_runs(batcher, engine)]
        for mark, priority in ((1, 0), (2, 0), (3, 7), (4, 1)):
            tasks += start(batcher, call(mark, priority=priority))
        await asyncio.sleep(0)
        engine.free.set()
        await asyncio.gather(*tasks)
        await batcher.close()
        return engine.ran

    assert asyncio.run(scenario()) == [[0], [4], [3], [1], [2]]


def test_waiting_calls_are_joined_into_the_next_run() -> None:
    """What waits while the engine is busy shares one run; each gets its own answer."""
    seen = Seen()

    async def scenario() -> tuple[list[list[float]], list[Answer]]:
        engine = HeldEngine()
        batcher = make(engine, max_batch_tokens=8, seen=seen)
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
    assert [(run.calls, run.rows) for run in seen.runs] == [(1, 1), (3, 6)]
    assert all(answer.stages.queue_s > 0 for answer in answers)


def test_call_without_weights_never_shares_a_run_with_one_that_wants_them() -> None:
    """Asking for nothing extra costs nothing extra."""

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


def test_large_call_runs_in_parts_and_comes_back_whole() -> None:
    """A call of any size occupies the engine for one part at a time."""

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


def test_large_call_lets_a_small_one_pass_after_its_first_part() -> None:
    """Who asks for much waits longer than who asks for little."""

    async def scenario() -> list[float]:
        engine = HeldEngine()
        batcher = make(engine)
        tasks = [await first_runs(batcher, engine)]
        tasks += start(batcher, call(1, rows=9), call(2))
        await asyncio.sleep(0)
        engine.free.set()
        await asyncio.gather(*tasks)
        await batcher.close()
        return [marks[0] for marks in engine.ran]

    assert asyncio.run(scenario()) == [0, 1, 2, *[1] * 8]


def test_call_passed_over_by_urgent_ones_is_served_after_a_bounded_number_of_runs() -> None:
    """Priorities order the queue, but starve nobody."""

    async def scenario() -> list[float]:
        engine = HeldEngine()
        batcher = make(engine, max_calls=999)
        tasks = [await first_runs(batcher, engine)]
        tasks += start(batcher, call(1))
        tasks += start(batcher, *(call(2, priority=1) for _ in range(3 * MAX_RUNS_PASSED)))
        await asyncio.sleep(0)
        engine.free.set()
        await asyncio.gather(*tasks)
        await batcher.close()
        return [marks[0] for marks in engine.ran]

    ran = asyncio.run(scenario())
    assert ran.index(1) == MAX_RUNS_PASSED + 1  # and the run that was under way


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_calls": 3}, "queue: at most 3 calls may be in it, and so many are"),
        ({"max_tokens": 6}, "queue: at most 6 tokens may be in it: it holds 6, this call has 2"),
    ],
    ids=["calls", "tokens"],
)
def test_submit_beyond_the_queue_is_refused_at_once(limits: dict[str, int], message: str) -> None:
    """Nobody waits for a place to wait; what waits is not lost."""
    seen = Seen()

    async def scenario() -> int:
        engine = HeldEngine()
        batcher = make(engine, seen=seen, **limits)
        tasks = [await first_runs(batcher, engine), *start(batcher, call(1), call(2))]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as caught:
            await batcher.submit(call(3))
        assert message in str(caught.value)
        engine.free.set()
        await asyncio.gather(*tasks)
        await batcher.submit(call(4))
        await batcher.close()
        return caught.value.retry_after_s or 0

    assert asyncio.run(scenario()) == 1
    assert max(seen.depths) == (3, 6)
    assert seen.depths[-1] == (0, 0)


def test_submit_larger_than_an_empty_queue_is_served() -> None:
    """A call within the limits of one call always has its turn."""

    async def scenario() -> Answer:
        engine = HeldEngine()
        engine.free.set()
        batcher = make(engine, max_tokens=1)
        answer = await batcher.submit(call(1, rows=3))
        await batcher.close()
        return answer

    assert asyncio.run(scenario()).output.shape == (3, 1, 1)


def test_retry_after_is_the_time_the_queue_will_take() -> None:
    """The number comes from the engine's own last runs."""

    async def scenario() -> int:
        engine = HeldEngine()
        batcher = make(engine, max_calls=2)
        first = await first_runs(batcher, engine)
        await asyncio.sleep(0.5)  # the only measured run takes half a second for two tokens
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

    assert 4 <= asyncio.run(scenario()) <= 8  # 16 tokens at 4 a second; the machine may be busy


def test_submit_past_its_deadline_is_told_and_never_run() -> None:
    """A call that waited too long costs the engine nothing."""
    seen = Seen()

    async def scenario() -> list[list[float]]:
        engine = HeldEngine()
        batcher = make(engine, seen=seen)
        first = await first_runs(batcher, engine)
        with pytest.raises(DeadlineExceeded, match=r"limit of 0\.01 s passed"):
            await batcher.submit(call(1, timeout_s=0.01))
        engine.free.set()
        await first
        await batcher.close()
        return engine.ran

    assert asyncio.run(scenario()) == [[0]]
    assert seen.drops == ["queued"]


def test_submit_whose_caller_left_is_never_run() -> None:
    """A queued call ends with its caller."""
    seen = Seen()

    async def scenario() -> list[list[float]]:
        engine = HeldEngine()
        batcher = make(engine, seen=seen)
        first = await first_runs(batcher, engine)
        [left] = start(batcher, call(1))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])  # the engine's thread asks no loop what goes next
        engine.free.set()
        await first
        await batcher.close()
        return engine.ran

    assert asyncio.run(scenario()) == [[0]]
    assert seen.drops == ["queued"]
    assert seen.depths[-1] == (0, 0)


def test_run_that_nobody_waits_for_is_stopped() -> None:
    """The engine is free for the next call at once."""
    seen = Seen()

    async def scenario() -> HeldEngine:
        engine = HeldEngine()
        batcher = make(engine, seen=seen)
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
    assert seen.drops == ["running"]


def test_run_that_somebody_still_waits_for_goes_on() -> None:
    """One caller's leaving is nobody else's loss."""

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
    """The engine's refusal reaches who was in that run, and nobody later."""

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
    """Accepted is answered; a late call is told to come back."""

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


class PromptEngine:
    """An engine that answers at once, and remembers where and how it ran."""

    layer = LayerConfig(1, 1)
    provider: Provider = "cpu"

    def __init__(self, concurrent_runs: int = 1) -> None:
        self.concurrent_runs = concurrent_runs
        self.ran: list[tuple[list[float], bool, bool]] = []
        """The marks, whether other runs were going on, and whether it was on the main thread."""

    def run(
        self, inputs: Inputs, *, weights: bool, stop: Stop | None = None, concurrent: bool = False
    ) -> Outputs:
        """Answer with the embeddings; a negative number fails in an unexpected way."""
        marks = inputs.embeddings[:, 0, 0].tolist()
        on_main = threading.current_thread() is threading.main_thread()
        self.ran.append((marks, concurrent, on_main))
        if min(marks) < 0:
            raise MemoryError
        return Outputs(inputs.embeddings, None)


def test_what_is_little_and_alone_is_run_on_the_loop() -> None:
    """Once the engine's pace is known; a large one goes to a thread."""

    async def scenario() -> list[tuple[list[float], bool, bool]]:
        engine = PromptEngine()
        batcher = make(engine, max_batch_tokens=10**6, inline_s=0.5)
        for _ in range(99):  # the thread may be quick enough to take the next one, too
            await batcher.submit(call(1))
            await asyncio.sleep(0.001)
        await batcher.submit(call(2, rows=10**6))  # at the pace of one row, far above
        await batcher.close()
        return engine.ran

    first, *others, last = asyncio.run(scenario())
    assert not first[2]  # nobody knows yet how long it takes
    assert any(on_main for _, _, on_main in others)
    assert not last[2]
    assert not any(concurrent for _, concurrent, _ in (first, *others, last))


def test_calls_of_one_turn_of_the_loop_share_a_run() -> None:
    """The first of them does not run ahead of those that have come with it."""

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
    """Two calls that cannot be joined are in the engine together; each is right."""

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
    assert [answer.output.item() for answer in answers] == [0, 1, 2]


def test_waiting_calls_are_shared_among_concurrent_runs() -> None:
    """One run does not take all and leave the other thread idle."""

    async def scenario() -> list[tuple[list[float], bool, bool]]:
        engine = PromptEngine(concurrent_runs=2)
        batcher = make(engine, max_batch_tokens=10**6, inline_s=0)
        await asyncio.gather(*start(batcher, *(call(mark, rows=MIN_SHARE) for mark in range(4))))
        await batcher.close()
        return engine.ran

    ran = asyncio.run(scenario())
    assert sum(len(marks) for marks, _, _ in ran) == 4 * MIN_SHARE
    assert max(len(marks) for marks, _, _ in ran) == 2 * MIN_SHARE
    assert ran[0][1]  # it knew that more was waiting


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


def test_run_that_fails_unexpectedly_leaves_its_thread_usable() -> None:
    """Its own call gets the error; the next one is served."""

    async def scenario() -> Answer:
        batcher = make(PromptEngine())
        with pytest.raises(MemoryError):
            await batcher.submit(call(-1))
        answer = await batcher.submit(call(1))
        await batcher.close()
        return answer

    assert asyncio.run(scenario()).output.item() == 1


@pytest.mark.parametrize(
    ("lengths", "max_waste", "ran"),
    [
        ((4, 4, 4), 0, [[0, 1, 2]]),
        ((40, 41), 0, [[0], [1]]),
        ((40, 41), 0.25, [[0, 1]]),
        ((40, 60, 40), 0, [[0], [1], [2]]),
        ((4, 6, 4), 0, [[0, 2], [1]]),
    ],
    ids=["equal", "unequal", "padding allowed", "long: each in turn", "short: one is passed"],
)
def test_calls_share_a_run_where_that_saves_more_than_it_delays(
    lengths: tuple[int, ...], max_waste: float, ran: list[list[float]]
) -> None:
    """Padding is for the settings to allow; who is passed must gain more than it waits."""

    async def scenario() -> list[list[float]]:
        engine = HeldEngine()
        batcher = make(engine, max_batch_tokens=10**6, max_waste=max_waste)
        tasks = [await first_runs(batcher, engine)]
        tasks += start(batcher, *(call(mark, length=size) for mark, size in enumerate(lengths)))
        await asyncio.sleep(0)
        engine.free.set()
        await asyncio.gather(*tasks)
        await batcher.close()
        return engine.ran

    assert asyncio.run(scenario()) == [[0], *ran]


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
