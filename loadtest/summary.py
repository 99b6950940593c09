"""From what was seen of every call to the figures of a load, as the raw file has them."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from hdrh.histogram import HdrHistogram

from loadtest.records import FAILURES, Records

PERCENTILES: Final = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99.9": 99.9}

_MOST_US: Final = 3_600_000_000
"""An hour: no call may take longer."""
_DIGITS: Final = 3
_STAGE = re.compile(rb"([A-Za-z][\w-]{0,31});dur=(\d+(?:\.\d+)?)")
_LEAST_WINDOWS, _MOST_WINDOWS = 5, 60

Floats = npt.NDArray[np.float64]


def histogram_of(latencies_s: Floats) -> HdrHistogram:
    """Return an HDR histogram of times, in microseconds to three digits."""
    histogram = HdrHistogram(1, _MOST_US, _DIGITS)
    whole = np.clip(np.rint(latencies_s * 1e6), 1, _MOST_US).astype(np.int64)
    for value, count in zip(*np.unique(whole, return_counts=True), strict=True):
        histogram.record_value(int(value), int(count))
    return histogram


def summary(histogram: HdrHistogram) -> dict[str, Any]:
    """Return count and, in milliseconds, mean, percentiles and maximum; None where count is 0."""
    count = int(histogram.get_total_count())
    if not count:
        return {"count": 0, "mean": None, **dict.fromkeys(PERCENTILES), "max": None}
    told = {name: histogram.get_value_at_percentile(at) / 1e3 for name, at in PERCENTILES.items()}
    return {
        "count": count,
        "mean": histogram.get_mean_value() / 1e3,
        **told,
        "max": histogram.get_max_value() / 1e3,
    }


def figures_of(records: Records) -> dict[str, Any]:
    """Return the part of a point that is counted and measured."""
    outcome = np.array(records.outcome)
    statuses = Counter(str(status) for status in outcome[outcome > 0].tolist())
    failures = Counter(FAILURES[reason] for reason in outcome[outcome < 0].tolist())
    latency = histogram_of(records.latencies_s())
    return {
        "warmup_s": records.warmup_s,
        "seconds": records.seconds,
        "offered": records.offered,
        "good_per_s": records.rate,
        "latency_ms": summary(latency),
        "sent_ms": summary(histogram_of(records.latencies_s(since="sent"))),
        "histogram": latency.encode().decode(),
        "statuses": dict(sorted(statuses.items())),
        "codes": dict(sorted(records.codes.items())),
        "failures": dict(sorted(failures.items())),
        "stages_ms": stages(records.timings),
        "windows": windows(records),
        "lag_ms": _spread(np.array(records.lag) * 1e3, p50=50, p99=99, max=100),
        "cpu_share": records.cpu_share,
        "waited": records.waited,
        "checked": records.checked,
        "wrong": records.wrong,
    }


def stages(timings: Iterable[bytes]) -> dict[str, dict[str, Any]] | None:
    """Return the server's own figures by stage, of its `Server-Timing` headers; None without."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for timing in timings:
        for name, duration in _STAGE.findall(timing):
            found[name.decode()].append(float(duration))
    told = {}
    for name, values in found.items():
        of_stage = np.array(values)
        told[name] = {**_spread(of_stage, p50=50, p99=99), "mean": float(of_stage.mean())}
    return told or None


def windows(records: Records) -> list[dict[str, Any]]:
    """
    Return how the load went over time: by windows of a second, but 5 at least and 60 at most.

    A window's percentiles are of the good calls that were due in it, its rate of those
    that were answered in it.
    """
    if records.seconds <= 0 or not records.offered:
        return []
    count = min(_MOST_WINDOWS, max(_LEAST_WINDOWS, int(records.seconds)))
    width = records.seconds / count
    good = records.is_good()
    due = (np.array(records.due)[good] - records.warmup_s) / width
    done = (np.array(records.done)[good] - records.warmup_s) / width
    latency = records.latencies_s() * 1e3
    found = []
    for number in range(count):
        own = latency[(due >= number) & (due < number + 1)]
        told = _spread(own, p50=50, p99=99)
        answered = int(((done >= number) & (done < number + 1)).sum())
        found.append(
            {"at_s": number * width, "rate": answered / width, "count": int(own.size), **told}
        )
    return found


def _spread(values: Floats, **shares: float) -> dict[str, Any]:
    if not values.size:
        return dict.fromkeys(shares)
    found = np.percentile(values, list(shares.values()))
    return dict(zip(shares, map(float, found), strict=True))
