"""Processes that a benchmark starts, waits for and ends."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from service.host.cpu import cpu_budget
from service.settings import PREFIX

ROOT = Path(__file__).parent.parent
HOST = "127.0.0.1"
_LIMIT_S = 60
_LOGS = ROOT / ".bench"


@dataclass(frozen=True)
class Peer:
    """A running server."""

    name: str
    port: int
    process: subprocess.Popen[bytes]

    def resident_mb(self) -> float:
        """Return its resident memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextlib.contextmanager
def headwise(
    repository: Path,
    *,
    argv: Sequence[str] = ("-m", "service"),
    checkout: Path = ROOT,
    **settings: object,
) -> Iterator[Peer]:
    """
    Give a running Headwise, or what else `argv` tells the interpreter; settings bare.

    `checkout` is the clone whose code it runs.

    All other settings are the defaults, so that it logs each request: to a file, as a
    container's log goes to one, which is gone when left.
    """
    port = free_port()
    chosen = {"repository": repository.resolve(), "port": port, "grace_s": 0}
    named = {f"{PREFIX}{key.upper()}": str(value) for key, value in (chosen | settings).items()}
    named["PYTHONPATH"] = str(checkout.resolve())
    _LOGS.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryFile(dir=_LOGS) as log,
        _started(
            "headwise", port, argv, ready="/v2/health/ready", environ=named, log=log, cwd=checkout
        ) as peer,
    ):
        yield peer


@contextlib.contextmanager
def plain(repository: Path) -> Iterator[Peer]:
    """Give the plain reference with the graph of the layer `mha`."""
    port = free_port()
    told = {
        "PEER_GRAPH": str(repository / "mha" / "1" / "layer.onnx"),
        "PEER_THREADS": str(cpu_budget().threads),
        "PEER_SPINNING": "0",
    }
    argv = ["-m", "bench.peers.serving.plain_app", str(port)]
    with _started("plain", port, argv, environ=told) as peer:
        yield peer


@contextlib.contextmanager
def echo() -> Iterator[Peer]:
    """Give the bare echo."""
    port = free_port()
    with _started("echo", port, ["-m", "bench.echo", str(port)]) as peer:
        yield peer


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def _started(
    name: str,
    port: int,
    argv: Sequence[str],
    *,
    ready: str | None = None,
    environ: Mapping[str, str] | None = None,
    log: IO[bytes] | int = subprocess.DEVNULL,
    cwd: Path = ROOT,
) -> Iterator[Peer]:
    """Give a started server; of this process's environment it has all but Headwise's settings."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    process = subprocess.Popen(
        [sys.executable, *argv], cwd=cwd, env=inherited | dict(environ or {}), stderr=log
    )
    try:
        _wait(process, port, ready)
        yield Peer(name, port, process)
    finally:
        process.terminate()
        process.wait(_LIMIT_S)


def _wait(process: subprocess.Popen[bytes], port: int, ready: str | None) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1) as connection:
            path = ready or "/"
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: b\r\n\r\n".encode())
            if ready is None or connection.recv(64).startswith(b"HTTP/1.1 200"):
                return
        time.sleep(0.05)
    raise RuntimeError("the server did not answer in time")
