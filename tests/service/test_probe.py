"""The container's health check, asked beside real servers and where there is none."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from service.probe import LIMIT_S
from tests.support.server import ROOT, Server


def probe(port: int, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Return the ended probe of a port."""
    return subprocess.run(
        [sys.executable, "-m", "service.probe"],
        env={**os.environ, "HEADWISE_PORT": str(port), **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_live_server_passes(server: Server) -> None:
    """Exit code 0, and nothing to read."""
    ended = probe(urlsplit(server.url).port or 0)

    assert (ended.returncode, ended.stderr) == (0, "")


def test_port_without_a_server_fails() -> None:
    """Exit code 1, and the reason in one line."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    ended = probe(port)

    assert ended.returncode == 1
    assert ended.stderr == "not alive: [Errno 111] Connection refused\n"


def test_server_that_hangs_fails() -> None:
    """Who accepts and never answers is not alive."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ended = probe(silent.getsockname()[1])

    assert ended.returncode == 1
    assert ended.stderr == "not alive: timed out\n"


@pytest.mark.parametrize("answer", [b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"SSH-2.0\r\n"])
def test_another_answer_fails(answer: bytes) -> None:
    """What is not a 200 is told as it came."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = subprocess.Popen(
            [sys.executable, "-m", "service.probe"],
            env={**os.environ, "HEADWISE_PORT": str(listener.getsockname()[1])},
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        connection, _ = listener.accept()
        with connection:
            connection.recv(1024)
            connection.sendall(answer)
            _, told = process.communicate(timeout=60)

    assert process.returncode == 1
    assert told.decode() == f"not alive: {answer.splitlines(keepends=True)[0]!r}\n"


def test_image_gives_the_probe_longer_than_it_takes() -> None:
    """The engine ends it later than it ends itself, so that the reason is told."""
    [line] = [
        line
        for line in Path(ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("HEALTHCHECK")
    ]

    assert f"--timeout={LIMIT_S + 1}s" in line
