"""
One OpenTelemetry span for each answered call, where the setting asks for it.

The packages are those of the extra `otel`; they are imported only then.  Where
spans go is OpenTelemetry's own business: `OTEL_EXPORTER_OTLP_ENDPOINT` and its kin.
They wait in a queue of bounded length and are sent by a thread of the SDK's own; one
that finds the queue full is dropped.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from service import __version__
from service.errors import SettingsInvalid
from service.logs import event

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

CLOSE_S: Final = 2.0
"""How long the end of the process waits for the last spans to be sent."""

_SDK: Final = "opentelemetry.sdk"
"""The logger that tells of a full queue."""

_EXPORTER: Final = "opentelemetry.exporter"
"""The logger that tells of failed requests to the collector."""

CONTEXT_HEADERS: Final = ("traceparent", "tracestate")
"""All that a span takes from its request: https://www.w3.org/TR/trace-context."""


class Tracing(Protocol):
    """Where answered calls are told."""

    def call(self, model: str, stages: Mapping[str, float], headers: Mapping[str, str]) -> None:
        """
        Tell one call: its stages in seconds, `total` among them.

        Of the request's headers, those of the trace's context suffice.
        """
        ...

    def close(self) -> None:
        """Send what has not been sent, as far as that takes at most `CLOSE_S`; blocks."""
        ...


class NoTracing:
    """Tells nobody."""

    def call(self, model: str, stages: Mapping[str, float], headers: Mapping[str, str]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class OpenTelemetry:
    """
    Spans sent by OTLP over HTTP.

    A call's span has one child a stage, laid end to end up to the answer; what
    is left at the front is reading and decoding.  A `traceparent` is honoured.

    Raises:
        SettingsInvalid: the packages are not installed.
    """

    def __init__(self) -> None:
        self._collector = _CollectorState()
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation import tracecontext

            exporter = _exporter(self._collector)
        except ImportError as error:
            raise SettingsInvalid(
                "tracing: needs the OpenTelemetry packages: pip install 'headwise[otel]'"
            ) from error
        own = {"service.name": "headwise", "service.version": __version__}
        # At the interpreter's exit the SDK would wait up to 30 s: `close` has a limit.
        self._provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        for name in (_SDK, _EXPORTER):
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [self._collector], False
        self._tracer = self._provider.get_tracer("headwise", __version__)
        self._parent_of = tracecontext.TraceContextTextMapPropagator().extract
        self._in_context = trace.set_span_in_context
        self._kind = trace.SpanKind.SERVER

    def call(self, model: str, stages: Mapping[str, float], headers: Mapping[str, str]) -> None:
        """See `Tracing.call`."""
        end = time.time_ns()
        span = self._tracer.start_span(
            "attention",
            context=self._parent_of(dict(headers)),
            kind=self._kind,
            attributes={"headwise.model": model},
            start_time=end - _ns(stages["total"]),
        )
        inside, cursor = self._in_context(span), end
        for stage in ("encode", "compute", "assembly", "queue"):
            start = cursor - _ns(stages[stage])
            child = self._tracer.start_span(stage, context=inside, start_time=start)
            child.end(cursor)
            cursor = start
        span.end(end)

    def close(self) -> None:
        """See `Tracing.close`."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(CLOSE_S)
        if sending.is_alive():
            self._collector.fails(f"the last spans were not taken within {CLOSE_S:g} s")


class _CollectorState(logging.Handler):
    """
    Whether the collector takes spans; each change is one line of the log.

    As a handler it receives what OpenTelemetry's packages log, several lines for each
    request that fails.  A queue that was full while the collector took spans is logged
    once in the life of the process: under more load than it takes, that goes on.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._changing = threading.Lock()
        self._is_failing = False
        self._has_overflowed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Take note of what went wrong; called under the handler's lock."""
        if record.name.startswith(_SDK):
            if self._has_overflowed:
                return
            self._has_overflowed = True
        self.fails(record.getMessage())

    def fails(self, reason: str) -> None:
        """Log that spans are lost, unless that was logged since the collector last took some."""
        with self._changing:
            if not self._is_failing:
                self._is_failing = True
                event("spans are not sent", level=logging.WARNING, reason=reason)

    def works(self) -> None:
        """Log that spans are sent again, if they were not."""
        with self._changing:
            if self._is_failing:
                self._is_failing = False
                event("spans are sent again")


def _exporter(collector: _CollectorState) -> "SpanExporter":
    """
    Return what sends spans by OTLP over HTTP, and tells `collector` of each success.

    Raises:
        ImportError: the packages are not installed.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    class Exporter(OTLPSpanExporter):
        def export(self, spans: "Sequence[ReadableSpan]") -> SpanExportResult:
            result = super().export(spans)
            if result is SpanExportResult.SUCCESS:
                collector.works()
            return result

    return Exporter()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
