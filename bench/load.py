"""
Send prepared HTTP requests and time the answers: by clients that wait, or at a rate that does not.

A closed load has N clients, each sending its next request when its last is
answered.  An open load sends at a given rate whatever the server does, and
counts latency from the moment a request was due: a stalled server shows.
"""

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

CONNECTION_LOST = 0
"""Counted as a status: the connection ended without an answer."""


@dataclass
class Result:
    """
    What came of one load.

    `latencies_s` and `statuses` are in the order of the answers.
    """

    started: float = 0.0
    ended: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    offered: int = 0
    """Requests that were due; those that never got a connection are in no list."""

    @property
    def seconds(self) -> float:
        """From the first request to the last answer."""
        return self.ended - self.started

    @property
    def rate(self) -> float:
        """Answers of status 200 a second."""
        return self.statuses.count(200) / self.seconds

    @property
    def answered(self) -> float:
        """Answers of any status a second."""
        return len(self.statuses) / self.seconds

    def by_status(self) -> dict[int, int]:
        """Return how many answers had each status."""
        return dict(Counter(self.statuses))

    def percentiles_ms(self, *shares: float, status: int = 200) -> tuple[float, ...]:
        """Return latencies in milliseconds at these percentiles; NaN without an answer."""
        own = self.latencies(status)
        if not own.size:
            return tuple(float("nan") for _ in shares)
        return tuple(float(value) * 1e3 for value in np.percentile(own, shares))

    def latencies(self, status: int = 200) -> npt.NDArray[np.float64]:
        """Return the latencies of one status, in seconds."""
        pairs = zip(self.latencies_s, self.statuses, strict=True)
        return np.array([latency for latency, found in pairs if found == status])


class Connection(asyncio.Protocol):
    """One kept HTTP/1.1 connection with at most one request under way."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[int] | None = None
        self._received = bytearray()
        self._expected: int | None = None
        self._status = 0
        self._closes = False

    @classmethod
    async def open(cls, host: str, port: int) -> "Connection":
        """Return a connected one."""
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(cls, host, port)
        return protocol

    @property
    def is_usable(self) -> bool:
        """False once the server closed it, or said that it would."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes) -> "asyncio.Future[int]":
        """Return the status of the answer, once all of it has come."""
        self._answer = asyncio.get_running_loop().create_future()
        if self._transport is None or self._transport.is_closing():
            self._finish(CONNECTION_LOST)
        else:
            self._transport.write(request)
        return self._answer

    def close(self) -> None:
        """End the connection, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        if isinstance(transport, asyncio.Transport) or hasattr(transport, "write"):
            self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits."""
        self._transport = None
        self._finish(CONNECTION_LOST)

    def data_received(self, data: bytes) -> None:
        """Take a part of an answer."""
        self._received += data
        if self._expected is None and not self._read_head():
            return
        whole = (
            self._received.endswith(b"0\r\n\r\n")
            if self._expected == -1
            else len(self._received) >= (self._expected or 0)
        )
        if whole:
            self._received.clear()
            self._expected = None
            if self._closes:
                self.close()
            self._finish(self._status)

    def _read_head(self) -> bool:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._received[:end]).lower()
        self._status = int(head[9:12])
        self._closes = b"\r\nconnection: close" in head
        at = head.find(b"\r\ncontent-length:")
        if at >= 0:
            self._expected = end + 4 + int(head[at + 17 :].split(b"\r\n", 1)[0])
        else:
            self._expected = -1
        return True

    def _finish(self, status: int) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(status)


def request_bytes(path: str, body: bytes, **headers: str) -> bytes:
    """Return a whole POST request; underscores in header names stand for hyphens."""
    lines = [f"POST {path} HTTP/1.1", "Host: bench", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def closed_load(
    host: str, port: int, requests: Sequence[bytes], *, clients: int, seconds: float
) -> Result:
    """Return what N clients saw that each wait for their answers, for some seconds."""
    result = Result(started=time.perf_counter())
    deadline = result.started + seconds
    turn = itertools.cycle(requests)

    async def client() -> None:
        connection = await Connection.open(host, port)
        while (sent := time.perf_counter()) < deadline:
            if not connection.is_usable:
                connection = await Connection.open(host, port)
            result.offered += 1
            status = await connection.send(next(turn))
            result.latencies_s.append(time.perf_counter() - sent)
            result.statuses.append(status)
        connection.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    result.ended = time.perf_counter()
    return result


async def open_load(
    host: str,
    port: int,
    requests: Sequence[bytes],
    *,
    rate: float,
    seconds: float,
    connections: int = 512,
    poisson: bool = True,
    seed: int = 0,
) -> Result:
    """
    Return what came of requests sent at a rate, latency counted from when each was due.

    At most `connections` are under way; a request that finds none free waits for
    one, and its waiting counts.
    """
    result = Result()
    free: deque[Connection] = deque()
    due: deque[tuple[float, bytes]] = deque()
    under_way: set[asyncio.Task[None]] = set()
    opened = 0

    async def send(connection: Connection, when: float, request: bytes) -> None:
        while True:
            status = await connection.send(request)
            result.latencies_s.append(time.perf_counter() - when)
            result.statuses.append(status)
            if not connection.is_usable:
                connection = await Connection.open(host, port)
            if not due:
                free.append(connection)
                return
            when, request = due.popleft()

    def start(connection: Connection, when: float, request: bytes) -> None:
        task = asyncio.create_task(send(connection, when, request))
        under_way.add(task)
        task.add_done_callback(under_way.discard)

    result.started = time.perf_counter()
    arrivals = _arrivals(rate, seconds, poisson=poisson, seed=seed)
    for offset, request in zip(arrivals, itertools.cycle(requests), strict=False):
        when = result.started + offset
        if (ahead := when - time.perf_counter()) > 0:
            await asyncio.sleep(ahead)
        result.offered += 1
        if free:
            start(free.popleft(), when, request)
        elif opened < connections:
            opened += 1
            start(await Connection.open(host, port), when, request)
        else:
            due.append((when, request))
        if result.offered % 16 == 0:
            await asyncio.sleep(0)  # answers are read also when the generator is behind
    while under_way:
        await asyncio.wait(under_way)
    result.ended = time.perf_counter()
    for connection in free:
        connection.close()
    return result


def _arrivals(rate: float, seconds: float, *, poisson: bool, seed: int) -> Iterator[float]:
    """Give the moments, in seconds from the start, at which requests are due."""
    random = np.random.default_rng(seed)
    moment = 0.0
    while True:
        moment += float(random.exponential(1 / rate)) if poisson else 1 / rate
        if moment >= seconds:
            return
        yield moment
