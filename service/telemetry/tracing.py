"""
One OpenTelemetry span for each answered call, where the setting asks for it.

The packages are those of the extra `otel`; they are imported only then.  Where
spans go is OpenTelemetry's own business: `OTEL_EXPORTER_OTLP_ENDPOINT` and its kin.
"""

import time
from collections.abc import Mapping
from typing import Final, Protocol

from service import __version__
from service.errors import SettingsInvalid

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
        """Send what has not been sent."""
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
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation import tracecontext
        except ImportError as error:
            raise SettingsInvalid(
                "tracing: needs the OpenTelemetry packages: pip install 'headwise[otel]'"
            ) from error
        own = {"service.name": "headwise", "service.version": __version__}
        self._provider = TracerProvider(resource=Resource.create(own))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
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
        self._provider.shutdown()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
