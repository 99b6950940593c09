"""The command `headwise-load` as people run it: what it prints, writes, and ends with."""

import contextlib
import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hdrh.histogram import HdrHistogram
from rich.console import Console

from loadtest import raw, sweep
from loadtest.cli import main
from loadtest.plan import Live, Plan
from loadtest.point import Point
from loadtest.progress import Display, duration_text, live_text, result_text
from loadtest.trust import is_trustworthy
from loadtest.work import Work
from tests.service.transport.test_tls import Files
from tests.support.layers import Layers
from tests.support.load_stub import Stub
from tests.support.server import ROOT, Server, until

QUICK = ("--null-time", "0", "--warmup", "0", "--max-lag", "1h", "--max-spread", "1000000%")
"""A machine that is busy with other tests makes no load unstable."""
KEY = "a-key-that-is-long-enough-for-the-server"


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    """Return a server that answers at once."""
    with Stub() as running:
        yield running


@contextlib.contextmanager
def started(*argv: object) -> Iterator["subprocess.Popen[str]"]:
    """Give the running command; it has ended in the end, whatever the test found."""
    with subprocess.Popen(
        [sys.executable, "-m", "loadtest", *map(str, argv)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def load(*argv: object) -> tuple[int, str, str]:
    """Return exit code, output and errors of the command, once it has ended."""
    with started(*argv) as process:
        output, errors = process.communicate(timeout=120)
        return process.returncode, output, errors


def written(path: Path) -> dict[str, Any]:
    """Return what is in a raw file."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_url_alone_is_enough(server: Server, tmp_path: Path) -> None:
    """The model is the server's default, the load 100 calls a second; the table is printed."""
    file = tmp_path / "raw.json"

    code, output, errors = load(server.url, "--duration", "1s", "--raw", file)

    [point] = written(file)["points"]
    assert code in (0, 1), errors  # whether the machine was quiet is not this test's matter
    assert (code == 0) == is_trustworthy(point["warnings"])
    assert point["id"] == "binary 1x8 weights=off 100/s"
    assert (point["model"], point["arrivals"], point["rate"]) == ("open", "poisson", 100)
    assert f"{point['latency_ms']['p50']:.3g}" in output
    assert written(file)["generator"]["null_calls_per_s"] > 0
    assert written(file)["server"]["model"] == "mha"
    assert written(file)["server"]["details"]["layer"]["embed_dim"] == 24


def test_raw_file_can_be_recomputed(tmp_path: Path) -> None:
    """Calls = rate x time; every call has an outcome, every good one a place in the histogram."""
    file = tmp_path / "raw.json"
    with Stub(refuse=10, timing="queue;dur=2") as stub:
        argv = ("--rate", 50, "--arrivals", "constant", "--duration", "2s", "--raw", file)

        code, _, errors = load(stub.url, *argv, *QUICK)

    found = written(file)
    [point] = found["points"]
    assert code == 3, errors  # more refusals than any load may have
    assert point["offered"] == point["rate"] * point["seconds"] == 100
    assert sum(point["statuses"].values()) + sum(point["failures"].values()) == 100
    histogram = HdrHistogram.decode(point["histogram"])
    assert histogram.get_total_count() == point["latency_ms"]["count"] == point["statuses"]["200"]
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99), ("p99.9", 99.9)):
        assert histogram.get_value_at_percentile(share) / 1e3 == point["latency_ms"][name]
    assert point["codes"] == {"queue_full": point["statuses"]["429"]}
    assert point["stages_ms"]["queue"]["mean"] == 2
    assert found["command"][:2] == ["headwise-load", stub.url]
    assert found["format"] == 1


def test_sweep_is_the_product_of_its_lists(tmp_path: Path) -> None:
    """Loads, shapes and formats, each with each, and an estimate before."""
    file = tmp_path / "raw.json"
    lists = ("--rate", "50,100", "--clients", "1", "--shape", "1x8,2x4", "--format", "json,binary")
    with Stub() as stub:
        code, _, errors = load(stub.url, *lists, "--count", 5, "--raw", file, *QUICK)

    ids = [point["id"] for point in written(file)["points"]]
    assert code == 0, errors
    assert ids == [
        f"{form} {shape} weights=off {load}"
        for shape in ("1x8", "2x4")
        for form in ("json", "binary")
        for load in ("50/s", "100/s", "1 clients")
    ]
    assert "12 points, about " in errors


