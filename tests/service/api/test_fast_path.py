"""The fast path: who goes it, and that nobody can tell it from the ASGI path."""

import asyncio
import gc
import gzip
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from loadtest import oip
from service.api.api_keys import ApiKeys
from service.api.fast_path import InferFastPath, PendingCall
from service.codecs.chunks import Chunk
from service.inference.calls import Answer, Call
from service.inference.queued_call import QueuedCall
from service.transport.coalescing import Delivery
from service.transport.standard_headers import Headers
from tests.support.doubles import quiet_server
from tests.support.layers import Layers
from tests.support.server import Server, until

SAME_EACH_TIME = {"date", "server-timing", "x-request-id", "connection"}
"""Headers in which two answers to one request may differ."""


def request(
    *headers: str,
    path: str = "/v2/models/tiny/infer",
    method: str = "POST",
    rows: int = 1,
    length: int = 2,
    wire: str = "binary",
    version: str = "HTTP/1.1",
    body: Callable[[bytes], bytes] = lambda body: body,
    **more: Any,
) -> bytes:
    """Return a whole request about a tensor of ascending numbers."""
    numbers = np.arange(rows * length * 8, dtype="<f4") / 100
    entry: dict[str, Any] = {
        "name": "embeddings",
        "datatype": "FP32",
        "shape": [rows, length, 8],
    }
    lines = list(headers)
    if wire == "binary":
        entry["parameters"] = {"binary_data_size": numbers.nbytes}
        document = {"inputs": [entry], "parameters": {"binary_data_output": True}} | more
        header = orjson.dumps(document)
        content = header + numbers.tobytes()
        lines.append(f"Inference-Header-Content-Length: {len(header)}")
    else:
        entry["data"] = numbers.tolist()
        content = orjson.dumps({"inputs": [entry]} | more)
    content = body(content)
    head = [f"{method} {path} {version}", "Host: a", *lines, f"Content-Length: {len(content)}"]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + content


@dataclass
class Caller:
    """A connection that keeps what it was sent."""

    answers: list[tuple[int, dict[bytes, bytes], bytes]] = field(default_factory=list)
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self, status: int, headers: Headers, pieces: Iterable[Chunk]) -> None:
        """Keep it."""
        self.answers.append((status, dict(headers), b"".join(pieces)))
        self.heard.set()

    def when_delivered(self, tell: Callable[[Delivery], None]) -> None:
        """Take everything at once."""
        tell(Delivery(0, is_stalled=False))


