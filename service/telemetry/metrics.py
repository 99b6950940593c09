"""
What the server counts, as Prometheus metrics in a registry of its own.

Every label value comes from a closed set: routes, models that are served,
error codes, stages.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Literal

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from service.host.memory_limit import memory_limit
from service.inference.calls import Run
from service.telemetry.histogram import Histogram

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

STAGES: Final = ("queue", "assembly", "compute", "encode", "total")

_SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
_CALLS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SHARES: Final = (0.0, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.5)


class Metrics(Collector):
    """The server's metrics; one per application, so that tests share nothing."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        """Answered requests by route and status."""
        self.refusals: Counter[tuple[str, str]] = Counter()
        """Errors answered, by code and model; "" = none, or not known."""
        self.in_flight = 0
        self.unsent_answer_bytes = 0
        self.body_memory_bytes: Callable[[], int] = int
        """Returns what bodies hold; zero until somebody knows."""
        self.reader_memory_bytes: Callable[[], int] = int
        """Returns what the processes that decode large bodies hold."""
        self.ready = False
        self.served: list[tuple[str, str, str, str]] = []
        """Each model's name, version, precision and provider."""
        self.build: dict[str, str] = {}
        """What this process is made of, by label."""
        self._models: dict[str, ModelMetrics] = {}
        self._call_codes: tuple[str, ...] = ()
        self._memory_limit = memory_limit()
        self._registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._registry.register(self)

    def of_model(self, model: str) -> "ModelMetrics":
        """Return what a model's queue and its calls report to; at first all of it is 0."""
        if model not in self._models:
            self._models[model] = ModelMetrics()
            self.refusals.update({(code, model): 0 for code in self._call_codes})
        return self._models[model]

    def expect(
        self,
        requests: Iterable[tuple[str, str]],
        codes: Iterable[str],
        call_codes: Iterable[str],
    ) -> None:
        """
        Show these at 0 before the first of each: a counter that appears with its first
        event has no increase to Prometheus.

        `requests` are pairs of route and status; `call_codes` are those of errors of calls
        whose model is known, which each model has from its loading on.
        """
        self.requests.update(dict.fromkeys(requests, 0))
        self.refusals.update({(code, ""): 0 for code in codes})
        self._call_codes = tuple(call_codes)

    @property
    def runs(self) -> int:
        """How often an engine has run."""
        return sum(model.runs["calls"].count for model in self._models.values())

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Give all that was counted."""
        yield from self._of_server()
        yield from self._of_models()

    def _of_server(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "headwise_requests", "HTTP requests answered", labels=["route", "status"]
        )
        for labels, count in self.requests.items():
            requests.add_metric(labels, count)
        yield requests
        refusals = CounterMetricFamily(
            "headwise_refusals",
            "Requests answered with an error, by its code and the model, where it is known",
            labels=["code", "model"],
        )
        for labels, count in self.refusals.items():
            refusals.add_metric(labels, count)
        yield refusals
        yield GaugeMetricFamily(
            "headwise_requests_in_flight", "HTTP requests not yet answered", self.in_flight
        )
        yield GaugeMetricFamily(
            "headwise_unsent_answer_bytes",
            "Answers that are being computed or that their callers have not read yet, as FP32",
            self.unsent_answer_bytes,
        )
        yield GaugeMetricFamily(
            "headwise_body_memory_bytes",
            "Memory that bodies take while they are received, decoded and computed",
            self.body_memory_bytes(),
        )
        yield GaugeMetricFamily(
            "headwise_reader_memory_bytes",
            "Memory of the processes that decode large JSON bodies, which is not in process_*",
            self.reader_memory_bytes(),
        )
        yield GaugeMetricFamily("headwise_ready", "1 = ready for calls", self.ready)
        yield GaugeMetricFamily(
            "headwise_memory_limit_bytes",
            "Memory that the process may hold: its control group's limit, else the machine's",
            self._memory_limit,
        )
        build = GaugeMetricFamily(
            "headwise_build_info",
            "1, with the versions of the service, of Python and of ONNX Runtime, and the provider",
            labels=list(self.build),
        )
        build.add_metric(list(self.build.values()), 1)
        yield build
        info = GaugeMetricFamily(
            "headwise_model_info",
            "1 for each model that is served, with its version, precision and provider",
            labels=["model", "version", "precision", "provider"],
        )
        for served in self.served:
            info.add_metric(served, 1)
        yield info

    def _of_models(self) -> Iterator[Metric]:
        stages = HistogramMetricFamily(
            "headwise_stage_seconds",
            f"Time of one call in each stage: {', '.join(STAGES)}",
            labels=["stage", "model"],
        )
        runs = {
            "calls": _histogram("headwise_run_calls", "Calls that share one run"),
            "rows": _histogram("headwise_run_rows", "Sequences in one run"),
            "padding": _histogram(
                "headwise_run_padding_share", "Share of padding among the tokens of one run"
            ),
        }
        tokens = CounterMetricFamily(
            "headwise_tokens",
            "Queries and keys that the engine ran, by kind: content, padding",
            labels=["model", "kind"],
        )
        engine = CounterMetricFamily(
            "headwise_engine_seconds",
            "Time that runs took, batching and splitting included, summed over concurrent runs",
            labels=["model"],
        )
        cancelled = CounterMetricFamily(
            "headwise_cancelled",
            "Calls whose caller left or whose time passed, by where they were: queued, running",
            labels=["model", "where"],
        )
        queue = {
            "calls": _gauge("headwise_queue_calls", "Calls let in and not answered yet"),
            "tokens": _gauge("headwise_queue_tokens", "Their queries and keys"),
        }
        for name, model in self._models.items():
            for stage, times in model.stages.items():
                stages.add_metric([stage, name], times.buckets(), times.sum)
            for what, values in model.runs.items():
                runs[what].add_metric([name], values.buckets(), values.sum)
            for kind, count in model.tokens.items():
                tokens.add_metric([name, kind], count)
            engine.add_metric([name], model.engine_s)
            for where, count in model.cancelled.items():
                cancelled.add_metric([name, where], count)
            queue["calls"].add_metric([name], model.queue_calls)
            queue["tokens"].add_metric([name], model.queue_tokens)
        yield from (stages, *runs.values(), tokens, engine, cancelled, *queue.values())


class ModelMetrics:
    """One model's calls, queues and runs, of all its versions together."""

    def __init__(self) -> None:
        self.stages = {stage: Histogram(_SECONDS) for stage in STAGES}
        self.runs = {
            "calls": Histogram(_CALLS),
            "rows": Histogram(_CALLS),
            "padding": Histogram(_SHARES),
        }
        self.tokens = {"content": 0, "padding": 0}
        self.engine_s = 0.0
        self.cancelled = {"queued": 0, "running": 0}
        self.queue_calls = 0
        self.queue_tokens = 0

    def call(self, stages: Mapping[str, float]) -> None:
        """A call was answered: how long each stage took, in seconds."""
        for stage, seconds in stages.items():
            self.stages[stage].add(seconds)

    def queue(self) -> "QueueMetrics":
        """Return what one more queue of this model reports to: each version has its own."""
        return QueueMetrics(self)

    def on_run(self, run: Run) -> None:
        """The engine has run."""
        self.runs["calls"].add(run.calls)
        self.runs["rows"].add(run.rows)
        self.runs["padding"].add(1 - run.tokens / run.padded_tokens)
        self.tokens["content"] += run.tokens
        self.tokens["padding"] += run.padded_tokens - run.tokens
        self.engine_s += run.assembly_s + run.compute_s

    def on_drop(self, where: Literal["queued", "running"]) -> None:
        """A call's caller left, or its time limit passed, while it was there."""
        self.cancelled[where] += 1


class QueueMetrics:
    """One queue of a model; see `batcher.Observer`."""

    def __init__(self, model: ModelMetrics) -> None:
        self.on_run = model.on_run
        self.on_drop = model.on_drop
        self._model = model
        self._calls = self._tokens = 0

    def on_queue_change(self, calls: int, tokens: int) -> None:
        """So many calls and tokens are in this queue or its engine."""
        self._model.queue_calls += calls - self._calls
        self._model.queue_tokens += tokens - self._tokens
        self._calls, self._tokens = calls, tokens


def _histogram(name: str, documentation: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, documentation, labels=["model"])


def _gauge(name: str, documentation: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, labels=["model"])
