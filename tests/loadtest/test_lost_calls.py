"""Every way in which calls can be lost costs the trust and the exit code."""

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.calls import CONNECTION_LOST
from loadtest.drive import closed_load, open_load
from loadtest.endpoint import Endpoint
from loadtest.plan import Live, Plan
from loadtest.report.raw_files import read
from loadtest.report.verdict import verdict
from tests.loadtest.test_cli import QUICK, load, started, written
from tests.loadtest.test_drive import prepare
from tests.support.load_stub import Stub
from tests.support.processes import children_of, command_of
from tests.support.server import until

DISTRUST = "These numbers are not to be trusted."
BUSY = QUICK[:2] + QUICK[4:]
"""As QUICK, with a warm-up."""

WAYS: dict[str, tuple[dict[str, Any], tuple[object, ...], str]] = {
    "never answered since the warm-up": (
        {"deaf": 10, "delays_ms": [2]},
        ("--clients", 20, "--warmup", "0.5s", "--duration", "1s", "--timeout", "2s", *BUSY),
        "lost calls: 8 of ",
    ),
    "never answered since the warm-up, open": (
        {"deaf": 10, "delays_ms": [2]},
        (
            *("--rate", 20, "--connections", 20, "--warmup", "2s", "--duration", "0.5s"),
            *("--timeout", "4s", *BUSY),
        ),
        "(timed out: 8)",
    ),
    "reset": ({"reset": 20}, ("--clients", 2, "--count", 100, *QUICK), "(connection lost: "),
    "closed": ({"drop": 50}, ("--rate", 500, "--count", 100, *QUICK), "(connection lost: "),
    "too slow": (
        {"delays_ms": [1] * 9 + [2000]},
        ("--clients", 1, "--count", 12, "--timeout", "0.5s", *QUICK),
        "(timed out: 1)",
    ),
    "no connection free": (
        {"delays_ms": [300]},
        ("--rate", 50, "--count", 30, "--connections", 1, "--timeout", "0.4s", *QUICK),
        "no connection free in time: ",
    ),
    "not all made": (
        {"delays_ms": [1]},
        ("--rate", 20, "--count", 1000, "--duration", "0.5s", *QUICK),
        "of 1000 calls were made before --duration was over",
    ),
    "all refused": ({"refuse": 1}, ("--clients", 1, "--count", 10, *QUICK), "no good answer to 10"),
}


@pytest.mark.fault("F2", "F7")
@pytest.mark.parametrize("way", WAYS)
def test_lost_calls_are_told_and_end_with_1(way: str, tmp_path: Path) -> None:
    """However few they are; the raw file has them, and so has every later report."""
    spec, argv, told = WAYS[way]
    file = tmp_path / "raw.json"
    with Stub(**spec) as stub:
        code, output, errors = load(stub.url, *argv, "--raw", file)

    assert code == 1, errors
    words = " ".join(output.split())
    assert DISTRUST in words
    assert told in words
    [point] = written(file)["points"]
    assert sum(point["statuses"].values()) + sum(point["failures"].values()) == point["offered"]
    assert verdict(read(written(file))).sentence == DISTRUST


@pytest.mark.fault("F7")
def test_refused_share_is_exit_code_3_without_an_objective_too(tmp_path: Path) -> None:
    """Figures of the answered half are true; a program that starts the tester must notice."""
    file = tmp_path / "raw.json"
    with Stub(refuse=2) as stub:
        argv = ("--clients", 1, "--count", 40, *QUICK)
        plain = load(stub.url, *argv, "--raw", file)
        allowed = load(stub.url, *argv, "--slo", "errors<60%")

    assert plain[0] == 3
    assert "breaks errors<=1%: errors 50.00%" in plain[2]
    assert allowed[0] == 0, allowed[2]


@pytest.mark.fault("F2")
def test_generator_that_dies_leaves_no_trusted_report(tmp_path: Path) -> None:
    """What was measured before is told, with what is missing."""
    file = tmp_path / "raw.json"
    argv = ("--clients", "1,2", "--duration", "1s", "--raw", file, *QUICK)
    with Stub(delays_ms=[2]) as stub, started(stub.url, *argv) as process:
        until(lambda: file.exists() and len(written(file)["points"]) == 1)
        os.kill(generator_of(process.pid), signal.SIGKILL)
        output, errors = process.communicate(timeout=60)

    assert process.returncode == 1, errors
    assert DISTRUST in output
    assert "could not be measured: the generator's process ended (-9)" in written(file)["failure"]
    later = verdict(read(written(file)))
    assert later.sentence == DISTRUST
    assert later.doubts[0].startswith("The measurement ended early: ")


