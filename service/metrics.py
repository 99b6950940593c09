"""
What the server counts, as Prometheus metrics in a registry of its own.

Every label value comes from a closed set: routes, models that are served,
error codes, stages.
"""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """The server's metrics; one per application, so that tests share nothing."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.requests = Counter(
            "headwise_requests_total",
            "HTTP requests answered",
            ["route", "status"],
            registry=self.registry,
        )
        self.refusals = Counter(
            "headwise_refusals_total",
            "HTTP requests answered with an error, by its code",
            ["code"],
            registry=self.registry,
        )
        self.stage_seconds = Histogram(
            "headwise_stage_seconds",
            "Time of one call in each stage: queue, compute, encode, total",
            ["stage", "model"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.queue_calls = Gauge(
            "headwise_queue_calls", "Calls waiting for the engine", registry=self.registry
        )
        self.in_flight = Gauge(
            "headwise_requests_in_flight", "HTTP requests not yet answered", registry=self.registry
        )
        self.ready = Gauge("headwise_ready", "1 = ready for calls", registry=self.registry)

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)
