"""
One HTTP/1.1 connection: uvicorn's protocol with a fast path, strict framing and time limits.

What differs from uvicorn's `HttpToolsProtocol`:

- A request that arrived whole is offered to the fast path before it is parsed.
- An offer to upgrade is ignored, as RFC 9110, 7.8 allows: the body remains the body.
- The input ends in one place, `_end_input`, whether it is malformed, late, too large or
  closed by the caller: what came whole before is answered, then the error, then the
  connection closes.  Every request has at most one answer.
- An answer that its caller does not read is cut off: see `CoalescingTransport`.
- A request head must arrive in time and stay within `MAX_HEAD_BYTES`.  The same time is
  given to the rest of a body whose request was answered early.

`tests/service/transport/test_connection.py` names everything of uvicorn that this relies on.
The file is long because uvicorn's connection is one class, whose state all of this shares.
"""

import asyncio
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import httptools
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from service.codecs.chunks import Chunk
from service.errors import HeadwiseError, InvalidInput, MethodNotAllowed, TooLarge, TooSlow
from service.transport.coalescing import CoalescingTransport, Delivery
from service.transport.exchange import CONNECTION
from service.transport.problems import CLOSE, answer_of
from service.transport.receiving import joined
from service.transport.request_head import check_head
from service.transport.standard_headers import Headers
from service.transport.tls import speaks_no_tls

MAX_HEAD_BYTES: Final = 64 * 1024
"""Of a request head, or of what follows a body's last chunk, when it does not come in one read."""

_PATIENCE_S: Final = 0.05
"""How long the rest of a request for the fast path is awaited before the ASGI path gets it."""

_PROBE_S: Final = 0.02
"""After the caller's end of input, how long to answer before testing whether it still reads."""

_RESET_S: Final = 0.01
"""How often to look whether that test was answered by a reset."""

_TLS_END_S: Final = 0.2
"""How long a caller that rests may take to end TLS when the server stops."""

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

_Call = TypeVar("_Call")


class FastPath(Protocol[_Call]):
    """Answers small requests from the connection's bytes; see `api.fast_path`."""

    def lacks(self, data: bytes) -> int:
        """Return how many bytes are missing of a request that may be taken once it is whole."""
        ...

    def take(self, data: bytes, connection: "HttpConnection") -> _Call | None:
        """Take the request, for which `connection.answer` is called once; None = not taken."""
        ...

    def leave(self, call: _Call) -> None:
        """Drop a call whose caller has left."""
        ...


class _Receiving(Enum):
    """Which part of a request the parser is in."""

    NOTHING = auto()
    HEAD = auto()
    BODY = auto()


