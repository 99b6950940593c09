"""
Where encoding and decoding run: on the event loop, in a thread, or in another process.

Parsing JSON holds the interpreter's lock from beginning to end, so that even a
thread of its own would stop the event loop; a large body goes to a process.
"""

import asyncio
import ctypes
import multiprocessing
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Final, TypeVar

from service.errors import DecodingFailed

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

_PR_SET_PDEATHSIG: Final = 1
"""prctl(2): the signal that a process gets when its parent dies."""

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


class UnawaitedThreads(ThreadPoolExecutor):
    """Threads that a shutdown never waits for: what they still do, nobody needs any more."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Start nothing more; what `wait` says is ignored."""
        super().shutdown(wait=False, cancel_futures=True)


class Offload:
    """The threads and the process of one server, started when they are first needed."""

    def __init__(self) -> None:
        self._threads = UnawaitedThreads(2, thread_name_prefix="codec")
        self._stops: set[threading.Event] = set()
        self._process: ProcessPoolExecutor | None = None

    def close(self) -> None:
        """End the threads and the process, without waiting for what nobody waits for."""
        for stop in self._stops:
            stop.set()
        self._threads.shutdown()
        if self._process is not None:
            self._process.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()

    async def decode(self, size: Size, decode: Callable[..., _T], *args: object) -> _T:
        """
        Return `decode(*args)`: from here, from a thread, or for much JSON from another process.

        Raises:
            DecodingFailed: the process ended before it answered.
        """
        if size.is_small:
            return decode(*args)
        loop = asyncio.get_running_loop()
        if size.json_bytes <= _PROCESS_JSON_BYTES:
            return await loop.run_in_executor(self._threads, decode, *args)
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._process = ProcessPoolExecutor(1, context, initializer=_follow_the_server)
        try:
            return await loop.run_in_executor(self._process, decode, *args)
        except BrokenProcessPool as error:
            self._process = None
            raise DecodingFailed("the process that reads large bodies ended") from error

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


def _follow_the_server() -> None:
    """Leave Ctrl-C, which reaches all of a terminal, to the server; never outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
