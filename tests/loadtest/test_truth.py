"""
The load tester against what is known: arithmetic, a server that does nothing, and other tools.

All but the freeze hold measured times against the truth, with the tolerances that the tool
promises: `make test-timed` runs them where nothing else runs, and every figure is printed.
A neighbour that is busy for a while only spoils a round; a tool that is wrong is wrong in all.
"""

import json
import os
import re
import signal
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from bench import wrk
from bench.debian import NotHere
from loadtest import null
from loadtest.drive import closed_load, open_load
from loadtest.endpoint import Endpoint
from loadtest.formats import encode
from loadtest.plan import Live, Plan
from loadtest.point import Point, measure
from loadtest.summary import figures_of
from loadtest.target import Input, Target, discover
from loadtest.trust import SILENT, warnings_of
from loadtest.work import Work, draw_tensors
from tests.loadtest.test_cli import load, written
from tests.support.layers import Layers
from tests.support.load_stub import Stub, go_ahead
from tests.support.perf_analyzer import TOOL
from tests.support.server import Server

ROUNDS = 3
RUNS = 5
INTERLEAVED = 7
CLIENTS = 2
COMPARED = Work("4", "256")
"""Some milliseconds each: of less, what a client itself costs is a large share."""
FIGURES = ("p50", "p90", "p99")


def hold(round_of: Callable[[], list[str]]) -> None:
    """Assert that a round of measurements finds nothing that disagrees; later ones may mend it."""
    for _ in range(ROUNDS):
        disagrees = round_of()
        if not disagrees:
            return
        show("disagrees:", *disagrees)
    pytest.fail(f"in each of {ROUNDS} rounds, at last: {'; '.join(disagrees)}")


def differences(found: dict[str, float], truth: dict[str, float]) -> list[str]:
    """Return which percentiles in ms are farther from the truth than is promised."""
    return [
        f"{name} {found[name]:.3f} ms, truth {truth[name]:.3f} ms"
        for name in FIGURES
        if abs(found[name] - truth[name]) > max(0.03 * truth[name], 0.3)
    ]


def medians(points: list[dict[str, Any]]) -> dict[str, float]:
    """Return the middle one of each percentile over several runs."""
    return {
        name: statistics.median(point["latency_ms"][name] for point in points) for name in FIGURES
    }


def percentiles(values_ms: "np.ndarray[Any, np.dtype[np.float64]]") -> dict[str, float]:
    """Return the true ones."""
    found = np.percentile(values_ms, (50, 90, 99), method="inverted_cdf")
    return dict(zip(FIGURES, found.tolist(), strict=True))


def show(what: str, *told: object) -> None:
    """Print a line of figures; `pytest -rP` shows them."""
    print(what, *told)  # noqa: T201


@pytest.fixture
def urgent() -> Iterator[None]:
    """Have nobody else take the generator's core, where the system lets it: it keeps the time."""
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    go_ahead()
    yield
    os.sched_setscheduler(0, policy, parameter)


@pytest.mark.timed
@pytest.mark.usefixtures("urgent")
@pytest.mark.parametrize(
    "delays_ms",
    [
        pytest.param([2.0], id="2ms"),
        pytest.param([5.0], id="5ms"),
        pytest.param([10.0], id="10ms"),
        pytest.param([40.0], id="40ms"),
        pytest.param([2.0, 2.0, 10.0, 2.0, 2.0], id="2ms-or-10ms"),
        pytest.param([20.0, 20.0, 100.0, 20.0, 20.0], id="20ms-or-100ms"),
        pytest.param([float(ms) for ms in range(21, 61)], id="uniform"),
    ],
)
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
def test_known_latencies_are_found(delays_ms: list[float], is_open: bool) -> None:
    """
    Percentiles are within the larger of 3 % and 0.3 ms of the truth, either way.

    What the stub kept to by its own clock is shown beside them: it tells who was late.
    """
    count = 400  # every delay as often as every other
    plan = Plan(count=count, warmup_s=0.0)
    truth = percentiles(np.array(delays_ms))
    with Stub(delays_ms=delays_ms) as stub:
        target = discover(Endpoint.parse(stub.url), model=None)
        point = (
            Point(Work(), rate=100, plan=plan) if is_open else Point(Work(), clients=4, plan=plan)
        )

        def one_round() -> list[str]:
            found = medians([measure(target, point) for _ in range(RUNS)])
            show("found", found, "truth", truth, "the stub kept", stub.kept_ms(RUNS * count))
            return differences(found, truth)

        hold(one_round)


@pytest.mark.timed
@pytest.mark.usefixtures("urgent")
@pytest.mark.parametrize("rate", [20, 40])
def test_known_ceiling_is_seen_below_and_above(rate: int) -> None:
    """Below, each call takes its turn's time; above, each waits longer than the last."""
    ceiling, count = 25, 3 * rate
    plan = Plan(count=count, warmup_s=0.0)
    number = np.arange(count)
    waits_ms = 1e3 * np.maximum(1 / ceiling, (number + 1) / ceiling - number / rate)
    truth = percentiles(waits_ms)
    with Stub(ceiling=ceiling) as stub:
        target = discover(Endpoint.parse(stub.url), model=None)
        point = Point(Work(), rate=rate, arrivals="constant", plan=plan)

        def one_round() -> list[str]:
            found = medians([measure(target, point) for _ in range(RUNS)])
            show(f"{ceiling}/s at most, {rate}/s due:", found, "truth", truth)
            return differences(found, truth)

        hold(one_round)


