"""A transport that sends at once what belongs together."""

import asyncio
import contextlib
import os
import select
from collections.abc import Iterable
from typing import Any

from service.pieces import Chunk


class Gathering:
    """
    A transport that sends two writes of one turn of the loop together, and at once.

    Uvicorn writes an answer's head and body apart: two system calls here, two
    packets on the way, and two wake-ups there.  And the loop's own transport sends
    when the turn is over: an answer would wait until it is counted and logged.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""
        self.is_closed = False
        is_plain = transport.get_extra_info("sslcontext") is None
        self._socket = transport.get_extra_info("socket").fileno() if is_plain else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send the bytes, at the latest when the loop turns."""
        if self._held:
            held, self._held = self._held, b""
            self.send(held, data)
        elif data:
            self._held = data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Close the connection once all is sent."""
        self.is_closed = True
        self._flush()
        self._transport.close()

    def is_reset(self) -> bool:
        """Whether the peer has reset the connection, which no read tells once its input ended."""
        if self._socket is None:
            return False
        poll = select.poll()
        poll.register(self._socket, 0)  # a reset is reported whatever is asked for
        return bool(poll.poll(0))

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held)

    def send(self, *pieces: Chunk) -> None:
        """Give the system what it takes now, and the transport what is left."""
        self._flush()
        sent = 0
        is_free = not self._transport.is_closing() and not self._transport.get_write_buffer_size()
        if self._socket is not None and is_free:
            # Whatever keeps it from being sent, the transport will meet and tell.
            with contextlib.suppress(OSError):
                sent = os.writev(self._socket, pieces)
        if sent < sum(map(len, pieces)):
            self._transport.writelines(_after(pieces, sent))


def _after(pieces: Iterable[Chunk], sent: int) -> list[Chunk]:
    """Return what is left of the pieces without the first so many bytes."""
    left: list[Chunk] = []
    for piece in pieces:
        left.append(memoryview(piece)[sent:])
        sent = max(0, sent - len(piece))
    return left
