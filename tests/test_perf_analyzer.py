"""Triton's load tester, as NVIDIA built it, against a real server."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from tests.layers import Layers
from tests.perf_analyzer import TOOL, Failed, Level, measure
from tests.server import Server

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

# The fewest windows that it takes, and any spread between them: the numbers are not the point.
WINDOWS = ["--measurement-interval", "300", "--stability-percentage", "1000"]


@pytest.fixture(scope="module")
def server(layers: Layers) -> Iterator[Server]:
    """Return a server for this file's calls alone, which shares memory."""
    if not TOOL.exists():
        pytest.skip("perf_analyzer was not fetched: make .venv/perf_analyzer.stamp does it")
    with Server(layers.repository, shared_memory=True, max_length=64) as running:
        yield running


def counted(server: Server, model: str) -> dict[str, int]:
    """Return how many calls of a model the server says it answered, failed and ran."""
    [entry] = server.get(f"/v2/models/{model}/stats").json()["model_stats"]
    return {
        "success": entry["inference_stats"]["success"]["count"],
        "fail": entry["inference_stats"]["fail"]["count"],
        "rows": entry["inference_count"],
    }


def spent_us(level: Level) -> int:
    """Return what a call took on average from its arrival to its answer, as the server says."""
    return (
        level.queue_us + level.compute_input_us + level.compute_infer_us + level.compute_output_us
    )


def measure_exactly(
    server: Server, model: str, *options: str, requests: int, batch: int = 1
) -> None:
    """Let the tool send so many requests, and assert that all of them were answered well."""
    before = counted(server, model)

    [level] = measure(
        server.url,
        model,
        *SHAPES[model],
        *["-b", str(batch), "--request-count", str(requests)],
        *options,
    )

    assert level.client_requests == requests
    # It asks for the server's statistics when its first requests are on their way already.
    assert 0 < level.server_requests <= requests
    assert level.inferences == level.server_requests * batch
    assert 0 < level.executions <= requests
    assert 0 < spent_us(level) <= level.server_latency_us <= level.latency_us
    after = counted(server, model)
    assert {key: after[key] - before[key] for key in after} == {
        "success": requests,
        "fail": 0,
        "rows": requests * batch,
    }


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("model", ["mha", "mha-weights"])
def test_concurrency_sweep_reports_every_level(server: Server, model: str, form: str) -> None:
    """One to four callers at once: each level has its numbers, and no request failed."""
    before = counted(server, model)
    levels = measure(
        server.url,
        model,
        *SHAPES[model],
        *["--concurrency-range", "1:4"],
        *WINDOWS,
        *FORMATS[form],
    )

    after = counted(server, model)
    assert [level.load for level in levels] == [1, 2, 3, 4]
    assert after["fail"] == before["fail"]
    assert all(level.client_requests > 0 for level in levels)
    # Windows begin and end amid requests: level by level the two counts differ by a few.
    seen = sum(level.client_requests for level in levels)
    assert seen <= after["success"] - before["success"]
    assert all(0 < spent_us(level) <= level.latency_us for level in levels)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("model", SHAPES)
def test_every_request_is_answered_and_counted_once(server: Server, model: str, form: str) -> None:
    """The client's count, the server's, and the number that was asked for are one."""
    measure_exactly(
        server,
        model,
        *["--concurrency-range", "3"],
        *FORMATS[form],
        requests=60,
        batch=2,
    )


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("model", ["mha", "mha-weights"])
def test_poisson_arrivals_are_answered_and_counted_once(
    server: Server, model: str, form: str
) -> None:
    """Calls that come when they come, not when the last was answered."""
    measure_exactly(
        server,
        model,
        *["--request-rate-range", "80", "--request-distribution", "poisson"],
        *FORMATS[form],
        requests=80,
    )


@pytest.mark.parametrize("model", SHAPES)
def test_shared_memory_carries_the_tensors(server: Server, model: str) -> None:
    """Bodies are short, and no region is left behind."""
    said = len(server.log())

    measure_exactly(
        server,
        model,
        *["--shared-memory", "system", "--output-shared-memory-size", "16384"],
        *["--concurrency-range", "2"],
        requests=40,
        batch=2,
    )

    lines = [orjson.loads(line) for line in server.log()[said:].splitlines()]
    sizes = [line["answer_bytes"] for line in lines if "/infer" in line.get("route", "")]
    assert len(sizes) == 40
    assert max(sizes) < 300
    assert server.get("/v2/systemsharedmemory/status").json() == []


def test_version_in_the_path_is_measured_too(server: Server) -> None:
    """`-x` names the version, as in metadata, configuration, statistics and calls."""
    measure_exactly(server, "mha", "-x", "1", requests=20)


def test_our_metrics_can_be_collected_beside(server: Server) -> None:
    """The tool reads a Prometheus endpoint, and only warns of what no CPU has."""
    metrics = server.url.removeprefix("http://") + "/metrics"

    measure_exactly(
        server, "mha", "--verbose-csv", "--collect-metrics", "--metrics-url", metrics, requests=20
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
        measure(server.url, model, *options, "--request-count", "10")

    assert message in str(caught.value)


def test_readme_command_measures_what_it_says(server: Server) -> None:
    """As it stands there, on a narrower layer and for a shorter time."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    [command] = re.findall(r"^\$ (perf_analyzer .*)$", readme, re.MULTILINE)
    words = shlex.split(command.replace(":8,768", ":8,24"))
    options = words[words.index("mha") + 1 :]

    levels = measure(server.url, "mha", *options, *WINDOWS)

    assert words[:6] == ["perf_analyzer", "-i", "http", "-u", "127.0.0.1:8000", "-m"]
    assert [level.load for level in levels] == [1, 6, 11, 16]
