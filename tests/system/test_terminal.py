"""A server at a terminal: what it says once it is ready, and what the terminal's end means."""

import fcntl
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httpx
import orjson
import pytest

from tests.support.layers import Layers
from tests.support.server import END_LIMIT_S, ROOT, Server, until
from tests.system.test_reload import publish

SERVE = (sys.executable, "-m", "service")
WAITING_LEADER = """
import signal, subprocess, sys
signal.signal(signal.SIGHUP, lambda *told: None)
sys.exit(subprocess.Popen([sys.executable, "-m", "service"], restore_signals=False).wait())
"""

LEADERS = {
    "itself": SERVE,
    "a shell": ("sh", "-c", f"{shlex.join(SERVE)}; true"),  # which waits, as `make` does
}
"""Who leads the session of the terminal: the kernel tells the leader first that it was closed."""


def _take_terminal() -> None:
    """Make standard input the terminal of this session, and take hangups as any shell does."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may be under nohup


class Terminal:
    """A terminal with one session that runs a server; `close` closes it as its window would."""

    def __init__(self, command: tuple[str, ...], repository: Path, **settings: object) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("HEADWISE_")}
        named = {"repository": repository, "port": 0} | settings
        self._master, slave = pty.openpty()
        os.set_blocking(self._master, False)
        self._output = b""
        self.process = subprocess.Popen(
            command,
            env=clean | {f"HEADWISE_{name.upper()}": str(value) for name, value in named.items()},
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)

    def __enter__(self) -> Self:
        """Return once the server is ready and has said all that it says then."""
        pid, self.url = self.wait_for(r"starting .*pid=(\d+) url=(\S+)").groups()
        self.pid = int(pid)
        self.wait_for(r"Reload .*\n")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGINT)
        self.process.wait(END_LIMIT_S)

    def close(self) -> None:
        """Close the terminal; the kernel then hangs its session up."""
        if self._master >= 0:
            os.close(self._master)
            self._master = -1

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._master, keys)

    def output(self) -> str:
        """Return what was written so far, until the terminal was closed."""
        with suppress(OSError):  # nothing to be read now, or nobody left who writes
            while self._master >= 0:
                self._output += os.read(self._master, 65536)
        return self._output.decode().replace("\r\n", "\n")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Return the first match of a pattern in the output, once it is there."""
        until(lambda: re.search(pattern, self.output()) is not None)
        found = re.search(pattern, self.output())
        assert found is not None
        return found

    def is_listening(self) -> bool:
        """Say whether anything still listens where the server did."""
        address = urlsplit(self.url)
        with socket.socket() as caller:
            return caller.connect_ex((address.hostname, address.port)) == 0


@pytest.fixture
def repository(layers: Layers, tmp_path: Path) -> Path:
    """Return a copy of the repository that a test may add to."""
    return Path(shutil.copytree(layers.repository, tmp_path / "repository"))


@pytest.mark.fault("E2")
@pytest.mark.parametrize("leader", LEADERS)
def test_closing_the_terminal_ends_the_server(layers: Layers, leader: str) -> None:
    """The port is free again: whoever closes the window is done with what ran in it."""
    with Terminal(LEADERS[leader], layers.repository, grace_s=300) as terminal:
        terminal.close()
        until(lambda: not terminal.is_listening())
        code = terminal.process.wait(END_LIMIT_S)

    assert code == (0 if leader == "itself" else -signal.SIGHUP)


@pytest.mark.fault("E2")
def test_closing_the_terminal_of_a_leader_that_waits_ends_the_server(layers: Layers) -> None:
    """As `make` does, which a window may run directly: it is told, and passes nothing on."""
    waits = (sys.executable, "-c", WAITING_LEADER)
    with Terminal(waits, layers.repository) as terminal:
        terminal.close()
        until(lambda: not terminal.is_listening())
        code = terminal.process.wait(END_LIMIT_S)

    assert code == 0


@pytest.mark.fault("E2")
def test_closing_the_terminal_answers_the_calls_under_way(layers: Layers, tmp_path: Path) -> None:
    """It is the clean stop of Ctrl-C, not an abort."""
    content = orjson.dumps({"model": "tiny", "embeddings": [[0.5] * 8]})
    with Terminal(SERVE, layers.repository) as terminal:
        address = urlsplit(terminal.url)
        with socket.create_connection((address.hostname, address.port), timeout=60) as caller:
            head = f"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
            caller.sendall(head.encode() + b"Expect: 100-continue\r\n\r\n")
            assert b"100 Continue" in caller.recv(100)
            terminal.close()
            until(lambda: httpx.get(f"{terminal.url}/v2/health/ready").status_code == 503)
            caller.sendall(content)
            answer = caller.makefile("rb").read()
        code = terminal.process.wait(END_LIMIT_S)

    assert b"HTTP/1.1 200 " in answer
    assert code == 0