@pytest.fixture(scope="module")
def repository(layers: Layers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository that is soon loaded."""
    path = tmp_path_factory.mktemp("one") / "repository"
    shutil.copytree(layers.repository / "tiny", path / "tiny")
    return path


def outcome(repository: Path, data: bytes, **settings: Any) -> list[tuple[int, Any, bytes]] | None:
    """Return what was answered on the fast path; None = it did not take the request."""

    async def scenario() -> list[tuple[int, Any, bytes]] | None:
        server = quiet_server(repository, **settings)
        fast_path = InferFastPath(server)
        caller = Caller()
        taken = fast_path.take(data, caller)
        assert server.lifecycle.in_flight == (taken is not None)
        await server.models.close()
        await asyncio.sleep(0)
        assert server.lifecycle.in_flight == 0
        assert server.metrics.of_model("tiny").queue_calls == 0
        assert (taken is None) == (not caller.answers)
        return caller.answers if taken is not None else None

    return asyncio.run(scenario())


USUAL = {
    "binary": request(),
    "JSON": request(wire="json"),
    "rows": request(rows=3, length=5),
    "weights": request(path="/v2/models/tiny-weights/infer"),
    "version": request(path="/v2/models/tiny/versions/1/infer"),
    "id": request(id="an id"),
    "long id": request(id="x" * 500),
    "timeout": request("X-Request-Timeout-S: 5"),
    "heads": request(
        path="/v2/models/tiny-weights/infer",
        parameters={"heads": "1", "binary_data_output": True},
    ),
    "causal": request(parameters={"causal": True, "priority": 3}),
    "own id": request("X-Request-Id: mine"),
    "trace": request("traceparent: 00-" + "a" * 32 + "-" + "b" * 16 + "-01"),
    "odd case": request("x-OTHER: 1"),
}


@pytest.mark.parametrize("name", USUAL)
def test_usual_call_is_taken_and_answered_once(repository: Path, name: str) -> None:
    """Its caller hears one answer, of the length that is told."""
    answers = outcome(repository, USUAL[name])

    assert answers is not None
    [(status, headers, body)] = answers
    assert status == 200
    assert int(headers[b"content-length"]) == len(body)
    assert re.search(rb"queue;dur=.*total;dur=", headers[b"server-timing"])


UNUSUAL = {
    "another endpoint": request(path="/v1/attention"),
    "another verb": request(method="PUT"),
    "a query": request(path="/v2/models/tiny/infer?a=1"),
    "an unknown model": request(path="/v2/models/nope/infer"),
    "another version": request(path="/v2/models/tiny/versions/9/infer"),
    "compressed": request("Content-Encoding: gzip", body=gzip.compress),
    "unknown encoding": request("Content-Encoding: br"),
    "wrong time limit": request("X-Request-Timeout-S: soon"),
    "expects": request("Expect: 100-continue"),
    "closes": request("Connection: close"),
    "not whole": request()[:-1],
    "more than one": request() * 2,
    "no head": b"POST /v2",
    "nothing": b"",
    "HTTP/1.0": request(version="HTTP/1.0"),
    "no JSON": request(wire="json", body=lambda body: b"{" + body),
    "too short": request(body=lambda body: body[:-4]),
    "shared memory": request(
        outputs=[
            {
                "name": "output",
                "parameters": {
                    "shared_memory_region": "r",
                    "shared_memory_byte_size": 64,
                },
            }
        ]
    ),
    "much": request(rows=64, length=2200),
    "much of an answer": request(path="/v2/models/tiny-weights/infer", length=800),
    "much of a JSON answer": request(length=3000, parameters={}),
    "a long head": request(f"X-Long: {'x' * 9000}"),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_not_usual_is_not_taken(repository: Path, name: str) -> None:
    """It goes the ASGI path, as if nobody had looked at it."""
    assert outcome(repository, UNUSUAL[name]) is None


def test_compressed_answers_take_the_asgi_path(repository: Path) -> None:
    """Where they are switched on and asked for."""
    data = request("Accept-Encoding: gzip")

    assert outcome(repository, data) is not None
    assert outcome(repository, data, compress_answers=True) is None


def test_request_that_is_refused_is_not_taken(repository: Path, tmp_path: Path) -> None:
    """A key, the phase of the server, the queue: the ASGI path says what is wrong."""
    path = tmp_path / "keys"
    path.write_text("someone:" + "k" * 40 + "\n")

    async def scenario() -> None:
        server = quiet_server(repository, keys=ApiKeys(path))
        fast_path = InferFastPath(server)
        assert fast_path.take(request(), Caller()) is None
        assert fast_path.take(request("X-API-Key: " + "n" * 40), Caller()) is None
        caller = Caller()
        assert fast_path.take(request("X-API-Key: " + "k" * 40), caller) is not None
        server.lifecycle.phase = "draining"
        assert fast_path.take(request("X-API-Key: " + "k" * 40), Caller()) is None
        await server.models.close()
        assert [status for status, _, _ in caller.answers] == [200]
        assert caller.answers[0][1][b"connection"] == b"close"
        server = quiet_server(repository, max_queue_calls=1)
        fast_path = InferFastPath(server)
        assert fast_path.take(request(), Caller()) is not None
        assert fast_path.take(request(), Caller()) is None
        await server.models.close()

    asyncio.run(scenario())


def test_shapes_that_have_passed_are_checked_again_for_another_layer(
    layers: Layers, tmp_path: Path
) -> None:
    """A call is like the one before only as long as the layer is."""
    repository = tmp_path / "repository"
    shutil.copytree(layers.repository / "tiny", repository / "tiny")

    async def scenario() -> None:
        server = quiet_server(repository)
        fast_path = InferFastPath(server)
        for _ in range(2):
            assert fast_path.take(request(), Caller()) is not None
        other = shutil.copytree(layers.artifact("mha"), repository / "tiny" / "2")
        manifest = orjson.loads((other / "manifest.json").read_bytes())
        (other / "manifest.json").write_bytes(
            orjson.dumps(manifest | {"name": "tiny", "version": 2})
        )
        await server.models.refresh(retry=False)
        assert fast_path.take(request(), Caller()) is None
        await server.models.close()

    asyncio.run(scenario())


def test_positions_are_looked_at_in_every_call_whose_head_is_remembered(layers: Layers) -> None:
    """Its shapes have passed; its positions may be others, also such as no layer has."""
    x = np.random.default_rng(3).standard_normal((1, 2, 8)).astype(np.float32)

    def data(*positions: int) -> bytes:
        body = oip.encode(
            {"embeddings": x, "positions": np.array([positions])},
            parameters={"binary_data_output": True},
        )
        head = "POST /v2/models/learned/infer HTTP/1.1\r\nHost: a\r\n"
        length = f"{oip.HEADER_LENGTH}: {body.header_length}\r\n"
        size = f"Content-Length: {len(body.content)}\r\n\r\n"
        return (head + length + size).encode() + body.content

    async def scenario() -> list[tuple[int, dict[bytes, bytes], bytes] | None]:
        server = quiet_server(layers.wide)
        fast_path = InferFastPath(server)
        answers: list[tuple[int, dict[bytes, bytes], bytes] | None] = []
        for positions in ((0, 1), (8, 3), (8, 9), (-1, 0), (3, 8)):
            caller = Caller()
            if fast_path.take(data(*positions), caller) is None:
                answers.append(None)
            else:
                await caller.heard.wait()
                answers.append(caller.answers[0])
        await server.models.close()
        return answers

    answers = asyncio.run(scenario())

    assert [answer is None for answer in answers] == [False, False, True, True, False]
    for answer, positions in ((answers[0], [0, 1]), (answers[1], [8, 3]), (answers[4], [3, 8])):
        assert answer is not None
        status, headers, content = answer
        size = int(headers[oip.HEADER_LENGTH.lower().encode()])
        wanted = layers.formula("learned")(x, positions=[positions]).output
        assert status == 200
        np.testing.assert_allclose(oip.decode(content, size)["output"], wanted, atol=1e-5)


def test_many_heads_are_forgotten_again(repository: Path) -> None:
    """Callers that put a number of their own into each head cost no memory in the end."""

    async def scenario() -> int:
        server = quiet_server(repository)
        fast_path = InferFastPath(server)
        for i in range(1000):
            assert fast_path.lacks(request(f"X-Call: {i}")[:-1]) == 1
        return len(fast_path._routes)

    assert asyncio.run(scenario()) <= 256


def test_withdrawn_key_is_refused_although_its_head_is_remembered(
    repository: Path, tmp_path: Path
) -> None:
    """Remembering what a head says never stands for checking its key."""
    path, key = tmp_path / "keys", "k" * 40
    path.write_text(f"someone:{key}\nother:{'o' * 40}\n")
    data = request(f"X-API-Key: {key}")

    async def scenario() -> list[bool]:
        keys = ApiKeys(path)
        server = quiet_server(repository, keys=keys)
        fast_path = InferFastPath(server)
        taken = [fast_path.take(data, Caller()) is not None for _ in range(2)]
        for content in (f"other:{'o' * 40}\n", f"renamed:{key}\n"):
            path.write_text(content)
            keys.refresh(retry=False)
            taken.append(fast_path.take(data, Caller()) is not None)
            taken.append(fast_path.lacks(data[:-1]) == 1)
        await server.models.close()
        return taken

    assert asyncio.run(scenario()) == [True, True, False, False, True, True]


@pytest.mark.parametrize(
    "header",
    ["X-API-Key: " + "n" * 40, "Authorization: Bearer " + "n" * 40, "X-Other: n"],
    ids=["wrong", "wrong bearer", "none"],
)
def test_head_without_a_valid_key_is_neither_remembered_nor_waited_for(
    repository: Path, tmp_path: Path, header: str
) -> None:
    """A stranger can neither fill the memory of heads nor empty it."""
    path = tmp_path / "keys"
    path.write_text("someone:" + "k" * 40 + "\n")

    async def scenario() -> None:
        server = quiet_server(repository, keys=ApiKeys(path))
        fast_path = InferFastPath(server)
        assert fast_path.take(request(header), Caller()) is None
        assert fast_path.lacks(request(header)[:-1]) == 0
        await server.models.close()
        assert not fast_path._routes

    asyncio.run(scenario())


def test_head_that_is_remembered_is_not_kept(repository: Path, tmp_path: Path) -> None:
    """Only digests of it and of its key, and what the call needs."""
    path, key = tmp_path / "keys", "k" * 40
    path.write_text(f"someone:{key}\n")
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    data = request(f"X-API-Key: {key}", f"traceparent: {trace}", "X-Other: unneeded")

    async def scenario() -> dict[bytes, Any]:
        server = quiet_server(repository, keys=ApiKeys(path))
        fast_path = InferFastPath(server)
        assert fast_path.take(data, Caller()) is not None
        assert (
            fast_path.take(request(f"X-API-Key: {key}", path="/v2/models/x/infer"), Caller())
            is None
        )
        await server.models.close()
        return dict(fast_path._routes)

    [(digest, route)] = asyncio.run(scenario()).items()
    assert len(digest) == 32
    assert key not in repr(route)
    assert "unneeded" not in repr(route)
    assert route.trace_context == {"traceparent": trace}


def test_waiting_call_does_not_hold_what_was_received(repository: Path, tmp_path: Path) -> None:
    """With keys its tensors are copies, however they lie: the head before them holds a key."""
    path, key = tmp_path / "keys", "k" * 40
    path.write_text(f"a:{key}\n")

    async def scenario() -> None:
        server = quiet_server(repository, keys=ApiKeys(path))
        fast_path = InferFastPath(server)
        for padding in range(4):
            data = bytearray(request(f"X-API-Key: {key}\r\nX-Padding: {'x' * padding}"))
            waiting = fast_path.take(data, Caller())  # type: ignore[arg-type]
            assert waiting is not None
            data.clear()  # refused for as long as there is a view of it
        await server.models.close()

    asyncio.run(scenario())


def test_deadline_that_passes_is_told(repository: Path) -> None:
    """As on the ASGI path: 504 and the code."""
    answers = outcome(repository, request("X-Request-Timeout-S: 0.000000001"))

    assert answers is not None
    [(status, headers, body)] = answers
    assert status == 504
    assert headers[b"x-error-code"] == b"deadline_exceeded"
    assert orjson.loads(body)["code"] == "deadline_exceeded"


def test_failure_that_nobody_thought_of_is_told(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 500 without what it was, and the next call is served."""

    async def scenario() -> Caller:
        server = quiet_server(repository)
        fast_path = InferFastPath(server)
        engine, caller = server.models.get("tiny").engine, Caller()
        with monkeypatch.context() as broken:
            broken.setattr(engine, "run", lambda *_, **__: 1 / 0)
            assert fast_path.take(request(), caller) is not None
            await caller.heard.wait()
        assert fast_path.take(request(), caller) is not None
        await server.models.close()
        await asyncio.sleep(0)
        return caller

    first, second = asyncio.run(scenario()).answers
    assert first[0] == 500
    assert orjson.loads(first[2])["code"] == "internal"
    assert b"division" not in first[2]
    assert second[0] == 200


def connect(server: Server) -> socket.socket:
    """Return a bare connection."""
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Return the next answer."""
    response = HTTPResponse(connection)
    response.begin()
    body = response.read()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return response.status, headers, body


NO_REQUEST = {"not whole", "more than one", "no head", "nothing", "expects", "closes", "HTTP/1.0"}
"""What has not one answer, or no other way to go."""


@pytest.fixture(scope="module")
def asgi(layers: Layers) -> Iterator[Server]:
    """Return a server that answers everything through ASGI."""
    with Server(layers.repository, fast_path="off") as running:
        yield running


@pytest.mark.parametrize("name", [*USUAL, *sorted(UNUSUAL.keys() - NO_REQUEST)])
def test_both_paths_answer_alike(server: Server, asgi: Server, name: str) -> None:
    """Status, body and headers are those of a server without the fast path."""
    answers = []
    for chosen in (server, asgi):
        with connect(chosen) as connection:
            connection.sendall((USUAL | UNUSUAL)[name])
            status, headers, body = answer(connection)
        kept = {name: text for name, text in headers.items() if name not in SAME_EACH_TIME}
        answers.append((status, kept, body))

    assert answers[0] == answers[1]


@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.2])
def test_request_in_parts_is_answered(server: Server, pause_s: float) -> None:
    """However it is cut, and whether or not the rest comes in time for the fast path."""
    data = request(length=7)
    head = data.index(b"\r\n\r\n") + 4
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for cuts in ([head], [head - 2], [10], [head + 9], [head, head + 20], [head, -1]):
            start = 0
            for cut in [*cuts, len(data)]:
                connection.sendall(data[start:cut] if cut > 0 else data[start:-1])
                start = cut if cut > 0 else len(data) - 1
                time.sleep(pause_s)
            assert answer(connection)[0] == 200


def test_requests_of_one_connection_are_answered_in_their_order(server: Server) -> None:
    """Early ones wait, whether they came in one packet, apart, or in part."""
    ids = [f"call {i}" for i in range(40)]
    data = [request(id=name, length=1 + i % 5) for i, name in enumerate(ids)]
    joined = b"".join(data)
    for cuts in ([len(joined)], [len(data[0]), len(joined)], list(range(97, len(joined) + 97, 97))):
        with connect(server) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            start = 0
            for cut in cuts:
                connection.sendall(joined[start:cut])
                start = cut
            found = []
            for _ in ids:
                status, headers, body = answer_of(connection)
                assert status == 200
                size = int(headers["inference-header-content-length"])
                found.append(orjson.loads(body[:size])["id"])
        assert found == ids


def answer_of(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Return the next answer, and take nothing of the one after it."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    status, *lines = head.decode().strip().split("\r\n")
    headers = {name.lower(): text for name, _, text in (line.partition(": ") for line in lines)}
    body = b""
    while len(body) < int(headers["content-length"]):
        body += connection.recv(int(headers["content-length"]) - len(body))
    return int(status.split()[1]), headers, body


@pytest.fixture(scope="module")
def brief(layers: Layers) -> Iterator[Server]:
    """Return a server that lets connections rest for a second."""
    with Server(layers.repository, keep_alive_s=1) as running:
        yield running


def test_connection_that_rests_is_closed_and_one_that_works_is_not(brief: Server) -> None:
    """The time counts from the last answer, whichever way it went."""
    whole, full = request(), request("Expect: nothing")
    for data in (whole, full, whole):
        with connect(brief) as connection:
            for _ in range(6):
                connection.sendall(data)
                assert answer(connection)[0] in (200, 417)
                time.sleep(0.4)
            started = time.monotonic()
            assert connection.recv(1) == b""
            assert 0.1 < time.monotonic() - started < 5


def test_caller_that_leaves_is_written_down(layers: Layers) -> None:
    """Before all of its body has come, and while its call is run."""
    with Server(layers.repository) as server:
        with connect(server) as connection:
            connection.sendall(request()[:-1])
        until(lambda: '"status":499' in server.log())
        calls = [connect(server) for _ in range(20)]
        for connection in calls:
            connection.sendall(request(rows=16, length=200))
        for connection in calls:
            connection.close()
        until(lambda: server.log().count('"message":"request"') == 21)
        metrics = server.get("/metrics").text
    assert 'headwise_queue_calls{model="tiny"} 0.0' in metrics
    assert "headwise_requests_in_flight 1.0" in metrics  # the one that asks
    counted = re.findall(r"^headwise_requests_total{.*infer.*} (.*)", metrics, re.MULTILINE)
    assert sum(map(float, counted)) == 21


def test_end_of_the_server_waits_for_what_it_took(layers: Layers) -> None:
    """SIGTERM: what is on its way is answered, and its connection closed."""
    with Server(layers.repository, grace_s=1) as server:
        with connect(server) as connection:
            connection.sendall(request())
            assert "connection" not in answer(connection)[1]
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_log('"stopping"')
            connection.sendall(request())
            status, headers, _ = answer(connection)
            assert status == 200
            assert headers["connection"] == "close"
            assert connection.recv(1) == b""
        assert server.process.wait(30) == 0


def test_answered_call_leaves_nothing_to_collect(repository: Path) -> None:
    """Its memory is free at once, not when the collector next looks for rings."""

    def alive() -> list[object]:
        return [o for o in gc.get_objects() if type(o) in {PendingCall, QueuedCall, Call, Answer}]

    async def scenario() -> list[object]:
        server = quiet_server(repository)
        fast_path = InferFastPath(server)

        async def call() -> None:
            caller = Caller()
            taken = fast_path.take(request(), caller)
            assert taken is not None
            await caller.heard.wait()

        await call()
        await asyncio.sleep(0.1)
        gc.collect()
        others = list(map(id, alive()))  # those of other tests
        gc.disable()
        try:
            await call()
            await asyncio.sleep(0.1)
            return [left for left in alive() if id(left) not in others]
        finally:
            gc.enable()
            await server.models.close()

    assert asyncio.run(scenario()) == []
