"""What docs/load-testing.md shows works: the load tester, Locust and perf_analyzer as written."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import locust, perf_analyzer
from tests.support.layers import Layers
from tests.support.server import ROOT, Server

MANUAL = (ROOT / "docs" / "load-testing.md").read_text()
COMMANDS = re.findall(
    r"^\$ (.*)$", "\n".join(re.findall(r"```console\n(.*?)```", MANUAL, re.DOTALL)), re.MULTILINE
)
ADDRESS = "127.0.0.1:8000"

SHORT = ["--duration", "0.5", "--warmup", "0.2", "--null-time", "0.2", "--precision", "50%"]
"""The examples are about options, not about numbers."""

MEASURED = (0, 1, 3)
"""A machine with other work may break the objective, or spoil the numbers: that is no failure."""

_LIMIT_S = 300


@pytest.fixture(scope="module")
def served(layers: Layers) -> Iterator[Server]:
    """Return a server for this file's calls alone."""
    with Server(layers.repository) as running:
        yield running


def starting_with(*words: str) -> list[list[str]]:
    """Return the manual's commands that begin so, each as its words."""
    return [argv for argv in map(shlex.split, COMMANDS) if tuple(argv[: len(words)]) == words]


def test_every_command_is_of_a_kind_that_is_tested() -> None:
    """The load tester and its script, Locust, perf_analyzer."""
    tested = (
        ("python", "-m", "loadtest"),
        ("python", "docs/recompute.py"),
        ("locust",),
        ("perf_analyzer",),
    )

    assert sum(len(starting_with(*words)) for words in tested) == len(COMMANDS)


def test_load_commands_do_what_they_say(served: Server, tmp_path: Path) -> None:
    """From top to bottom in one folder: later ones read what earlier ones wrote."""
    commands = starting_with("python", "-m", "loadtest")
    assert len(commands) > 7
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    [bodies] = re.findall(r"```jsonl\n(.*?)```", MANUAL, re.DOTALL)
    (tmp_path / "calls.jsonl").write_text(bodies)

    for argv in commands:
        words = [word.replace(f"http://{ADDRESS}", served.url) for word in argv[1:]]
        is_load = words[2] == served.url
        ended = subprocess.run(
            [sys.executable, *words, *(SHORT if is_load else [])],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
        allowed = MEASURED if is_load else (0,)
        assert ended.returncode in allowed, f"{argv}: {ended.stderr}"
        assert "p99" in ended.stdout, argv

    written = {path.name for path in tmp_path.iterdir()}
    assert written == {
        *("calls.jsonl", "before.json", "after.json", "rates.json", "shapes.json", "clients.json"),
        *("capacity.json", "report.html", "report.csv", "all.html", "both.html"),
    }
    assert "p99 by batch and length" in (tmp_path / "all.html").read_text()
    [[_, script, raw_file]] = starting_with("python", "docs/recompute.py")
    again = subprocess.run(
        [sys.executable, str(ROOT / script), raw_file],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "latency_p99_ms" in again.stdout


def test_main_readme_shows_commands_of_this_page() -> None:
    """So they are tested here."""
    main = (ROOT / "README.md").read_text()

    shown = re.findall(r"^\$ (python -m loadtest .*)$", main, re.MULTILINE)

    assert shown
    assert set(shown) <= set(COMMANDS)


def test_exit_codes_are_those_of_the_help() -> None:
    """The table here and the text there."""
    ended = subprocess.run(
        [sys.executable, "-m", "loadtest", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    told = re.findall(r"^  (\d+) +\S", ended.stdout, re.MULTILINE)

    assert re.findall(r"^\| (\d+) \|", MANUAL, re.MULTILINE) == told


@pytest.mark.fault("H1")
@pytest.mark.parametrize("kind", ["both", "json", "binary"])
def test_locust_file_calls_without_a_failure(served: Server, tmp_path: Path, kind: str) -> None:
    """As the manual has it, until it has made calls; a tag takes one of the two calls."""
    if not locust.TOOL.exists():
        pytest.skip("Locust was not fetched: make .venv/locust.stamp does it")
    [argv] = starting_with("locust")
    words = [word.replace(f"http://{ADDRESS}", served.url) for word in argv[1:]]
    words[words.index("--run-time") + 1] = "10m"
    tags = [] if kind == "both" else ["--tags", kind]

    calls = {"json": "/v1/attention", "binary": "/v2/models/{model}/infer, binary"}
    wanted = set(calls.values()) if kind == "both" else {calls[kind]}

    def enough(lines: list[locust.Line]) -> bool:
        return wanted <= {line.name for line in lines if line.requests > 0}

    lines = {line.name: line for line in locust.measure(tmp_path, *words, *tags, enough=enough)}

    assert lines.keys() - {"metadata", "Aggregated"} == wanted
    for name in wanted:
        assert lines[name].requests > 0
        assert lines[name].failures == 0


@pytest.mark.fault("H1")
def test_locust_counts_refusals_as_failures(served: Server, tmp_path: Path) -> None:
    """A run against a model that is not there does not look well."""
    if not locust.TOOL.exists():
        pytest.skip("Locust was not fetched: make .venv/locust.stamp does it")
    options = ["-f", "bench/locustfile.py", "--host", served.url, "--users", "1"]

    with pytest.raises(AssertionError, match=r"400|404|413"):
        locust.measure(
            tmp_path,
            *(*options, "--run-time", "10m", "--shape", "1x5000"),
            enough=lambda lines: any(line.failures for line in lines),
        )


@pytest.mark.parametrize("index", range(len(starting_with("perf_analyzer"))))
def test_perf_analyzer_recipe_measures_every_level(served: Server, index: int) -> None:
    """As it stands there, on a narrower layer and for a shorter time."""
    if not perf_analyzer.TOOL.exists():
        pytest.skip("perf_analyzer was not fetched: make .venv/perf_analyzer.stamp does it")
    argv = [word.replace(":8,768", ":8,24") for word in starting_with("perf_analyzer")[index]]
    assert argv[:5] == ["perf_analyzer", "-i", "http", "-u", ADDRESS]
    model = argv[argv.index("-m") + 1]
    options = argv[argv.index("-m") + 2 :]

    levels = perf_analyzer.measure(
        served.url,
        model,
        *options,
        *("--measurement-interval", "300", "--stability-percentage", "1000"),
    )

    assert len(levels) == 4
    assert all(level.client_requests > 0 for level in levels)
