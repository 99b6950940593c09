"""A transport that sends an answer in one piece, and cuts off callers that read nothing."""

import asyncio
import contextlib
import fcntl
import os
import select
import socket
import struct
import sys
import termios
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from service.codecs.chunks import Chunk

_TLS_WRITE_BYTES: Final = 64 * 1024
"""
How much a TLS transport is given at a time.  It encrypts all it is given and hands it to the
socket's transport, whose buffer it does not count, until that says that it is full.
"""

_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: on, for 0 s."""

_LOOKS: Final = 4
"""How often a stalled connection is looked at within the time limit."""


@dataclass(frozen=True)
class Delivery:
    """How far what was written to a connection has got."""

    unsent_bytes: int
    """What the system has not taken, and never will once the connection is lost."""
    is_stalled: bool
    """The connection was cut because its caller took nothing for too long."""

    @property
    def is_whole(self) -> bool:
        """True when the system has taken all of it."""
        return not self.unsent_bytes


WHOLE: Final = Delivery(0, is_stalled=False)


class CoalescingTransport:
    """
    A transport that sends two writes of one turn of the loop together, and at once.

    Uvicorn writes an answer's head and body apart: two system calls here, two
    packets on the way, and two wake-ups there.  And the loop's own transport sends
    when the turn is over: an answer would wait until it is counted and logged.

    It also watches what the system does not take at once: when the caller takes no
    byte of it for `answer_timeout_s` (up to a quarter longer), the connection is aborted.
    The protocol passes on what it hears of the transport: `on_drained`, `on_lost`.
    """

    def __init__(
        self, transport: Any, loop: asyncio.AbstractEventLoop, *, answer_timeout_s: float
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._look_s = answer_timeout_s / _LOOKS
        self._held = b""
        self.is_closed = False
        self._is_plain = transport.get_extra_info("sslcontext") is None
        self._socket: int = transport.get_extra_info("socket").fileno()
        self._waiting: list[Callable[[Delivery], None]] = []
        self._written = 0
        """Bytes that the system or the transport was given."""
        self._taken = 0
        """How many of them the system had, when that was last looked at."""
        self._acknowledged = 0
        """How many of them the caller's system had, when that was last looked at."""
        self._idle_looks = 0
        self._watch: asyncio.TimerHandle | None = None
        self._lost: Delivery | None = None

    def begin(self) -> None:
        """Let writing be paused as long as anything is buffered: its end is the buffer's end."""
        # A TLS transport would take 0 for "always".
        self._transport.set_write_buffer_limits(high=0 if self._is_plain else 1, low=0)

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
        if not self._is_plain:
            return False
        poll = select.poll()
        poll.register(self._socket, 0)  # a reset is reported whatever is asked for
        return bool(poll.poll(0))

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._pass_on([held])

    def send(self, *pieces: Chunk) -> None:
        """Give the system what it takes now, and the transport what is left."""
        self._flush()
        sent = 0
        is_free = not self._transport.is_closing() and not self._transport.get_write_buffer_size()
        if self._is_plain and is_free:
            # Whatever keeps it from being sent, the transport will meet and tell.
            with contextlib.suppress(OSError):
                sent = os.writev(self._socket, pieces)
                self._written += sent
                self._taken = self._written
        if sent < sum(map(len, pieces)):
            self._pass_on(_after(pieces, sent))

    def delivery(self) -> Delivery:
        """Return how far everything that was written has got."""
        self._flush()
        if self._lost is not None:
            return self._lost
        buffered = self._buffered()
        return Delivery(buffered, is_stalled=False) if buffered else WHOLE

    def when_delivered(self, tell: Callable[[Delivery], None]) -> None:
        """
        Call `tell` once the system has taken all that was written, or never will.

        That is at once where nothing is buffered.
        """
        delivery = self.delivery()
        if delivery.is_whole or self._lost is not None:
            tell(delivery)
        else:
            self._waiting.append(tell)

    def on_drained(self) -> None:
        """The transport's buffer is empty."""
        if not self._buffered():
            self._settle(WHOLE)

    def on_lost(self) -> None:
        """The connection is no more; what was not sent by then never will be."""
        if self._lost is None:
            # The transport has thrown its buffer away: what it held was seen at the last write.
            self._lost = Delivery(self._written - self._taken, is_stalled=False)
        self._settle(self._lost)

    def _pass_on(self, pieces: list[Chunk]) -> None:
        """Give the transport what the system did not take, and watch it until it is gone."""
        if self._lost is not None:
            return
        size = sum(map(len, pieces))
        self._written += size
        if self._is_plain or size <= _TLS_WRITE_BYTES:
            self._transport.writelines(pieces)
        else:
            for piece in pieces:
                view = memoryview(piece)
                for start in range(0, len(view), _TLS_WRITE_BYTES):
                    self._transport.write(view[start : start + _TLS_WRITE_BYTES])
        self._taken = self._written - self._buffered()
        if self._watch is None and self._written > self._taken:
            self._acknowledged, self._idle_looks = self._taken - _unacknowledged(self._socket), 0
            self._watch = self._loop.call_later(self._look_s, self._look)

    def _buffered(self) -> int:
        """Return how many bytes the transport has not handed to the system."""
        return int(self._transport.get_write_buffer_size())

    def _look(self) -> None:
        """Abort the connection when nothing was acknowledged since so many looks; else go on."""
        self._watch = None
        if self._lost is not None:
            return
        # Looks are counted, not seconds: a process that was itself suspended blames no caller.
        self._idle_looks += 1
        self._taken = self._written - self._buffered()
        # The system makes room only now and then, whereas a slow caller takes a little always.
        acknowledged = self._taken - _unacknowledged(self._socket)
        if acknowledged > self._acknowledged:
            self._acknowledged, self._idle_looks = acknowledged, 0
        if self._written == self._taken:
            self._settle(WHOLE)
        elif self._idle_looks >= _LOOKS:
            self._lost = Delivery(self._written - self._taken, is_stalled=True)
            # A reset, so that the system keeps nothing for the caller either.
            self._transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _RESET
            )
            self._transport.abort()
        else:
            self._watch = self._loop.call_later(self._look_s, self._look)

    def _settle(self, delivery: Delivery) -> None:
        self._taken = self._written
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        waiting, self._waiting = self._waiting, []
        for tell in waiting:
            tell(delivery)


def _unacknowledged(fileno: int) -> int:
    """Return how many bytes the system keeps for the other side of a connection; 0 = unknown."""
    with contextlib.suppress(OSError):
        return int.from_bytes(fcntl.ioctl(fileno, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return 0


def _after(pieces: Iterable[Chunk], sent: int) -> list[Chunk]:
    """Return what is left of the pieces without the first so many bytes."""
    left: list[Chunk] = []
    for piece in pieces:
        left.append(memoryview(piece)[sent:])
        sent = max(0, sent - len(piece))
    return left
