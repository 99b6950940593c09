"""docs/design.md is true: its scripts run without any HTTP library, its table is the walls'."""

import re
from pathlib import Path

import pytest

from tests.support.layers import Layers
from tests.support.server import ROOT
from tests.system.test_readme import blocks, run_python
from tests.test_walls import ROOMS

PAGE = (ROOT / "docs" / "design.md").read_text()
SCRIPTS = blocks("python", PAGE)

WITHOUT_HTTP = """\
import sys

for name in ("fastapi", "httptools", "prometheus_client", "starlette", "uvicorn"):
    sys.modules[name] = None  # importing it raises ImportError
"""


@pytest.fixture
def folder(layers: Layers, tmp_path: Path) -> Path:
    """Return a directory with the repository `artifacts` in it."""
    (tmp_path / "artifacts").symlink_to(layers.repository)
    return tmp_path


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_of_the_page_runs_where_no_http_library_can_be_imported(
    folder: Path, script: str
) -> None:
    """The core is usable without a server, and the script's own asserts hold."""
    run_python("-c", WITHOUT_HTTP + script, folder=folder)


def test_importing_an_http_library_fails_where_scripts_run(folder: Path) -> None:
    """Else the test above would show nothing."""
    for name in ("service.app", "service.telemetry.metrics", "service.transport.exchange"):
        with pytest.raises(AssertionError, match="ModuleNotFoundError"):
            run_python("-c", f"{WITHOUT_HTTP}\nimport {name}", folder=folder)


def test_every_module_of_the_core_can_be_imported_without_http(folder: Path) -> None:
    """Not only those that the scripts need."""
    modules = sorted(
        f"service.{package}.{file.stem}"
        for package in ("host", "inference", "codecs")
        for file in (ROOT / "service" / package).glob("[a-z]*.py")
    )
    assert len(modules) > 20

    run_python("-c", WITHOUT_HTTP + "\n".join(f"import {name}" for name in modules), folder=folder)


def test_table_of_packages_is_that_of_the_walls() -> None:
    """The same packages in the same order, with the same libraries."""
    rows = re.findall(r"^\| `(service[\w.]*)` \| (.*?) \|", PAGE, re.MULTILINE)

    rooms = [room for room in ROOMS if room.name.startswith("service")]
    assert rows == [(room.name, ", ".join(sorted(room.libraries)) or "none") for room in rooms]


def test_names_in_the_page_are_those_of_the_code() -> None:
    """A function that is renamed takes its mention along."""
    code = "\n".join(file.read_text() for file in (ROOT / "service").rglob("*.py"))
    section = PAGE.split("\n## A request's life\n")[1].split("\n## ")[0]
    names = {name.split(".")[-1] for name in re.findall(r"`([A-Za-z_.]+)`", section)}

    assert len(names) > 20
    assert {name for name in names if not re.search(rf"(def|class) {name}\b", code)} == set()
