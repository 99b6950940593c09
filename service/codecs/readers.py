"""The processes that decode large JSON bodies: how many, in which order, within which limits."""

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

from service.codecs.reader_process import CannotStart, Killed, ReaderProcess
from service.errors import NotReady, TooLarge
from service.logs import event
from service.threads import ADVICE, UnawaitedThreads

PROCESSES: Final = 4
"""
How many bodies are decoded at once, each in a process of its own, among which the system
shares the cores: the body of one caller does not hold up that of another.
"""

_IDLE_S: Final = 10.0
"""How long a process is kept for the next body: starting one takes a few tenths of a second."""

_LOOK_S: Final = 0.02
"""How often it is looked at what a body costs while it is decoded."""

_OVERTAKING_BYTES_PER_S: Final = 10 * 2**20
"""
A body that is so much smaller than one that waits may overtake it for one second: small ones
go first, and none waits for ever.
"""

_RETRY_AFTER_S: Final = 5

Hold = Callable[[int], None]
"""Holds so many bytes of memory for a body, in all; raises where that is too much."""

_T = TypeVar("_T")


class Readers:
    """
    The processes of one server; they are started when they are needed, and end when they rest.

    Used on one event loop.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._threads = UnawaitedThreads(PROCESSES, "reader")
        """Each speaks to one process, and comes with it."""
        self._readers: set[ReaderProcess] = set()
        self._idle: list[tuple[ReaderProcess, asyncio.TimerHandle]] = []
        self._free = PROCESSES
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._is_reported = False
        """The log has that no process can be started."""

    def close(self) -> None:
        """End every process, whatever it does, and take nothing more."""
        for reader in self._readers:
            reader.kill()
        for reader, end in self._idle:
            end.cancel()
            reader.end()
        self._threads.shutdown()

    def memory_bytes(self) -> int:
        """Return the memory that the processes hold beside what they share with files."""
        return sum(reader.memory_bytes() for reader in self._readers)

    async def check(self) -> None:
        """Start a process, to report in the log if that is impossible; it ends when it rests."""
        await self._turn(0)
        reader = self._taken()
        try:
            await self._in_thread(reader, reader.start)
        except CannotStart as error:
            self._report(error)
        finally:
            self._give_back(reader)

    async def decode(
        self, decode: Callable[..., _T], content: bytes, *args: object, hold: Hold
    ) -> _T:
        """
        Return `decode(content, *args)` from a process.

        The process is ended when it exceeds its limits, or when the waiting task is cancelled.

        Raises:
            TooLarge: it took longer than the time limit.
            NotReady: no process can be started, or it was ended from outside.
            DecodingFailed: the process ended by itself before it answered.
            QueueFull, TooLarge: as `hold` does, which is told how much memory it takes.
        """
        await self._turn(len(content))
        reader = self._taken()
        work: asyncio.Future[_T] | None = None
        try:
            work = self._in_thread(reader, reader.decode, decode, content, *args)
            await self._within_limits(work, reader, len(content), hold)
            outcome = work.result()
        except CannotStart as error:
            self._report(error)
            raise NotReady(
                "body: JSON of this size is read by a process of its own, which could not be"
                f" started: {error}; until it can, send less, or the tensors in binary",
                retry_after_s=_RETRY_AFTER_S,
            ) from error
        except Killed as error:
            problem = "the process that decoded a large body was ended from outside"
            event(problem, level=logging.WARNING, advice="see how much memory is left")
            raise NotReady(
                f"body: {problem}, most often because memory is short; try again later",
                retry_after_s=_RETRY_AFTER_S,
            ) from error
        finally:
            if work is not None and not work.done():
                reader.kill()
                # What becomes of it, nobody waits for.
                work.add_done_callback(lambda work: work.cancelled() or work.exception())
            self._give_back(reader)
        self._is_reported = False
        return outcome

    def _in_thread(
        self, reader: ReaderProcess, work: Callable[..., _T], *args: Any
    ) -> asyncio.Future[_T]:
        """
        Begin the work of a thread with a process.

        Raises:
            CannotStart: there is no thread for it.
        """
        try:
            return asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        except RuntimeError as error:
            reader.kill()
            raise CannotStart(f"{error}; {ADVICE}") from error

    async def _within_limits(
        self, work: asyncio.Future[Any], reader: ReaderProcess, size: int, hold: Hold
    ) -> None:
        """
        Return when the work is done.

        Raises:
            TooLarge, QueueFull: see `decode`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        while not work.done():
            if loop.time() > deadline:
                raise TooLarge(
                    f"body: expected JSON that is decoded within {self._timeout_s:g} s"
                    f" (decode_timeout_s), these {size} bytes take longer; NaN, Infinity and"
                    " mistakes make decoding slow: send less, or the tensors in binary"
                )
            hold(size + reader.memory_bytes())
            await asyncio.wait({work}, timeout=_LOOK_S)

    async def _turn(self, size: int) -> None:
        """Return when a process may be taken; smaller bodies go first, but not for ever."""
        if self._free:
            self._free -= 1
            return
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        order = loop.time() + size / _OVERTAKING_BYTES_PER_S
        heapq.heappush(self._waiting, (order, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Let the next one that still waits take a process."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _taken(self) -> ReaderProcess:
        """Return a process: one that rests, else one to be started."""
        while self._idle:
            reader, end = self._idle.pop()
            end.cancel()
            if reader.is_alive():
                return reader
            self._end(reader)  # the system may have ended it for its memory
        reader = ReaderProcess()
        self._readers.add(reader)
        return reader

    def _give_back(self, reader: ReaderProcess) -> None:
        """Keep the process for the next body if it is there, and pass the turn on."""
        if reader.is_ended:
            self._readers.discard(reader)
        else:
            end = asyncio.get_running_loop().call_later(_IDLE_S, self._end_idle, reader)
            self._idle.append((reader, end))
        self._pass_on()

    def _end_idle(self, reader: ReaderProcess) -> None:
        self._idle = [idle for idle in self._idle if idle[0] is not reader]
        self._end(reader)

    def _end(self, reader: ReaderProcess) -> None:
        self._readers.discard(reader)
        self._threads.submit(reader.end)

    def _report(self, error: CannotStart) -> None:
        """Log once that no process can be started."""
        if not self._is_reported:
            self._is_reported = True
            event(
                "large JSON bodies are refused: the process that reads them does not start",
                level=logging.WARNING,
                problem=str(error),
            )
