"""From what was seen of all calls to the figures of a load, as the raw file has them."""

from typing import Any, Final

from loadtest.calls import FAILURES
from loadtest.histogram import Histogram
from loadtest.records import Records

PERCENTILES: Final = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99.9": 99.9}


def summary(histogram: Histogram) -> dict[str, Any]:
    """Return count and, in milliseconds, mean, percentiles and maximum; None where count is 0."""
    return {
        "count": histogram.total,
        "mean": histogram.mean_ms(),
        **{name: histogram.percentile_ms(at) for name, at in PERCENTILES.items()},
        "max": histogram.max_ms(),
    }


def figures_of(records: Records) -> dict[str, Any]:
    """Return the part of a point that is counted and measured."""
    times = records.times
    counts = sorted(records.outcomes.items())
    return {
        "warmup_s": records.warmup_s,
        "seconds": records.seconds,
        "offered": records.offered,
        "good_per_s": records.rate,
        "latency_ms": summary(times.latency),
        "histogram": times.latency.encode(),
        "sent_ms": summary(times.since_sent),
        "sent_histogram": times.since_sent.encode(),
        "statuses": {str(status): count for status, count in counts if status > 0},
        "codes": dict(sorted(records.codes.items())),
        "failures": dict(sorted((FAILURES[why], count) for why, count in counts if why < 0)),
        "stages_ms": stages(records),
        "windows": windows(records),
        "silence": {"seconds": times.silence_s, "at_s": times.silence_at_s},
        "lag_ms": _spread(records.lag, p50=50, p99=99, max=100),
        "lag_histogram": records.lag.encode(),
        "timestamps": "kernel" if records.timestamp_flaw is None else "process",
        "timestamp_flaw": records.timestamp_flaw,
        "contradicted": records.contradicted,
        "unread_s": 0.0 if records.timestamp_flaw is not None else records.unread_s,
        "cpu_share": records.cpu_share,
        "waited": records.waited,
        "checked": records.checked,
        "wrong": records.wrong,
    }


def stages(records: Records) -> dict[str, dict[str, Any]] | None:
    """Return the server's own figures by stage, of its `Server-Timing` headers; None without."""
    told = {name.decode(): stage(times) for name, times in records.stages.items()}
    return {name: found for name, found in told.items() if found} or None


def stage(times: Histogram) -> dict[str, Any] | None:
    """Return the figures of one stage; None where nothing was counted."""
    if not times.total:
        return None
    return {
        "count": times.total,
        "mean": times.mean_ms(),
        **_spread(times, p50=50, p99=99),
        "histogram": times.encode(),
    }


def windows(records: Records) -> list[dict[str, Any]]:
    """
    Return how the load went over time: by windows of a second or more, 5 at least, 60 at most.

    A window's percentiles are of the good calls that were due in it, its rate of those
    that were answered in it; calls of the warm-up that were still under way are in the first.
    """
    if not records.offered:
        return []
    return [
        {
            "at_s": window.at_s,
            "seconds": window.seconds,
            "answered": window.answered,
            "rate": window.answered / window.seconds,
            "count": window.latency.total,
            **_spread(window.latency, p50=50, p99=99),
            "histogram": window.latency.encode(),
        }
        for window in records.times.windows.windows(records.seconds)
    ]


def _spread(of: Histogram, **shares: float) -> dict[str, Any]:
    return {name: of.percentile_ms(share) for name, share in shares.items()}
