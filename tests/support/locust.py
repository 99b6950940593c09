"""
Locust in an environment of its own: fetched once, run, and read.

`python -m tests.support.locust` makes it beside the virtual environment of that Python: what Locust
needs would bind the versions that we serve with.
"""

import csv
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.server import ROOT, until

HOME = Path(sys.prefix) / "tools" / "locust"
TOOL = HOME / "bin" / "locust"
"""The command, once fetched."""

_REQUIREMENT = "locust==2.47.0"
_LIMIT_S = 120


class NotFetched(Exception):
    """Locust cannot be had on this machine; the message says why."""


@dataclass(frozen=True)
class Line:
    """What Locust says of one kind of request."""

    name: str
    requests: int
    failures: int
    median_ms: float


def fetch() -> None:
    """
    Put Locust into its own environment.

    Raises:
        NotFetched: it cannot be installed.
    """
    shutil.rmtree(HOME, ignore_errors=True)
    venv.create(HOME, with_pip=True)
    pip = [str(HOME / "bin" / "python"), "-m", "pip", "install", "-qq", "--retries", "1"]
    done = subprocess.run(
        [*pip, "-c", str(ROOT / "constraints.txt"), _REQUIREMENT],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        shutil.rmtree(HOME, ignore_errors=True)
        raise NotFetched((done.stderr.strip() or "no word").splitlines()[-1])


def measure(folder: Path, *options: str, enough: Callable[[list[Line]], bool]) -> list[Line]:
    """
    Return what Locust measures with these options, a kind of request each.

    It runs until what it has seen is `enough`, however long that takes on this machine.  Its
    files lie in `folder`.  A run with failed requests fails.
    """
    command = [str(TOOL), "--headless", "--csv", str(folder / "run"), *options]
    log = folder / "locust.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        until(lambda: process.poll() is not None or enough(_lines(folder)), _LIMIT_S)
        process.terminate()
        process.wait(_LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, log.read_text()
    return _lines(folder)


def _lines(folder: Path) -> list[Line]:
    """Return what its file says by now; nothing while it is being written."""
    try:
        with (folder / "run_stats.csv").open() as file:
            return [
                Line(
                    row["Name"],
                    int(row["Request Count"]),
                    int(row["Failure Count"]),
                    float(row["Median Response Time"] or 0),
                )
                for row in csv.DictReader(file)
            ]
    except (OSError, KeyError, TypeError, ValueError):
        return []


if __name__ == "__main__":
    try:
        fetch()
    except NotFetched as reason:
        sys.exit(f"Locust cannot be had: {reason}")
