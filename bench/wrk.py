"""
wrk, a load generator in C: fetched once, and run with our requests.

    python -m bench.wrk

It comes as Debian builds it, and is unpacked beside the virtual environment's packages;
nothing is installed on the machine.  https://github.com/wg/wrk
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.debian import NotHere, run, unpack

HOME: Final = Path(sys.prefix) / "tools" / "wrk"
_PACKAGES: Final = ("wrk", "libluajit-5.1-2")

# Requests are whole files; their turn is kept over the connections, not in each.
_SCRIPT: Final = """
local requests, turn = {}, 0
function init(paths)
  for i, path in ipairs(paths) do
    local file = assert(io.open(path, "rb"))
    requests[i] = file:read("*a")
    file:close()
  end
end
function request()
  turn = turn % #requests + 1
  return requests[turn]
end
function done(summary, latency)
  local e = summary.errors
  io.write(string.format(
    '\\n{"calls": %d, "us": %d, "p50": %d, "p99": %d, "max": %d, "refused": %d, "lost": %d}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    latency.max, e.status, e.connect + e.read + e.write + e.timeout))
end
"""


@dataclass(frozen=True)
class Seen:
    """What one closed load saw."""

    calls: int
    seconds: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    refused: int
    """Answers that are no 2xx; they count among `calls`."""
    lost: int
    """Connections that failed, or answers that did not come."""

    @property
    def rate(self) -> float:
        """Good answers a second."""
        return (self.calls - self.refused) / self.seconds


def fetch() -> None:
    """
    Return once wrk is there.

    Raises:
        NotHere: this is no Debian, or the download failed.
    """
    if (HOME / "wrk").exists():
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = unpack(_PACKAGES, folder) / "usr"
        HOME.mkdir(parents=True, exist_ok=True)
        for library in (files / "lib").glob("*/libluajit*.so*"):
            shutil.copy(library, HOME, follow_symlinks=True)
        shutil.copy(files / "bin" / "wrk", HOME)


def closed(
    host: str, port: int, requests: Sequence[bytes], *, clients: int, seconds: float
) -> Seen:
    """
    Return what N clients saw, each of which waits for its answers, over whole seconds.

    wrk runs in one thread, and no call outlives it: a latency is of an answer that came.

    Raises:
        NotHere: wrk was not fetched, or ended with an error.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.lua").write_text(_SCRIPT)
        paths = []
        for i, request in enumerate(requests):
            paths.append(str(folder / f"{i}"))
            Path(paths[-1]).write_bytes(request)
        told = run(
            [
                str(HOME / "wrk"),
                "--threads=1",
                f"--connections={clients}",
                f"--duration={max(1, round(seconds))}s",
                "--timeout=60s",
                f"--script={folder / 'script.lua'}",
                f"http://{host}:{port}/",
                *paths,
            ],
            folder,
            {**os.environ, "LD_LIBRARY_PATH": str(HOME)},
        )
    found = json.loads(told.strip().splitlines()[-1])
    return Seen(
        calls=found["calls"],
        seconds=found["us"] / 1e6,
        p50_ms=found["p50"] / 1e3,
        p99_ms=found["p99"] / 1e3,
        max_ms=found["max"] / 1e3,
        refused=found["refused"],
        lost=found["lost"],
    )


if __name__ == "__main__":
    try:
        fetch()
    except NotHere as reason:
        sys.exit(f"wrk cannot be had: {reason}")
    print(HOME / "wrk")
