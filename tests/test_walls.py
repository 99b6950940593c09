"""The walls between the parts: which package imports which, and which library."""

import ast
import sys
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Room:
    """One package, or the files of `service/` that stand below or above its packages."""

    name: str
    libraries: frozenset[str] = frozenset()
    """The packages beside the standard library that it may import."""
    modules: frozenset[str] | None = None
    """The only modules of other rooms that it may import; None = all of the rooms before it."""


def room(name: str, *libraries: str, modules: "set[str] | None" = None) -> Room:
    """Return a room by the names of what it may import."""
    return Room(name, frozenset(libraries), None if modules is None else frozenset(modules))


ROOMS = [
    room("service", "orjson", "pydantic"),
    room("service.host"),
    room("service.inference", "numpy", "onnxruntime", "pydantic", "safetensors"),
    room("service.codecs", "numpy", "orjson", "simdjson"),
    room("service.telemetry", "opentelemetry", "prometheus_client"),
    room("service.transport", "httptools", "orjson", "starlette", "uvicorn"),
    room("service.api", "fastapi", "orjson", "starlette"),
    room("service.__main__", "fastapi", "starlette", "uvicorn"),
    room(
        "export",
        *("numpy", "onnx", "onnx_ir", "rich", "safetensors", "torch"),
        # Artifacts are proven by the engine that serves them.
        modules={
            "service",
            "service.contract",
            "service.errors",
            "service.host.malloc",
            "service.layer_config",
            "service.host.memory_limit",
            "service.inference.artifact",
            "service.inference.calls",
            "service.inference.engine",
            "service.inference.parity",
        },
    ),
    room(
        "loadtest",
        *("hdrh", "httptools", "numpy", "orjson", "pydantic", "rich", "safetensors", "uvloop"),
        # A client like any other, but for `--repository`: see ORACLE.
        modules={"service.inference.parity"},
    ),
]
"""
From the ground up.  `bench/` and `tests/`, which stand on all of them, import what they like.

`service` is the ground of that package: the files that all others may import.  `service.__main__`
stands for those that put the parts together.
"""

ROOF = {"__main__", "app", "probe"}
"""The files of `service/` that put the parts together."""

ORACLE = "loadtest.oracle"
ORACLE_MODULES = {
    "service.contract",
    "service.errors",
    "service.inference.artifact",
    "service.inference.calls",
    "service.inference.engine",
}
"""What the one file of the load tester imports that runs an artifact itself."""

NAMES = [room.name for room in ROOMS]
FILES = sorted(
    file
    for package in ("service", "export", "loadtest")
    for file in (ROOT / package).rglob("*.py")
    if file.name != "__init__.py"
)


def module_of(file: Path) -> str:
    """Return the dotted name of a file."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


MODULES = {module_of(file): file for file in FILES}


def room_of(module: str) -> Room:
    """Return the room that a module is in."""
    parts = module.split(".")
    if parts[0] == "service" and len(parts) == 2:
        name = "service.__main__" if parts[1] in ROOF else "service"
    else:
        name = ".".join(parts[:2]) if parts[0] == "service" else parts[0]
    return ROOMS[NAMES.index(name)]


@cache
def imports_of(file: Path) -> frozenset[str]:
    """Return the dotted names of all modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            assert node.module is not None
            found = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= found & MODULES.keys() or {node.module}
    return frozenset(names)


def own_imports(file: Path) -> set[str]:
    """Return which modules of ours a file imports."""
    return {name for name in imports_of(file) if name.split(".")[0] in {"service", *NAMES}}


def libraries_of(file: Path) -> set[str]:
    """Return which packages a file imports that are neither ours nor the standard library's."""
    tops = {name.split(".")[0] for name in imports_of(file) - own_imports(file)}
    return tops - set(sys.stdlib_module_names)


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_file_imports_only_from_its_room_and_those_below(file: Path) -> None:
    """No part knows what stands on top of it; exporter and load tester see a few modules."""
    own = room_of(module_of(file))
    others = {name for name in own_imports(file) if name != "service" and room_of(name) != own}

    if own.modules is None:
        below = NAMES[: NAMES.index(own.name)]
        assert {room_of(name).name for name in others} <= set(below)
    else:
        allowed = own.modules | (ORACLE_MODULES if module_of(file) == ORACLE else set())
        assert others <= allowed


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_file_imports_only_the_libraries_of_its_room(file: Path) -> None:
    """No HTTP in inference, no framework in codecs, no torch where an artifact is served."""
    assert libraries_of(file) <= room_of(module_of(file)).libraries


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_room_is_allowed_no_library_that_it_does_not_need(room: Room) -> None:
    """The list says what is true, and a library that is gone leaves it."""
    files = [file for file in FILES if room_of(module_of(file)) == room]

    used = set().union(*(libraries_of(file) for file in files))

    assert files
    assert used == room.libraries


def test_no_two_files_import_each_other() -> None:
    """Every file can be read after those that it builds on."""
    graph = {module: own_imports(file) - {"service"} for module, file in MODULES.items()}

    order = list(TopologicalSorter(graph).static_order())  # raises CycleError

    assert set(MODULES) <= set(order)


def test_one_file_of_the_service_imports_onnxruntime() -> None:
    """Whatever the runtime does is translated at one border."""
    importers = [module for module, file in MODULES.items() if "onnxruntime" in libraries_of(file)]

    assert importers == ["service.inference.engine"]


def test_artifact_alone_reads_with_pydantic_and_safetensors_in_inference() -> None:
    """Distrust of files has one place; everything behind it holds checked values."""
    readers = {
        module
        for module, file in MODULES.items()
        if room_of(module).name == "service.inference"
        and libraries_of(file) & {"pydantic", "safetensors"}
    }

    assert readers == {"service.inference.artifact"}


def test_schedule_imports_no_clock_thread_or_loop() -> None:
    """Time is an argument there, so that every order of events can be tested."""
    names = {name.split(".")[0] for name in imports_of(MODULES["service.inference.schedule"])}

    assert not names & {"asyncio", "concurrent", "threading", "time"}


def test_protocol_client_needs_numpy_and_orjson_alone() -> None:
    """It is shared by the load tester, the benchmarks and the tests."""
    assert libraries_of(MODULES["loadtest.oip"]) == {"numpy", "orjson"}
    assert not own_imports(MODULES["loadtest.oip"])


def test_parity_rule_needs_numpy_alone() -> None:
    """Server, exporter, load tester and benchmarks share it."""
    file = MODULES["service.inference.parity"]

    assert libraries_of(file) == {"numpy"}
    assert own_imports(file) == {"service.contract"}


@pytest.mark.parametrize("file", [*FILES, *(ROOT / "bench").rglob("*.py")], ids=module_of)
def test_file_of_more_than_400_lines_says_why(file: Path) -> None:
    """A file is one noun; one that must be longer has the reason in its docstring."""
    text = file.read_text()
    docstring = " ".join((ast.get_docstring(ast.parse(text)) or "").split())

    assert len(text.splitlines()) <= 400 or "file is long because" in docstring
