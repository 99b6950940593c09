"""Every request is in flight from its beginning to its end, and counted and logged once."""

import asyncio
import json
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from service.api.fast_path import InferFastPath
from service.api.server import Server as Parts
from service.app import create_app
from service.codecs.chunks import Chunk
from service.transport.coalescing import WHOLE, Delivery
from service.transport.connection import MAX_HEAD_BYTES
from service.transport.exchange import CONNECTION
from service.transport.standard_headers import Headers
from tests.service.api.test_fast_path import connect, request
from tests.support.doubles import KeptAccessLog, quiet_server
from tests.support.layers import Layers
from tests.support.server import Server

INFER = "/v2/models/{name}/infer"

# Request heads that the application never sees

REFUSED_HEADS = {
    "slow": (b"GET /v2 HTTP/1.1\r\nHost: a\r\n", 408, "too_slow"),
    "none": (b"", 408, "too_slow"),
    "too large": (
        b"GET /v2 HTTP/1.1\r\nHost: a\r\nX-Long: " + b"a" * MAX_HEAD_BYTES,
        413,
        "too_large",
    ),
    "malformed": (b"GET /v2 HTTP/1.1\r\nno header\r\n\r\n", 400, "invalid_input"),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "invalid_input"),
    "without a host": (b"GET /v2 HTTP/1.1\r\n\r\n", 400, "invalid_input"),
    "CONNECT": (b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", 405, "method_not_allowed"),
}


@pytest.fixture(scope="module")
def strict(layers: Layers) -> Iterator[Server]:
    """Return a server that waits for a request head for half a second."""
    with Server(layers.repository, head_timeout_s=0.5) as running:
        yield running


def counted(server: Server, sample: str) -> float:
    """Return the value of a sample of the metrics; one that is not there counts 0."""
    text = server.get("/metrics").text
    found = re.search(rf"^{re.escape(sample)} (.*)$", text, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


def refused_heads_of(log: str) -> list[dict[str, Any]]:
    """Return the access-log lines of requests without a method."""
    lines = [json.loads(line) for line in log.splitlines()]
    return [line for line in lines if line["message"] == "request" and line["method"] is None]


@pytest.mark.parametrize("name", REFUSED_HEADS)
def test_request_head_that_is_refused_is_counted_and_logged_once(strict: Server, name: str) -> None:
    """As any other request: by route and status, by code, and with a line."""
    head, status, code = REFUSED_HEADS[name]
    requests = f'headwise_requests_total{{route="unmatched",status="{status}"}}'
    refusals = f'headwise_refusals_total{{code="{code}",model=""}}'
    before = counted(strict, requests), counted(strict, refusals)
    lines_before = len(refused_heads_of(strict.whole_log()))

    with connect(strict) as connection:
        connection.sendall(head)
        answer = connection.makefile("rb").read()

    body = answer.partition(b"\r\n\r\n")[2]
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert orjson.loads(body)["code"] == code
    assert counted(strict, requests) == before[0] + 1
    assert counted(strict, refusals) == before[1] + 1
    assert counted(strict, "headwise_requests_in_flight") == 1  # the one that reads the metrics
    [line] = refused_heads_of(strict.whole_log())[lines_before:]
    assert (line["route"], line["status"], line["code"]) == ("unmatched", status, code)
    assert line["answer_bytes"] == len(body)
    assert line["request_id"]


def test_request_head_that_is_refused_after_a_request_is_a_request_of_its_own(
    strict: Server,
) -> None:
    """Both have a line: the one that was answered, and the one that could not be read."""
    lines_before = len(refused_heads_of(strict.whole_log()))

    with connect(strict) as connection:
        connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: a\r\nX-Request-Id: before\r\n\r\nNO\r\n\r\n")
        answer = connection.makefile("rb").read()

    assert re.findall(rb"HTTP/1.1 (\d+) ", answer) == [b"200", b"400"]
    log = strict.whole_log()
    assert log.count('"request_id":"before"') == 1
    assert len(refused_heads_of(log)) == lines_before + 1


def test_connection_that_closes_within_a_request_head_is_no_request(strict: Server) -> None:
    """Nothing was asked and nothing is answered: health checks of load balancers do so."""
    lines_before = len(refused_heads_of(strict.whole_log()))

    with connect(strict) as connection:
        connection.sendall(b"GET /v2")
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read()

    assert answer == b""
    assert len(refused_heads_of(strict.whole_log())) == lines_before


# Each way a request can end, on each path


@dataclass
class FakeConnection:
    """The connection of one request, of whose answer `delivered` is what becomes."""

    delivered: Delivery = WHOLE
    is_broken: bool = False
    """Writing an answer fails."""
    has_whole_body: bool = True
    is_lost: bool = False
    on_left: list[Callable[[], None]] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)

    def answer(self, status: int, headers: Headers, pieces: Iterable[Chunk]) -> None:
        """Take the answer of the fast path."""
        if self.is_broken:
            raise RuntimeError("broken")
        self.answered.append(status)

    def delivery(self) -> Delivery:
        """Return what became of the answer."""
        return self.delivered

    def when_delivered(self, tell: Callable[[Delivery], None]) -> None:
        """Say at once what became of the answer."""
        tell(self.delivered)

    def leave(self) -> None:
        """Let the caller leave."""
        self.is_lost = True
        for notify in list(self.on_left):
            notify()


