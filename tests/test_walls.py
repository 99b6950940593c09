"""The walls between the parts: who may import whom."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ROWS = [
    {"errors", "contract", "cgroup", "log_writer", "request_record"},
    {"checks"},
    {
        "settings",
        "logs",
        "cpu",
        "cuda",
        "artifact",
        "life",
        "head",
        "calls",
        "heap",
        "memory",
        "tracing",
        "tally",
        "parity",
    },
    {"access_log", "engine", "batches", "metrics", "statistics", "keys", "tls"},
    {"schedule"},
    {"batcher", "repository", "unsent"},
    {
        "journal",
        "models",
        "json_reader",
        "shapes",
        "pieces",
        "workers",
        "datatypes",
        "shared_memory",
    },
    {"simdjson_reader", "options", "oip_inputs"},
    {"log_settings"},
    {"json_codec", "safetensors_codec", "oip_request", "gathering", "receiving", "compression"},
    {"oip_response"},
    {"problems", "exchange"},
    {"schemas"},
    {"middleware", "openapi", "control"},
    {"express"},
    {"protocol", "routes", "protocol_routes", "shared_memory_routes", "inference"},
    {"app"},
    {"__main__", "probe"},
]
"""A file of `service` imports only from rows above its own."""

EXPORT_MAY_SEE = {"contract", "artifact", "calls", "engine", "errors", "parity"}
"""What of `service` the exporter is made of; it proves artifacts through the serving engine."""

LOADTEST = sorted((ROOT / "loadtest").rglob("*.py"))
LOADTEST_MAY_SEE = {
    "answers": {"parity"},
    "oracle": {"artifact", "calls", "contract", "engine", "errors"},
}
"""What of `service` a file of the load tester may import; all others know it from outside."""


def imports_of(file: Path) -> set[str]:
    """Return the dotted names of all modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def parts_of(names: set[str], package: str) -> set[str]:
    """Return which modules of a package those names lead into."""
    modules = {file.stem for file in (ROOT / package).glob("*.py")}
    heads = {name.split(".")[1] for name in names if name.startswith(f"{package}.")}
    return heads & modules - {"__init__"}


@pytest.mark.parametrize("file", sorted((ROOT / "service").glob("*.py")), ids=lambda f: f.stem)
def test_service_file_imports_only_from_rows_above(file: Path) -> None:
    """No part knows what stands on top of it."""
    if file.stem == "__init__":
        assert not imports_of(file)
        return
    row = next(i for i, row in enumerate(ROWS) if file.stem in row)

    above = set().union(*ROWS[:row])

    assert parts_of(imports_of(file), "service") <= above


def test_every_service_file_has_a_row() -> None:
    """The table is complete, and names nothing that is gone."""
    files = {file.stem for file in (ROOT / "service").glob("*.py")} - {"__init__"}

    assert files == set().union(*ROWS)


@pytest.mark.parametrize("file", sorted((ROOT / "service").glob("*.py")), ids=lambda f: f.stem)
def test_service_never_imports_torch_or_the_exporter(file: Path) -> None:
    """The serving image holds neither."""
    heads = {name.split(".")[0] for name in imports_of(file)}

    assert not heads & {"torch", "onnx", "onnxscript", "export", "tests", "bench", "loadtest"}


def test_one_file_imports_onnxruntime() -> None:
    """Whatever the runtime does is translated at one border."""
    files = [*(ROOT / "service").glob("*.py"), *(ROOT / "export").glob("*.py")]

    importers = [f for f in files if any(n.startswith("onnxruntime") for n in imports_of(f))]

    assert importers == [ROOT / "service" / "engine.py"]


def test_schedule_imports_no_clock_thread_or_loop() -> None:
    """Time is an argument there, so that every order of events can be tested."""
    heads = {name.split(".")[0] for name in imports_of(ROOT / "service" / "schedule.py")}

    assert not heads & {"asyncio", "concurrent", "threading", "time", "onnxruntime"}


@pytest.mark.parametrize("file", sorted((ROOT / "export").glob("*.py")), ids=lambda f: f.stem)
def test_exporter_sees_only_what_proves_an_artifact(file: Path) -> None:
    """The exporter knows the contract and the engine, nothing of HTTP."""
    assert parts_of(imports_of(file), "service") <= EXPORT_MAY_SEE


@pytest.mark.parametrize("file", LOADTEST, ids=lambda f: f.stem)
def test_load_tester_is_a_client_like_any_other(file: Path) -> None:
    """It stands on its own: the laboratory may import it, never the reverse."""
    names = imports_of(file)

    assert not {name.split(".")[0] for name in names} & {"bench", "export", "tests", "torch"}
    assert parts_of(names, "service") <= LOADTEST_MAY_SEE.get(file.stem, set())


def test_protocol_client_needs_numpy_and_orjson_alone() -> None:
    """It is shared by the load tester, the benchmarks and the tests."""
    heads = {name.split(".")[0] for name in imports_of(ROOT / "loadtest" / "oip.py")}

    assert heads - set(sys.stdlib_module_names) == {"numpy", "orjson"}


def test_parity_rule_needs_numpy_alone() -> None:
    """The load tester and the benchmarks share it with the service."""
    names = imports_of(ROOT / "service" / "parity.py")

    outside = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert outside == {"numpy", "service"}
    assert parts_of(names, "service") == {"contract"}