class Freeze:
    """Stops a server for a while, amid a load."""

    def __init__(self, server: Server, at_s: float, seconds: float) -> None:
        self._process, self._at_s, self._seconds = server.process, at_s, seconds
        self.began: float | None = None
        self.ended: float | None = None

    def __call__(self, live: Live) -> bool:
        """Go on."""
        if self.began is None and live.elapsed_s >= self._at_s:
            self._process.send_signal(signal.SIGSTOP)
            self.began = live.elapsed_s
        elif self.began is not None and live.elapsed_s >= self.began + self._seconds:
            self._process.send_signal(signal.SIGCONT)
            self.ended = self.ended or live.elapsed_s
        return True

    @property
    def seconds(self) -> float:
        """How long it really was."""
        assert self.began is not None
        assert self.ended is not None
        return self.ended - self.began


@pytest.mark.slow
@pytest.mark.fault("F4")
def test_stalled_server_shows_in_an_open_load_and_hides_in_a_closed_one(layers: Layers) -> None:
    """
    Stopped for 3 s of 15: a fifth of the calls were due then, and waited evenly up to 3 s.

    So p90 is half of it, p99 95 % of it.  A client that waits made no calls meanwhile: it
    saw one slow call in thousands.
    """
    plan = Plan(seconds=15.0, warmup_s=1.0)
    with Server(layers.repository, max_queue_calls=100_000, timeout_s=600) as server:
        target = discover(Endpoint.parse(server.url), model="tiny")
        opened, closed = Freeze(server, 6, 3), Freeze(server, 6, 3)
        truth = measure(target, Point(Work(), rate=100, arrivals="constant", plan=plan), opened)
        hidden = measure(target, Point(Work(), clients=1, plan=plan), closed)

    found, seen = truth["latency_ms"], hidden["latency_ms"]
    stall_ms = 1e3 * opened.seconds
    share = opened.seconds / plan.seconds
    show("open ", opened.seconds, found)
    show("closed", closed.seconds, seen)
    assert truth["statuses"] == {"200": 1500}
    assert found["p50"] < 0.1 * stall_ms
    for name, at in (("p90", 0.90), ("p99", 0.99)):
        wait_ms = stall_ms * (1 - (1 - at) / share)
        assert found[name] == pytest.approx(wait_ms, rel=0.1), name
    assert found["max"] == pytest.approx(stall_ms, rel=0.1)
    assert seen["max"] == pytest.approx(1e3 * closed.seconds, rel=0.1)
    assert seen["p99"] < 0.1 * stall_ms
    for one in (truth, hidden):
        assert any(warning.startswith(SILENT) for warning in warnings_of(one, None))
    assert any(warning.startswith("unstable") for warning in warnings_of(truth, None))


@pytest.mark.timed
def test_generator_makes_3000_calls_a_second_on_one_core() -> None:
    """Binary, one row of eight tokens of BERT's width: 24 kB each way."""
    inputs = (Input("embeddings", "FP32", None, None, 768),)
    endpoint = Endpoint("http", "127.0.0.1", 80)
    target = Target(endpoint, "v2", "null", "1", "mha", inputs, None)
    tensors = draw_tensors(Work(), inputs, 4, most_bytes=2**26, seed=0)
    messages = [encode(target, Work(), one) for one in tensors]
    requests = [endpoint.post_bytes(m.path, m.body, m.headers) for m in messages]

    rates = [null.calls_per_s(requests, len(messages[0].body), seconds=1.0) for _ in range(RUNS)]

    show("calls/s of a server that does nothing", [round(rate) for rate in rates])
    assert statistics.median(rates) >= 3000


@pytest.mark.timed
def test_open_load_of_3000_calls_a_second_is_sent_in_time() -> None:
    """Rate, not only ability: the calls are made when they are due."""
    inputs = (Input("embeddings", "FP32", None, None, 768),)
    found = []
    with null.serving(24_700) as endpoint:
        target = Target(endpoint, "v2", "null", "1", "mha", inputs, None)
        tensors = draw_tensors(Work(), inputs, 4, most_bytes=2**26, seed=0)
        messages = [encode(target, Work(), one) for one in tensors]
        requests = [endpoint.post_bytes(m.path, m.body, m.headers) for m in messages]
        plan = Plan(seconds=2.0, warmup_s=0.5)
        for _ in range(RUNS):
            records = open_load(endpoint, requests, rate=3000, plan=plan)
            found.append((records.rate, figures_of(records)["lag_ms"]["p50"], records.cpu_share))

    show("rate, lag in ms at p50, cores", found)
    assert statistics.median(rate for rate, _, _ in found) == pytest.approx(3000, rel=0.05)
    assert statistics.median(lag for _, lag, _ in found) < 1.0


