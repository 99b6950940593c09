"""
A server that does nothing: it reads a request and answers the same bytes to each.

    python -m loadtest.null ANSWER_BYTES

listens on a free port of 127.0.0.1, prints it, and ends when its input does.  How many
calls a second the generator makes of it is what the generator itself can do at most.
"""

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Final

import uvloop

from loadtest.drive import closed_load
from loadtest.endpoint import Endpoint
from loadtest.plan import Plan

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CLIENTS: Final = 16


def calls_per_s(requests: Sequence[bytes], answer_bytes: int, *, seconds: float) -> float:
    """Return how many calls this process makes a second of a server that does nothing."""
    with serving(answer_bytes) as endpoint:
        plan = Plan(seconds=seconds, warmup_s=0.2)
        return closed_load(endpoint, requests, clients=_CLIENTS, plan=plan).rate


@contextlib.contextmanager
def serving(answer_bytes: int) -> Iterator[Endpoint]:
    """Give where a server that does nothing listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "loadtest.null", str(answer_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None  # noqa: S101 - for the types alone
    assert process.stdout is not None  # noqa: S101
    try:
        yield Endpoint("http", "127.0.0.1", int(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


class _Null(asyncio.Protocol):
    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
        else:
            data = self._head + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._head = data
                return
            found = _LENGTH.search(data, 0, end)
            self._head = b""
            self._missing = end + 4 + (int(found[1]) if found else 0) - len(data)
        if self._missing <= 0 and self._transport is not None:
            self._missing = 0
            self._transport.write(self._answer)


async def _serve(answer: bytes) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Null(answer), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    server.close()


if __name__ == "__main__":
    size = int(sys.argv[1])
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: {size}"
    uvloop.run(_serve(f"{head}\r\n\r\n".encode() + bytes(size)))
