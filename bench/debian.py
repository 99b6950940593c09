"""Programs as Debian builds them, unpacked without being installed: that needs no rights."""

import subprocess
from collections.abc import Mapping
from pathlib import Path


class NotHere(Exception):
    """A program cannot be had on this machine, or ended with an error; the message says why."""


def unpack(packages: tuple[str, ...], folder: Path) -> Path:
    """
    Return where the files of these packages lie below `folder`, from the machine's own sources.

    Raises:
        NotHere: this is no Debian, or the download failed.
    """
    get = ["apt-get", "-qq", "download", *packages]
    try:
        run(get, folder)
    except NotHere:
        # No list of packages is there yet, or it names some that are there no more.
        run(["apt-get", "-qq", "update"], folder)
        run(get, folder)
    for package in folder.glob("*.deb"):
        run(["dpkg-deb", "-x", str(package), "unpacked"], folder)
    return folder / "unpacked"


def run(command: list[str], folder: Path, environ: Mapping[str, str] | None = None) -> str:
    """
    Return what a command prints.

    Raises:
        NotHere: it is not there, or ended with an error; its last word is told.
    """
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ, check=False, capture_output=True, text=True
        )
    except OSError as error:
        raise NotHere(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()[-1]
        raise NotHere(f"{Path(command[0]).name}: {last}")
    return done.stdout
