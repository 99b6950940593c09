"""
A process that decodes large JSON bodies: parsing one holds the interpreter's lock throughout.

It is started and spoken to through pipes alone: it needs no semaphore, no shared memory and
no file.  A message is a pickle whose buffers (the body, the arrays of a result) follow it as
they lie in memory.  This file is both sides; `main` is the process's own.
"""

import contextlib
import ctypes
import os
import pickle
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, cast

from service.errors import DecodingFailed, HeadwiseError, TooLarge
from service.host.malloc import give_back
from service.threads import ADVICE

_COUNT: Final = struct.Struct("<I")
_LENGTH: Final = struct.Struct("<Q")

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

_NICE: Final = 5
"""Niceness relative to the server's event loop, as the engine's threads have it."""

_PR_SET_PDEATHSIG: Final = 1
"""prctl(2): the signal that a process gets when its parent dies."""


class CannotStart(Exception):
    """The process cannot be started; the message names the resource that is missing."""


class Killed(Exception):
    """The process was ended from outside: by the system, most often, where memory is short."""


class ReaderProcess:
    """
    One such process, which decodes one body at a time.

    `decode` blocks and belongs in a thread, where it also starts the process the first time;
    `kill` and `memory_bytes` are called from elsewhere meanwhile.
    """

    def __init__(self) -> None:
        self.is_ended = False
        """It decodes no more."""
        self._running: _Running | None = None

    def start(self) -> "_Running":
        """
        Start the process, and return it once it is ready; takes a few tenths of a second.

        Raises:
            CannotStart: the message says why.
        """
        try:
            self._running = running = _started()
        except OSError as error:
            self.is_ended = True
            raise CannotStart(f"{error.strerror}; {ADVICE}") from error
        if self.is_ended:  # `kill` was called meanwhile, and may have found no process
            running.process.kill()
        with running.errors as errors:
            try:
                receive(running.replies)
            except EOFError:
                said = errors.read().decode(errors="replace").strip().splitlines()
                how = self.end()
                reason = said[-1] if said else how
                raise CannotStart(f"it ended at its start: {reason}") from None
        return running

    def decode(self, decode: Callable[..., Any], content: bytes, *args: object) -> Any:
        """
        Return `decode(content, *args)`; what it raises there is raised here.

        Raises:
            CannotStart: see `start`.
            Killed: somebody ended the process before it answered.
            DecodingFailed: it ended by itself.
        """
        running = self._running or self.start()
        try:
            send(running.requests, (decode, pickle.PickleBuffer(content), args))
            is_result, outcome = receive(running.replies, is_writable=True)
        except (OSError, EOFError):
            how = self.end()
            if how == signal.SIGKILL.name:
                raise Killed from None
            raise DecodingFailed(f"the process that reads large bodies ended: {how}") from None
        if is_result:
            return outcome
        raise outcome

    def kill(self) -> None:
        """Make the process end at once; the thread that waits for its answer learns it."""
        self.is_ended = True
        if self._running is not None:
            self._running.process.kill()

    def end(self) -> str:
        """End the process; return how it ended, once nothing of it is left."""
        self.kill()
        if self._running is None:
            return "it was not started"
        code = self._running.process.wait()
        for pipe in (self._running.requests, self._running.replies):
            with contextlib.suppress(OSError):  # it cannot take what was not sent yet
                pipe.close()
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def is_alive(self) -> bool:
        """Return whether the process was started, and has not ended by itself."""
        return self._running is not None and self._running.process.poll() is None

    def memory_bytes(self) -> int:
        """Return the memory that the process holds beside what it shares with files."""
        if self._running is None:
            return 0
        try:
            fields = Path(f"/proc/{self._running.process.pid}/statm").read_text().split()
        except OSError:
            return 0
        return (int(fields[1]) - int(fields[2])) * _PAGE_BYTES


def send(stream: IO[bytes], value: object) -> None:
    """Write a message."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    stream.write(_COUNT.pack(len(parts)))
    stream.writelines(_LENGTH.pack(part.nbytes) for part in parts)
    stream.writelines(parts)
    stream.flush()


def receive(stream: IO[bytes], *, is_writable: bool = False) -> Any:
    """
    Read a message; `is_writable` = the arrays in it may be changed.

    Raises:
        EOFError: the stream ended.
    """
    (count,) = _COUNT.unpack(_exactly(stream, _COUNT.size))
    lengths = [_LENGTH.unpack(_exactly(stream, _LENGTH.size))[0] for _ in range(count)]
    head = _exactly(stream, lengths[0])
    read = _exactly_writable if is_writable else _exactly
    # Both ends are ours: nothing that a caller sent is unpickled.
    return pickle.loads(head, buffers=[read(stream, length) for length in lengths[1:]])  # noqa: S301


def main() -> None:
    """Decode what comes until the server ends."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Whatever else is printed must not come between the messages.
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    _follow_the_server()
    # What every body needs is loaded before the first one comes.
    from service.codecs import attention_json, oip_request  # noqa: F401

    send(replies, None)
    os.dup2(nowhere, 2)
    while True:
        try:
            reply = _reply(*receive(requests))
        except EOFError:
            return
        send(replies, reply)
        del reply
        give_back()


def _reply(decode: Callable[..., Any], content: bytes, args: tuple[object, ...]) -> object:
    """Return whether there is a result, and the result, or what was raised instead."""
    try:
        return True, decode(content, *args)
    except HeadwiseError as error:
        return False, error.with_traceback(None)
    except MemoryError:
        return False, TooLarge(
            "body: decoding it takes more memory than the system gives (ulimit -v);"
            " send less, or the tensors in binary"
        )
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        failure = DecodingFailed(f"decoding a large body failed: {type(error).__name__}: {error}")
        failure.add_note(trace)
        return False, failure


@dataclass(frozen=True)
class _Running:
    """The process, and what it reads and writes."""

    process: subprocess.Popen[bytes]
    requests: IO[bytes]
    replies: IO[bytes]
    errors: IO[bytes]
    """Why it ended at its start."""


def _started() -> _Running:
    """
    Return the process; it may not be ready yet.

    Raises:
        OSError: the system starts no more processes, or opens no more files.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        # It multiplies no matrices: numpy's threads would only count against a limit on them.
        "OPENBLAS_NUM_THREADS": "1",
    }
    pipe = subprocess.PIPE
    process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
        # -P: a directory `service` where the server was started is not this package.
        [sys.executable, "-P", "-m", __name__],
        env=environment,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    )
    pipes = cast(tuple[IO[bytes], ...], (process.stdin, process.stdout, process.stderr))
    return _Running(process, *pipes)


def _follow_the_server() -> None:
    """
    Leave Ctrl-C and a closed terminal, which reach all of its group, to the server.

    It never outlives the server.

    Where memory is short, the system ends this process, not the server.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _exactly(stream: IO[bytes], size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise EOFError
    return content


def _exactly_writable(stream: IO[bytes], size: int) -> bytearray:
    content = bytearray(size)
    if stream.readinto(content) < size:  # type: ignore[attr-defined]
        raise EOFError
    return content


if __name__ == "__main__":
    main()
