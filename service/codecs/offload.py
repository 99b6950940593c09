"""
Where encoding and decoding run: on the event loop, in a thread, or in another process.

Parsing JSON holds the interpreter's lock from beginning to end, so that even a
thread of its own would stop the event loop; a large body goes to a process.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final, TypeVar

from service.codecs.readers import Hold, Readers
from service.codecs.size import PROCESS_JSON_BYTES, Size
from service.threads import UnawaitedThreads, all_started

_THREADS: Final = 2

_T = TypeVar("_T")


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
        if size.json_bytes <= PROCESS_JSON_BYTES:
            return await self.in_thread(decode, content, *args)
        return await self.readers.decode(decode, content, *args, hold=hold)

    async def do(self, size: Size, work: Callable[..., _T], *args: object) -> _T:
        """Return `work(*args)`: from here when it is little, else from a thread."""
        return work(*args) if size.is_small else await self.in_thread(work, *args)

    async def in_thread(self, work: Callable[..., _T], *args: object) -> _T:
        """Return `work(*args)` from a thread: for what may be long, and leaves the lock."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, _without_stop, work, *args)

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


def _without_stop(work: Callable[..., _T], *args: object) -> _T:
    """Return `work(*args)`; StopIteration, which no future can raise, becomes a RuntimeError."""
    try:
        return work(*args)
    except StopIteration as error:
        raise RuntimeError("the work raised StopIteration") from error
