"""The bodies of requests without tensors."""

import asyncio
import gzip
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from service.api.control import json_object
from service.settings import Settings
from service.telemetry.request_record import RECORD, UNMATCHED, RequestRecord
from service.transport import exchange
from service.transport.exchange import CONNECTION
from tests.support.doubles import quiet_server
from tests.support.layers import Layers
from tests.support.server import Server


class Waiting:
    """A connection on which a whole body has come; see `exchange.Connection`."""

    has_whole_body = True
    is_lost = False

    def __init__(self) -> None:
        self.on_left: list[Callable[[], None]] = []


def control_request(body: bytes, connection: Waiting) -> Request:
    """Return a request with a gzip body on that connection."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "http_version": "1.1",
        "path": "/v2/repository/index",
        "query_string": b"",
        "headers": [(b"content-encoding", b"gzip")],
        "extensions": {CONNECTION: connection},
        RECORD: RequestRecord("POST", UNMATCHED, "id", 0.0),
    }
    return Request(scope, receive)


@pytest.mark.fault("A1")
def test_control_body_is_decompressed_in_a_thread_that_stops_when_the_caller_leaves(
    monkeypatch: pytest.MonkeyPatch, layers: Layers
) -> None:
    """Also a body without tensors: the event loop goes on, and nothing is done for nobody."""
    began, stopped = threading.Event(), threading.Event()

    def hold(*args: Any) -> bytes:
        stop = args[-1]
        began.set()
        assert stop.wait(60)
        stopped.set()
        return b""

    monkeypatch.setattr(exchange, "decompress", hold)

    async def scenario() -> None:
        connection = Waiting()
        server = quiet_server(layers.repository)
        request = control_request(gzip.compress(b"{}"), connection)
        task = asyncio.create_task(json_object(request, server))
        await asyncio.to_thread(began.wait, 60)  # the loop is free for this
        assert not task.done()
        for leave in connection.on_left:
            leave()
        with pytest.raises(ClientDisconnect):
            await task
        await asyncio.to_thread(stopped.wait, 60)
        server.offload.close()

    asyncio.run(scenario())

    assert stopped.is_set()


def test_control_body_of_a_caller_that_has_left_is_not_decompressed(
    monkeypatch: pytest.MonkeyPatch, layers: Layers
) -> None:
    """Who left while the body came is not worked for."""
    calls: list[bytes] = []

    def note(content: bytes, *args: Any) -> bytes:
        calls.append(content)
        return b""

    monkeypatch.setattr(exchange, "decompress", note)

    async def scenario() -> None:
        connection = Waiting()
        server = quiet_server(layers.repository)
        connection.is_lost = True
        request = control_request(gzip.compress(b"{}"), connection)
        with pytest.raises(ClientDisconnect):
            await json_object(request, server)
        server.offload.close()

    asyncio.run(scenario())

    assert not calls


@pytest.mark.fault("E8")
def test_what_is_switched_off_names_the_variable_that_switches_it_on(server: Server) -> None:
    """In the same words everywhere, and the variable is one that there is."""
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 32}
    tensor = {"name": "embeddings", "shape": [1, 1, 8], "datatype": "FP32", "parameters": region}
    switched_off = {
        "/v2/repository/models/tiny/load": {},
        "/v2/repository/models/tiny/unload": {},
        "/v2/logging": {},
        "/v2/systemsharedmemory/region/r/register": {"key": "/r", "byte_size": 32},
        "/v2/models/tiny/infer": {"inputs": [tensor]},
    }
    for path, body in switched_off.items():
        answer = server.post(path, json=body)

        assert (answer.status_code, answer.json()["code"]) == (403, "disabled"), path
        told = re.fullmatch(
            r".+: switched off; (HEADWISE_\w+)=true switches it on", answer.json()["error"]
        )
        assert told, answer.json()
        assert told[1] in {Settings.variable(name) for name in Settings.model_fields}
