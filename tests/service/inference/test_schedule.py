"""The order of the queue: what runs next, and what shares a run."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.inference.batches import RUN_OVERHEAD_TOKENS, Batch, BatchLimits, Slice, slices_of
from service.inference.calls import Call, Inputs
from service.inference.schedule import MAX_RUNS_PASSED, MIN_SHARE, Schedule, ScheduledRun

NO_LIMITS = BatchLimits(10**9, 10**9, 0.999)
ONE_ROW = BatchLimits(1, 1, 0.0)
"""No two slices share a run."""

many = settings(max_examples=150, deadline=None, derandomize=True)


@dataclass(eq=False)
class Caller:
    """A call in the queue, as a schedule knows it."""

    mark: int
    deadline: float = math.inf
    is_over: bool = False
    runs_before: int = 0
    slices: list[Slice] = field(default_factory=list)


Scheduled = ScheduledRun[Caller]


def call(*, rows: int = 1, length: int = 1, **options: Any) -> Call:
    """Return a call of equal lengths, of width 1."""
    return Call(Inputs(np.zeros((rows, length, 1), np.float32)), **options)


def add(
    schedule: Schedule[Caller],
    mark: int,
    call: Call,
    *,
    limits: BatchLimits = ONE_ROW,
    deadline: float = math.inf,
) -> Caller:
    """Let a call wait, in the slices that the limits make of it."""
    caller = Caller(mark, deadline, slices=slices_of(call, limits))
    schedule.add(caller, caller.slices)
    return caller


def drain(schedule: Schedule[Caller], *, now: float = 0.0) -> list[list[int]]:
    """Run all that waits, one run after the other; return the marks of each run."""
    ran = []
    run = schedule.take(now)
    while run is not None:
        ran.append([ticket.queued.mark for ticket in run.tickets])
        run = schedule.take(now, ended=run)
    return ran


def test_take_serves_urgent_calls_first_and_equals_in_turn() -> None:
    """1 is the highest priority, 0 the default after all others."""
    schedule: Schedule[Caller] = Schedule(ONE_ROW, 1)
    for mark, priority in ((1, 0), (2, 0), (3, 7), (4, 1)):
        add(schedule, mark, call(priority=priority))

    assert drain(schedule) == [[4], [3], [1], [2]]


def test_large_call_lets_a_small_one_pass_after_its_first_slice() -> None:
    """The slices of a large call take turns with calls that came later."""
    schedule: Schedule[Caller] = Schedule(ONE_ROW, 1)
    add(schedule, 1, call(rows=9))
    add(schedule, 2, call())

    assert drain(schedule) == [[1], [2], *[[1]] * 8]


@pytest.mark.parametrize(
    ("lengths", "max_waste", "ran"),
    [
        ((4, 4, 4), 0, [[0, 1, 2]]),
        ((20,) * 5, 0, [[0, 1, 2, 3, 4]]),
        ((40, 41), 0, [[0], [1]]),
        ((40, 41), 0.25, [[0, 1]]),
        ((40, 60, 40), 0, [[0], [1], [2]]),
        ((4, 6, 4), 0, [[0, 2], [1]]),
    ],
    ids=[
        "equal",
        "equal: none is passed",
        "unequal",
        "padding allowed",
        "long: each in turn",
        "short: one is passed",
    ],
)
def test_calls_share_a_run_where_that_saves_more_than_it_delays(
    lengths: tuple[int, ...], max_waste: float, ran: list[list[int]]
) -> None:
    """Padding is for the settings to allow; who is overtaken must gain more than it waits."""
    limits = BatchLimits(10**6, 10**6, max_waste)
    schedule: Schedule[Caller] = Schedule(limits, 1)
    for mark, length in enumerate(lengths):
        add(schedule, mark, call(length=length), limits=limits)

    assert drain(schedule) == ran


def test_waiting_calls_are_shared_among_concurrent_runs() -> None:
    """One run does not take all and leave nothing for the other."""
    schedule: Schedule[Caller] = Schedule(NO_LIMITS, 2)
    for mark in range(4):
        add(schedule, mark, call(rows=MIN_SHARE), limits=NO_LIMITS)

    first, second, third = schedule.take(0.0), schedule.take(0.0), schedule.take(0.0)

    assert first is not None
    assert second is not None
    assert third is None  # both runs are in progress
    assert [first.batch.rows, second.batch.rows] == [2 * MIN_SHARE, MIN_SHARE]
    assert (first.is_alone, second.is_alone) == (False, False)


def test_slice_that_does_not_fit_ends_the_search_in_its_priority() -> None:
    """Slices of less similar length are not tried: the one that is nearest goes first."""
    limits = BatchLimits(20, 10**6, 0.25)
    schedule: Schedule[Caller] = Schedule(limits, 1)
    for mark, (rows, length) in enumerate([(1, 10), (2, 10), (1, 9)]):
        add(schedule, mark, call(rows=rows, length=length), limits=limits)

    assert drain(schedule) == [[0], [1], [2]]


def test_take_leaves_out_calls_that_are_over_or_late() -> None:
    """A call that nobody waits for costs the engine nothing."""
    schedule: Schedule[Caller] = Schedule(NO_LIMITS, 1)
    left = add(schedule, 1, call(), limits=NO_LIMITS)
    add(schedule, 2, call(), limits=NO_LIMITS, deadline=5.0)
    add(schedule, 3, call(), limits=NO_LIMITS, deadline=math.nextafter(5.0, 6.0))
    left.is_over = True

    assert drain(schedule, now=5.0) == [[3]]
    assert schedule.is_idle


def test_run_is_abandoned_once_all_of_its_calls_are_over() -> None:
    """A run goes on for as long as one call expects its answer."""
    schedule: Schedule[Caller] = Schedule(NO_LIMITS, 1)
    one, two = (add(schedule, mark, call(), limits=NO_LIMITS) for mark in (1, 2))
    other = add(schedule, 3, call(weights=True), limits=NO_LIMITS)
    run = schedule.take(0.0)
    assert run is not None

    assert schedule.runs_of(one) == schedule.runs_of(two) == [run]
    assert schedule.runs_of(other) == []
    one.is_over = True
    assert not run.is_abandoned
    two.is_over = True
    assert run.is_abandoned


@dataclass
class Drawn:
    """One thing that happens to a schedule."""

    what: str
    priority: int = 0
    rows: int = 1
    length: int = 1
    weights: bool = False
    lasts: float = 0.0
    which: int = 0


EVENTS = st.lists(
    st.builds(
        Drawn,
        st.sampled_from(["add", "add", "add", "take", "take", "end", "leave", "wait"]),
        st.integers(0, 3),
        st.integers(1, 5),
        st.integers(1, 9),
        st.booleans(),
        st.sampled_from([1.0, 3.0, math.inf]),
        st.integers(0, 9),
    ),
    max_size=60,
)


class Model:
    """A schedule, and what must be true of it: what waits, what runs, how often it ran."""

    def __init__(self, limits: BatchLimits, concurrent_runs: int) -> None:
        self.limits = limits
        self.concurrent_runs = concurrent_runs
        self.schedule: Schedule[Caller] = Schedule(limits, concurrent_runs)
        self.running: list[Scheduled] = []
        self.left: dict[Caller, list[Slice]] = {}
        """Slices that have not been run, in the order of arrival."""
        self.runs = 0

    def add(self, call: Call, *, deadline: float = math.inf) -> Caller:
        """Let a call wait."""
        mark = len(self.left)
        caller = add(self.schedule, mark, call, limits=self.limits, deadline=deadline)
        caller.runs_before = self.runs
        self.left[caller] = list(caller.slices)
        return caller

    def waiting(self, now: float) -> list[Caller]:
        """Return the calls that may be run."""
        return [c for c, rest in self.left.items() if rest and not c.is_over and now < c.deadline]

    def take(self, now: float, *, ended: Scheduled | None = None) -> Scheduled | None:
        """Take the next run, and assert whatever must be true of it."""
        waiting = self.waiting(now)
        run = self.schedule.take(now, ended=ended)
        if run is None:
            assert not waiting or len(self.running) == self.concurrent_runs
            return None
        self.check_first(run, waiting)
        self.check_batch(run.batch)
        assert run.batch.slices == [ticket.slice_ for ticket in run.tickets]
        for ticket in run.tickets:
            assert ticket.queued in waiting
            self.left[ticket.queued].remove(ticket.slice_)  # raises if it has been run before
        assert run.is_alone is (not self.waiting(now) and not self.running)
        self.running.append(run)
        self.runs += 1
        assert len(self.running) <= self.concurrent_runs
        return run

    def check_first(self, run: Scheduled, waiting: list[Caller]) -> None:
        """Assert that the run serves the call whose turn it is."""
        first = run.tickets[0].queued
        if self.runs - waiting[0].runs_before >= MAX_RUNS_PASSED:
            assert first is waiting[0]
        else:
            urgency = {c: c.slices[0].call.priority or math.inf for c in waiting}
            assert urgency[first] == min(urgency.values())

    def check_batch(self, batch: Batch) -> None:
        """Assert that the batch is of one kind and, where slices share it, within the limits."""
        assert len({slice_.kind for slice_ in batch.slices}) == 1
        assert batch.rows == sum(slice_.count for slice_ in batch.slices)
        if len(batch.slices) > 1:
            assert batch.rows * max(batch.length, batch.key_length) <= self.limits.max_tokens
            assert batch.rows * batch.length * batch.key_length <= self.limits.max_cells
            assert batch.tokens >= (1 - self.limits.max_waste) * batch.padded_tokens


@many
@given(
    events=EVENTS,
    concurrent_runs=st.integers(1, 3),
    limits=st.sampled_from([ONE_ROW, BatchLimits(16, 64, 0.25), NO_LIMITS]),
)
def test_each_slice_runs_once_in_turn_in_time_and_within_the_limits(
    events: list[Drawn], concurrent_runs: int, limits: BatchLimits
) -> None:
    """Whatever arrives, leaves and ends in whatever order: nothing is lost, late or run twice."""
    model, now = Model(limits, concurrent_runs), 0.0

    for event in events:
        match event.what:
            case "add":
                options = {"weights": event.weights, "priority": event.priority}
                model.add(
                    call(rows=event.rows, length=event.length, **options),
                    deadline=now + event.lasts,
                )
            case "take":
                model.take(now)
            case "end" if model.running:
                model.take(now, ended=model.running.pop(event.which % len(model.running)))
            case "leave" if model.left:
                list(model.left)[event.which % len(model.left)].is_over = True
            case "wait":
                now += 1.0
    while model.take(now) is not None or model.running:
        model.take(now, ended=model.running.pop())

    assert model.waiting(now) == []
    assert model.schedule.is_idle


@many
@given(arrivals=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=90))
def test_call_is_passed_by_a_bounded_number_of_runs(arrivals: list[list[int]]) -> None:
    """Priorities order the queue, but starve nobody: here 1 to 3 calls arrive with every run."""
    model = Model(ONE_ROW, 1)
    passed: dict[Caller, int] = {}

    ended = None
    for priorities in arrivals:
        for priority in priorities:
            passed[model.add(call(priority=priority))] = 0
        run = model.take(0.0, ended=ended)
        assert run is not None
        model.running.clear()
        ended = run
        for caller in model.waiting(0.0):
            passed[caller] += run.tickets[0].queued.mark > caller.mark

    assert max(passed.values(), default=0) <= MAX_RUNS_PASSED


def test_call_passed_by_urgent_ones_runs_after_exactly_the_bound() -> None:
    """The bound is reached: until then the urgent ones go first."""
    schedule: Schedule[Caller] = Schedule(ONE_ROW, 1)
    add(schedule, 1, call())
    for _ in range(3 * MAX_RUNS_PASSED):
        add(schedule, 2, call(priority=1))

    assert drain(schedule).index([1]) == MAX_RUNS_PASSED


@many
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_slice_overtakes_only_where_all_save_what_each_waits(lengths: list[int]) -> None:
    """Who goes first for its length delays those before it by no more than a run's start."""
    limits = BatchLimits(10**6, 10**9, 0.0)
    model = Model(limits, 1)
    for length in lengths:
        model.add(call(length=length))

    ended = None
    while waiting := model.waiting(0.0):
        model.running.clear()
        run = ended = model.take(0.0, ended=ended)
        assert run is not None
        marks = {ticket.queued.mark for ticket in run.tickets}
        for ticket in run.tickets[1:]:
            overtaken = [c for c in waiting if c.mark < ticket.queued.mark and c.mark not in marks]
            saved = RUN_OVERHEAD_TOKENS * len(waiting)
            assert len(overtaken) * ticket.slice_.tokens <= saved


@many
@given(
    rows=st.lists(st.integers(1, 300), min_size=1, max_size=12), concurrent_runs=st.integers(2, 4)
)
def test_run_of_several_slices_leaves_the_other_runs_their_share(
    rows: list[int], concurrent_runs: int
) -> None:
    """No run takes more queries than an equal share, unless that would be less than MIN_SHARE."""
    model = Model(NO_LIMITS, concurrent_runs)
    for count in rows:
        model.add(call(rows=count))

    while waiting := model.waiting(0.0):
        queries = sum(caller.slices[0].count for caller in waiting)
        run = model.take(0.0)
        if run is None:
            run = model.take(0.0, ended=model.running.pop())
        assert run is not None
        share = max(MIN_SHARE, queries // concurrent_runs)
        assert run.batch.rows <= share or len(run.tickets) == 1
