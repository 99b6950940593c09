"""Raw files of the load tester, made up from known distributions, to test its reports on."""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
from hdrh.histogram import HdrHistogram

Raw = dict[str, Any]

SERVER_MS = 2.0
"""What a call takes in the made-up server while nobody waits."""


def point(
    latencies_ms: npt.NDArray[np.float64],
    *,
    rate: float | None = 100.0,
    clients: int | None = None,
    rows: str = "1",
    length: str = "8",
    seconds: float = 10.0,
    refused: int = 0,
    lost: int = 0,
    **changed: Any,
) -> Raw:
    """Return a point with these latencies of good answers; `changed` replaces its fields."""
    model = "closed" if rate is None else "open"
    form, weights, mask = (
        changed.pop(name, default)
        for name, default in (("format", "binary"), ("weights", "off"), ("mask", "none"))
    )
    load = f"{rate:g}/s" if rate is not None else f"{clients} clients"
    good = len(latencies_ms)
    stages = np.minimum(latencies_ms, SERVER_MS)
    made: Raw = {
        "id": f"{form} {rows}x{length} weights={weights} {load}",
        "model": model,
        "arrivals": "poisson" if rate is not None else None,
        "rate": rate,
        "clients": clients,
        "work": {
            "rows": rows,
            "length": length,
            "weights": weights,
            "mask": mask,
            "format": form,
        },
        "warmup_s": 1.0,
        "seconds": seconds,
        "offered": good + refused + lost,
        "latency_ms": latency(latencies_ms),
        "sent_ms": latency(latencies_ms * 0.98),
        "histogram": histogram(latencies_ms),
        "statuses": {"200": good} | ({"429": refused} if refused else {}),
        "codes": {"queue_full": refused} if refused else {},
        "failures": {"connection lost": lost} if lost else {},
        "stages_ms": {
            "queue": stage((latencies_ms - stages) * 0.8),
            "assembly": stage(stages * 0.05),
            "compute": stage(stages * 0.65),
            "encode": stage(stages * 0.1),
            "total": stage(stages * 0.8 + (latencies_ms - stages) * 0.8),
        },
        "decode_ms": stage(latencies_ms * 0.01),
        "windows": windows(latencies_ms, seconds),
        "lag_ms": {"p50": 0.02, "p99": 0.31, "max": 1.4},
        "cpu_share": 0.21,
        "checked": 0,
        "wrong": 0,
        "warnings": [],
    }
    return made | changed


def latency(values_ms: npt.NDArray[np.float64]) -> Raw:
    """Return the figures of latencies."""
    names = ("p50", "p90", "p95", "p99", "p99.9")
    if not len(values_ms):
        return {"count": 0, "mean": None, "max": None} | dict.fromkeys(names)
    found = np.percentile(values_ms, (50, 90, 95, 99, 99.9), method="inverted_cdf")
    return {
        "count": len(values_ms),
        "mean": float(values_ms.mean()),
        **dict(zip(names, map(float, found), strict=True)),
        "max": float(values_ms.max()),
    }


def stage(values_ms: npt.NDArray[np.float64]) -> Raw:
    """Return the figures of a stage."""
    if not len(values_ms):
        return {"p50": None, "p99": None, "mean": None}
    p50, p99 = np.percentile(values_ms, (50, 99))
    return {"p50": float(p50), "p99": float(p99), "mean": float(values_ms.mean())}


def windows(values_ms: npt.NDArray[np.float64], seconds: float) -> list[Raw]:
    """Return what ten windows of equal length saw."""
    return [
        {
            "at_s": i * seconds / 10,
            "rate": len(part) / seconds * 10,
            "p50": float(np.percentile(part, 50)),
            "p99": float(np.percentile(part, 99)),
        }
        for i, part in enumerate(np.array_split(values_ms, 10))
        if len(part)
    ]


def histogram(values_ms: npt.NDArray[np.float64]) -> str:
    """Return latencies as the raw file keeps them."""
    kept = HdrHistogram(1, 3_600_000_000, 3)
    for value in values_ms:
        kept.record_value(round(value * 1e3))
    return str(kept.encode().decode())


def queueing(
    rate: float, seconds: float, seed: int = 0, service_ms: float = SERVER_MS
) -> npt.NDArray[np.float64]:
    """Return latencies at one server with a queue: Poisson arrivals, gamma service times."""
    random = np.random.default_rng(seed)
    amount = max(1, round(rate * seconds))
    arrivals = np.cumsum(random.exponential(1e3 / rate, amount))
    served = random.gamma(16, service_ms / 16, amount)
    free, latencies = 0.0, np.empty(amount)
    for i, (arrival, takes) in enumerate(zip(arrivals, served, strict=True)):
        free = max(free, arrival) + takes
        latencies[i] = free - arrival
    return latencies + random.gamma(4, 0.05, amount)


def sweep(*rates: float, seconds: float = 10.0, **changed: Any) -> list[Raw]:
    """Return points over rates; above what the server can, a full queue refuses."""
    service_ms = changed.pop("service_ms", SERVER_MS)
    ceiling = 1e3 / service_ms
    made = []
    for i, rate in enumerate(rates):
        taken = min(rate, 0.985 * ceiling)
        values = queueing(taken, seconds, seed=i, service_ms=service_ms)
        refused = round((rate - taken) * seconds)
        made.append(point(values, rate=rate, seconds=seconds, refused=refused, **changed))
    return made


def shapes(rows: tuple[int, ...], lengths: tuple[int, ...], **changed: Any) -> list[Raw]:
    """Return points over batch and length at one low rate."""
    return [
        point(
            queueing(20, 10, seed=b * s, service_ms=1.5 + 0.02 * b * s),
            rate=20.0,
            rows=str(b),
            length=str(s),
            **changed,
        )
        for b, s in itertools.product(rows, lengths)
    ]


def raw(points: list[Raw], **changed: Any) -> Raw:
    """Return a whole raw file's content."""
    made: Raw = {
        "format": 1,
        "tool": "headwise-load 0.1.0",
        "command": [
            *["python", "-m", "loadtest", "http://127.0.0.1:8000"],
            *["--rate", "100,200,400", "--shape", "1x8", "--slo", "p99<20ms"],
        ],
        "started": "2026-11-30T10:00:00+00:00",
        "ended": "2026-11-30T10:04:00+00:00",
        "interrupted": False,
        "client": {
            "cpu": "AMD EPYC 7B13",
            "cores": 2,
            "memory_gb": 7.8,
            "python": "3.11.7",
            "kernel": "6.1.0-28-amd64",
            "commit": "0123abc",
        },
        "server": {
            "url": "http://127.0.0.1:8000",
            "name": "headwise",
            "version": "0.1.0",
            "model": "mha",
            "details": {
                "layer": {"embed_dim": 768, "num_heads": 12},
                "provider": "cpu",
                "precision": "fp32",
                "limits": {"max_rows": 256, "max_length": 4096},
            },
        },
        "generator": {"null_calls_per_s": 8200.0},
        "slo": "p99<20ms",
        "capacity": None,
        "points": points,
    }
    return made | changed