@pytest.fixture(scope="module")
def repository(layers: Layers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository that is soon loaded."""
    path = tmp_path_factory.mktemp("one") / "repository"
    shutil.copytree(layers.repository / "tiny", path / "tiny")
    return path


@dataclass(frozen=True)
class Ending:
    """How a request goes, and what is counted and logged then."""

    status: int
    code: str | None = None
    headers: tuple[str, ...] = ()
    connection: Callable[[], FakeConnection] = FakeConnection
    leaves: bool = False
    fails: bool = False
    """The engine raises what nobody expects."""


ENDINGS = {
    "answered": Ending(200),
    "refused": Ending(504, "deadline_exceeded", headers=("X-Request-Timeout-S: 0.000000001",)),
    "left while computing": Ending(499, leaves=True),
    "left without its answer": Ending(
        499, connection=lambda: FakeConnection(Delivery(10, is_stalled=False))
    ),
    "stalled": Ending(
        499, "client_stalled", connection=lambda: FakeConnection(Delivery(10, is_stalled=True))
    ),
    "failed": Ending(500, "internal", fails=True),
    "failed and left without its answer": Ending(
        499, connection=lambda: FakeConnection(Delivery(10, is_stalled=False)), fails=True
    ),
    "broken off": Ending(200, connection=lambda: FakeConnection(is_broken=True)),
}


async def on_fast_path(server: Parts, data: bytes, ending: Ending) -> None:
    """Let the fast path take a request, and return when it is over."""
    fast_path, connection = InferFastPath(server), ending.connection()
    pending = fast_path.take(data, connection)
    assert pending is not None
    assert server.lifecycle.in_flight == 1
    if ending.leaves:
        fast_path.leave(pending)
    assert await server.lifecycle.stop(grace_s=0, drain_s=60)


async def on_asgi_path(server: Parts, data: bytes, ending: Ending) -> None:
    """Let the application answer a request, and return when it is over."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    method, path, _ = first.split(" ")
    pairs = (line.split(": ", 1) for line in lines)
    connection = ending.connection()

    async def receive() -> dict[str, Any]:
        if ending.leaves:
            asyncio.get_running_loop().call_soon(connection.leave)
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        if connection.is_broken:
            raise RuntimeError("broken")

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in pairs],
        "extensions": {CONNECTION: connection},
    }
    app = create_app(server, refuse=lambda _: None)
    async with asyncio.timeout(60):
        await app(scope, receive, send)


PATHS = {"fast path": on_fast_path, "ASGI path": on_asgi_path}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ENDINGS)
def test_request_is_in_flight_until_its_one_line_whatever_becomes_of_it(
    repository: Path, monkeypatch: pytest.MonkeyPatch, name: str, path: str
) -> None:
    """Else a server that drains would wait for it, or count it twice."""
    ending, log = ENDINGS[name], KeptAccessLog()

    async def scenario() -> Parts:
        server = quiet_server(repository, access_log=log)
        if ending.fails:
            engine = server.models.get("tiny").engine
            monkeypatch.setattr(engine, "run", lambda *_, **__: 1 / 0)
        await PATHS[path](server, request(*ending.headers), ending)
        await server.models.close()
        await asyncio.sleep(0)
        server.offload.close()
        return server

    server = asyncio.run(scenario())

    [record] = log.records
    assert (record.route, record.status, record.code) == (INFER, ending.status, ending.code)
    assert +server.metrics.requests == {(INFER, str(ending.status)): 1}
    assert +server.metrics.refusals == ({} if ending.code is None else {(ending.code, "tiny"): 1})
    assert server.lifecycle.in_flight == 0
    assert server.metrics.unsent_answer_bytes == 0
    assert server.metrics.of_model("tiny").queue_calls == 0