def test_estimate_is_what_the_points_will_take() -> None:
    """Warm-up and time, or as many calls as the rate needs time for; said as people do."""
    timed = Point(Work(), rate=10, plan=Plan(seconds=20, warmup_s=2))
    counted = Point(Work(), rate=10, plan=Plan(seconds=3600, count=50, warmup_s=1))

    assert timed.expected_s == 22.5
    assert counted.expected_s == 6.5
    told = [duration_text(seconds) for seconds in (9.6, 61, 3720)]
    assert told == ["10 s", "1 min 1 s", "1 h 2 min"]


def test_points_are_made_once_and_without_those_that_are_there() -> None:
    """However often a list names them."""
    points = [Point(Work(), rate=rate) for rate in (1.0, 2.0, 1.0, 3.0)]

    left = sweep.left(points, {points[1].id})

    assert [point.rate for point in left] == [1, 3]


@pytest.mark.parametrize(
    ("live", "text"),
    [
        (Live(0.1, True, 3, 3, 9.0, 1.0, 2.0), "warming up"),
        (Live(3, False, 30, 30, 9.7, 1.234, 20.51), "p50 1.23 ms  p99 20.5 ms  10/s"),
        (Live(3, False, 30, 0, 0, float("nan"), float("nan")), "30 calls, no answer now"),
    ],
)
def test_live_figures_are_short(live: Live, text: str) -> None:
    """They share a line with the bar."""
    assert live_text(live) == text


def test_silence_is_told_once_until_an_answer_comes() -> None:
    """Also where no terminal shows live figures."""
    shown = io.StringIO()
    display = Display(Console(file=shown), total_s=60, quiet=False)
    nan = float("nan")

    for second, good in enumerate([1] + [0] * 14 + [1] + [0] * 5):
        display.live(Live(second, False, 9, good, good, nan, nan))

    told = "no answer for 5 s; a call is given up after --timeout"
    assert shown.getvalue().splitlines() == [told] * 2


def test_point_is_told_in_plain_numbers() -> None:
    """Four digits are no power of ten."""
    latency = {"count": 2, "p50": 9.94, "p95": 1034.0, "p99": 1034.0, "max": 1034.0}

    told = result_text({"id": "a", "latency_ms": latency, "good_per_s": 1070.9, "offered": 3})

    gap = "\N{NARROW NO-BREAK SPACE}"
    assert told == (
        f"a: p50 9.94  p95 1{gap}034  p99 1{gap}034  max 1{gap}034 ms  1{gap}071 good/s  1 not good"
    )


@pytest.mark.fault("H1")
def test_interrupted_sweep_tells_what_it_has_and_can_be_resumed(tmp_path: Path) -> None:
    """
    Whole points are kept as they are, the rest is measured then.

    The interruption comes when it comes: amid a point, or between two.
    """
    file = tmp_path / "raw.json"
    argv = ("--clients", "1,2,3", "--duration", "2s", "--raw", file, *QUICK)
    with Stub(delays_ms=[2]) as stub:
        with started(stub.url, *argv) as process:
            until(lambda: file.exists() and len(written(file)["points"]) > 0)
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
        first = written(file)

        again = load(stub.url, *argv)
        resumed = load(stub.url, *argv, "--resume")
        second = written(file)

    assert process.returncode == 130, errors
    assert first["interrupted"]
    assert first["ended"]
    whole = [point for point in first["points"] if not point["interrupted"]]
    assert 1 <= len(whole) <= 2
    assert f"{whole[0]['latency_ms']['p50']:.3g}" in output
    assert again[0] == 2
    assert f"--raw: {file}: is there already; --resume goes on with it" in again[2]
    assert resumed[0] == 0, resumed[2]
    assert not second["interrupted"]
    assert [point["clients"] for point in second["points"]] == [1, 2, 3]
    assert second["points"][: len(whole)] == whole


def test_server_that_is_gone_before_the_last_load_leaves_what_was_measured(tmp_path: Path) -> None:
    """The points until then are told and kept; the code says that it was not all."""
    file = tmp_path / "raw.json"
    argv = ("--clients", "1,2,3", "--duration", "2s", "--timeout", "1s", "--raw", file, *QUICK)
    with Stub(delays_ms=[2]) as stub, started(stub.url, *argv) as process:
        until(lambda: file.exists() and len(written(file)["points"]) > 0)
        stub.process.kill()
        output, errors = process.communicate(timeout=60)

    first = written(file)["points"][0]
    assert process.returncode == 1, errors
    assert f"{first['latency_ms']['p50']:.3g}" in output
    assert "headwise-load: ended early: binary 1x8 weights=off " in errors
    assert f" clients could not be measured: {stub.url}: " in errors
    assert f"raw file: {file}" in errors


