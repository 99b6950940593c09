"""A real server process on loopback, for the tests that must not fake one."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 60
END_LIMIT_S = 60


class Server:
    """
    `python -m service` on a free port; ready when entered, gone when left.

    Settings are given as keywords without prefix: `max_rows=4`.  `command` is what the
    interpreter is told instead of `-m service`.
    """

    def __init__(
        self,
        repository: Path,
        *,
        wait: str = "ready",
        command: Sequence[str] = ("-m", "service"),
        **settings: object,
    ) -> None:
        self._wait = wait
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("HEADWISE_")
        }
        named = {"repository": repository, "port": 0, "log_format": "json", "grace_s": 0}
        for name, value in (named | settings).items():
            environment[f"HEADWISE_{name.upper()}"] = str(value)
        self._log = (repository.parent / f"server-{time.monotonic_ns()}.log").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, *command], env=environment, cwd=ROOT, stderr=self._log
        )
        self.url = ""
        # One client keeps its connections: a call after a refused one shares its connection.
        self.client = httpx.Client(timeout=60)

    def __enter__(self) -> Self:
        self.url = self.wait_for_log(r'"url":"(https?://[^"]+)"')[1]
        if self._wait == "ready":
            until(lambda: self.get("/v2/health/ready").status_code == 200)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.client.close()
        self._log.close()

    def get(self, path: str) -> httpx.Response:
        """Return the answer to one GET."""
        return self.client.get(self.url + path)

    def post(self, path: str, **what: object) -> httpx.Response:
        """Return the answer to one POST; keywords as for httpx."""
        return self.client.post(self.url + path, **what)  # type: ignore[arg-type]

    def log(self) -> str:
        """Return everything logged so far."""
        return Path(self._log.name).read_text()

    def whole_log(self) -> str:
        """
        Return the log with the line of every request that was answered so far.

        Lines are written in their order, but a moment later: this makes one more request,
        and waits for its line.  The log's level must be info or debug.
        """
        marker = f"marker-{time.monotonic_ns()}"
        self.client.get(self.url + "/v2", headers={"X-Request-ID": marker})
        self.wait_for_log(marker)
        return self.log()

    def wait_for_log(self, pattern: str) -> re.Match[str]:
        """Return the first match of a pattern in the log, once it is there."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            if self.process.poll() is not None and not re.search(pattern, self.log()):
                raise AssertionError(f"the server ended: {self.log()}")
            found.extend(re.finditer(pattern, self.log()))
            return bool(found)

        until(look)
        return found[0]


def until(condition: Callable[[], bool], limit_s: float = START_LIMIT_S) -> None:
    """Return once `condition()` is true; a refused connection counts as not yet."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.01)
    raise AssertionError(f"not within {limit_s} s")
