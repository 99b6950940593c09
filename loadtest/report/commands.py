"""`report` and `compare`: from raw files to a terminal, a CSV file, a page."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from loadtest.report.columns import as_csv
from loadtest.report.comparing import compare
from loadtest.report.comparison_page import comparison_page
from loadtest.report.measurement import Measurement, RawInvalid, objective
from loadtest.report.page import page
from loadtest.report.raw_files import load
from loadtest.report.terminal import show_comparison, show_measurement

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_NARROWEST = 150
"""Letters in a line where nobody's terminal says: the table needs them."""


def main(argv: Sequence[str], prog: str = "python -m loadtest") -> int:
    """Run `report …` or `compare …`; return 0 when done, 2 when a file stood in the way."""
    parser = argparse.ArgumentParser(prog=prog)
    add_parsers(parser.add_subparsers(required=True))
    arguments = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    return run(arguments)


def add_parsers(commands: "Commands") -> None:
    """Add both commands; the namespace's `run` takes the namespace and returns the exit code."""
    report = commands.add_parser(
        "report", help="print the table of raw files; write CSV and a page", allow_abbrev=False
    )
    report.add_argument("raw", nargs="+", type=Path, help="raw files of one measurement")
    report.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")
    report.add_argument("--csv", type=Path, metavar="FILE", help="write a line a point")
    report.add_argument(
        "--slo", metavar="SLO", help="hold the latencies against this instead, as in p99<20ms"
    )
    report.set_defaults(run=_report)
    both = commands.add_parser(
        "compare", help="set two raw files side by side, with ratios A / B", allow_abbrev=False
    )
    both.add_argument("a", type=Path, metavar="A", help="raw file")
    both.add_argument("b", type=Path, metavar="B", help="raw file to compare it with")
    both.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")
    both.set_defaults(run=_compare)


def _report(arguments: argparse.Namespace) -> int:
    try:
        measurement = _checked(load(arguments.raw), arguments.slo)
        show_measurement(measurement, _console())
        _write(arguments.html, lambda: page(measurement))
        _write(arguments.csv, lambda: as_csv(measurement))
    except RawInvalid as error:
        return _refuse(error)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    try:
        comparison = compare(load([arguments.a]), load([arguments.b]))
        show_comparison(comparison, _console())
        _write(arguments.html, lambda: comparison_page(comparison))
    except RawInvalid as error:
        return _refuse(error)
    return 0


def _checked(measurement: Measurement, slo: str | None) -> Measurement:
    """Return the measurement with the objective asked for, if it means something."""
    if slo is not None:
        objective("--slo", slo)
        return measurement.model_copy(update={"slo": slo})
    return measurement


def _console() -> Console:
    """Return a console on standard output, wide enough where that is no terminal."""
    console = Console(highlight=False, emoji=False)
    if console.is_terminal:
        return console
    return Console(highlight=False, emoji=False, width=_NARROWEST)


def _write(path: Path | None, content: Callable[[], str]) -> None:
    if path is None:
        return
    try:
        path.write_text(content(), encoding="utf-8")
    except OSError as error:
        raise RawInvalid(f"{path}: cannot be written: {error.strerror}") from None


def _refuse(error: RawInvalid) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2
