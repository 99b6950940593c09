"""Bytes in, answers out: a connection driven piece by piece, and answers read one by one."""

import asyncio
import io
import socket
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, Self

import uvicorn
from uvicorn.server import ServerState

from service.api.fast_path import InferFastPath
from service.api.requests import head_refused
from service.app import create_app
from service.transport.connection import FastPath, HttpConnection
from tests.support.doubles import quiet_server

LIMIT_S = 60
"""Far more than any exchange takes: what does not end by then hangs."""


@dataclass(frozen=True)
class Piece:
    """Bytes that arrive together, and how many turns the loop makes before the next arrive."""

    content: bytes
    turns: int = 0


class MemoryTransport(asyncio.Transport):
    """The server's end of a connection: what it sends goes to a real socket of this process."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__({"socket": sock})
        self._sock = sock
        sock.setblocking(False)  # more answers than fit fail, and block nothing
        self.may_deliver = asyncio.Event()
        self.may_deliver.set()
        self.closed = asyncio.Event()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send at once: all that these tests are answered fits into the socket."""
        self._sock.sendall(data)

    def get_write_buffer_size(self) -> int:
        """Nothing waits here."""
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """No limit matters where nothing waits."""

    def pause_reading(self) -> None:
        """Deliver nothing until reading is resumed."""
        self.may_deliver.clear()

    def resume_reading(self) -> None:
        """Deliver again."""
        self.may_deliver.set()

    def is_closing(self) -> bool:
        """Whether nothing is delivered any more."""
        return self.closed.is_set()

    def close(self) -> None:
        """End the connection."""
        self.closed.set()
        self.may_deliver.set()


class App:
    """The application with real engines in this process; make it where a loop runs."""

    def __init__(self, repository: Path, **settings: Any) -> None:
        self.server = quiet_server(repository, **settings)
        self.models = self.server.models
        self.fast_path = InferFastPath(self.server)
        app = create_app(self.server, refuse=lambda _: None)
        self.config = uvicorn.Config(app, log_config=None, ws="none", access_log=False)
        self.config.load()

    def connection(self, fast_path: FastPath[Any] | None) -> HttpConnection:
        """Return a connection that is not made yet."""
        return HttpConnection(
            config=self.config,
            server_state=ServerState(),
            app_state={},
            fast_path=fast_path,
            head_timeout_s=LIMIT_S,
            answer_timeout_s=LIMIT_S,
            on_head_refused=partial(head_refused, self.server),
        )

    async def converse(self, pieces: Iterable[Piece], *, uses_fast_path: bool) -> bytes:
        """Return all that is sent to a caller that sends these pieces and ends its output."""
        ours, theirs = socket.socketpair()
        with closing(ours), closing(theirs):
            transport = MemoryTransport(theirs)
            connection = self.connection(self.fast_path if uses_fast_path else None)
            connection.connection_made(transport)
            async with asyncio.timeout(LIMIT_S):
                for piece in pieces:
                    await transport.may_deliver.wait()
                    if transport.is_closing():
                        break
                    connection.data_received(piece.content)
                    for _ in range(piece.turns):
                        await asyncio.sleep(0)
                await transport.may_deliver.wait()
                if not transport.is_closing() and connection.eof_received():
                    await transport.closed.wait()
            connection.connection_lost(None)
            theirs.close()
            with ours.makefile("rb") as sent:
                return sent.read()


class _Source(io.BytesIO):
    """What `HTTPResponse` takes for a socket; it reads no further than one answer."""

    def makefile(self, mode: str) -> Self:
        return self

    def close(self) -> None:
        """Stay open for the next answer."""


def answers_in(content: bytes) -> list[tuple[int, bytes]]:
    """Return status and body of each final answer."""
    source, found = _Source(content), []
    while source.tell() < len(content):
        response = HTTPResponse(source)  # type: ignore[arg-type]
        response.begin()
        found.append((response.status, response.read()))
    return found
