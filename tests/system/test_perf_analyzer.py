"""Triton's load tester, as NVIDIA built it, against a real server."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest

from tests.support.layers import Layers
from tests.support.perf_analyzer import TOOL, Failed, Level, Stuck, measure
from tests.support.server import Server, until

SHAPES = {
    "mha": ["--shape", "embeddings:16,24"],
    "mha-weights": ["--shape", "embeddings:16,24"],
    "cross-weights": ["--shape", "embeddings:9,12", "--shape", "memory:5,6"],
}
"""What a call of each model looks like: the tool wants every free axis but the batch."""

FORMATS = {
    "binary": [],
    "json": ["--input-tensor-format", "json", "--output-tensor-format", "json"],
}

POISSON = ["--request-rate-range", "80", "--request-distribution", "poisson"]

# Three short windows, whatever their spread: the numbers are not the point.
WINDOWS = ["--measurement-interval", "300", "--stability-percentage", "1000"]


@pytest.fixture(scope="module")
def server(layers: Layers) -> Iterator[Server]:
    """Return a server for this file's calls alone, which shares memory."""
    if not TOOL.exists():
        pytest.skip("perf_analyzer was not fetched: make .venv/perf_analyzer.stamp does it")
    with Server(layers.repository, shared_memory=True, max_length=64) as running:
        yield running


@dataclass(frozen=True)
class Counts:
    """What the server tells of a model's calls since it started."""

    success: int
    fail: int
    rows: int

    @classmethod
    def of(cls, server: Server, model: str) -> "Counts":
        """Return them as they are now."""
        [entry] = server.get(f"/v2/models/{model}/stats").json()["model_stats"]
        calls = entry["inference_stats"]
        return cls(calls["success"]["count"], calls["fail"]["count"], entry["inference_count"])

    def since(self, before: "Counts") -> "Counts":
        """Return how they have grown."""
        return Counts(
            self.success - before.success, self.fail - before.fail, self.rows - before.rows
        )


def in_flight(server: Server) -> int:
    """Return how many requests the server has not answered, but for the one that asks."""
    found = re.search(r"^headwise_requests_in_flight (\d+)", server.get("/metrics").text, re.M)
    assert found
    return int(found[1]) - 1


def answers(server: Server, log_start: int) -> list[dict[str, object]]:
    """Return what the log has said since then of the calls that were answered well."""
    lines = [orjson.loads(line) for line in server.whole_log()[log_start:].splitlines()]
    return [line for line in lines if "/infer" in line.get("route", "") and line["status"] == 200]


def spent_us(level: Level) -> int:
    """Return what a call took on average from its arrival to its answer, as the server says."""
    return (
        level.queue_us + level.compute_input_us + level.compute_infer_us + level.compute_output_us
    )


def measure_well(server: Server, model: str, *options: str, batch: int = 1) -> list[Level]:
    """
    Return what the tool finds, once it is proven that all went well.

    No call failed, every call that the tool saw answered was counted once, and what the server
    says it spent on a call is within what the tool waited for it.
    """
    before, log_start = Counts.of(server, model), len(server.log())

    levels = measure(server.url, model, *SHAPES[model], "-b", str(batch), *options)

    grown = Counts.of(server, model).since(before)
    assert grown.fail == 0
    assert grown.success == len(answers(server, log_start))
    assert grown.rows == grown.success * batch
    # Windows begin and end amid calls: level by level the two sides' counts differ by a few.
    assert sum(level.client_requests for level in levels) <= grown.success
    for level in levels:
        assert level.client_requests > 0
        assert level.inferences == level.server_requests * batch
        assert level.executions > 0
        assert 0 < spent_us(level) <= level.latency_us
    return levels


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("model", ["mha", "mha-weights"])
def test_concurrency_sweep_reports_every_level(server: Server, model: str, form: str) -> None:
    """One to four callers at once, each level with its numbers."""
    levels = measure_well(
        server, model, "--concurrency-range", "1:4", *WINDOWS, *FORMATS[form], batch=2
    )

    assert [level.load for level in levels] == [1, 2, 3, 4]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("model", SHAPES)
