"""Bodies under way: how much memory of them there may be at once."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

from service.codecs.size import MEMORY_PER_JSON_BYTE
from service.errors import QueueFull, TooLarge

FREE_BYTES: Final = 64 * 1024
"""
What is never refused: a connection receives so much before anybody asks for the body, and
large bodies of some callers must not shut out the small ones of others.
"""

_RETRY_AFTER_S: Final = 1


class BodyMemory:
    """
    A budget of bytes for bodies: while they are received, decompressed and decoded, and for
    their tensors until the call is answered.

    Used from any thread.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._bytes = 0

    def bytes_held(self) -> int:
        """Return how many bytes are counted now."""
        return self._bytes

    def add(self, size: int, *, beside: int = 0) -> None:
        """
        Count so many bytes more, for what takes `beside` already.

        Raises:
            TooLarge: that is more than there will ever be room for.
            QueueFull: it is more than there is room for now.
        """
        total = beside + size
        with self._lock:
            if total > FREE_BYTES and self._bytes + size > self._limit_bytes:
                if total > self._limit_bytes:
                    raise TooLarge(
                        f"body: reading it takes {total} bytes of memory or more, all bodies"
                        f" together may take {self._limit_bytes} (max_bodies_bytes); JSON takes"
                        f" {MEMORY_PER_JSON_BYTE} times its length and more: send less, or the"
                        " tensors in binary"
                    )
                raise QueueFull(
                    f"bodies: at most {self._limit_bytes} bytes of memory may be taken by bodies"
                    f" that are received, decoded or computed, {self._bytes} are, and this one"
                    f" takes {size} more",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._bytes += size

    def remove(self, size: int) -> None:
        """Count so many bytes as free again."""
        with self._lock:
            self._bytes -= size

    @contextlib.contextmanager
    def held(self) -> Iterator["HeldBody"]:
        """Give what holds memory for one body; it is released at the end of the block."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            body.release()


class HeldBody:
    """The memory that one body takes."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._bytes = 0
        self._is_over = False

    def hold(self, size: int) -> None:
        """
        Hold so many bytes in all, if they are more than before.

        Raises:
            TooLarge, QueueFull: see `BodyMemory.add`.
        """
        with self._lock:
            more = size - self._bytes
            if more > 0 and not self._is_over:
                self._memory.add(more, beside=self._bytes)
                self._bytes = size

    def release(self) -> None:
        """Hold nothing, now and later: a thread may not have noticed yet that the body is over."""
        with self._lock:
            self._is_over = True
            self._memory.remove(self._bytes)
            self._bytes = 0
