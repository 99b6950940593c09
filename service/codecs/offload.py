"""
Where encoding and decoding run: on the event loop, in a thread, or in another process.

Parsing JSON holds the interpreter's lock from beginning to end, so that even a
thread of its own would stop the event loop; a large body goes to a process.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from service.codecs.readers import Hold, Readers
from service.threads import UnawaitedThreads, all_started

_INLINE_JSON_BYTES: Final = 320 * 1024
_INLINE_RAW_BYTES: Final = 4 * 2**20
"""
Up to here the work is done at once: 0.5 to 1 ms.  As much in a thread would hold the
interpreter's lock for as long, and cost two changes of threads besides.
"""

JSON_PER_RAW_BYTE: Final = 5
"""An FP32 number takes four bytes, and some twenty as JSON."""

_PROCESS_JSON_BYTES: Final = 4 * 2**20
"""From here JSON is read in another process: 4 MiB hold the lock for about 15 ms."""

MEMORY_PER_JSON_BYTE: Final = 6
MEMORY_PER_RAW_BYTE: Final = 3
"""
What a body takes for each of its bytes, from its receipt to its tensors: 5.3 was measured for
JSON with nine digits a number, 3.5 with 17.  Shorter numbers take up to 20; how much it really
is, is looked at while a large body is decoded.
"""

_THREADS: Final = 2

_T = TypeVar("_T")


@dataclass(frozen=True)
class Size:
    """How much there is to read or write: JSON takes a hundred times as long as raw tensors."""

    json_bytes: int = 0
    raw_bytes: int = 0

    @property
    def is_small(self) -> bool:
        """True when the work is done at once."""
        return self.json_bytes <= _INLINE_JSON_BYTES and self.raw_bytes <= _INLINE_RAW_BYTES

    @property
    def memory_bytes(self) -> int:
        """About how much memory reading a body of this size takes, itself included."""
        return MEMORY_PER_JSON_BYTE * self.json_bytes + MEMORY_PER_RAW_BYTE * self.raw_bytes


class Offload:
    """
    The threads and the processes of one server.

    `decode_timeout_s` is how long a process may take for one body.

    Raises:
        ThreadsUnavailable: the system starts no more threads.
    """

    def __init__(self, decode_timeout_s: float) -> None:
        self._threads = all_started(UnawaitedThreads(_THREADS, "codec"), _THREADS)
        self._stops: set[threading.Event] = set()
        self.readers = Readers(decode_timeout_s)

    def close(self) -> None:
        """End the threads and the processes, without waiting for what nobody waits for."""
        for stop in self._stops:
            stop.set()
        self._threads.shutdown()
        self.readers.close()

    async def decode(
        self, size: Size, decode: Callable[..., _T], content: bytes, *args: object, hold: Hold
    ) -> _T:
        """
        Return `decode(content, *args)`: from here, from a thread, or for much JSON from a process.

        Raises:
            HeadwiseError: what `decode` raises, or see `Readers.decode`.
        """
        if size.is_small:
            return decode(content, *args)
        if size.json_bytes <= _PROCESS_JSON_BYTES:
            return await self.in_thread(decode, content, *args)
        return await self.readers.decode(decode, content, *args, hold=hold)

    async def do(self, size: Size, work: Callable[..., _T], *args: object) -> _T:
        """Return `work(*args)`: from here when it is little, else from a thread."""
        return work(*args) if size.is_small else await self.in_thread(work, *args)

    async def in_thread(self, work: Callable[..., _T], *args: object) -> _T:
        """Return `work(*args)` from a thread: for what may be long, and leaves the lock."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def interruptible(self, work: Callable[..., _T], *args: object) -> _T:
        """
        Return `work(*args, stop)` from a thread.

        `stop` is an event that is set when nobody waits for the result any more, because
        the waiting task was cancelled or the workers were closed.
        """
        stop = threading.Event()
        self._stops.add(stop)
        try:
            return await self.in_thread(work, *args, stop)
        finally:
            stop.set()
            self._stops.discard(stop)

    async def chunks(self, chunks: Iterator[_T]) -> AsyncIterator[_T]:
        """Give chunks that are made one by one in a thread, as fast as they are taken."""
        loop = asyncio.get_running_loop()
        while True:
            chunk = await loop.run_in_executor(self._threads, next, chunks, None)
            if chunk is None:
                return
            yield chunk
