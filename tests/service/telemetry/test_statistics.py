"""The protocol's statistics: what one call, one run and one failure add to them."""

import asyncio
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InferenceFailed
from service.inference.batcher import Batcher
from service.inference.batches import BatchLimits
from service.inference.calls import Call, Inputs, Run, Stages
from service.inference.schedule import QueueLimits
from service.telemetry.statistics import ModelStatistics, Statistics
from tests.support.doubles import HeldEngine, RecordingObserver

ZERO = {"count": 0, "ns": 0}


def run(
    rows: int, *, assembly_s: float = 0.0, compute_s: float = 0.0, splitting_s: float = 0.0
) -> Run:
    """Return a run of that many rows."""
    return Run(1, rows, rows, rows, 0.0, assembly_s, compute_s, splitting_s)


def test_document_before_any_call_has_every_field() -> None:
    """perf_analyzer reads each of them unguarded."""
    document = Statistics().of("tiny", 3).document()

    assert document == {
        "name": "tiny",
        "version": "3",
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": dict.fromkeys(
            (
                *("success", "fail", "queue", "compute_input", "compute_infer"),
                *("compute_output", "cache_hit", "cache_miss"),
            ),
            ZERO,
        ),
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }


def test_answered_adds_rows_and_the_times_of_each_stage() -> None:
    """Sequences are counted, not calls; batching and splitting are counted apart."""
    counted = ModelStatistics("tiny", 1)

    counted.answered(3, Stages(0.5, 0.25, 2.0, splitting_s=0.125), 4.0)
    counted.answered(2, Stages(0.5, 0.25, 2.0, splitting_s=0.125), 4.0)

    document = counted.document()
    assert document["inference_count"] == 5
    assert document["execution_count"] == 0
    assert document["last_inference"] > 1_700_000_000_000
    assert document["inference_stats"] == {
        "success": {"count": 2, "ns": 8_000_000_000},
        "fail": ZERO,
        "queue": {"count": 2, "ns": 1_000_000_000},
        "compute_input": {"count": 2, "ns": 250_000_000},
        "compute_infer": {"count": 2, "ns": 4_000_000_000},
        "compute_output": {"count": 2, "ns": 250_000_000},
        "cache_hit": ZERO,
        "cache_miss": ZERO,
    }


def test_failed_counts_nothing_as_answered() -> None:
    """What failed was no inference."""
    counted = ModelStatistics("tiny", 1)

    counted.failed(0.5)

    document = counted.document()
    assert document["inference_stats"].pop("fail") == {"count": 1, "ns": 500_000_000}
    assert list(document["inference_stats"].values()) == [ZERO] * 7
    assert (document["inference_count"], document["last_inference"]) == (0, 0)


def test_run_is_counted_by_its_rows() -> None:
    """Each batch size has times of its own, the smallest first."""
    counted = ModelStatistics("tiny", 1)

    counted.run(run(7, assembly_s=0.25, compute_s=1.0, splitting_s=0.125))
    counted.run(run(2, compute_s=0.5))
    counted.run(run(7, assembly_s=0.25, compute_s=1.0, splitting_s=0.125))

    document = counted.document()
    assert document["execution_count"] == 3
    assert document["batch_stats"] == [
        {
            "batch_size": 2,
            "compute_input": {"count": 1, "ns": 0},
            "compute_infer": {"count": 1, "ns": 500_000_000},
            "compute_output": {"count": 1, "ns": 0},
        },
        {
            "batch_size": 7,
            "compute_input": {"count": 2, "ns": 250_000_000},
            "compute_infer": {"count": 2, "ns": 2_000_000_000},
            "compute_output": {"count": 2, "ns": 250_000_000},
        },
    ]


SECONDS = st.floats(0, 1e4)


@given(
    calls=st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=5)
)
def test_stages_never_add_up_to_more_than_the_call(
    calls: list[tuple[float, float, float, float, float]],
) -> None:
    """Runs of one call may overlap in time; what is told of them must not exceed its own time."""
    counted = ModelStatistics("tiny", 1)
    for queue_s, input_s, splitting_s, compute_s, total_s in calls:
        before = times(counted)
        stages = Stages(queue_s, input_s + splitting_s, compute_s, splitting_s)

        counted.answered(1, stages, total_s)

        added = {name: ns - before[name] for name, ns in times(counted).items()}
        success = added.pop("success")
        assert min(added.values()) >= 0
        assert sum(added.values()) <= success == int(total_s * 1e9)
        assert added["queue"] == min(int(queue_s * 1e9), success)


def times(counted: ModelStatistics) -> dict[str, int]:
    """Return the nanoseconds of what an answered call adds to."""
    stats = counted.document()["inference_stats"]
    parts = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    assert {stats[name]["count"] for name in parts} == {stats["success"]["count"]}
    return {name: stats[name]["ns"] for name in parts}


def test_of_keeps_names_and_versions_apart() -> None:
    """A newer version begins at zero; the older one's numbers stay what they were."""
    statistics = Statistics()

    statistics.of("tiny", 1).failed(1.0)
    statistics.of("tiny", 1).failed(1.0)

    fails = [
        statistics.of(name, version).document()["inference_stats"]["fail"]["count"]
        for name, version in (("tiny", 1), ("tiny", 2), ("tiny-weights", 1))
    ]
    assert fails == [2, 0, 0]


def batched(*marks: tuple[float, ModelStatistics | None]) -> tuple[list[object], RecordingObserver]:
    """Run calls of two rows each as one run; return how they ended, and what was observed."""
    engine, observer = HeldEngine(), RecordingObserver()

    async def go() -> list[object]:
        queue, limits = QueueLimits(99, 9999, timeout_s=30), BatchLimits(99, 10**6, 0.25)
        batcher = Batcher(engine, queue, limits, observer, inline_s=0.0)
        calls = [
            batcher.submit(
                Call(Inputs(np.full((2, 1, 1), mark, np.float32))),
                on_run=None if counted is None else counted.run,
            )
            for mark, counted in marks
        ]
        engine.free.set()
        ended: list[object] = list(await asyncio.gather(*calls, return_exceptions=True))
        await batcher.close()
        return ended

    return asyncio.run(go()), observer


def executions(counted: ModelStatistics) -> list[Any]:
    """Return the number of runs, and the batch size and count of each kind of them."""
    document = counted.document()
    batches = document["batch_stats"]
    return [
        document["execution_count"],
        [(batch["batch_size"], batch["compute_infer"]["count"]) for batch in batches],
    ]


def test_run_that_joins_calls_of_one_model_is_one_execution() -> None:
    """Three calls, one run: that is what batching is for."""
    counted = ModelStatistics("tiny", 1)

    ended, observer = batched((1, counted), (2, counted), (3, counted))

    assert len(ended) == 3
    assert [run.calls for run in observer.runs] == [3]
    assert executions(counted) == [1, [(6, 1)]]


def test_run_that_joins_calls_of_two_models_is_an_execution_of_each() -> None:
    """Either model ran; a call that names none is nobody's."""
    plain, weights = ModelStatistics("tiny", 1), ModelStatistics("tiny-weights", 1)

    _, observer = batched((1, plain), (2, weights), (3, None), (4, plain))

    assert [run.calls for run in observer.runs] == [4]
    assert executions(plain) == executions(weights) == [1, [(8, 1)]]


def test_run_that_fails_is_no_execution() -> None:
    """Only what gave answers is counted."""
    counted = ModelStatistics("tiny", 1)

    ended, _ = batched((-1, counted))

    assert isinstance(ended[0], InferenceFailed)
    assert executions(counted) == [0, []]
