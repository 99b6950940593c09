"""
One HTTP request and its answer, straight over ASGI.

The calls with tensors are read and answered here: a framework's request and
response objects would cost more than all that is done for a small call.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, Final, Protocol, TypeVar, cast
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from service.codecs.compression import decompress, encoding_of
from service.codecs.offload import Offload
from service.codecs.readers import Hold
from service.codecs.size import Size
from service.errors import TooLarge, TooSlow
from service.telemetry.request_record import RECORD, RequestRecord
from service.transport.coalescing import Delivery
from service.transport.request_head import by_name

CONNECTION: Final = "headwise.connection"
"""The ASGI extension that holds a `Connection`."""

_T = TypeVar("_T")


class Connection(Protocol):
    """What a request can know of the connection it came on: `HttpConnection`, `PlainConnection`."""

    on_left: list[Callable[[], None]]
    """To be called when the caller leaves."""
    is_lost: bool
    """The caller has left."""

    @property
    def has_whole_body(self) -> bool:
        """True when nothing of the request is still to come."""
        ...

    def delivery(self) -> Delivery:
        """Return how far what was written has got."""
        ...

    def when_delivered(self, tell: Callable[[Delivery], None]) -> None:
        """Call `tell` once the system has taken all that was written, or never will."""
        ...


async def delivered(connection: Connection) -> None:
    """
    Return once the system has taken all that was written to a connection.

    Raises:
        ClientDisconnect: it never will.
    """
    done: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()

    def tell(delivery: Delivery) -> None:
        if not done.done():
            done.set_result(delivery)

    connection.when_delivered(tell)
    if not (await done).is_whole:
        raise ClientDisconnect


async def read_body(
    exchange: "Exchange",
    offload: Offload,
    *,
    limit_bytes: int,
    decompressed_limit_bytes: int,
    timeout_s: float,
    size_of: Callable[[int], Size],
    hold: Hold,
) -> bytes:
    """
    Return the whole body, decompressed off the event loop until the task is cancelled.

    `hold` holds the memory that reading it takes, before it is received or decompressed;
    `size_of` says what a body of so many bytes is.

    Raises:
        InvalidInput: it is not of the encoding that it names.
        TooLarge: above a limit, as it came or decompressed.
        TooSlow: it did not arrive in time.
        UnsupportedMediaType: it is encoded in an unknown way.
        QueueFull, TooLarge: as `hold` does.
        ClientDisconnect: the caller has left.
    """
    encoding = encoding_of(exchange.headers.get("content-encoding", ""))

    def hold_plain(size: int, beside: int = 0) -> None:
        hold(beside + size_of(size).memory_bytes)

    hold_received = hold_plain if encoding is None else hold
    content = await exchange.body(limit_bytes=limit_bytes, timeout_s=timeout_s, hold=hold_received)
    if encoding is None:
        return content
    hold_decompressed = partial(hold_plain, beside=len(content))
    limit = decompressed_limit_bytes
    return await offload.interruptible(decompress, content, encoding, limit, hold_decompressed)


class Exchange:
    """A request whose head has come, and the way back to who sent it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.path: str = scope["path"]
        self.http_version: str = scope["http_version"]
        self.record: RequestRecord = scope[RECORD]
        self.headers = by_name(scope["headers"])
        self._query: bytes = scope["query_string"]
        self._connection: Connection = scope["extensions"][CONNECTION]
        self._receive = receive
        self._send = send

    def query(self) -> list[tuple[str, str]]:
        """Return the query string's pairs."""
        text = self._query.decode("latin-1")
        return parse_qsl(text, keep_blank_values=True) if text else []

    async def body(self, *, limit_bytes: int, timeout_s: float, hold: Hold) -> bytes:
        """
        Return the whole body, as it came.

        `hold` is told its size before it is read, or where that is not known as it comes.

        Raises:
            TooLarge: above the limit, by its own word or by what came.
            TooSlow: it did not arrive in time.
            QueueFull, TooLarge: as `hold` does.
            ClientDisconnect: it will never be whole.
        """
        announced = self.headers.get("content-length", "")
        if announced.isdigit() and int(announced[:20]) > limit_bytes:
            raise TooLarge(f"body: at most {limit_bytes} bytes, got {announced[:20]}")
        if announced.isdigit():
            hold(int(announced[:20]))
        parts: list[bytes] = []
        if self._connection.has_whole_body:
            await self._read(parts, limit_bytes, hold)
        else:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._read(parts, limit_bytes, hold)
            except TimeoutError:
                size = sum(map(len, parts))
                raise TooSlow(
                    f"body: expected within {timeout_s:g} s, got {size} bytes by then"
                ) from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def while_there(self, work: Coroutine[Any, Any, _T]) -> _T:
        """
        Return what the work gives; a caller that leaves cancels it, and it is not begun for
        one that has left.

        Raises:
            ClientDisconnect: nobody is there to answer to.
        """
        if self._connection.is_lost:
            work.close()
            raise ClientDisconnect
        task = cast(asyncio.Task[None], asyncio.current_task())
        has_left = False

        def leave() -> None:
            nonlocal has_left
            has_left = task.cancel()

        on_left = self._connection.on_left
        on_left.append(leave)
        try:
            return await work
        except asyncio.CancelledError:
            if not has_left:
                raise
            task.uncancel()
            raise ClientDisconnect from None
        finally:
            on_left.remove(leave)

    async def answer(
        self,
        headers: list[tuple[bytes, bytes]],
        content: bytes | AsyncIterator[bytes],
        *,
        status: int = 200,
    ) -> None:
        """Send this content; its length must be among the headers, or is not known."""
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        if isinstance(content, bytes):
            await self._send({"type": "http.response.body", "body": content})
            return
        async for piece in content:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    async def _read(self, parts: list[bytes], limit_bytes: int, hold: Hold) -> None:
        """Append what comes to the parts, until all is there."""
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit_bytes:
                raise TooLarge(f"body: at most {limit_bytes} bytes, got more")
            hold(size)
            more = message.get("more_body", False)
