"""Behind real proxies: a body never becomes a request that the proxy did not see."""

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest

from tests.service.transport.test_framing import HIDDEN, LAST, OFFERS, post
from tests.support.layers import Layers
from tests.support.server import Server, until
from tests.support.wire import answers_in

pytestmark = pytest.mark.slow

SIZES = (40_000, 50_000, 60_000)
"""Of bodies: more than nginx keeps in memory, so that head and body go on in several reads."""


def nginx(directory: Path, port: int, server: str) -> tuple[list[str], str]:
    """Return command and configuration of nginx with its usual lines for WebSockets."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "\n".join(f"{kind}_temp_path {directory}/{kind};" for kind in kinds)
    file = directory / "nginx.conf"
    return (
        ["nginx", "-e", "stderr", "-c", str(file)],
        f"""
daemon off;
master_process off;
pid {directory}/nginx.pid;
error_log stderr;
events {{ worker_connections 64; }}
http {{
    access_log off;
    {temporary}
    upstream headwise {{ server {server}; keepalive 4; }}
    server {{
        listen 127.0.0.1:{port};
        location /v2/repository {{ return 403; }}
        location / {{
            proxy_pass http://headwise;
            proxy_http_version 1.1;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection "upgrade";
        }}
    }}
}}
""",
    )


def haproxy(directory: Path, port: int, server: str) -> tuple[list[str], str]:
    """Return command and configuration of HAProxy that keeps its connections to the server."""
    return (
        ["haproxy", "-db", "-f", str(directory / "haproxy.conf")],
        f"""
global
    maxconn 64
defaults
    mode http
    timeout connect 10s
    timeout client 60s
    timeout server 60s
frontend callers
    bind 127.0.0.1:{port}
    http-request deny deny_status 403 if {{ path_beg /v2/repository }}
    default_backend headwise
backend headwise
    http-reuse always
    server one {server}
""",
    )


PROXIES: dict[str, Callable[[Path, int, str], tuple[list[str], str]]] = {
    "nginx": nginx,
    "haproxy": haproxy,
}


def free_port() -> int:
    """Return a port on which nothing listens now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def proxied(name: str, directory: Path, server: Server) -> Iterator[tuple[str, int]]:
    """Run a proxy before the server, and give its address."""
    port = free_port()
    command, configuration = PROXIES[name](directory, port, server.url.removeprefix("http://"))
    (directory / f"{name}.conf").write_text(configuration)
    with running(command, directory, port) as address:
        yield address


@contextmanager
def running(command: list[str], directory: Path, port: int) -> Iterator[tuple[str, int]]:
    """Run a proxy that will listen on a port of the loopback, and give its address."""
    path = os.environ.get("PATH", "") + ":/usr/sbin"
    if shutil.which(command[0], path=path) is None:
        pytest.skip(f"{command[0]} is not installed")
    address = "127.0.0.1", port
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, env={"PATH": path}, stdout=log, stderr=log)
    try:

        def listens() -> bool:
            assert process.poll() is None, (directory / "log").read_text()
            with socket.socket() as sock:
                return sock.connect_ex(address) == 0

        until(listens)
        yield address
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def controlled(layers: Layers) -> Iterator[Server]:
    """Return a server whose callers may unload models."""
    with Server(layers.repository, model_control=True, log_level="debug") as running:
        yield running


def infer(size: int, *lines: str) -> bytes:
    """Return a right binary call of about so many bytes, which look like requests."""
    rows = size // 32
    numbers = (HIDDEN * (size // len(HIDDEN) + 1))[: rows * 32]
    entry = {
        "name": "embeddings",
        "datatype": "FP32",
        "shape": [1, rows, 8],
        "parameters": {"binary_data_size": len(numbers)},
    }
    header = orjson.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}})
    length = f"Inference-Header-Content-Length: {len(header)}"
    return post("/v2/models/tiny/infer", header + numbers, length, *lines)


def talk(address: tuple[str, int], data: bytes) -> list[tuple[int, bytes]]:
    """Return the answers to what one connection sends."""
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(data)
        with connection.makefile("rb") as received:
            return answers_in(received.read())


@pytest.mark.fault("B5")
@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("name", PROXIES)
def test_hidden_request_in_a_body_never_passes_a_proxy(
    controlled: Server, tmp_path: Path, name: str, offer: str
) -> None:
    """What the proxy forbids is not done, and every call beside it has its own answer."""
    lines = OFFERS[offer]
    padded = HIDDEN + b" " * 60_000
    host, port = controlled.url.removeprefix("http://").split(":")
    with proxied(name, tmp_path, controlled) as address:
        for size in SIZES:
            call = infer(size, *lines)
            direct = talk((host, int(port)), call + LAST)
            assert talk(address, call + LAST) == direct
            for is_chunked in (False, True):
                hidden = post("/nope", padded[:size], *lines, is_chunked=is_chunked)
                assert [status for status, _ in talk(address, hidden + LAST)] == [404, 200]
        forbidden = talk(address, HIDDEN + LAST)

    assert [status for status, _ in direct] == [200, 200]
    assert forbidden[0][0] == 403
    assert "/v2/repository" not in controlled.log()
    assert controlled.get("/v2/models/tiny/ready").status_code == 200
