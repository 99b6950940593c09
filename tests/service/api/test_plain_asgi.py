"""The application under an ASGI server of another make: the same answers, and the same ends."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from safetensors.numpy import save
from starlette.types import ASGIApp, Message

from service.api.api_keys import ApiKeys
from service.api.server import Server as Parts
from service.app import create_app, make_server
from service.inference.batcher import Batcher
from service.inference.batches import BatchLimits
from service.inference.schedule import QueueLimits
from service.settings import Settings
from service.telemetry.tracing import NoTracing
from tests.service.api.test_fast_path import SAME_EACH_TIME
from tests.support.doubles import HeldEngine, KeptAccessLog, quiet_server
from tests.support.layers import Layers
from tests.support.server import Server

KEY = "k" * 40
ATTENTION: dict[str, Any] = {"model": "tiny", "embeddings": [[0.5] * 8] * 3, "weights": True}
INFER: dict[str, Any] = {
    "inputs": [{"name": "embeddings", "shape": [1, 2, 8], "datatype": "FP32", "data": [0.25] * 16}]
}
LIMIT_S = 60

OF_THE_SERVER = SAME_EACH_TIME | {"transfer-encoding"}
"""Headers that are the HTTP server's own, or that differ each time."""


@dataclass(frozen=True)
class Case:
    """A request, and the route and status under which it is counted."""

    method: str
    path: str
    route: str
    status: int
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=lambda: {"X-API-Key": KEY})


CASES = {
    "attention": Case("POST", "/v1/attention", "/v1/attention", 200, orjson.dumps(ATTENTION)),
    "attention, safetensors": Case(
        "POST",
        "/v1/attention?model=tiny&weights=true",
        "/v1/attention",
        200,
        save({"embeddings": np.full((2, 3, 8), 0.5, np.float32)}),
        {"X-API-Key": KEY, "Content-Type": "application/x-safetensors"},
    ),
    "attention, in chunks": Case(
        "POST",
        "/v1/attention",
        "/v1/attention",
        200,
        orjson.dumps({"model": "tiny", "embeddings": [[0.1] * 8] * 300, "weights": True}),
    ),
    "infer": Case(
        "POST", "/v2/models/tiny/infer", "/v2/models/{name}/infer", 200, orjson.dumps(INFER)
    ),
    "wrong": Case("POST", "/v1/attention", "/v1/attention", 400, b"{"),
    "no such path": Case("GET", "/nowhere", "unmatched", 404),
    "no such model": Case(
        "POST", "/v2/models/nope/infer", "/v2/models/{name}/infer", 404, orjson.dumps(INFER)
    ),
    "no key": Case("POST", "/v1/attention", "unmatched", 401, orjson.dumps(ATTENTION), headers={}),
    "live": Case("GET", "/v2/health/live", "/v2/health/live", 200, headers={}),
    "ready": Case("GET", "/v2/health/ready", "/v2/health/ready", 200, headers={}),
    "models": Case("GET", "/v1/models/tiny", "/v1/models/{name}", 200),
    "docs": Case("GET", "/docs", "/docs", 200),
    "openapi": Case("GET", "/openapi.json", "/openapi.json", 200),
    "HEAD": Case("HEAD", "/v1/models/tiny", "/v1/models/{name}", 200),
}


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with one key."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"someone:{KEY}\n")
    return path


@pytest.fixture(scope="module")
def keyed(layers: Layers, keys_file: Path) -> Iterator[Server]:
    """Return a real server with that key."""
    with Server(layers.repository, api_keys_file=keys_file) as running:
        yield running


@contextlib.asynccontextmanager
async def lifespan(app: ASGIApp) -> AsyncIterator[None]:
    """Start the application as an ASGI server does, and end it."""
    received: asyncio.Queue[Message] = asyncio.Queue()
    sent: asyncio.Queue[Any] = asyncio.Queue()
    task = asyncio.ensure_future(app({"type": "lifespan"}, received.get, sent.put))
    async with asyncio.timeout(LIMIT_S):
        await received.put({"type": "lifespan.startup"})
        assert await sent.get() == {"type": "lifespan.startup.complete"}
    try:
        yield
    finally:
        async with asyncio.timeout(LIMIT_S):
            await received.put({"type": "lifespan.shutdown"})
            assert await sent.get() == {"type": "lifespan.shutdown.complete"}
            await task


