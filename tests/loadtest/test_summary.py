"""The load tester's figures, from what was seen of every call."""

from array import array
from math import nan

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram
from hypothesis import given
from hypothesis import strategies as st

from loadtest.calls import CONNECTION_LOST, NOT_SENT, TIMED_OUT, Calls
from loadtest.histogram import Histogram
from loadtest.records import Records
from loadtest.summary import PERCENTILES, figures_of, stages, summary, windows

THREE_DIGITS = 1e-3
"""What the histogram keeps of a value."""


def calls_of(
    latencies_s: list[float], *, outcome: int = 200, seconds: float = 10.0, wait_s: float = 0.0
) -> Calls:
    """Return calls that were due evenly, each sent `wait_s` later, after a warm-up of 1 s."""
    calls = Calls()
    for i, latency in enumerate(latencies_s):
        due = 1.0 + seconds * i / len(latencies_s)
        done = due + latency
        calls.add(due, due + wait_s, done, done, nan, outcome)
    return calls


def records_of(calls: Calls, *, seconds: float = 10.0) -> Records:
    """Return what is kept of calls after a warm-up of 1 s."""
    records = Records(1.0, seconds)
    records.seconds = seconds
    records.fold(calls, array("d"))
    return records


def histogram_of(latencies_s: list[float]) -> Histogram:
    """Return a histogram of times."""
    made = Histogram()
    made.add(np.array(latencies_s))
    return made


@given(st.lists(st.floats(1e-6, 100), min_size=1, max_size=300))
def test_percentiles_are_those_of_the_calls_and_in_order(latencies_s: list[float]) -> None:
    """Whatever the calls: to three digits, p50 <= p90 <= p99 <= p99.9 <= max."""
    found = summary(histogram_of(latencies_s))

    told = [found[name] for name in (*PERCENTILES, "max")]
    assert told == sorted(told)
    assert found["count"] == len(latencies_s)
    ordered = np.sort(np.maximum(np.rint(np.array(latencies_s) * 1e6), 1)) / 1e3
    for name, share in PERCENTILES.items():
        rank = max(1, int(np.ceil(share / 100 * len(ordered) - 1e-9)))
        near = ordered[max(0, rank - 2) : rank + 1]
        assert near.min() * (1 - THREE_DIGITS) <= found[name] <= near.max() * (1 + THREE_DIGITS)
    assert found["max"] == pytest.approx(ordered[-1], rel=THREE_DIGITS)


def test_figures_can_be_had_again_from_the_histogram() -> None:
    """It travels in the raw file, and says the same."""
    found = figures_of(records_of(calls_of([0.001 * i for i in range(1, 500)])))

    again = HdrHistogram.decode(found["histogram"])

    latency = found["latency_ms"]
    assert again.get_total_count() == latency["count"]
    assert again.get_mean_value() / 1e3 == latency["mean"]
    assert again.get_max_value() / 1e3 == latency["max"]
    for name, share in PERCENTILES.items():
        assert again.get_value_at_percentile(share) / 1e3 == latency[name]


def test_latency_counts_from_when_a_call_was_due() -> None:
    """Waiting to be sent is part of it, and told apart."""
    found = figures_of(records_of(calls_of([0.5] * 20, wait_s=0.4)))

    assert found["latency_ms"]["p50"] == pytest.approx(500, rel=THREE_DIGITS)
    assert found["sent_ms"]["p50"] == pytest.approx(100, rel=THREE_DIGITS)


def test_only_good_answers_have_a_latency_and_every_call_is_counted() -> None:
    """Refusals are quick, and would flatter; offered is what became of all."""
    calls = calls_of([0.1] * 5)
    for outcome in (429, 429, 503, CONNECTION_LOST, TIMED_OUT, NOT_SENT):
        calls.extend(calls_of([0.001], outcome=outcome))

    found = figures_of(records_of(calls))

    assert found["latency_ms"]["count"] == 5
    assert found["latency_ms"]["p50"] == pytest.approx(100, rel=THREE_DIGITS)
    assert found["statuses"] == {"200": 5, "429": 2, "503": 1}
    assert found["failures"] == {
        "connection lost": 1,
        "no connection free in time": 1,
        "timed out": 1,
    }
    total = sum(found["statuses"].values()) + sum(found["failures"].values())
    assert found["offered"] == total == 11


def test_nothing_good_has_no_figures_rather_than_zeros() -> None:
    """A latency of 0 ms would be the best of all."""
    found = figures_of(records_of(calls_of([0.1], outcome=500)))

    assert found["latency_ms"] == {
        "count": 0,
        "mean": None,
        "p50": None,
        "p90": None,
        "p95": None,
        "p99": None,
        "p99.9": None,
        "max": None,
    }


def test_rate_leaves_out_what_came_after_the_end() -> None:
    """An answer to a backlog counts in latency, not in what was done a second."""
    records = records_of(calls_of([0.1] * 50 + [20.0] * 50))

    found = figures_of(records)

    assert found["good_per_s"] == pytest.approx(50 / 10)
    assert found["latency_ms"]["count"] == 100


def test_windows_hold_every_call_once_and_show_a_stall() -> None:
    """A call belongs to when it was due."""
    found = windows(records_of(calls_of([0.01] * 500 + [2.0] * 100 + [0.01] * 400)))

    assert [window["at_s"] for window in found] == pytest.approx(range(10))
    assert sum(window["count"] for window in found) == 1000
    assert [window["p50"] > 1000 for window in found] == [False] * 5 + [True] + [False] * 4


def test_window_without_an_answer_has_no_median() -> None:
    """It is there all the same."""
    found = windows(records_of(calls_of([0.01] * 2, seconds=5), seconds=5))

    assert [window["count"] for window in found] == [1, 0, 1, 0, 0]
    assert found[1]["p50"] is None


def test_stages_are_those_of_server_timing() -> None:
    """Every stage that is named with a duration, whatever else a metric says."""
    records = Records(1.0, 10.0)
    totals = [
        records.add_timing(b"queue;dur=%d, compute;dur=2.5, cache;desc=hit, total;dur=9" % i)
        for i in range(101)
    ]
    records.fold(Calls(), array("d"))

    found = stages(records)

    assert totals == [0.009] * 101
    assert found is not None
    queue = {name: found["queue"][name] for name in ("p50", "p99", "mean")}
    assert queue == pytest.approx({"p50": 50, "p99": 99, "mean": 50}, rel=THREE_DIGITS)
    assert set(found) == {"queue", "compute", "total"}
    other = Records(1.0, 10.0)
    assert stages(other) is None
    assert np.isnan(other.add_timing(b"miss"))
    other.fold(Calls(), array("d"))
    assert stages(other) is None
