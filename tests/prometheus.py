"""
Prometheus and its promtool as Debian builds them: fetched once, run, and asked.

`python -m tests.prometheus` puts both into the virtual environment of that Python.  Nothing is
installed on the machine, and no daemon is started.
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

from tests.server import until

HOME = Path(sys.prefix) / "tools" / "prometheus"
PROMETHEUS = HOME / "prometheus"
PROMTOOL = HOME / "promtool"
"""The commands, once fetched: programs of their own, which need nothing beside them."""

_PACKAGE = "prometheus"
_LISTENING = re.compile(r'msg="Listening on" address=(\S+)')


class NotFetched(Exception):
    """The tools cannot be had on this machine; the message says why."""


def fetch() -> None:
    """
    Put the tools into this virtual environment, as the machine's own package source has them.

    Raises:
        NotFetched: this is no Debian, or the download failed.
    """
    shutil.rmtree(HOME, ignore_errors=True)
    get = ["apt-get", "-qq", "download", _PACKAGE]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        try:
            _run(get, directory)
        except NotFetched:
            # No list of packages is there yet, or it names one that is there no more.
            _run(["apt-get", "-qq", "update"], directory)
            _run(get, directory)
        [package] = directory.glob(f"{_PACKAGE}_*.deb")
        _run(["dpkg-deb", "-x", str(package), "unpacked"], directory)
        tools = [
            directory / "unpacked" / "usr" / "bin" / tool.name for tool in (PROMETHEUS, PROMTOOL)
        ]
        for tool in tools:
            _run([str(tool), "--version"], directory)
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


def _run(command: list[str], directory: Path) -> None:
    try:
        done = subprocess.run(command, cwd=directory, check=False, capture_output=True, text=True)
    except OSError as error:
        raise NotFetched(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()[-1]
        raise NotFetched(f"{Path(command[0]).name}: {last}")


if __name__ == "__main__":
    try:
        fetch()
    except NotFetched as reason:
        sys.exit(f"Prometheus cannot be had: {reason}")