async def ready(client: httpx.AsyncClient) -> None:
    """Return once the application takes calls."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            answer = await client.get("/v2/health/ready")
            if answer.status_code == 200:
                return
            await asyncio.sleep(0.01)


def comparable(answer: httpx.Response) -> tuple[int, dict[str, str], bytes]:
    """Return what two answers to one request have in common."""
    headers = {k: v for k, v in answer.headers.items() if k not in OF_THE_SERVER}
    return answer.status_code, headers, answer.content


def test_application_answers_under_any_asgi_server_as_in_its_own_process(
    layers: Layers, keyed: Server, keys_file: Path
) -> None:
    """Byte for byte, and each request is counted and logged once."""
    log = KeptAccessLog()
    real = {
        name: keyed.client.request(
            case.method, keyed.url + case.path, content=case.content, headers=case.headers
        )
        for name, case in CASES.items()
    }

    async def scenario() -> tuple[Parts, dict[str, httpx.Response]]:
        server = make_server(
            Settings(repository=layers.repository, api_keys_file=keys_file),
            tracing=NoTracing(),
            keys=ApiKeys(keys_file),
            access_log=log,
        )
        app = create_app(server, refuse=lambda error: pytest.fail(str(error)))
        transport = httpx.ASGITransport(app)
        async with (
            lifespan(app),
            httpx.AsyncClient(transport=transport, base_url=keyed.url) as client,
        ):
            await ready(client)
            log.records.clear()
            server.metrics.requests.clear()
            return server, {
                name: await client.request(
                    case.method, case.path, content=case.content, headers=case.headers
                )
                for name, case in CASES.items()
            }

    try:
        server, plain = asyncio.run(scenario())
    finally:
        gc.unfreeze()  # the application takes everything that is there for its own

    for name, case in CASES.items():
        assert plain[name].status_code == case.status, name
        assert comparable(plain[name]) == comparable(real[name]), name
    expected = [(case.route, case.status) for case in CASES.values()]
    assert [(record.route, record.status) for record in log.records] == expected
    assert [record.request_id for record in log.records] == [
        answer.headers["x-request-id"] for answer in plain.values()
    ]
    assert sum(server.metrics.requests.values()) == len(CASES)
    assert server.lifecycle.in_flight == 0


# Callers that leave, as ASGI says it


BODY = orjson.dumps(ATTENTION)
START: Message = {"type": "http.request", "body": BODY[:20], "more_body": True}
REST: Message = {"type": "http.request", "body": BODY[20:], "more_body": False}
LEFT: Message = {"type": "http.disconnect"}


def attention_scope() -> dict[str, Any]:
    """Return the scope of a call, without any extension."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/attention",
        "query_string": b"",
        "headers": [(b"host", b"a")],
    }


@dataclass(frozen=True)
class Bench:
    """An application whose engine is held, and what it recorded."""

    server: Parts
    app: ASGIApp
    engine: HeldEngine
    log: KeptAccessLog

    @classmethod
    def of(cls, repository: Path) -> "Bench":
        """Make one; call it where a loop runs."""
        log, engine = KeptAccessLog(), HeldEngine()
        server = quiet_server(repository, access_log=log)
        server.models.get("tiny").batcher = Batcher(
            engine,
            QueueLimits(8, 1024, LIMIT_S),
            BatchLimits(1024, 2**20, 0.0),
            server.metrics.of_model("tiny").queue(),
            inline_s=0,
        )
        return cls(server, create_app(server, refuse=lambda _: None), engine, log)

    async def close(self) -> None:
        """End what runs."""
        self.engine.free.set()
        await self.server.models.close()
        self.server.offload.close()

    def check_free(self) -> None:
        """Check that nothing of the requests is left."""
        metrics = self.server.metrics
        assert self.server.lifecycle.in_flight == 0
        assert metrics.of_model("tiny").queue_calls == 0
        assert metrics.unsent_answer_bytes == 0


@pytest.mark.parametrize("when", ["within its body", "after its body", "while it is computed"])
def test_caller_that_leaves_ends_its_call(layers: Layers, when: str) -> None:
    """Counted 499, the queue empty and the engine free for the next call."""

    async def scenario() -> Bench:
        bench = Bench.of(layers.repository)
        messages = [START, LEFT] if when == "within its body" else [START, REST, LEFT]
        sent: list[Message] = []

        async def receive() -> Message:
            message = messages.pop(0)
            if message is LEFT and when == "while it is computed":
                assert await asyncio.to_thread(bench.engine.started.wait, LIMIT_S)
            return message

        async def send(message: Message) -> None:
            sent.append(message)

        async with asyncio.timeout(LIMIT_S):
            await bench.app(attention_scope(), receive, send)
        if when == "while it is computed":
            assert await asyncio.to_thread(bench.engine.ended.wait, LIMIT_S)
            assert bench.engine.stopped == 1
        await asyncio.sleep(0)
        bench.check_free()
        assert sent == []

        bench.engine.free.set()
        transport = httpx.ASGITransport(bench.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            assert (await client.post("/v1/attention", content=BODY)).status_code == 200
        await bench.close()
        return bench

    bench = asyncio.run(scenario())

    assert [record.status for record in bench.log.records] == [499, 200]
    assert +bench.server.metrics.requests == {
        ("/v1/attention", "499"): 1,
        ("/v1/attention", "200"): 1,
    }
    bench.check_free()


def test_request_that_the_server_ends_within_its_last_message_was_answered(layers: Layers) -> None:
    """Some servers give `http.disconnect` before they return from sending the last message."""

    async def scenario() -> Bench:
        bench = Bench.of(layers.repository)
        bench.engine.free.set()
        messages, over = [START, REST], asyncio.Event()

        async def receive() -> Message:
            if messages:
                return messages.pop(0)
            await over.wait()
            return LEFT

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                over.set()
                for _ in range(5):
                    await asyncio.sleep(0)

        async with asyncio.timeout(LIMIT_S):
            await bench.app(attention_scope(), receive, send)
        await bench.close()
        return bench

    bench = asyncio.run(scenario())

    assert [record.status for record in bench.log.records] == [200]
    bench.check_free()


def test_server_that_cannot_send_says_that_the_caller_has_left(layers: Layers) -> None:
    """ASGI 2.4: sending raises an OSError; that is no failure on our side."""

    async def scenario() -> Bench:
        bench = Bench.of(layers.repository)
        bench.engine.free.set()
        messages = [START, REST]

        async def receive() -> Message:
            if messages:
                return messages.pop(0)
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            raise ConnectionResetError

        async with asyncio.timeout(LIMIT_S):
            await bench.app(attention_scope(), receive, send)
        await bench.close()
        return bench

    bench = asyncio.run(scenario())

    [record] = bench.log.records
    assert (record.status, record.failure) == (499, None)
    bench.check_free()
