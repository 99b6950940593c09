"""What a connection relies on in uvicorn, and how much of its input it keeps."""

import asyncio
import inspect
import logging
import socket
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from service.transport.connection import HttpConnection
from tests.support.wire import MemoryTransport

METHODS: dict[type, dict[str, list[str]]] = {
    HttpToolsProtocol: {
        "connection_made": ["transport"],
        "connection_lost": ["exc"],
        "data_received": ["data"],
        "eof_received": [],
        "shutdown": [],
        "resume_writing": [],
        "timeout_keep_alive_handler": [],
        "on_message_begin": [],
        "on_url": ["url"],
        "on_header": ["name", "value"],
        "on_headers_complete": [],
        "on_body": ["body"],
        "on_message_complete": [],
        "on_response_complete": [],
        "_start_asgi_task": ["cycle", "app"],
        "_unset_keepalive_if_required": [],
    },
    RequestResponseCycle: {"run_asgi": ["app"], "receive": [], "send": ["message"]},
    FlowControl: {"pause_reading": [], "resume_reading": []},
}
"""By class: the methods that are overridden or called, and their parameters."""

CONNECTION = {
    "cycle",
    "flow",
    "headers",
    "loop",
    "parser",
    "pipeline",
    "scheme",
    "scope",
    "server_state",
    "timeout_keep_alive",
    "timeout_keep_alive_task",
    "transport",
}
CYCLE = {
    "disconnected",
    "keep_alive",
    "message_event",
    "more_body",
    "response_complete",
    "response_started",
    "scope",
}
"""The attributes that are read or set."""


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    """Never answer."""
    await asyncio.Event().wait()


def connection() -> HttpConnection:
    """Return a connection to an application that answers nothing."""
    config = uvicorn.Config(nothing, log_config=None, ws="none", access_log=False)
    config.load()
    return HttpConnection(
        config=config,
        server_state=ServerState(),
        app_state={},
        fast_path=None,
        head_timeout_s=60.0,
        answer_timeout_s=60.0,
        on_head_refused=lambda status, code, size: None,
    )


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_uvicorn_has_the_methods_that_a_connection_relies_on(kind: type) -> None:
    """Another version may rename what is no public interface: see its pin in pyproject.toml."""
    for name, parameters in METHODS[kind].items():
        found = inspect.signature(getattr(kind, name)).parameters

        assert list(found) == ["self", *parameters], name


def test_uvicorn_has_the_attributes_that_a_connection_relies_on() -> None:
    """After a request has begun, each of them is there."""

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        with closing(ours), closing(theirs):
            made = connection()
            made.connection_made(MemoryTransport(theirs))
            made.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert vars(made).keys() >= CONNECTION
            assert vars(made.cycle).keys() >= CYCLE
            assert vars(made.flow).keys() >= {"read_paused", "write_paused"}
            assert made.server_state.default_headers == []
            assert made.server_state.total_requests == 0
            assert STATUS_LINE[200] == b"HTTP/1.1 200 OK\r\n"
            for task in made.tasks:
                task.cancel()
            made.connection_lost(None)
            await asyncio.sleep(0)

    logging.getLogger("uvicorn.error").disabled = True
    try:
        asyncio.run(scenario())
    finally:
        logging.getLogger("uvicorn.error").disabled = False


def test_uvicorn_is_pinned_to_the_version_that_is_tested() -> None:
    """A range of more would promise what nobody tried."""
    root = Path(__file__).parents[3]
    major, minor = version("uvicorn").split(".")[:2]

    pinned = f'"uvicorn>={major}.{minor},<{major}.{int(minor) + 1}"'

    assert pinned in (root / "pyproject.toml").read_text()


def test_pipelined_requests_wait_unread_while_parsed_ones_do() -> None:
    """However much a caller sends ahead, one read's worth of its requests is kept."""
    block = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 30

    async def scenario() -> tuple[int, bool]:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            await receive()  # resumes reading, in uvicorn
            await asyncio.sleep(0)
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        ours, theirs = socket.socketpair()
        with closing(ours), closing(theirs):
            made, transport = connection(), MemoryTransport(theirs)
            made.app = answer
            made.connection_made(transport)
            most = 0
            for _ in range(3):
                await asyncio.wait_for(transport.may_deliver.wait(), 60)
                made.data_received(block)
                most = max(most, len(made.pipeline))
            is_paused = made.flow.read_paused
            await asyncio.wait_for(transport.may_deliver.wait(), 60)
            made.connection_lost(None)
            return most, is_paused

    most, is_paused = asyncio.run(scenario())

    assert most <= 30  # the running one's successors: a second read came only after them
    assert is_paused
