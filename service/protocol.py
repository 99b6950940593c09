"""
Uvicorn's HTTP protocol, with limits on a request's head, and word of leaving.

Uvicorn times out idle connections only after their first answer, and never one
that sends its headers byte by byte; and it keeps a head of any size.  That a
caller has left it tells only to who waits for it, which would take a task for
each call.
"""

import asyncio
import re
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Final

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.errors import HeadwiseError, TooLarge, TooSlow
from service.exchange import CONNECTION
from service.express import Express, Headers, Ride
from service.gathering import Gathering
from service.pieces import Chunk
from service.problems import CLOSE, status_of

MAX_HEAD_BYTES: Final = 64 * 1024
"""Of a head, or of what follows a body's last chunk, when it does not come in one read."""

_PATIENCE_S: Final = 0.05
"""How long the express way is kept open for the rest of a request."""

_UPGRADE = re.compile(rb"\r\nupgrade: *h2c(?=\r\n)", re.IGNORECASE)


def protocol_of(express: Express, *, head_timeout_s: float) -> type[HttpToolsProtocol]:
    """
    Return the protocol, which offers each request that comes whole to the express way first.

    A head that takes longer than the limit is answered 408 and the connection closed; one
    that grows beyond `MAX_HEAD_BYTES` is answered 413, whoever sends it.
    """

    class TimedProtocol(HttpToolsProtocol):
        """Runs a timer from the first byte of a head, or from connecting, to its last."""

        _timer: asyncio.TimerHandle | None = None
        _loose_bytes = 0
        """How much has come since the last that was a body, or the end of a head or body."""
        _is_in_request = False
        """Part of a request has come, and part of it has not."""
        _ride: Ride | None = None
        """What is on the express way."""
        _early = b""
        """What has come of the next request meanwhile."""
        _lacks = 0
        """How many bytes are missing of what is held."""
        _patience: asyncio.TimerHandle | None = None
        _stays_open = True
        _rests_since = 0.0

        @property
        def has_whole_body(self) -> bool:
            return not self.pipeline and self.cycle is not None and not self.cycle.more_body

        def connection_made(self, transport: Any) -> None:
            self._gathering = Gathering(transport, self.loop)
            super().connection_made(self._gathering)  # type: ignore[arg-type]
            self._held: list[bytes] = []  # of a request that may go the express way
            self.on_left: list[Callable[[], None]] = []
            self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._let_go()
            self._stop_timer()
            super().connection_lost(exc)
            if self._ride is not None:
                ride, self._ride = self._ride, None
                express.leave(ride)
            for tell in list(self.on_left):
                tell()

        def data_received(self, data: bytes) -> None:
            if self._ride is not None:
                self._early += data
                self.flow.pause_reading()
                return
            if not self._is_at_rest:
                self._take_the_full_way(data)
                return
            if self._held:
                self._held.append(data)
                self._lacks -= len(data)
                if self._lacks > 0:
                    return
                data = self._release()
            self._ride = express.take(data, self)
            if self._ride is not None:
                self._stop_timer()
                return
            self._lacks = express.lacks(data)
            if self._lacks > 0:
                self._hold(data)
            else:
                self._take_the_full_way(data)

        def _hold(self, data: bytes) -> None:
            """Wait a moment for the rest of a request that may go the express way."""
            self._stop_timer()
            self._held.append(data)
            self._patience = self.loop.call_later(_PATIENCE_S, self._let_go)

        def _release(self) -> bytes:
            """Return what was held, and wait no more."""
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None
            held, self._held = self._held, []
            return b"".join(held)

        def _let_go(self) -> None:
            """Send what is held the full way, which can wait."""
            if self._held:
                self._take_the_full_way(self._release())

        def answer(self, status: int, headers: Headers, pieces: Iterable[Chunk]) -> None:
            """Send the answer of what is on the express way; then it is free again."""
            self._ride = None
            if not self._stays_open and CLOSE not in headers:
                headers.append(CLOSE)
            lines = [b"%b: %b\r\n" % line for line in self.server_state.default_headers + headers]
            self._gathering.send(b"".join([STATUS_LINE[status], *lines, b"\r\n"]), *pieces)
            self.server_state.total_requests += 1
            if CLOSE in headers:
                self.transport.close()
                return
            self._rests_since = self.loop.time()
            if self.timeout_keep_alive_task is None:
                self._look_after_rest(self.timeout_keep_alive)
            if self._early:
                early, self._early = self._early, b""
                self.flow.resume_reading()
                self.data_received(early)

        def shutdown(self) -> None:
            self._let_go()
            self._stays_open = False
            if self._ride is None:
                super().shutdown()

        def on_response_complete(self) -> None:
            self._rests_since = self.loop.time()
            super().on_response_complete()

        def timeout_keep_alive_handler(self) -> None:
            """Close the connection if it rests that long; one timer serves many calls."""
            self.timeout_keep_alive_task = None
            left_s = self._rests_since + self.timeout_keep_alive - self.loop.time()
            if self._ride is not None or self._held:
                self._look_after_rest(self.timeout_keep_alive)
            elif left_s > 0:
                self._look_after_rest(left_s)
            else:
                super().timeout_keep_alive_handler()

        def _look_after_rest(self, seconds: float) -> None:
            self.timeout_keep_alive_task = self.loop.call_later(
                seconds, self.timeout_keep_alive_handler
            )

        @property
        def _is_at_rest(self) -> bool:
            """True when nothing of a request has come, and all of its answers has gone."""
            return (
                not self._is_in_request
                and (self.cycle is None or self.cycle.response_complete)
                and not self.pipeline
                and not self.flow.write_paused
            )

        def _take_the_full_way(self, data: bytes) -> None:
            if self.cycle is None or self.cycle.response_complete:
                if self._timer is None:
                    self._start_timer()
                data = _without_upgrade(data)
            self._loose_bytes += len(data)
            super().data_received(data)
            if self._loose_bytes > MAX_HEAD_BYTES:
                self._refuse(TooLarge(f"head: at most {MAX_HEAD_BYTES} bytes, got more"))

        def on_message_begin(self) -> None:
            self._is_in_request = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._loose_bytes = 0
            self._stop_timer()
            self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._loose_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._loose_bytes = 0
            self._is_in_request = False
            # What came after an early answer was the rest of a body, and no head.
            self._stop_timer()
            super().on_message_complete()
            if not self.pipeline:
                # Reading may have been held up over a large body; then nobody would see him leave.
                self.flow.resume_reading()

        def _start_timer(self) -> None:
            self._timer = self.loop.call_later(head_timeout_s, self._on_timeout)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _on_timeout(self) -> None:
            limit = f"within {head_timeout_s:g} s of connecting or of its first byte"
            self._refuse(TooSlow(f"head: expected {limit}"))

        def _refuse(self, error: HeadwiseError) -> None:
            if not self.transport.is_closing():
                if self.cycle is None or self.cycle.response_complete:
                    self.transport.write(_answer(error))
                self.transport.close()

    return TimedProtocol


def _without_upgrade(data: bytes) -> bytes:
    """
    Return what came first of a request without its offer of HTTP/2, as Java's clients make it.

    Uvicorn would take it as another protocol, and lose the body.
    """
    end = data.find(b"\r\n\r\n") + 2
    head = data[:end]  # a body may hold anything, and be long
    return _UPGRADE.sub(b"", head, count=1) + data[end:] if b"h2c" in head.lower() else data


def _answer(error: HeadwiseError) -> bytes:
    status = HTTPStatus(status_of(error))
    body = orjson.dumps({"error": str(error), "code": error.code})
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
