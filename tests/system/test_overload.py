"""Crowds, killed clients and restarts under traffic: the slow checks of calm."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from bench.servers import HOST, free_port
from loadtest.endpoint import request_bytes
from tests.support.layers import Layers
from tests.support.server import Server, until
from tests.system.test_main import metric

CLIENTS = 1000
RESTARTS = 20
POLL_S = 0.5
LIMIT_S = 60
MOST_MB = 16
"""Of resident memory that a server at rest may have more than before."""

LOST = 0
"""Stands for the status of a call whose connection ended without an answer."""

GOOD = {"model": "tiny", "embeddings": [[0.5] * 8] * 4}
LONG = request_bytes(
    HOST,
    "/v1/attention?model=mha&weights=true",
    save({"embeddings": np.zeros((4, 200, 24), np.float32)}),
    ("Content-Type", "application/x-safetensors"),
)


def open_files(server: Server) -> int:
    """Return how many file descriptors the server holds."""
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def resident_mb(server: Server) -> float:
    """Return the server's resident memory."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def kill_clients(server: Server, count: int) -> None:
    """Connect, send a whole call or half of one, and end the connection without a word."""
    port = int(server.url.rsplit(":", 1)[1])

    async def one(i: int) -> None:
        _, writer = await asyncio.open_connection(HOST, port)
        writer.write(LONG if i % 2 else LONG[: len(LONG) // 2])
        await asyncio.sleep(0.001 * (i % 7))
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    for start in range(0, count, 50):
        await asyncio.gather(*(one(i) for i in range(start, start + 50)))


@pytest.mark.slow
def test_killed_clients_leave_nothing_behind(layers: Layers) -> None:
    """No slot, no file descriptor and no memory is lost, and the next call is right."""
    with Server(layers.repository) as server:
        asyncio.run(kill_clients(server, 200))  # what is allocated once is allocated now
        until(lambda: metric(server, 'headwise_queue_calls{model="mha"}') == 0)
        files, memory = open_files(server), resident_mb(server)

        asyncio.run(kill_clients(server, CLIENTS))

        until(lambda: metric(server, 'headwise_queue_calls{model="mha"}') == 0)
        until(lambda: open_files(server) <= files)
        # One: the question itself.
        until(lambda: metric(server, "headwise_requests_in_flight") == 1)
        # What was freed is kept for the next calls, and given back once the server rests.
        until(lambda: resident_mb(server) - memory <= MOST_MB)
        log = server.whole_log()
        after = server.post("/v1/attention", json={"model": "tiny", "embeddings": [[0.5] * 8]})

    assert "Traceback" not in log
    assert after.status_code == 200


async def status_of(call: Awaitable[httpx.Response]) -> int:
    """Return the status that a call is answered with, or that it is not."""
    try:
        return (await call).status_code
    except httpx.TransportError:
        return LOST


class Watcher:
    """A client of two instances: it polls readiness, never stops sending, never sends again."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self.ready: set[int] = set()
        self.answers: list[int] = []
        self.stop = False

    async def poll(self) -> None:
        """Ask both for readiness, over and over, each time over a new connection."""
        while not self.stop:
            for port in self.ports:
                async with httpx.AsyncClient(timeout=LIMIT_S) as client:
                    status = await status_of(client.get(f"http://{HOST}:{port}/v2/health/ready"))
                (self.ready.add if status == 200 else self.ready.discard)(port)
            await asyncio.sleep(POLL_S)

    async def send(self) -> None:
        """Send to whatever was last seen ready, over kept connections."""
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:
            while not self.stop:
                for port in sorted(self.ready):
                    call = client.post(f"http://{HOST}:{port}/v1/attention", json=GOOD)
                    self.answers.append(await status_of(call))
                await asyncio.sleep(0)


@pytest.mark.slow
def test_restarts_in_turn_fail_no_call_of_a_client_that_polls(layers: Layers) -> None:
    """The grace is long enough for a poll of half a second; no retry is needed."""
    ports = [free_port(), free_port()]

    async def scenario() -> list[int]:
        watcher = Watcher(ports)
        servers = [Server(layers.repository, port=port, grace_s=2) for port in ports]
        for server in servers:
            await asyncio.to_thread(server.__enter__)
        tasks = [asyncio.create_task(watcher.poll())]
        await asyncio.to_thread(until, lambda: len(watcher.ready) == 2)
        tasks.append(asyncio.create_task(watcher.send()))
        for i in range(RESTARTS):
            old = servers[i % 2]
            old.process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(old.process.wait, 60)
            assert code == 0
            old.__exit__(None, None, None)
            servers[i % 2] = Server(layers.repository, port=ports[i % 2], grace_s=2)
            await asyncio.to_thread(servers[i % 2].__enter__)
            await asyncio.to_thread(until, lambda: len(watcher.ready) == 2)
        watcher.stop = True
        await asyncio.gather(*tasks)
        for server in servers:
            await asyncio.to_thread(server.__exit__, None, None, None)
        return watcher.answers

    answers = asyncio.run(scenario())

    assert len(answers) > 1000
    assert set(answers) == {200}