@pytest.mark.timed
def test_capacity_of_a_known_ceiling_is_found(tmp_path: Path) -> None:
    """Within 5 % of it."""
    ceiling, file = 400, tmp_path / "raw.json"
    search = ("--find-capacity", "--slo", "p99<50ms", "--rate", 100, "--arrivals", "constant")
    with Stub(ceiling=ceiling) as stub:
        code, output, errors = load(
            *(stub.url, *search, "--precision", "2%", "--duration", "3s", "--warmup", "0.5s"),
            *("--raw", file, "--null-time", "0", "--max-lag", "1h", "--max-spread", "1000000%"),
        )

    show(errors)
    found = written(file)["capacity"]
    assert code == 0, output
    assert found["rate"] == pytest.approx(ceiling, rel=0.05)


@pytest.fixture(scope="module")
def quiet(layers: Layers) -> Iterator[Server]:
    """Return a server for these comparisons alone."""
    with Server(layers.repository) as running:
        yield running


def interleaved(
    ours: Callable[[], tuple[float, float]], theirs: Callable[[], tuple[float, float]], who: str
) -> None:
    """Assert that two tools see the same p50 and p99, by the medians of runs in turn."""

    def one_round() -> list[str]:
        pairs = [(ours(), theirs()) for _ in range(INTERLEAVED)]
        show(f"headwise-load (p50, p99 ms): {[pair[0] for pair in pairs]}")
        show(f"{who} (p50, p99 ms): {[pair[1] for pair in pairs]}")
        found = []
        for at, name, tolerance in ((0, "p50", 0.10), (1, "p99", 0.25)):
            mine, its = (statistics.median(pair[side][at] for pair in pairs) for side in (0, 1))
            told = f"{name} {mine:.3f} ms, {who} {its:.3f} ms, ratio {mine / its:.3f}"
            show(told)
            found += [told] if abs(mine - its) > tolerance * its else []
        return found

    hold(one_round)


def closed_run(server: Server) -> tuple[Endpoint, list[bytes], Callable[[], tuple[float, float]]]:
    """Return where calls go, the calls, and how to make them with our tool."""
    endpoint = Endpoint.parse(server.url)
    target = discover(endpoint, model="mha")
    tensors = draw_tensors(COMPARED, target.inputs, 8, most_bytes=2**26, seed=0)
    messages = [encode(target, COMPARED, one) for one in tensors]
    requests = [endpoint.post_bytes(m.path, m.body, m.headers) for m in messages]

    def run() -> tuple[float, float]:
        plan = Plan(seconds=2.0, warmup_s=0.5)
        told = figures_of(closed_load(endpoint, requests, clients=CLIENTS, plan=plan))
        return told["latency_ms"]["p50"], told["latency_ms"]["p99"]

    return endpoint, requests, run


@pytest.mark.timed
def test_wrk_sees_the_same(quiet: Server) -> None:
    """A closed load on one server, in turns."""
    try:
        wrk.fetch()
    except NotHere as reason:
        pytest.skip(f"wrk cannot be had: {reason}")
    endpoint, requests, ours = closed_run(quiet)

    def theirs() -> tuple[float, float]:
        seen = wrk.closed(endpoint.host, endpoint.port, requests, clients=CLIENTS, seconds=2)
        assert (seen.refused, seen.lost) == (0, 0)
        return seen.p50_ms, seen.p99_ms

    interleaved(ours, theirs, "wrk")


@pytest.mark.timed
def test_perf_analyzer_sees_the_same(quiet: Server, tmp_path: Path) -> None:
    """A closed load on one server, in turns, with the same numbers: its own take longer."""
    if not TOOL.exists():
        pytest.skip("perf_analyzer was not fetched: make .venv/perf_analyzer.stamp does it")
    _, _, ours = closed_run(quiet)
    address, data = urlsplit(quiet.url).netloc, tmp_path / "data.json"
    inputs = discover(Endpoint.parse(quiet.url), model="mha").inputs
    rows = [
        {"embeddings": {"content": row.ravel().tolist(), "shape": list(row.shape)}}
        for one in draw_tensors(COMPARED, inputs, 8, most_bytes=2**26, seed=0)
        for row in one.inputs["embeddings"]
    ]
    data.write_text(json.dumps({"data": rows}))
    command = [
        *(
            str(TOOL),
            "-i",
            "http",
            "-u",
            address,
            "-m",
            "mha",
            "--shape",
            "embeddings:256,24",
            "-b",
            "4",
        ),
        *("--concurrency-range", str(CLIENTS), "--measurement-interval", "1000"),
        *("--stability-percentage", "1000", "--input-data", str(data)),
    ]

    def theirs() -> tuple[float, float]:
        ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        p50, p99 = (
            int(re.findall(rf"p{share} latency: (\d+) usec", ended.stdout)[0]) / 1e3
            for share in (50, 99)
        )
        return p50, p99

    interleaved(ours, theirs, "perf_analyzer")
