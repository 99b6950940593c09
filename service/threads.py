"""Threads, and what happens where the system starts no more of them."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from service.errors import ThreadsUnavailable

ADVICE: Final = "see the limits on processes and threads (pids.max of the control group, ulimit -u)"
"""Which resource it is that a thread or a process needs, and where it is limited."""

_E = TypeVar("_E", bound=ThreadPoolExecutor)


def start(thread: threading.Thread) -> None:
    """
    Start a thread.

    Raises:
        ThreadsUnavailable: the system starts no more.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise ThreadsUnavailable(f"threads: {error}; {ADVICE}") from None


class UnawaitedThreads(ThreadPoolExecutor):
    """Threads that a shutdown never waits for: what they still do, nobody needs any more."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Start nothing more; what `wait` says is ignored."""
        super().shutdown(wait=False, cancel_futures=True)


def all_started(executor: _E, count: int) -> _E:
    """
    Return the executor once all of its threads, so many, are there; else they come with the work.

    Raises:
        ThreadsUnavailable: the system starts no more.
    """
    all_there = threading.Barrier(count)
    try:
        # Each waits for the last one, so that none takes the place of another.
        for _ in range(count):
            executor.submit(all_there.wait)
    except RuntimeError as error:
        all_there.abort()
        executor.shutdown(wait=False)
        raise ThreadsUnavailable(f"threads: {error}; {ADVICE}") from None
    return executor


class LastResort:
    """
    Does something when its time has come, whatever the rest of the process waits for.

    Its thread is started with it.

    Raises:
        ThreadsUnavailable: the system starts no more.
    """

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act
        self._changed = threading.Condition()
        self._at: float | None = None
        start(threading.Thread(target=self._run, name="last resort", daemon=True))

    def within(self, seconds: float) -> None:
        """Act after so many seconds, or at the time that was named before if that is sooner."""
        with self._changed:
            at = time.monotonic() + seconds
            self._at = at if self._at is None else min(at, self._at)
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while self._at is None or self._at > time.monotonic():
                self._changed.wait(None if self._at is None else self._at - time.monotonic())
        self._act()