class HttpConnection(HttpToolsProtocol):
    """
    One connection.

    `fast_path` is offered each request that arrives whole while nothing else is being
    received or answered; None = every request takes the ASGI path.  `on_head_refused` is
    called with the status, the code and the body's size of each answer to a request head that
    the application never sees.
    """

    def __init__(
        self,
        *args: Any,
        fast_path: FastPath[Any] | None,
        head_timeout_s: float,
        answer_timeout_s: float,
        on_head_refused: Callable[[int, str, int], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.on_left: list[Callable[[], None]] = []
        self.is_lost = False
        self._fast_path = fast_path
        self._head_timeout_s = head_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._on_head_refused = on_head_refused

        self._receiving = _Receiving.NOTHING
        self._loose_bytes = 0  # received since the last byte of a body, or end of a head or body
        self._timer: asyncio.TimerHandle | None = None  # of what is being received
        self._has_eof = False
        self._input_ended = False
        self._head_error: HeadwiseError | None = None  # why the last head is refused
        self._last_error: HeadwiseError | None = None  # answered after all requests
        self._body_error: Exception | None = None  # raised where the last body is read

        self._running: RequestResponseCycle | None = None  # the request that ASGI answers, or did
        self._pending: Any = None  # the call that the fast path answers
        self._early: list[bytes] = []  # received while a call is pending
        self._held: list[bytes] = []  # the beginning of a request for the fast path
        self._missing = 0  # bytes of the request that is held
        self._patience: asyncio.TimerHandle | None = None
        self._stays_open = True
        self._rests_since = 0.0

    # The transport's side

    def connection_made(self, transport: Any) -> None:
        """Begin: the first request head must arrive in time."""
        self._output = CoalescingTransport(
            transport, self.loop, answer_timeout_s=self._answer_timeout_s
        )
        super().connection_made(self._output)  # type: ignore[arg-type]
        self._output.begin()
        self.flow = _Flow(self.transport, self.pipeline)
        if speaks_no_tls(transport):
            self._end_input(
                InvalidInput("address: this port speaks HTTPS only; expected https://, got no TLS")
            )
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """End every request of this connection."""
        self.is_lost = True
        self._output.on_lost()
        self._let_go()
        self._stop_timer()
        super().connection_lost(exc)
        if self._pending is not None and self._fast_path is not None:
            call, self._pending = self._pending, None
            self._fast_path.leave(call)
        for notify in list(self.on_left):
            notify()
        self._forget_head()
        self.pipeline.clear()
        self.cycle = None  # type: ignore[assignment]

    def resume_writing(self) -> None:
        """Go on writing: the system has taken all that was buffered."""
        super().resume_writing()
        self._output.on_drained()

    def delivery(self) -> Delivery:
        """Return how far everything that was written has got."""
        return self._output.delivery()

    def when_delivered(self, tell: Callable[[Delivery], None]) -> None:
        """Call `tell` once the system has taken all that was written, or never will."""
        self._output.when_delivered(tell)

    def data_received(self, data: bytes) -> None:
        """Offer the bytes to the fast path where a request may begin, else parse them."""
        if self._pending is not None:
            self._early.append(data)
            self.flow.pause_reading()
        elif self._input_ended or self._output.is_closed:
            return  # over TLS, bytes may come after the closing
        elif self._fast_path is not None and self._is_between_requests:
            self._offer(data, self._fast_path)
        else:
            self._feed(data)

    def eof_received(self) -> bool:  # type: ignore[override]  # as asyncio defines it
        """
        Answer what came whole, then close; True = the transport must stay open until then.

        A caller that closed its socket looks the same as one that only ended its input and
        waits, until something is sent: see `_probe`.
        """
        self._has_eof = True
        if self._pending is None:
            self._end_at_eof()
        # TLS has no half-closed connections: asyncio closes them whatever is returned.
        stays = self._is_answering and self.scheme == "http"
        if stays:
            self.loop.call_later(_PROBE_S, self._probe, _CONTINUE)
        return stays

    def shutdown(self) -> None:
        """Close as soon as what came is answered."""
        self._let_go()
        self._stays_open = False
        if self._pending is None:
            super().shutdown()
        if not self._is_answering and self.scheme == "https":
            # Closing waits for the caller's own end of TLS, which one that rests does not send.
            self.loop.call_later(_TLS_END_S, self.transport.abort)

    # The fast path

    def _offer(self, data: bytes, fast_path: FastPath[Any]) -> None:
        """Let the fast path take a request that is whole, or wait a moment for its rest."""
        if self._held:
            self._held.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return
            data = self._release()
        self._pending = fast_path.take(data, self)
        if self._pending is not None:
            self._stop_timer()
            return
        self._missing = fast_path.lacks(data)
        if self._missing > 0:
            self._hold(data)
        else:
            self._feed(data)

    def _hold(self, data: bytes) -> None:
        """Wait a moment for the rest of a request that the fast path may take."""
        self._stop_timer()
        self._held.append(data)
        self._patience = self.loop.call_later(_PATIENCE_S, self._let_go)

    def _release(self) -> bytes:
        """Return what was held, and wait no more."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        held, self._held = self._held, []
        return joined(held)

    def _let_go(self) -> None:
        """Parse what is held: the ASGI path waits for the rest of a request as long as it takes."""
        if self._held:
            self._feed(self._release())

    def answer(self, status: int, headers: Headers, pieces: Iterable[Chunk]) -> None:
        """Send the answer of the pending call; the next request may then be taken."""
        self._pending = None
        if not self._stays_open and CLOSE not in headers:
            headers.append(CLOSE)
        self._output.send(self._response_head(status, headers), *pieces)
        self.server_state.total_requests += 1
        if CLOSE in headers:
            self.transport.close()
            return
        self._rests_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._check_idle_in(self.timeout_keep_alive)
        if self._early:
            early, self._early = self._early, []
            self.flow.resume_reading()
            self.data_received(joined(early))
        if self._has_eof and self._pending is None:
            self._end_at_eof()

    # The parser

    def _feed(self, data: bytes) -> None:
        """Parse what came; the ASGI application answers the requests in it."""
        self._loose_bytes += len(data)
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError as error:
            self._end_input(self._parsing_error(error))
            return
        if self._loose_bytes > MAX_HEAD_BYTES:
            part = "trailer" if self._receiving is _Receiving.BODY else "head"
            self._end_input(TooLarge(f"{part}: at most {MAX_HEAD_BYTES} bytes, got more"))
            return
        self._limit_receiving()

    def _parse(self, data: memoryview) -> None:
        """
        Call the `on_` methods for what came.

        After the head of a request that offers an upgrade, the parser stops and takes the
        request to have no body.  That head, which is complete then, is read again without
        its offer by a new parser, and so is all that follows it.
        """
        while (end := self._end_of_upgrade_head(data)) is not None:
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            # As uvicorn sets it: what follows a request that closes is parsed, but not answered.
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(head)
            data = data[end:]

    def _end_of_upgrade_head(self, data: memoryview) -> int | None:
        """Parse up to the end of a head that offers an upgrade; None = there was none."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            return int(stop.args[0])
        return None

    def _head_without_upgrade(self) -> bytes:
        """Return the request head that was just parsed, as if nothing had been offered."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b\r\n" % line for line in self.headers if line[0] != b"upgrade"]
        return b"".join([*lines, b"\r\n"])

    def _parsing_error(self, error: httptools.HttpParserError) -> HeadwiseError:
        """Return what to answer when the parser, or one of the methods that it calls, fails."""
        if self._head_error is not None:
            # Its traceback leads to the head, which may hold a key, and back to this connection.
            head_error, self._head_error = self._head_error, None
            return head_error.with_traceback(None)
        if self._receiving is _Receiving.BODY:
            return InvalidInput(f"body: expected chunks as HTTP/1.1 defines them; {error}")
        if isinstance(error, httptools.HttpParserCallbackError):
            return InvalidInput("head: expected a path as the target of the request")
        if "PRI" in str(error):
            return InvalidInput("head: expected a request of HTTP/1.1, got HTTP/2 (as gRPC uses)")
        return InvalidInput(f"head: expected a request of HTTP/1.1; {error}")

    def on_message_begin(self) -> None:
        """A request begins."""
        self._receiving = _Receiving.HEAD
        self._unset_keepalive_if_required()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Start the application, unless this head must be refused or read again."""
        try:
            if self.parser.get_method() == b"CONNECT":
                raise MethodNotAllowed("CONNECT", allowed="GET, POST")
            check_head(self.parser.get_http_version(), self.headers)
        except HeadwiseError as error:
            self._head_error = error  # all that the parser reports is that a callback failed
            raise
        if self.parser.should_upgrade():
            return
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]
        super().on_headers_complete()
        self._forget_head()
        self._receiving = _Receiving.BODY
        self._loose_bytes = 0
        self._stop_timer()

    def _forget_head(self) -> None:
        """
        Drop this connection's own references to the request head; its cycle keeps one.

        An idle connection must hold no key, and trailer fields are not header fields.
        """
        self.scope, self.headers, self.url = {}, [], b""  # type: ignore[typeddict-item]

    def on_body(self, body: bytes) -> None:
        """Part of the body."""
        self._loose_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self.parser.should_upgrade():
            return
        self._receiving = _Receiving.NOTHING
        self._loose_bytes = 0
        self._rests_since = self.loop.time()
        self._stop_timer()
        super().on_message_complete()
        if not self.pipeline:
            # Reading may be paused over a large body; then nobody would see the caller leave.
            self.flow.resume_reading()

    # The ASGI application's side

    @property
    def has_whole_body(self) -> bool:
        """Whether nothing of the running request is still to come."""
        return self._running is not None and not self._running.more_body

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, partial(self._run, cycle, app))

    async def _run(
        self, cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Run the application; reading a body that will never be whole raises why."""

        async def receive_or_raise() -> Message:
            message = await receive()
            if self._body_error is None or cycle is not self.cycle:
                return message
            cycle.disconnected = isinstance(self._body_error, ClientDisconnect)
            raise self._body_error

        await app(scope, receive_or_raise, send)
        cycle.disconnected |= self.is_lost  # uvicorn marks the last request alone
        if cycle.disconnected:
            self.transport.close()
        elif cycle.response_started and not cycle.response_complete:
            # An answer is cut off when draining ends; nobody must take what was sent for all of it.
            cycle.disconnected = True
            self.transport.abort()

    def on_response_complete(self) -> None:
        """Start the next request, or wait for it, or end."""
        self._rests_since = self.loop.time()
        if self._running is not None:
            self._running.scope = {}  # type: ignore[typeddict-item]  # an idle connection holds no key
            self._running.body = bytearray()  # what was received of a body that was refused
        super().on_response_complete()
        if self._is_answering:
            return
        if self._input_ended:
            self._close()
        else:
            self._limit_receiving()

    # Ends

    def _end_input(self, error: HeadwiseError | None) -> None:
        """
        Take nothing more: what came whole is answered, then the error, then the connection closes.

        Inside a body, the error is raised where that body is read: its request is answered
        with it, unless it has its answer already.
        """
        if self._input_ended:
            return
        self._input_ended = True
        self._forget_head()
        self._stop_timer()
        if self._receiving is _Receiving.BODY:
            self._body_error = error or ClientDisconnect()
            self.cycle.keep_alive = False
            self.cycle.message_event.set()
        else:
            self._last_error = error
        if not self._is_answering:
            self._close()

    def _end_at_eof(self) -> None:
        self._let_go()
        self._end_input(None)

    def _close(self) -> None:
        """Send the last error, if there is one, and close."""
        if self.transport.is_closing():
            return
        error, self._last_error = self._last_error, None
        if error is None:
            self.transport.close()
            return
        status, headers, body = answer_of(error)
        if CLOSE not in headers:
            headers.append(CLOSE)
        self._output.send(self._response_head(status, headers), body)
        self.transport.close()
        self._on_head_refused(status, error.code, len(body))

    def _probe(self, probe: bytes = b"") -> None:
        """
        Drop the connection of a caller that has closed its socket while it is being answered.

        Its host resets the connection once something arrives there.  An interim response
        may precede any final one (RFC 9110, 15.2), and does no harm to one that still waits.
        """
        if not self._is_answering or self.transport.is_closing():
            return
        if self._output.is_reset():
            self.transport.abort()
            return
        if probe and self._may_send_interim:
            self.transport.write(probe)
        self.loop.call_later(_RESET_S, self._probe)

    @property
    def _may_send_interim(self) -> bool:
        """Whether nothing of the running request's answer is sent, and its caller knows 1xx."""
        if self._pending is not None or self._running is None:
            return True
        return not self._running.response_started and self._running.scope["http_version"] != "1.0"

    # States and time limits

    @property
    def _is_answering(self) -> bool:
        """Whether a request that came has not had its whole answer."""
        return self._pending is not None or (
            self._running is not None and not self._running.response_complete
        )

    @property
    def _is_between_requests(self) -> bool:
        """Whether the next byte begins a request, and every answer has been sent."""
        return (
            self._receiving is _Receiving.NOTHING
            and (self._running is None or self._running.response_complete)
            and not self.flow.write_paused
        )

    def _limit_receiving(self) -> None:
        """Start the time limit of what is being received while nothing is being answered."""
        if self._receiving is _Receiving.NOTHING or self._timer is not None or self._is_answering:
            return
        self._start_timer()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._head_timeout_s, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        limit = f"within {self._head_timeout_s:g} s of connecting or of its first byte"
        self._end_input(TooSlow(f"head: expected {limit}"))

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if it has been idle that long; one timer serves many calls."""
        self.timeout_keep_alive_task = None
        left_s = self._rests_since + self.timeout_keep_alive - self.loop.time()
        is_receiving = self._held or self._receiving is not _Receiving.NOTHING
        if is_receiving or self._is_answering:
            self._check_idle_in(self.timeout_keep_alive)
        elif left_s > 0:
            self._check_idle_in(left_s)
        else:
            super().timeout_keep_alive_handler()

    def _check_idle_in(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            seconds, self.timeout_keep_alive_handler
        )

    def _response_head(self, status: int, headers: Headers) -> bytes:
        lines = [b"%b: %b\r\n" % line for line in self.server_state.default_headers + headers]
        return b"".join([STATUS_LINE[status], *lines, b"\r\n"])


class _Flow(FlowControl):
    """
    Uvicorn's flow control, which reads nothing more while parsed requests wait.

    Else every answer would let another read's worth of requests into the queue.
    """

    def __init__(self, transport: asyncio.Transport, pipeline: Any) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if not self._pipeline:
            super().resume_reading()