@pytest.mark.fault("E2")
def test_sighup_reloads_while_the_terminal_is_there(repository: Path) -> None:
    """An operator's `kill -HUP` is no hangup."""
    with Terminal(SERVE, repository) as terminal:
        publish(repository, 2)
        os.kill(terminal.pid, signal.SIGHUP)
        terminal.wait_for("reloaded .*model=tiny version=2")
        publish(repository, 3)
        os.kill(terminal.pid, signal.SIGHUP)
        terminal.wait_for("reloaded .*model=tiny version=3")

        terminal.type(b"\x03")
        code = terminal.process.wait(END_LIMIT_S)

    assert code == 0


@pytest.mark.fault("E2")
@pytest.mark.parametrize("is_closed", [False, True])
def test_server_under_nohup_outlives_its_terminal(repository: Path, is_closed: bool) -> None:
    """It was told to ignore the hangup; `kill -HUP` reloads it, terminal or none."""
    command = ("sh", "-c", f"trap '' HUP; exec {shlex.join(SERVE)}")
    with Terminal(command, repository) as terminal:
        if is_closed:
            terminal.close()
        publish(repository, 2)
        os.kill(terminal.pid, signal.SIGHUP)

        def version() -> str:
            return str(httpx.get(f"{terminal.url}/v2/models/tiny").json()["versions"][-1])

        until(lambda: version() == "2")
        assert httpx.get(f"{terminal.url}/v2/health/ready").status_code == 200


@pytest.mark.fault("E2")
def test_server_without_a_terminal_reloads_on_sighup(repository: Path) -> None:
    """A daemon, such as under systemd or in a container, never had one that could be closed."""
    with daemon(repository) as (server, url):
        publish(repository, 2)
        server.send_signal(signal.SIGHUP)
        until(lambda: httpx.get(f"{url}/v2/models/tiny").json()["versions"][-1] == "2")
        assert httpx.get(f"{url}/v2/health/ready").status_code == 200


@contextmanager
def daemon(repository: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """Run a server in a session of its own, which has no terminal."""
    code = "import os, runpy; os.setsid(); runpy.run_module('service', run_name='__main__')"
    with Server(repository, command=("-c", code)) as server:
        yield server.process, server.url


@pytest.mark.fault("E3")
def test_ready_server_tells_a_terminal_what_to_do_next(layers: Layers) -> None:
    """A call that works when it is copied, the documentation, the process id, and how to stop."""
    with Terminal(SERVE, layers.repository, host="::") as terminal:
        call = shlex.split(terminal.wait_for(r"Try it +(curl .*)\n")[1])
        docs = terminal.wait_for(r"Documentation +(\S+)")[1]
        answer = httpx.post(
            call[2],
            content=call[4],
            headers={"Content-Type": "application/x-www-form-urlencoded"},  # as curl has it
        )
        page = httpx.get(docs)
        stop = terminal.wait_for(r"Stop +(.*)\n")[1]

    assert call[:2] + call[3:4] == ["curl", "-s", "-d"]
    assert answer.status_code == 200
    assert answer.json()["model"] == "tiny"
    assert "attention_weights" in answer.json()
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert stop == f"Ctrl-C, or kill {terminal.pid}"


@pytest.mark.fault("E2")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_it_loads_ends_in_one_line(number: signal.Signals, tmp_path: Path) -> None:
    """The libraries take a second or two: Ctrl-C in that time is no traceback."""
    sign = "import sys, time; sys.stderr.write('loading\\n'); sys.stderr.flush(); time.sleep(600)"
    (tmp_path / "uvicorn.py").write_text(sign)
    with subprocess.Popen(
        SERVE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as loading:
        assert loading.stderr is not None
        assert loading.stderr.readline() == "loading\n"
        loading.send_signal(signal.SIGHUP)  # nothing to reload yet, and nothing to end
        loading.send_signal(number)
        rest = loading.stderr.read()

    assert rest == f"stopped by {number.name}\n"
    assert loading.returncode == 128 + number