def test_refused_first_call_leaves_no_raw_file(server: Server, tmp_path: Path) -> None:
    """The mended command is not told that the file is there already."""
    file = tmp_path / "raw.json"

    code, _, errors = load(server.url, "--model", "tiny", "--shape", "300x8", "--raw", file, *QUICK)

    assert code == 2
    assert "at most 256 sequences, got 300" in errors
    assert not file.exists()


def test_interruption_amid_the_only_point_tells_what_was_measured(tmp_path: Path) -> None:
    """With how much of it there was; SIGTERM does the same."""
    file = tmp_path / "raw.json"
    with Stub(delays_ms=[2]) as stub:
        argv = ("--clients", 1, "--duration", "1h", "--raw", file, *QUICK)
        with started(stub.url, *argv) as process:
            until(lambda: httpx.get(f"{stub.url}/calls").json() > 100)
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate(timeout=60)

    [point] = written(file)["points"]
    assert process.returncode == 130, errors
    assert point["interrupted"]
    assert point["latency_ms"]["count"] > 0
    assert "where 3600 s were planned" in point["warnings"][-1]
    assert "interrupted" in output


@pytest.mark.fault("F5")
def test_resumed_test_is_the_same_test(tmp_path: Path) -> None:
    """Not of another server, nor with an option that changes what is measured."""
    file = tmp_path / "raw.json"
    with Stub() as stub, Stub() as other:
        argv = ("--rate", 50, "--duration", "0.5s", "--raw", file, *QUICK)
        assert load(stub.url, *argv)[0] == 0

        elsewhere = load(other.url, *argv, "--resume")
        others = {
            words: load(stub.url, *argv, "--resume", *words)
            for words in (
                ("--duration", "2s"),
                ("--seed", "1"),
                ("--bodies", "3"),
                ("--warmup", "1s"),
                ("--timeout", "2s"),
                ("--connections", "7"),
                ("--check",),
            )
        }
        judged = load(stub.url, *argv, "--resume", "--slo", "p99<1s")
        anew = load(other.url, *argv, "--overwrite")

    assert elsewhere[0] == 2
    assert f"--resume: the raw file is of {stub.url} with model stub, not of" in elsewhere[2]
    for words, (code, _, errors) in others.items():
        assert code == 2, words
        name = words[0].removeprefix("--")
        assert f"--resume: binary 1x8 weights=off 50/s was measured with {name}" in errors
    assert judged[0] == 2
    assert "--resume: the raw file was measured with --slo none, not p99<1s" in judged[2]
    assert anew[0] == 0
    assert written(file)["server"]["url"] == other.url


@pytest.mark.fault("F5")
def test_resuming_keeps_how_the_measurement_began(tmp_path: Path) -> None:
    """First command, start, machine and objective; each later command beside them."""
    file = tmp_path / "raw.json"
    with Stub() as stub:
        argv = ("-d", "0.2s", "--raw", file, *QUICK)
        assert load(stub.url, *argv, "-r", 50, "--slo", "p99<1h")[0] == 0
        first = written(file)
        assert load(stub.url, *argv, "-r", "50,60", "--resume")[0] == 0
        second = written(file)
        assert load(stub.url, *argv, "-r", "50,60", "--resume")[0] == 0
        third = written(file)
        code, output, _ = load("report", file)

    kept = ("command", "started", "client", "slo")
    assert {name: second[name] for name in kept} == {name: first[name] for name in kept}
    assert second["points"][0] == first["points"][0]
    [again] = second["resumed"]
    assert again["command"][-3:] == ["-r", "50,60", "--resume"]
    assert third["resumed"] == second["resumed"], "nothing was left to measure"
    assert code == 0
    assert "another machine" not in output


def test_wrong_answers_make_the_result_untrustworthy(tmp_path: Path) -> None:
    """Exit code 1, and a word."""
    with Stub(corrupt=5) as stub:
        code, output, _ = load(stub.url, "--count", 20, "--check", "--bodies", 1, *QUICK)

    assert code == 1
    assert "wrong answers: 4 of 20 differ" in " ".join(output.split())


def test_load_that_changes_its_mind_is_unstable() -> None:
    """Exit code 1, and how far the windows lie apart."""
    spread = ("--max-spread", "50%")
    with Stub(delays_ms=[1] * 200 + [40] * 100) as stub:
        code, output, _ = load(stub.url, "--rate", 100, "--duration", "3s", *QUICK, *spread)

    assert code == 1
    assert "unstable: the median went from " in " ".join(output.split())