def generator_of(pid: int) -> int:
    """Return the process in which the load runs."""
    for child in children_of(pid):
        if b"spawn_main" in (command_of(child) or b""):
            return child
    raise AssertionError("no generator")


@pytest.mark.fault("F4")
def test_seconds_without_an_answer_cost_the_trust(tmp_path: Path) -> None:
    """In a closed load they are in no percentile; its table says so, stalled or not."""
    file = tmp_path / "raw.json"
    argv = ("--clients", 4, "--duration", "6s", "--raw", file, *QUICK)
    with Stub(delays_ms=[2]) as stub, started(stub.url, *argv) as process:
        until(lambda: httpx.get(f"{stub.url}/calls").json() > 400)
        stub.process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        stub.process.send_signal(signal.SIGCONT)
        output, errors = process.communicate(timeout=60)

    words = " ".join(output.split())
    assert process.returncode == 1, errors
    assert DISTRUST in words
    assert "silent: no answer came for 2." in words
    assert "so stalls of the server hide in these figures (coordinated omission)" in words
    [point] = written(file)["points"]
    assert point["silence"]["seconds"] >= 2.4
    assert point["latency_ms"]["p99"] < 1000  # which is why it has to be said


@pytest.mark.fault("F4")
def test_generator_that_stood_still_is_no_silent_server() -> None:
    """The answers lay in the kernel; by its time stamps they were there."""
    stalled: list[float] = []

    def stall(live: Live) -> bool:
        if live.elapsed_s > 0.5 and not stalled:
            stalled.append(live.elapsed_s)
            time.sleep(1.5)
        return True

    with Stub(delays_ms=[2]) as stub:
        endpoint, requests, _ = prepare(stub.url)
        records = closed_load(
            endpoint, requests, clients=2, plan=Plan(seconds=3, warmup_s=0), watch=stall
        )

    assert stalled
    assert records.timestamp_flaw is None
    assert records.unread_s > 1.4
    assert records.times.silence_s < 1


@pytest.mark.fault("F2")
def test_client_whose_connection_cannot_be_made_again_is_counted() -> None:
    """It has no call under way, and is lost all the same: while it tries, and at the end."""
    with contextlib.ExitStack() as after:
        listener = after.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))

        def close_and_let_nobody_in() -> None:
            caller, _ = listener.accept()
            with caller:
                caller.recv(1024)
                for _ in range(4):  # whoever comes then waits to be let in
                    filler = after.enter_context(socket.socket())
                    filler.setblocking(False)
                    filler.connect_ex(listener.getsockname())

        thread = threading.Thread(target=close_and_let_nobody_in)
        thread.start()
        records = closed_load(
            Endpoint("http", *listener.getsockname()),
            [b"GET / HTTP/1.1\r\n\r\n"],
            clients=1,
            plan=Plan(seconds=1.5, warmup_s=0, timeout_s=0.5),
        )
        thread.join()

    # The call itself; a try for each half second after it.
    assert set(records.outcomes) == {CONNECTION_LOST}
    assert records.outcomes[CONNECTION_LOST] >= 3


@pytest.mark.fault("F2")
def test_warm_up_call_that_is_answered_late_is_in_the_figures() -> None:
    """A stall that begins in the warm-up is as long as one that begins later."""
    with Stub(delays_ms=[1500] + [1] * 5_000) as stub:
        endpoint, requests, _ = prepare(stub.url)
        plan = Plan(seconds=1.0, warmup_s=0.5)
        closed = closed_load(endpoint, requests, clients=1, plan=plan)
    with Stub(delays_ms=[1500] + [1] * 5_000) as stub:
        endpoint, requests, _ = prepare(stub.url)
        opened = open_load(endpoint, requests, rate=50, connections=1, plan=plan)

    for records in (closed, opened):
        assert (records.times.latency.max_ms() or 0) >= 1400
        assert set(records.outcomes) == {200}
