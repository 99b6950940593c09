"""
What the server counts, as Prometheus metrics in a registry of its own.

Every label value comes from a closed set: routes, models that are served,
error codes, stages.
"""

from collections.abc import Mapping
from functools import partial
from typing import Final, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from service.calls import Run

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

_SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
_CALLS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SHARES: Final = (0.0, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.5)


class Metrics:
    """The server's metrics; one per application, so that tests share nothing."""

    def __init__(self) -> None:
        self._models: dict[str, ModelMetrics] = {}
        # A second series for each, which nobody asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter(
            "headwise_requests_total", "HTTP requests answered", ["route", "status"]
        )
        self.refusals = counter(
            "headwise_refusals_total",
            "Requests answered with an error, by its code",
            ["code"],
        )
        self.cancelled = counter(
            "headwise_cancelled_total",
            "Calls whose caller left or whose time passed, by where they were: queued, running",
            ["model", "where"],
        )
        self.stage_seconds = histogram(
            "headwise_stage_seconds",
            "Time of one call in each stage: queue, assembly, compute, encode, total",
            ["stage", "model"],
            buckets=_SECONDS,
        )
        self.run_calls = histogram(
            "headwise_run_calls", "Calls joined in one run", ["model"], buckets=_CALLS
        )
        self.run_rows = histogram(
            "headwise_run_rows", "Sequences in one run", ["model"], buckets=_CALLS
        )
        self.run_padding = histogram(
            "headwise_run_padding_share",
            "Share of padding among the tokens of one run",
            ["model"],
            buckets=_SHARES,
        )
        self.queue_calls = gauge(
            "headwise_queue_calls", "Calls let in and not answered yet", ["model"]
        )
        self.queue_tokens = gauge("headwise_queue_tokens", "Their queries and keys", ["model"])
        self.in_flight = gauge("headwise_requests_in_flight", "HTTP requests not yet answered")
        self.ready = gauge("headwise_ready", "1 = ready for calls")
        self.model_info = gauge(
            "headwise_model_info",
            "1 for each model that is served, with its version, precision and provider",
            ["model", "version", "precision", "provider"],
        )

    def of_model(self, model: str) -> "ModelMetrics":
        """Return what a model's queue and its calls report to."""
        if model not in self._models:
            self._models[model] = ModelMetrics(self, model)
        return self._models[model]

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)


class ModelMetrics:
    """One model's calls, queue and runs; see `batcher.Observer`."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._queue_calls = metrics.queue_calls.labels(model)
        self._queue_tokens = metrics.queue_tokens.labels(model)
        self._run_calls = metrics.run_calls.labels(model)
        self._run_rows = metrics.run_rows.labels(model)
        self._run_padding = metrics.run_padding.labels(model)
        self._cancelled = {
            where: metrics.cancelled.labels(model, where) for where in ("queued", "running")
        }
        self._stages = {
            stage: metrics.stage_seconds.labels(stage, model)
            for stage in ("queue", "assembly", "compute", "encode", "total")
        }

    def call(self, stages: Mapping[str, float]) -> None:
        """A call was answered: how long each stage took, in seconds."""
        for stage, seconds in stages.items():
            self._stages[stage].observe(seconds)

    def queue(self, calls: int, tokens: int) -> None:
        """So many calls and tokens are in the queue or in the engine."""
        self._queue_calls.set(calls)
        self._queue_tokens.set(tokens)

    def run(self, run: Run) -> None:
        """The engine has run."""
        self._run_calls.observe(run.calls)
        self._run_rows.observe(run.rows)
        self._run_padding.observe(1 - run.tokens / run.padded_tokens)

    def dropped(self, where: Literal["queued", "running"]) -> None:
        """A call's caller left, or its time limit passed, while it was there."""
        self._cancelled[where].inc()