def test_poisson_arrivals_are_answered(server: Server, model: str, form: str) -> None:
    """Calls that come when they come, not when the last was answered."""
    [level] = measure_well(server, model, *POISSON, *WINDOWS, *FORMATS[form])

    assert level.load == 80


@pytest.mark.parametrize("load", [["--concurrency-range", "3"], POISSON])
@pytest.mark.parametrize("form", FORMATS)
def test_as_many_are_answered_as_were_to_be_sent(
    server: Server, form: str, load: list[str]
) -> None:
    """The number that was asked for, the tool's count and the server's are one."""
    model, count = "mha-weights", 80
    options = [*load, *FORMATS[form], "--request-count", str(count)]
    for _ in range(5):
        before = Counts.of(server, model)
        try:
            [level] = measure_well(server, model, *options, batch=2)
        except Stuck:
            # On its own: an answer that the server owed it would count as a failure once it left.
            until(lambda: in_flight(server) == 0)
            assert Counts.of(server, model).fail == before.fail
            continue
        break
    else:
        pytest.fail("the tool got stuck at every try")

    assert level.client_requests == Counts.of(server, model).since(before).success == count
    # It asks for the statistics when its first requests may have been answered already.
    assert 0 < level.server_requests <= count


@pytest.mark.parametrize("model", SHAPES)
def test_shared_memory_carries_the_tensors(server: Server, model: str) -> None:
    """Bodies are short, and no region is left behind."""
    log_start = len(server.log())

    measure_well(
        server,
        model,
        *["--shared-memory", "system", "--output-shared-memory-size", "16384"],
        *["--concurrency-range", "2"],
        *WINDOWS,
        batch=2,
    )

    assert all(int(str(line["answer_bytes"])) < 300 for line in answers(server, log_start))
    assert server.get("/v2/systemsharedmemory/status").json() == []


def test_version_in_the_path_is_measured_too(server: Server) -> None:
    """`-x` names the version, as in metadata, configuration, statistics and calls."""
    measure_well(server, "mha", "-x", "1", *WINDOWS)


def test_our_metrics_can_be_collected_beside(server: Server) -> None:
    """The tool reads a Prometheus endpoint, and only warns of what no CPU has."""
    metrics = server.url.removeprefix("http://") + "/metrics"

    measure_well(
        server, "mha", "--verbose-csv", "--collect-metrics", "--metrics-url", metrics, *WINDOWS
    )


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("mha", ["--shape", "embeddings:65,24"], "embeddings: at most 64 tokens long, got 65"),
        ("mha", ["--shape", "embeddings:4,23"], "embeddings: expected [B, S, 24], got [1, 4, 23]"),
        ("mha", ["--shape", "embeddings:4,24", "-x", "2"], "version 1 is served, got '2'"),
        ("nope", ["--shape", "embeddings:4,24"], "expected one of cross, mha, tiny, got 'nope'"),
    ],
)
def test_failing_requests_end_the_run_with_our_message(
    server: Server, model: str, options: list[str], message: str
) -> None:
    """So a run that ends well had none."""
    with pytest.raises(Failed) as caught:
        measure(server.url, model, *options, *WINDOWS)

    assert message in str(caught.value)


def test_readme_command_measures_what_it_says(server: Server) -> None:
    """As it stands there, on a narrower layer and for a shorter time."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    [command] = re.findall(r"^\$ (perf_analyzer .*)$", readme, re.MULTILINE)
    words = shlex.split(command.replace(":8,768", ":8,24"))
    options = words[words.index("mha") + 1 :]

    levels = measure(server.url, "mha", *options, *WINDOWS)

    assert words[:6] == ["perf_analyzer", "-i", "http", "-u", "127.0.0.1:8000", "-m"]
    assert [level.load for level in levels] == [1, 6, 11, 16]
