"""
A peer's processes: started as a session of their own, watched, and ended to the last child.

Some peers start children of children that outlive their parents.  The first process is made
the one that orphans are handed to, so that whatever came of it can be found below it.
"""

import contextlib
import ctypes
import http.client
import ipaddress
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers.errors import Unavailable

START_LIMIT_S = 120
_END_LIMIT_S = 20
_LISTEN = "0A"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Running:
    """A peer that takes calls."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    start_s: float
    """From its start until it was ready."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Its first process and all below it."""
        return tuple(process.pid for process in _tree(self.process.pid))

    def resident_mb(self) -> float:
        """Return the memory of all its processes; a page that several share counts once."""
        return sum(_proportional_kb(pid) for pid in self.pids) / 1024

    def addresses(self) -> set[str]:
        """Return where its processes listen, as addresses without their ports."""
        ours = {inode for pid in self.pids for inode in _sockets(pid)}
        return {address for inode, address in _listeners() if inode in ours}


@dataclass(frozen=True)
class _Process:
    """One process: a number that is used again has another start."""

    pid: int
    parent: int
    session: int
    started: int


@contextlib.contextmanager
def started(
    name: str,
    command: Sequence[str],
    folder: Path,
    environ: Mapping[str, str],
    ready: tuple[str, int, str],
) -> Iterator[Running]:
    """
    Give a started peer once `ready` (host, port, path) answers 200.

    Raises:
        Unavailable: it cannot be started, ended, or was not ready in time.
    """
    log, began = folder / "log", time.monotonic()
    libc = ctypes.CDLL(None)  # before the fork, where little is allowed

    def stay_together() -> None:
        """Adopt orphans, and end when whoever started this ends, killed or not."""
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    try:
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=stay_together,
            )
    except OSError as error:
        raise Unavailable(f"{name}: {command[0]}: {error.strerror}") from None
    try:
        _wait(name, process, log, ready)
        yield Running(name, ready[1], process, time.monotonic() - began)
    finally:
        _end(process)


def _wait(
    name: str, process: subprocess.Popen[bytes], log: Path, ready: tuple[str, int, str]
) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Unavailable(f"{name}: ended with {process.returncode}: {_last_words(log)}")
        if _answers_200(*ready):
            return
        time.sleep(0.05)
    raise Unavailable(f"{name}: not ready within {START_LIMIT_S} s: {_last_words(log)}")


def _answers_200(host: str, port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no word"])[-1].strip()[:500]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the first process to end, then make sure that nothing of it is left."""
    ours = set(_tree(process.pid))
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_LIMIT_S)
    ours |= set(_tree(process.pid))
    deadline = time.monotonic() + _END_LIMIT_S
    while time.monotonic() < deadline:
        left = [p for p in _all() if p.session == process.pid or _is_one_of(p, ours)]
        if process.poll() is not None and not left:
            return
        for found in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(found.pid, signal.SIGKILL)
        time.sleep(0.05)
    raise RuntimeError(f"processes are left: {[p.pid for p in left]}")


def _is_one_of(process: _Process, ours: set[_Process]) -> bool:
    """Whether it is one of these, whoever its parent is by now."""
    return any(process.pid == p.pid and process.started == p.started for p in ours)


def _tree(root: int) -> list[_Process]:
    """Return a process and all below it that still run."""
    below: dict[int, list[_Process]] = {}
    found = []
    for process in _all():
        below.setdefault(process.parent, []).append(process)
        if process.pid == root:
            found.append(process)
    for process in found:  # grows while it is read
        found += below.get(process.pid, [])
    return found


def _all() -> list[_Process]:
    """Return every process of the machine that is not a mere entry for its parent."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                # The name, in brackets, may hold anything.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    numbers = (int(fields[i]) for i in (1, 3, 19))
                    found.append(_Process(int(folder.name), *numbers))
    return found


def _sockets(pid: int) -> Iterator[str]:
    """Give the inodes of a process's sockets."""
    with contextlib.suppress(OSError):  # it, or one of its files, has gone
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(file)
                if target.startswith("socket:["):
                    yield target[8:-1]


def _listeners() -> Iterator[tuple[str, str]]:
    """Give inode and address of every TCP socket that listens."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN:
                    # Each word of 32 bits is written as this machine reads it.
                    raw = bytes.fromhex(fields[1].partition(":")[0])
                    words = (raw[i : i + 4] for i in range(0, len(raw), 4))
                    packed = b"".join(
                        int.from_bytes(word, "big").to_bytes(4, sys.byteorder) for word in words
                    )
                    yield fields[9], str(ipaddress.ip_address(packed))


def _proportional_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has ended
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
