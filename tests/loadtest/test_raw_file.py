"""Every figure of a report can be had again from the raw file, by a script that shares no code."""

import ast
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.loadtest.test_cli import QUICK, load, written
from tests.support.load_stub import Stub
from tests.support.server import ROOT, Server

SCRIPT = ROOT / "docs" / "recompute.py"
READ_OFF = {
    *("rate_per_s", "clients", "warmup_s", "seconds", "cpu_share", "checked", "wrong"),
    *("unanswered", "saturated", "rows", "length"),
}
"""Numbers of the CSV file that are readings or settings, or judgements on the figures."""


def recomputed(raw_file: Path) -> dict[str, Any]:
    """Return what the script finds in a raw file, by point."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(raw_file)], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def compare(raw_file: Path) -> None:
    """Hold every figure of the CSV file, and the windows, against the script."""
    lines = raw_file.with_suffix(".csv")
    code, _, errors = load("report", raw_file, "--csv", lines)
    assert code == 0, errors
    again = recomputed(raw_file)
    with lines.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(again) == len(written(raw_file)["points"])
    for row, point in zip(rows, written(raw_file)["points"], strict=True):
        figures = again[row["id"]]
        told = {name: value for name, value in row.items() if _is_number(value)}
        assert set(told) - READ_OFF <= set(figures)
        for name in set(told) - READ_OFF:
            assert float(told[name]) == pytest.approx(figures[name], rel=1e-12), name
        assert len(figures["windows"]) == len(point["windows"])
        for window, seen in zip(point["windows"], figures["windows"], strict=True):
            assert {name: window[name] for name in seen} == pytest.approx(seen)
        assert sum(window["count"] for window in figures["windows"]) == figures["good"]


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def test_script_is_short_and_needs_nothing_but_python() -> None:
    """Whoever doubts a figure can read it in one go."""
    tree = ast.parse(SCRIPT.read_text())
    lines = [line for line in SCRIPT.read_text().splitlines() if line.strip()]

    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported <= sys.stdlib_module_names
    assert len(lines) < 70


@pytest.mark.fault("F8")
def test_every_figure_is_recomputed_from_a_real_measurement(server: Server, tmp_path: Path) -> None:
    """Open and closed, with the server's own stages, over the windows of a second and more."""
    file = tmp_path / "raw.json"
    loads = ("--rate", "40,80", "--clients", 3, "--duration", "2s", "--warmup", "0.3s")

    load(server.url, *loads, "--shape", "2xuniform:1:9", "--raw", file, *QUICK[:2], *QUICK[4:])

    points = written(file)["points"]
    assert [point["model"] for point in points] == ["open", "open", "closed"]
    assert all(point["stages_ms"]["compute"]["count"] for point in points)
    compare(file)


@pytest.mark.fault("F8")
def test_every_figure_is_recomputed_where_calls_were_refused_and_lost(tmp_path: Path) -> None:
    """Outcomes add up to what was offered; only good answers are in the times."""
    file = tmp_path / "raw.json"
    with Stub(refuse=7, reset=11, timing="queue;dur=0.25, total;dur=0.001") as stub:
        argv = ("--rate", 200, "--clients", 2, "--count", 100, "--raw", file, *QUICK)
        code, _, errors = load(stub.url, *argv)

    assert code == 1, errors
    for point in written(file)["points"]:
        assert set(point["statuses"]) == {"200", "429"}
        assert set(point["failures"]) == {"connection lost"}
    compare(file)
