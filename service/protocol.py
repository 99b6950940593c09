"""
Uvicorn's HTTP protocol, with a limit on how long a request's head may take, and word of leaving.

Uvicorn times out idle connections only after their first answer, and never one
that sends its headers byte by byte.  That a caller has left it tells only to
who waits for it, which would take a task for each call.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.errors import TooSlow
from service.exchange import CONNECTION
from service.problems import status_of

_UPGRADE = re.compile(rb"\r\nupgrade: *h2c(?=\r\n)", re.IGNORECASE)


def with_head_timeout(seconds: float) -> type[HttpToolsProtocol]:
    """Return the protocol; a head that takes longer is answered 408 and the connection closed."""

    class TimedProtocol(HttpToolsProtocol):
        """Runs a timer from the first byte of a head, or from connecting, to its last."""

        _timer: asyncio.TimerHandle | None = None

        @property
        def has_whole_body(self) -> bool:
            return not self.pipeline and self.cycle is not None and not self.cycle.more_body

        @property
        def is_only_one(self) -> bool:
            return len(self.tasks) == 1

        def connection_made(self, transport: Any) -> None:
            super().connection_made(_Gathering(transport, self.loop))  # type: ignore[arg-type]
            self.on_left: list[Callable[[], None]] = []
            self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)
            for tell in list(self.on_left):
                tell()

        def data_received(self, data: bytes) -> None:
            if self.cycle is None or self.cycle.response_complete:
                if self._timer is None:
                    self._start_timer()
                data = _without_upgrade(data)
            super().data_received(data)

        def on_headers_complete(self) -> None:
            self._stop_timer()
            self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            if not self.pipeline:
                # Reading may have been held up over a large body; then nobody would see him leave.
                self.flow.resume_reading()

        def _start_timer(self) -> None:
            self._timer = self.loop.call_later(seconds, self._on_timeout)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _on_timeout(self) -> None:
            if not self.transport.is_closing():
                self.transport.write(_answer(seconds))
                self.transport.close()

    return TimedProtocol


class _Gathering:
    """
    A transport that sends two writes of one turn of the loop together.

    Uvicorn writes an answer's head and body apart: two system calls here, two
    packets on the way, and two wake-ups there.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send the bytes, at the latest when the loop turns."""
        if self._held:
            held, self._held = self._held, b""
            self._transport.writelines((held, data))
        elif data:
            self._held = data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Close the connection once all is sent."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held)


def _without_upgrade(data: bytes) -> bytes:
    """
    Return what came first of a request without its offer of HTTP/2, as Java's clients make it.

    Uvicorn would take it as another protocol, and lose the body.
    """
    end = data.find(b"\r\n\r\n") + 2
    head = data[:end]  # a body may hold anything, and be long
    return _UPGRADE.sub(b"", head, count=1) + data[end:] if b"h2c" in head.lower() else data


def _answer(seconds: float) -> bytes:
    error = TooSlow(f"head: expected within {seconds:g} s of connecting or of its first byte")
    body = orjson.dumps({"error": str(error), "code": error.code})
    head = (
        f"HTTP/1.1 {status_of(error)} Request Timeout\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