def test_broken_objective_is_an_exit_code_of_its_own() -> None:
    """For who builds on it; the figures are good all the same."""
    with Stub(delays_ms=[20]) as stub:
        broken = load(stub.url, "--count", 10, "--slo", "p50<10ms", *QUICK)
        kept = load(stub.url, "--count", 10, "--slo", "p50<1h", *QUICK)

    assert broken[0] == 3
    assert "binary 1x8 weights=off 100/s: breaks p50<10ms: p50 2" in broken[2]
    assert kept[0] == 0, kept[2]


def test_server_that_answers_nothing_well_is_no_result(tmp_path: Path) -> None:
    """Exit code 1: the figures are of nothing."""
    file = tmp_path / "raw.json"
    with Stub(refuse=1) as stub:
        code, output, _ = load(stub.url, "--count", 10, "--raw", file, *QUICK)

    [point] = written(file)["points"]
    assert code == 1
    assert point["latency_ms"]["p50"] is None
    assert "no good answer to 10 calls" in " ".join(output.split())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rate", "fast"], "--rate: expected numbers such as 100"),
        (["--clients", "1.5"], "--clients: expected whole numbers"),
        (["--shape", "8"], "--shape: expected ROWSxLENGTH such as 1x8"),
        (["--weights", "some"], "--weights: expected off, on or heads:0,3, got 'some'"),
        (["--mask", "some"], "--mask: expected one of none, padding, causal, pair, got 'some'"),
        (["--format", "xml"], "--format: expected one of json, binary, safetensors, shared-memory"),
        (["--duration", "0"], "--duration: expected a time above 0, got 0 s"),
        (["--warmup", "long"], "--warmup: expected a time such as 10s"),
        (["--count", "0"], "--count: expected a whole number from 1 on, got 0"),
        (["--connections", "0"], "--connections: expected a whole number from 1 on, got 0"),
        (["--slo", "quick"], "--slo: expected bounds such as p99<20ms"),
        (["--slo", "p99<20"], "--slo: expected a time with its unit, such as p99<20ms, got"),
        (["--find-capacity"], "--find-capacity: needs an objective"),
        (
            ["--find-capacity", "--slo", "p99<1s", "--clients", "2"],
            "--clients: --find-capacity looks for a rate, not for clients",
        ),
        (["--resume"], "--resume: goes on with a raw file, name it by --raw"),
        (["--repository", "artifacts"], "--repository: only means something together with --check"),
        (["--raw", "/nowhere/raw.json"], "--raw: /nowhere/raw.json: No such file or directory"),
        (["--header", "secret"], '--header: expected "Name: value" of printable characters'),
        (["--max-spread", "wide"], "--max-spread: expected a share such as 5% or 0.05, got 'wide'"),
        (["--model", "other"], "--model: expected one of stub, got 'other'"),
        (["--speed", "3"], "unrecognized arguments: --speed 3; see --help"),
    ],
)
def test_option_that_makes_no_sense_is_named(
    stub: Stub, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, and nothing is measured."""
    try:
        code: object = main([stub.url, *argv])
    except SystemExit as end:
        code = end.code

    output, errors = capsys.readouterr()
    assert (code, output) == (2, "")
    assert errors.startswith(f"headwise-load: {message}"), errors
    assert errors.count("\n") == 1


def test_nobody_there_is_exit_code_2() -> None:
    """With the address that was tried."""
    with Stub() as stub:
        url = stub.url

    code, output, errors = load(url)

    assert (code, output) == (2, "")
    assert errors == f"headwise-load: {url}: Connection refused: no server listens there\n"


def test_server_without_tls_is_told_apart(server: Server) -> None:
    """A scheme that was mistyped is named as the cause."""
    url = server.url.replace("http://", "https://")

    code, _, errors = load(url)

    assert code == 2
    assert errors == (
        f"headwise-load: {url}: it does not speak TLS: try http:// instead of https://\n"
    )


def test_server_of_another_kind_is_exit_code_2(server: Server) -> None:
    """With what it answered."""
    code, _, errors = load(f"{server.url}/elsewhere")

    assert code == 2
    assert "/elsewhere/v2: no Open Inference Protocol v2: answered 404" in errors


def test_key_is_sent_and_never_written(layers: Layers, tmp_path: Path) -> None:
    """Neither to the raw file nor to the screen."""
    (tmp_path / "keys").write_text(f"caller:{KEY}\n")
    file = tmp_path / "raw.json"
    with Server(layers.repository, wait="live", api_keys_file=tmp_path / "keys") as server:
        until(lambda: server.get("/v2/health/ready").status_code == 200)
        argv = ("--count", 10, "--raw", file, *QUICK)

        without = load(server.url, *argv)
        code, output, errors = load(server.url, "-H", f"Authorization: Bearer {KEY}", *argv)

    assert without[0] == 2
    assert "answered 401" in without[2]
    assert code == 0, errors
    assert written(file)["points"][0]["statuses"] == {"200": 10}
    assert KEY not in file.read_text() + output + errors
    assert "Authorization: ***" in written(file)["command"]


@pytest.mark.parametrize("word", ["-H", "--header"])
def test_command_is_written_down_without_what_headers_say(word: str) -> None:
    """In each way that a header can be given."""
    argv = ["http://x", word, "X-API-Key: open sesame", "--rate", "5"]

    assert raw.shown(argv) == ["http://x", word, "X-API-Key: ***", "--rate", "5"]
    for joined in ("--header=X-API-Key: open sesame", "-HX-API-Key: open sesame"):
        assert "sesame" not in " ".join(raw.shown([joined]))


def test_tls_is_spoken_and_verified(layers: Layers, tmp_path: Path) -> None:
    """By the authority that is named, with a certificate of our own, or not at all."""
    files = Files(tmp_path)
    files.make_authority("ca")
    files.make("server", "ca")
    files.make("client", "ca")
    files["both"].write_bytes(files["client"].read_bytes() + files["client-key"].read_bytes())
    settings: dict[str, Any] = {
        "tls_cert_file": files["server"],
        "tls_key_file": files["server-key"],
        "tls_client_ca_file": files["ca"],
    }
    with Server(layers.repository, wait="log", **settings) as server:
        argv = ("--count", 200, "--clients", 4, "--shape", "8x64", "--check", *QUICK)
        known = ("--ca-file", files["ca"], "--cert-file", files["both"])
        until(lambda: load(server.url, "--count", 1, *known, *QUICK)[0] == 0)

        stranger = load(server.url, *argv)
        code, _, errors = load(server.url, *argv, *known)
        insecure = load(
            server.url, "--count", 9, "--insecure", "--cert-file", files["both"], *QUICK
        )

    assert stranger[0] == 2
    assert "its certificate does not verify" in stranger[2]
    assert code == 0, errors
    assert insecure[0] == 0, insecure[2]


@pytest.mark.fault("F1")
def test_capacity_search_tells_the_highest_good_rate(tmp_path: Path) -> None:
    """Every probe is a point of the raw file; two rates enclose what was sought."""
    file = tmp_path / "raw.json"
    argv = ("--find-capacity", "--rate", 40, "--duration", "0.3s", "--raw", file, *QUICK)
    with Stub(refuse=2) as stub:  # half of all calls, at any rate
        with started(stub.url, *argv, "--slo", "errors<60%") as process:
            until(lambda: file.exists() and len(written(file)["points"]) >= 3)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        kept = written(file)
        code, _, errors = load(stub.url, *argv, "--slo", "errors<40%", "--overwrite")
    broken = written(file)

    assert process.returncode == 130
    assert [point["rate"] for point in kept["points"][:3]] == [40, 80, 160]
    assert code == 3
    assert "no rate keeps errors<40%: not even 33.3/s" in errors
    assert broken["slo"] == "errors<40%"
    assert broken["capacity"]["rate"] is None
    assert [point["rate"] for point in broken["points"]] == pytest.approx(
        [40, 40, 100 / 3, 100 / 3]
    )
    assert broken["points"][1]["id"] == broken["points"][0]["id"] + " try 2"


def test_help_shows_examples_and_exit_codes() -> None:
    """All that a newcomer needs on one screen and a bit."""
    code, output, _ = load("--help")

    assert code == 0
    for word in ("examples:", "exit codes:", "--find-capacity", "open (--rate", "130"):
        assert word in output
    assert load("--version") == (0, "headwise-load 0.1.0\n", "")


def test_report_and_comparison_are_verbs(tmp_path: Path) -> None:
    """Of a raw file, and of two."""
    one, two, page = tmp_path / "one.json", tmp_path / "two.json", tmp_path / "page.html"
    with Stub() as stub:
        for file in (one, two):
            assert load(stub.url, "--count", 20, "--raw", file, *QUICK)[0] == 0

    assert load("report", one, "--html", page)[0] == 0
    assert "<html" in page.read_text()
    assert load("compare", one, two)[0] == 0
    assert load("report", tmp_path / "none.json")[0] == 2
