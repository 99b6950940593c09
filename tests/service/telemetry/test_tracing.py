"""OpenTelemetry: a real server's spans, as a real collector would receive them."""

import http.server
import json
import signal
import socket
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

    def __init__(self, port: int = 0) -> None:
        self.bodies: list[bytes] = []
        super().__init__(("127.0.0.1", port), _Handler)


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


@needs_otel
@pytest.mark.fault("A8")
def test_collector_that_refuses_is_one_warning_and_one_line_when_it_is_back(
    layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans are a by-product: without a collector calls are answered, and the log stays short."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # nobody listens there once it is closed
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")

    with Server(layers.repository, tracing="true") as server:
        assert server.post("/v1/attention", json=GOOD).status_code == 200
        server.wait_for_log('"spans are not sent"')
        with Collector(port) as collector:
            threading.Thread(target=collector.serve_forever, daemon=True).start()

            def is_back() -> bool:
                assert server.post("/v1/attention", json=GOOD).status_code == 200
                return "spans are sent again" in server.log()

            until(is_back)
            end_of(server)
            collector.shutdown()
        told = other_lines(server)

    assert [line["message"] for line in told] == ["spans are not sent", "spans are sent again"]
    assert told[0]["level"] == "warning"
    assert str(port) in told[0]["reason"]


@needs_otel
@pytest.mark.fault("A8")
def test_collector_that_never_answers_costs_one_warning_and_no_forced_end(
    layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is bounded, and the end does not wait for what nobody takes."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        with Server(layers.repository, tracing="true") as server:
            answers = {server.post("/v1/attention", json=GOOD).status_code for _ in range(50)}
            server.wait_for_log('"spans are not sent"')
            end_of(server)

    assert answers == {200}
    assert [line["message"] for line in other_lines(server)] == ["spans are not sent"]


@needs_otel
@pytest.mark.fault("A8")
def test_last_spans_that_are_not_taken_are_told_at_the_end(
    layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that ends before anything failed says what is lost."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        with Server(layers.repository, tracing="true") as server:
            assert server.post("/v1/attention", json=GOOD).status_code == 200
            end_of(server)

    [line] = other_lines(server)
    assert line["message"] == "spans are not sent"
    assert line["reason"] == "the last spans were not taken within 2 s"


def end_of(server: Server) -> None:
    """Stop the server, and wait for its clean end."""
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait() == 0


def other_lines(server: Server) -> list[dict[str, Any]]:
    """Return the log but for requests, and for start and stop; a forced end is among them."""
    usual = {"starting", "loaded", "ready", "stopping", "stopped", "request"}
    lines = [json.loads(line) for line in server.log().splitlines()]
    return [line for line in lines if line["message"] not in usual]


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
