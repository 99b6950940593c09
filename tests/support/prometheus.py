"""
Prometheus and its promtool as Debian builds them: fetched once, run, and asked.

`python -m tests.support.prometheus` puts both into the virtual environment of that Python.
Nothing is installed on the machine, and no daemon is started.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from bench.debian import NotHere, run, unpack
from tests.support.server import until

HOME = Path(sys.prefix) / "tools" / "prometheus"
PROMETHEUS = HOME / "prometheus"
PROMTOOL = HOME / "promtool"
"""The commands, once fetched: programs of their own, which need nothing beside them."""

_PACKAGE = "prometheus"
_LISTENING = re.compile(r'msg="Listening on" address=(\S+)')


def fetch() -> None:
    """
    Put the tools into this virtual environment, as the machine's own package source has them.

    Raises:
        NotHere: this is no Debian, or the download failed.
    """
    shutil.rmtree(HOME, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        files = unpack((_PACKAGE,), directory)
        tools = [files / "usr" / "bin" / tool.name for tool in (PROMETHEUS, PROMTOOL)]
        for tool in tools:
            run([str(tool), "--version"], directory)
        HOME.mkdir(parents=True)
        for tool in tools:
            shutil.copy(tool, HOME)


def promtool(*arguments: str, folder: Path) -> tuple[bool, str]:
    """Return whether promtool is content, and what it printed."""
    done = subprocess.run(
        [PROMTOOL, *arguments],
        cwd=folder,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode == 0, done.stdout


class Prometheus:
    """A real one on loopback, with `prometheus.yml` in `folder`; gone when left."""

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "prometheus.log").open("w+b")
        self._process = subprocess.Popen(
            [
                PROMETHEUS,
                "--config.file=prometheus.yml",
                "--storage.tsdb.path=data",
                "--web.listen-address=127.0.0.1:0",
            ],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )
        self._url = ""
        self._client = httpx.Client(timeout=30)

    def __enter__(self) -> Self:
        found: list[str] = []

        def look() -> bool:
            log = Path(self._log.name).read_text()
            assert self._process.poll() is None, f"Prometheus ended: {log}"
            found.extend(_LISTENING.findall(log))
            return bool(found)

        until(look)
        self._url = f"http://{found[0]}"
        until(lambda: self._client.get(self._url + "/-/ready").status_code == 200)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()  # its data are thrown away
        self._process.wait()
        self._client.close()
        self._log.close()

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the data of one answer of its API; an error of Prometheus fails the test."""
        answer = self._client.get(f"{self._url}/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", f"{parameters}: {answer}"
        return answer["data"]

    def values(self, query: str) -> list[float]:
        """Return the value of each series that an expression gives now."""
        return [float(series["value"][1]) for series in self.ask("query", query=query)["result"]]


if __name__ == "__main__":
    try:
        fetch()
    except NotHere as reason:
        sys.exit(f"Prometheus cannot be had: {reason}")
