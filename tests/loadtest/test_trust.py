"""Whether the load tester trusts its own figures."""

from typing import Any

import pytest

from loadtest.trust import Limits, is_trustworthy, warnings_of


def point(**changes: Any) -> dict[str, Any]:
    """Return a point that is well in every respect but those named."""
    latency = {"count": 1000, "p50": 5.0, "p99": 10.0}
    well = {
        "model": "open",
        "offered": 1000,
        "good_per_s": 100.0,
        "latency_ms": latency,
        "sent_ms": latency,
        "statuses": {"200": 1000},
        "failures": {},
        "windows": [{"count": 200, "p50": 5.0 + i / 10} for i in range(5)],
        "lag_ms": {"p50": 0.1, "p99": 0.3, "max": 1.0},
        "cpu_share": 0.2,
        "waited": 0,
        "planned": None,
        "interrupted": False,
        "silence": {"seconds": 0.2, "at_s": 3.0},
        "timestamp_flaw": None,
        "contradicted": 0,
        "unread_s": 0.01,
        "checked": 0,
        "wrong": 0,
    }
    return well | changes


def test_good_point_has_no_warning() -> None:
    """Silence means trust."""
    assert warnings_of(point(), 10_000) == []


@pytest.mark.parametrize(
    ("changes", "null", "warning"),
    [
        ({"cpu_share": 0.9}, None, "the generator was the bottleneck: it used 90% of its core"),
        (
            {"lag_ms": {"p50": 1.0, "p99": 4.0, "max": 9.0}},
            None,
            "the generator was the bottleneck: it sent 4 ms late at p99, where 1 ms are allowed",
        ),
        (
            {"good_per_s": 8000.0},
            10_000,
            "the generator was the bottleneck: it made 8000 calls/s of the 10000 that it can make"
            " at all",
        ),
        (
            {"windows": [{"count": 50, "p50": v} for v in (4.0, 4.0, 8.0)]},
            None,
            "unstable: the median went from 4 to 8 ms over 3 windows, 100% of the middle one,"
            " where 50% are allowed",
        ),
        ({"checked": 9, "wrong": 1}, None, "wrong answers: 1 of 9 differ from what was expected"),
        ({"latency_ms": {"count": 0}}, None, "no good answer to 1000 calls"),
        pytest.param(
            {"failures": {"timed out": 5, "connection lost": 1}},
            None,
            "lost calls: 6 of 1000 were never answered, and are in no latency"
            " (timed out: 5, connection lost: 1)",
            marks=pytest.mark.fault("F2", "F7"),
        ),
        pytest.param(
            {"planned": 2000},
            None,
            "unfinished: 1000 of 2000 calls were made before --duration was over",
            marks=pytest.mark.fault("F2"),
        ),
        pytest.param(
            {"model": "closed", "silence": {"seconds": 3.0, "at_s": 6.0}},
            None,
            "silent: no answer came for 3 s, from 6 s on, while calls waited"
            " (a closed load hides most of that)",
            marks=pytest.mark.fault("F4"),
        ),
        pytest.param(
            {"contradicted": 7},
            None,
            "clocks disagree: 7 calls took the server longer, as it says (Server-Timing), than"
            " they took here from being sent to being read",
            marks=pytest.mark.fault("F3"),
        ),
        pytest.param(
            {"unread_s": 3.0},
            None,
            "the generator was the bottleneck: it left an answer unread for 3 s",
            marks=pytest.mark.fault("F4"),
        ),
    ],
)
def test_figures_that_mislead_are_not_to_be_trusted(
    changes: dict[str, Any], null: float | None, warning: str
) -> None:
    """Each reason is told in words and numbers."""
    told = warnings_of(point(**changes), null)

    assert told[0] == warning
    assert not is_trustworthy(told)


def test_refusals_are_told_and_do_not_spoil_the_figures() -> None:
    """A server that refuses what is too much is measured well; the exit code is 3 all the same."""
    told = warnings_of(
        point(
            latency_ms={"count": 900, "p50": 5.0, "p99": 10.0}, statuses={"200": 900, "429": 100}
        ),
        None,
    )

    assert told == ["10.0% of calls were answered otherwise than well (429: 100)"]
    assert is_trustworthy(told)


@pytest.mark.fault("F4")
def test_slow_calls_are_no_silence() -> None:
    """A server of one call in two seconds is silent in between, as it always is."""
    slow = {"count": 20, "p50": 2000.0, "p99": 2100.0}

    told = warnings_of(
        point(latency_ms=slow, sent_ms=slow, silence={"seconds": 2.1, "at_s": 0.0}), None
    )

    assert told == []


@pytest.mark.fault("F3")
def test_time_stamps_that_are_left_aside_are_told_and_spoil_nothing() -> None:
    """The times are those of reading then, which are true."""
    told = warnings_of(point(timestamp_flaw="the clock of this process is 500 ms ahead"), None)

    assert told == [
        "time stamps of the kernel left aside: the clock of this process is 500 ms ahead;"
        " an answer counts as there when it was read"
    ]
    assert is_trustworthy(told)


def test_calls_that_waited_for_a_connection_are_told() -> None:
    """More connections, or less load."""
    late = {"count": 1000, "p50": 2.0, "p99": 3.0}
    told = warnings_of(point(sent_ms=late, waited=20), None)

    assert told[0].startswith("2.0% of calls waited for a free connection")


@pytest.mark.fault("F7")
def test_calls_that_were_late_for_another_reason_did_not_wait_for_a_connection() -> None:
    """A free one was there: the load tester itself was late, which its lag tells."""
    late = {"count": 1000, "p50": 2.0, "p99": 3.0}

    assert warnings_of(point(sent_ms=late, waited=0), None) == []


def test_windows_with_few_answers_say_nothing_of_stability() -> None:
    """The median of three calls is chance."""
    few = [{"count": 3, "p50": value} for value in (1.0, 9.0)]
    empty = [{"count": 0, "p50": None}]

    assert warnings_of(point(windows=few + empty), None) == []


def test_quick_servers_may_vary_by_half_a_millisecond() -> None:
    """At 0.2 ms, half of it is the scheduler's."""
    quick = [{"count": 500, "p50": value} for value in (0.2, 0.2, 0.5)]

    assert warnings_of(point(windows=quick), None) == []


def test_allowed_spread_can_be_chosen() -> None:
    """By `--max-spread`."""
    windows = [{"count": 50, "p50": value} for value in (4.0, 4.0, 8.0)]

    assert warnings_of(point(windows=windows), None, Limits(spread=1.1)) == []
