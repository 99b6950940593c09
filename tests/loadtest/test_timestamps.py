"""Time stamps that cannot be true are found and left aside."""

import os
import shutil
import subprocess
import sys
from array import array
from math import nan
from pathlib import Path

import pytest

from loadtest.calls import Calls
from loadtest.records import Records
from loadtest.summary import figures_of
from loadtest.timestamps import clock_flaw
from tests.loadtest.test_cli import QUICK, written
from tests.support.load_stub import Stub
from tests.support.server import ROOT

DELAY_MS = 60


@pytest.mark.fault("F3")
@pytest.mark.parametrize("server_timing", [f"queue;dur=1, total;dur={DELAY_MS - 1}", None])
@pytest.mark.parametrize("offset", ["+0.5s", "-0.5s", "+0.02s"])
def test_clock_that_differs_from_the_kernels_makes_no_call_quicker(
    offset: str, server_timing: str | None, tmp_path: Path
) -> None:
    """Also by less than a call takes, and of a server that tells no times."""
    if shutil.which("faketime") is None:
        pytest.skip("faketime is not installed")
    file = tmp_path / "raw.json"
    with Stub(delays_ms=[DELAY_MS], timing=server_timing) as stub:
        argv = ("--clients", 2, "--count", 20, "--raw", file, *QUICK)
        ended = subprocess.run(
            [*("faketime", "-f", offset, sys.executable, "-m", "loadtest"), stub.url]
            + [str(word) for word in argv],
            cwd=ROOT,
            env=os.environ | {"FAKETIME_DONT_FAKE_MONOTONIC": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    [point] = written(file)["points"]
    assert ended.returncode == 0, ended.stderr
    assert point["latency_ms"]["p50"] >= DELAY_MS
    assert point["timestamps"] == "process"
    told = " ".join(ended.stdout.split())
    assert "time stamps of the kernel left aside: the clock of this process is " in told


def seen(*, done: float, read: float, total_s: float = nan) -> Records:
    """Return the records of one call that was due and sent at 2 s."""
    records, calls = Records(1.0, 10.0), Calls()
    records.seconds = 10.0
    calls.add(2.0, 2.0, done, read, total_s, 200)
    records.fold(calls, array("d"))
    return records


@pytest.mark.fault("F3")
@pytest.mark.parametrize(
    ("records", "flaw"),
    [
        (seen(done=1.9, read=2.3), "by them 1 answers came before their calls were sent"),
        (seen(done=2.4, read=2.3), "by them 1 answers came after they had been read"),
        (
            seen(done=2.1, read=2.3, total_s=0.25),
            "by them 1 calls took less than the server's own time",
        ),
    ],
)
def test_call_proves_that_its_time_stamp_is_false(records: Records, flaw: str) -> None:
    """From then on and for all calls before it counts when answers were read."""
    found = figures_of(records)

    assert found["timestamp_flaw"] == flaw
    assert found["timestamps"] == "process"
    assert found["latency_ms"]["p50"] == pytest.approx(300, rel=1e-3)
    assert found["unread_s"] == 0
    assert found["contradicted"] == 0


@pytest.mark.fault("F3")
def test_server_that_claims_more_than_the_whole_call_is_told_apart() -> None:
    """Then no time stamp is to blame: one of two clocks runs at another speed."""
    found = figures_of(seen(done=2.29, read=2.3, total_s=0.4))

    assert found["contradicted"] == 1
    assert found["timestamps"] == "kernel"


def test_time_stamps_that_agree_are_kept() -> None:
    """The kernel's moment of arrival is the answer's, however late it is read."""
    assert clock_flaw() is None
    found = figures_of(seen(done=2.2, read=2.3, total_s=0.19))

    assert found["timestamp_flaw"] is None
    assert found["latency_ms"]["p50"] == pytest.approx(200, rel=1e-3)
