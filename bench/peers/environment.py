"""
An environment of its own for each peer, made once: `.venv/peers/<name>`.

The pins in `requirements/<name>.txt` are all that is installed: what a package asks for
beside them, such as torch, is not.
"""

import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.peers.errors import Unavailable
from bench.servers import ROOT

HOME = ROOT / ".venv" / "peers"
REQUIREMENTS = Path(__file__).parent / "requirements"
_LIMIT_S = 1200

Progress = Callable[[str], None]
"""Takes one line about what is going on."""


def pins(name: str, requirements: Path = REQUIREMENTS) -> Mapping[str, str]:
    """Return the exact version of every package of a peer."""
    lines = (requirements / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==", 1) for line in lines if line and not line.startswith("#"))


def python_of(name: str) -> Path:
    """Return a peer's interpreter, there or not."""
    return HOME / name / "bin" / "python"


def packages_of(name: str) -> Path:
    """Return where a peer's packages lie."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return HOME / name / "lib" / version / "site-packages"


def install(
    name: str, progress: Progress, *, home: Path = HOME, requirements: Path = REQUIREMENTS
) -> None:
    """
    Make a peer's environment, unless it is there already, whole and of these pins.

    Raises:
        Unavailable: the installer failed; the message is its last line.
    """
    folder, stamp = home / name, home / f"{name}.stamp"
    wanted = requirements / f"{name}.txt"
    made_of = hashlib.sha256(wanted.read_bytes() + sys.version.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == made_of:
        return
    stamp.unlink(missing_ok=True)
    started, count = time.monotonic(), len(pins(name, requirements))
    progress(f"{name}: installing {count} packages into {_told(folder)}, once")
    shutil.rmtree(folder, ignore_errors=True)
    # Our own pip installs into it: one of its own would take seconds and megabytes.
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    options = ["--quiet", "--retries", "1", "--no-deps", "--requirement", str(wanted)]
    try:
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], name)
        _run([*pip, "install", *options], name)
    except Unavailable:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    stamp.write_text(made_of)
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and not f.is_symlink())
    progress(f"{name}: {size / 2**20:.0f} MB on disk, {time.monotonic() - started:.0f} s")


def _run(command: list[str], name: str) -> None:
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{name}: not installed within {_LIMIT_S} s") from None
    except OSError as error:
        raise Unavailable(f"{name}: {command[0]}: {error.strerror}") from None
    if done.returncode:
        words = done.stderr.strip() or done.stdout.strip() or "no word"
        errors = [line for line in words.splitlines() if line.startswith("ERROR")]
        raise Unavailable(f"{name}: not installed: {(errors or words.splitlines())[-1]}")


def _told(folder: Path) -> Path:
    """Return a path as short as it can be said."""
    return folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
