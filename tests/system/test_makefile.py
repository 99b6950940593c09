"""What `make run` does the first time; its interpreter only writes down what it is told."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.server import ROOT

PYTHON = """#!/bin/sh
echo "$@" >> calls
if [ "$2" = export ]; then mkdir -p "artifacts/$4/1" && touch "artifacts/$4/1/manifest.json"; fi
if [ "$2" = service ]; then echo "poll $HEADWISE_REPOSITORY_POLL_S" >> calls; fi
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a clone in which nothing is set up yet."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def make_run(clone: Path, **environ: str) -> tuple[list[str], list[str]]:
    """Return what `make run` prints, and what it calls."""
    (clone / "calls").write_text("")
    ended = subprocess.run(
        [shutil.which("make") or "make", "run"],
        cwd=clone,
        env={"PATH": os.environ["PATH"], **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout.splitlines(), (clone / "calls").read_text().splitlines()


@pytest.mark.fault("E3")
def test_first_run_says_what_it_does_and_exports_the_small_layer_first(clone: Path) -> None:
    """A line before everything that takes long; the layer of the README's first call is first."""
    printed, calls = make_run(clone)

    assert [line.split(":")[0] for line in printed] == [
        "Installing what this needs in .venv, once",
        "Exporting the sample layer tiny",
        "Exporting the sample layer mha",
    ]
    assert "downloads about 270 MB" in printed[0]
    assert [call.split(" --embed-dim")[0] for call in calls] == [
        "-m pip --version",
        "-m pip install -qq --disable-pip-version-check -c constraints.txt -e .[export,load]",
        "-m export --name tiny",
        "-m export --name mha",
        "-m service",
        "poll 2",
    ]


@pytest.mark.fault("E3")
def test_later_run_serves_at_once(clone: Path) -> None:
    """What is installed and published is used, and a setting of the user's own counts."""
    make_run(clone)

    printed, calls = make_run(clone, HEADWISE_REPOSITORY_POLL_S="30")

    assert printed == []
    assert calls == ["-m service", "poll 30"]
