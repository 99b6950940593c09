"""OpenTelemetry: a real server's spans, as a real collector would receive them."""

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.support.layers import Layers
from tests.support.server import ROOT, Server, until

TRACE = "0af7651916cd43dd8448eb211c80319c"
GOOD: dict[str, Any] = {"model": "tiny", "embeddings": [[0.5] * 8]}

needs_otel = pytest.mark.skipif(
    find_spec("opentelemetry.sdk") is None if find_spec("opentelemetry") else True,
    reason="the extra otel is not installed here",
)


class Collector(http.server.ThreadingHTTPServer):
    """Takes spans over OTLP/HTTP on loopback."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Collector)
        assert self.path == "/v1/traces"
        server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
        """Say nothing."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Return a running collector that servers of this test will send to."""
    with Collector() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{running.server_address[1]}"
        )
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        yield running
        running.shutdown()


@needs_otel
def test_call_is_one_span_with_a_child_a_stage_in_the_callers_trace(
    layers: Layers, collector: Collector
) -> None:
    """The caller finds the call, and where its time went, in its own trace."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
    )

    with Server(layers.repository, tracing="true") as server:
        server.post(
            "/v1/attention", json=GOOD, headers={"traceparent": f"00-{TRACE}-{'1' * 16}-01"}
        )
    until(lambda: bool(collector.bodies))

    request = ExportTraceServiceRequest.FromString(collector.bodies[0])
    [resource] = request.resource_spans
    spans = {span.name: span for span in resource.scope_spans[0].spans}
    assert set(spans) == {"attention", "queue", "assembly", "compute", "encode"}
    whole = spans.pop("attention")
    assert whole.trace_id.hex() == TRACE
    assert whole.parent_span_id.hex() == "1" * 16
    assert whole.attributes[0].value.string_value == "tiny"
    for span in spans.values():
        assert span.parent_span_id == whole.span_id
        assert whole.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= whole.end_time_unix_nano
    assert any(
        attribute.key == "service.name" and attribute.value.string_value == "headwise"
        for attribute in resource.resource.attributes
    )


def test_tracing_without_its_packages_refuses_the_start(layers: Layers) -> None:
    """Who asks for traces is never left without them silently."""
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None;"
        "from service.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    argv = ["--repository", str(layers.repository), "--port", "0", "--tracing", "true"]

    ended = subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert ended.returncode == 2
    assert "tracing: needs the OpenTelemetry packages: pip install 'headwise[otel]'" in ended.stderr
