"""
Log lines on their way to a file descriptor, written by a thread of its own.

Who logs appends to a buffer and goes on: no caller waits for the descriptor, so a reader
that has stopped (a full pipe, a terminal on hold) stops nothing but the log.  What no longer
fits into the buffer meanwhile is dropped, and a line says how much once the descriptor
takes lines again.  A descriptor that fails (a broken pipe, a full disk) loses its lines,
and nothing else; the next lines are tried again.

All lines go through one buffer, so they come out in the order in which they went in.
"""

import atexit
import os
import select
import threading
from collections.abc import Callable
from typing import Final

from service.threads import start

FLUSH_S: Final = 0.1
"""How long a line may wait for others before it is written; SIGKILL loses no older one."""

FLUSH_BYTES: Final = 256 * 1024
"""How much may wait: each write takes the interpreter from the event loop for a moment."""

MAX_BYTES: Final = 4 * 2**20
"""
How much the buffer holds when the descriptor takes nothing: at 8 000 lines a second some 2 s.
Lines that are to be written at once may take as much again, so that no access line crowds
out an error.
"""

END_S: Final = 1.0
"""How long the end of the process waits for a descriptor that takes nothing."""

_POLL_MS: Final = 1000


class LogWriter:
    """
    Writes lines to a descriptor: at the latest after `FLUSH_S`, and at the end of the process.

    `notice` returns the line that says how many lines were lost.  Used from any thread.

    Raises:
        ThreadsUnavailable: the system starts no more threads.
    """

    def __init__(
        self, descriptor: int, *, notice: Callable[[int], bytes], max_bytes: int = MAX_BYTES
    ) -> None:
        self._descriptor = descriptor
        self._notice = notice
        self._max_bytes = max_bytes
        # Reentrant: the collector may run a finalizer that logs while the lock is held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._lines: list[bytes] = []
        self._buffered = 0
        """Bytes of the lines."""
        self._writing = 0
        """Bytes that the thread has taken and not yet written."""
        self._lost = 0
        """Lines, since the last notice."""
        self._is_due = False
        self._is_closed = False
        self._is_torn = False
        """The last thing that was written is part of a line."""
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        start(self._thread)
        atexit.register(self.close)

    def write(self, line: bytes, *, at_once: bool = False) -> None:
        """Write a line, newline included, soon; or lose it when the buffer is full."""
        with self._lock:
            room = self._max_bytes * (2 if at_once else 1) - self._writing
            if self._is_closed or self._buffered + len(line) > room:
                self._lost += 1
                return
            self._lines.append(line)
            self._buffered += len(line)
            if self._is_due:
                return
            self._is_due = at_once or self._buffered >= FLUSH_BYTES
            if self._is_due or len(self._lines) == 1:
                self._changed.notify_all()

    def flush(self, limit_s: float = END_S) -> bool:
        """Return whether everything so far has left the buffer within this time."""
        with self._lock:
            self._is_due = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._lines and not self._writing, limit_s)

    def close(self, limit_s: float = END_S) -> None:
        """Write what there is, and take no more; a descriptor that takes nothing is left."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(limit_s)
        atexit.unregister(self.close)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            with self._lock:
                self._changed.wait_for(lambda: self._lines or self._is_due or self._is_closed)
                self._changed.wait_for(lambda: self._is_due or self._is_closed, FLUSH_S)
                content, self._lines = b"".join(self._lines), []
                self._buffered, self._writing = 0, len(content)
                lost, self._lost = self._lost, 0
                self._is_due, is_last = False, self._is_closed
            lost += self._put(content)
            if lost and not self._put(self._notice(lost)):
                lost = 0
            with self._lock:
                self._writing = 0
                self._lost += lost
                self._changed.notify_all()

    def _put(self, content: bytes) -> int:
        """Write whole lines; return how many of them did not get through."""
        if not content:
            return 0
        if self._is_torn:
            content = b"\n" + content
        written = 0
        try:
            while written < len(content):
                written += self._write_some(memoryview(content)[written:])
        except OSError:
            if written:
                self._is_torn = not content.startswith(b"\n", written - 1)
            return content.count(b"\n", max(written, int(self._is_torn)))
        self._is_torn = False
        return 0

    def _write_some(self, content: memoryview) -> int:
        """Write as much as the descriptor takes, waiting until it takes something."""
        try:
            return os.write(self._descriptor, content)
        except BlockingIOError:
            # Whoever shares a terminal or a pipe with this process may have made it so.
            ready = select.poll()
            ready.register(self._descriptor, select.POLLOUT)
            ready.poll(_POLL_MS)
            return 0
