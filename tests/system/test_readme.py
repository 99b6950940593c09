"""The README is true: its commands run, its code works, its tables are complete."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service import __version__
from service.errors import HeadwiseError
from service.settings import Settings
from tests.service.transport.test_problems import kinds
from tests.support.layers import Layers
from tests.support.server import ROOT, Server

README = (ROOT / "README.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
TOLERANCE = 1e-5
"""The last digits of FP32 differ from processor to processor."""

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed here")


def blocks(language: str, page: str = README) -> list[str]:
    """Return a page's code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """Return each `$ command` of the README with the output shown under it."""
    text = "\n".join(blocks("console"))
    return [
        (c, shown) for c, shown in re.findall(r"^\$ (.*)\n((?:(?!\$).*\n)*)", text, re.MULTILINE)
    ]


def table(heading: str) -> list[list[str]]:
    """Return the cells of the first table under a heading."""
    section = README.split(f"\n## {heading}\n")[1]
    lines = re.findall(r"^\|.*\|$", section.split("\n## ")[0], re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def setting_rows() -> list[str]:
    """Return what the table of settings has to say."""
    return [
        f"| `{Settings.variable(name)}` | `{Settings.flag(name)}` |"
        f" {'' if field.default is None else f'`{field.default}`'} | {field.description} |"
        for name, field in Settings.model_fields.items()
    ]


def numbers_of(value: Any) -> list[float]:
    """Return all numbers of a JSON value, in order."""
    if isinstance(value, dict):
        return [n for item in value.values() for n in numbers_of(item)]
    if isinstance(value, list):
        return [n for item in value for n in numbers_of(item)]
    return [float(value)] if isinstance(value, int | float) else []


def words_of(value: Any) -> Any:
    """Return a JSON value with every number replaced."""
    if isinstance(value, dict):
        return {key: words_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return [words_of(item) for item in value]
    return 0 if isinstance(value, int | float) else value


@pytest.mark.parametrize(
    ("command", "shown"), [pair for pair in commands() if pair[0].startswith("curl")]
)
def test_readme_curl_prints_what_is_shown(server: Server, command: str, shown: str) -> None:
    """A newcomer sees the very answer that the README promises."""
    argv = shlex.split(command.replace(ADDRESS, server.url))

    found = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)

    wanted = json.loads(shown)
    assert words_of(found) == words_of(wanted)
    np.testing.assert_allclose(numbers_of(found), numbers_of(wanted), atol=TOLERANCE)


def test_readme_shows_no_command_that_is_not_tested() -> None:
    """Every command is one of these kinds, each with a test of its own."""
    kinds_of_command = {command.split()[0] for command, _ in commands()}

    assert kinds_of_command == {
        *("make", "curl", "python", "docker", "perf_analyzer"),
        *(".", "pip", "export", "until"),
    }


def test_readme_make_verbs_exist() -> None:
    """Every verb that is mentioned can be made, and `make help` lists it."""
    verbs = set(re.findall(r"`(?:\w+=\S+ )?make ([a-z-]+)`", README)) | {
        command.split()[1] for command, _ in commands() if command.startswith("make")
    }

    listed = subprocess.run(
        [shutil.which("make") or "make", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert verbs <= set(re.findall(r"make ([a-z-]+)", listed.stdout)) | {"help"}


def section(heading: str) -> str:
    """Return the text under a heading of any level, up to the next one."""
    return re.split(rf"\n#+ {re.escape(heading)}\n", README)[1].split("\n#")[0]


def run_lines(page: str, folder: Path, address: str = ADDRESS) -> str:
    """Run the `$ ` lines of a page's console blocks as one shell does; return what they print."""
    lines = re.findall(r"^\$ (.*)$", "\n".join(blocks("console", page)), re.MULTILINE)
    ended = subprocess.run(
        ["bash", "-euc", "\n".join(lines).replace(ADDRESS, address)],  # noqa: S607
        cwd=folder,
        # pip finds what is installed, and nothing else: no test downloads.
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the README's commands find in a clone: environment and pins."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "constraints.txt").symlink_to(ROOT / "constraints.txt")
    return folder


@pytest.fixture(scope="module")
def exported(clone: Path, checkpoint: Path) -> Path:
    """Return a folder in which the README's export commands have all run, in their order."""
    import torch
    from safetensors.torch import save_file

    save_file(torch.nn.MultiheadAttention(16, 8).state_dict(), clone / "layer.safetensors")
    (clone / "CHECKPOINT_DIR").symlink_to(checkpoint)
    run_lines(section("Export your own layer"), clone)
    return clone


def run_python(*argv: str, folder: Path, **environ: str) -> None:
    """Run our interpreter on something that must succeed."""
    ended = subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environ},
    )
    assert ended.returncode == 0, ended.stderr


@needs_torch
def test_readme_export_commands_publish_what_they_name(exported: Path) -> None:
    """Each runs against files of the kind that it names."""
    names = {path.parent.parent.name for path in exported.glob("artifacts/*/1/manifest.json")}

    assert names == {"mha", "mine", "minilm-3"}


@needs_torch
@pytest.mark.parametrize("index", range(len(blocks("python"))))
def test_readme_python_block_runs(exported: Path, checkpoint: Path, index: int) -> None:
    """The code is copied, run, and its own asserts hold."""
    with Server(exported / "artifacts") as running:
        code = blocks("python")[index].replace(ADDRESS, running.url)
        run_python("-c", code, folder=exported, CHECKPOINT_DIR=str(checkpoint))


@needs_torch
@pytest.mark.fault("E4")
def test_readme_example_of_a_real_layer_runs_line_by_line(clone: Path, layers: Layers) -> None:
    """The script is saved, then every line runs beside a server that looks as `make run` does."""
    page = section("A real layer, end to end")
    [script] = blocks("python", page)
    assert "Save it as `minilm.py`" in page
    repository = clone / "line by line" / "artifacts"
    shutil.copytree(layers.repository, repository)
    with Server(repository, repository_poll_s=2) as running:
        folder = repository.parent
        (folder / "minilm.py").write_text(script.replace(ADDRESS, running.url))
        for name in (".venv", "constraints.txt"):
            (folder / name).symlink_to(clone / name)

        printed = run_lines(page, folder, running.url)

    assert printed.endswith("all 12 heads as transformers computes them\n")


@pytest.mark.fault("E4")
def test_readme_examples_server_looks_as_make_run_does() -> None:
    """The example waits for a look at the repository, which only a setting makes."""
    makefile = (ROOT / "Makefile").read_text()

    assert 'HEADWISE_REPOSITORY_POLL_S="$${HEADWISE_REPOSITORY_POLL_S:-2}" exec' in makefile


def test_readme_settings_table_is_complete_and_true() -> None:
    """One row a setting, as `--help` says it."""
    section = README.split("\n## Settings\n")[1].split("\n## ")[0]

    assert [line for line in section.splitlines() if line.startswith("| `")] == setting_rows()


def test_readme_errors_table_has_every_code_with_its_status() -> None:
    """One row an error that a caller can meet, and no other."""
    from service.transport.problems import STATUSES

    def pairs(kind: type[HeadwiseError]) -> tuple[str, str]:
        return str(STATUSES[kind]), f"`{kind.code}`"

    # Not `__subclasses__()`: a class that a test made may still be there.
    leaves = [kind for kind in kinds() if not any(kind in other.__bases__ for other in kinds())]

    assert {(row[0], row[1]) for row in table("Errors")} == {pairs(kind) for kind in leaves}


def test_readme_endpoints_are_those_of_openapi(server: Server) -> None:
    """No endpoint is promised that is not there, and none is hidden."""
    paths = set(server.get("/openapi.json").json()["paths"]) | {"/docs", "/openapi.json"}
    rows = [row[0] for row in table("Call it") if "/" in row[0]]

    told = set(re.findall(r"/[\w{}/.-]*", " ".join(rows)))
    endpoints = re.findall(r"^\| `(?:GET|POST) .*$", README, re.MULTILINE)
    told |= set(re.findall(r"(/[\w{}/.-]*)[`,]", " ".join(endpoints)))

    assert told == paths


def test_readme_file_tree_names_every_file() -> None:
    """A newcomer finds the room where a change belongs."""
    tree = next(block for block in blocks("text") if "contract.py" in block)

    for package in ("service", "export"):
        for file in (ROOT / package).rglob("[a-z]*.py"):
            assert file.name in tree, file.name


def test_changelog_has_the_current_version() -> None:
    """The version that is told is the one that is described."""
    changelog = (ROOT / "CHANGELOG.md").read_text()

    assert re.search(rf"^## {re.escape(__version__)} ", changelog, re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    [
        *ROOT.glob("*.md"),
        *(p for d in ("bench", "deploy", "docs") for p in (ROOT / d).glob("*.md")),
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_link_between_pages_leads_to_a_file(page: Path) -> None:
    """A page that moves takes its links with it."""
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())

    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []
