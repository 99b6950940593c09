"""The reports as tables in a terminal: one where it is wide enough, else one below the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.notation import is_supported
from loadtest.report.comparing import Comparison, joint_verdict
from loadtest.report.comparison_page import CLEAR
from loadtest.report.measurement import BEYOND_STAGES, STAGES, Measurement, Point
from loadtest.report.raw_files import read
from loadtest.report.verdict import Verdict, findings, subject, verdict
from loadtest.report.words import (
    THIN,
    THIN_MEANS,
    count,
    hides,
    labels,
    number,
    printable,
    ratio,
    shared,
)

_STATISTICS = ("p50", "p90", "p95", "p99", "p99.9", "max")


@dataclass(frozen=True)
class _Part:
    """Some columns of a table: its title, headings, and the cells of each point."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Text]]


def show(raw: Mapping[str, object], console: Console) -> None:
    """
    Print what a raw file says: the subject, the verdict, the figures.

    Raises:
        RawInvalid: a field is missing or wrong.
    """
    show_measurement(read(raw), console)


def table(raw: Mapping[str, object]) -> Table:
    """
    Return the table of a raw file alone.

    Raises:
        RawInvalid: a field is missing or wrong.
    """
    measurement = read(raw)
    return _table(measurement.points, [_answers(measurement), _stages(measurement)])


def show_measurement(measurement: Measurement, console: Console) -> None:
    """Print the subject, the verdict, the figures."""
    console.print(Text(subject(measurement)))
    _show_verdict(verdict(measurement), console)
    _show_tables(measurement.points, [_answers(measurement), _stages(measurement)], console)
    for name, value, note in findings(measurement):
        console.print(Text.assemble(f"{name}: ", (value, "bold"), f" ({note})"))
    null_rate = number(measurement.generator.null_calls_per_s)
    console.print(Text(f"The load tester alone: {null_rate} calls/s.", "dim"))


def _answers(measurement: Measurement) -> _Part:
    """Return what came of the calls, and the latencies of those answered well."""
    rows = []
    for point in measurement.points:
        told = [count(point.offered), number(point.good_rate)]
        told += [count(point.refused), count(point.failed)]
        rows.append(
            [
                *map(Text, told),
                *(_percentile(point, statistic) for statistic in _STATISTICS),
            ]
        )
    headings = ("calls", "good/s", "refused", "failed", *_STATISTICS)
    return _Part("latencies in ms", headings, rows)


def _percentile(point: Point, statistic: str) -> Text:
    """Return a latency; one that too few calls support is marked, and stands back."""
    told = number(point.latency_at(statistic))
    if is_supported(statistic, point.latency_ms.count):
        return Text(told)
    return Text(THIN + told, "dim")


def _stages(measurement: Measurement) -> _Part:
    """Return mean times of stages, those that the server told."""
    means = [point.parts_ms for point in measurement.points]
    told = [part for part in (*STAGES, *BEYOND_STAGES) if any(part in each for each in means)]
    rows = [[Text(number(each.get(part))) for part in told] for each in means]
    return _Part("mean ms by stage", told, rows)


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Print both subjects, the verdict, the ratios, and what does not match."""
    for side, measurement in (("A", comparison.a), ("B", comparison.b)):
        console.print(Text.assemble((side, "bold"), f": {subject(measurement)}"))
    _show_verdict(joint_verdict(comparison), console)
    points = [pair.a for pair in comparison.pairs]
    saturated = [pair.is_saturated for pair in comparison.pairs]
    _show_tables(points, [_latencies(comparison), _rates(comparison)], console, saturated)
    for side, alone in (("A", comparison.only_a), ("B", comparison.only_b)):
        for point in alone:
            console.print(Text(printable(f"only {side} has: {point.id}")))


def _latencies(comparison: Comparison) -> _Part:
    rows = []
    for pair in comparison.pairs:
        cells = []
        for name in ("p50", "p99"):
            cells += [_percentile(side, name) for side in (pair.a, pair.b)]
            cells.append(Text(ratio(pair.ratio(name))))
        rows.append([*cells, Text(CLEAR[pair.is_clear("p50")])])
    headings = [name for of in ("p50", "p99") for name in (f"{of} A", f"{of} B", "A / B")]
    return _Part("latencies in ms; A / B below 1: A is faster", [*headings, "p50 differs"], rows)


def _rates(comparison: Comparison) -> _Part:
    rows = [
        [
            Text(number(pair.a.good_rate)),
            Text(number(pair.b.good_rate)),
            Text(ratio(pair.rate_ratio)),
        ]
        for pair in comparison.pairs
    ]
    return _Part("good answers", ("good/s A", "good/s B", "A / B"), rows)


def _show_tables(
    points: Sequence[Point],
    parts: Sequence[_Part],
    console: Console,
    saturated: Sequence[bool] | None = None,
) -> None:
    """Print all parts side by side, or below each other where a number would be cut."""
    if not points:
        return
    whole = _table(points, parts, saturated)
    if console.measure(whole, options=console.options.update(width=10_000)).maximum > console.width:
        for part in parts:
            console.print(_table(points, [part], saturated))
    else:
        console.print(whole)
    if any(cell.plain.startswith(THIN) for part in parts for row in part.rows for cell in row):
        console.print(Text(THIN_MEANS, "dim"))


def _table(
    points: Sequence[Point], parts: Sequence[_Part], saturated: Sequence[bool] | None = None
) -> Table:
    marks = saturated or [point.is_saturated for point in points]
    title = "; ".join([*(part.title for part in parts), shared(points)])
    made = Table(
        title=Text(title.removesuffix("; ")),
        title_justify="left",
        caption=Text(hides(points)) if hides(points) else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
    )
    made.add_column("point", overflow="fold")
    for part in parts:
        for i, heading in enumerate(part.headings):
            # Names may be folded; a number never.
            widest = max([len(heading), *(len(row[i]) for row in part.rows)])
            made.add_column(heading, justify="right", no_wrap=True, min_width=widest)
    for i, label in enumerate(labels(points)):
        made.add_row(
            Text(f"{label} saturated" if marks[i] else label),
            *(cell for part in parts for cell in part.rows[i]),
            style="yellow" if marks[i] else None,
        )
    return made


def _show_verdict(found: Verdict, console: Console) -> None:
    console.print(Text(found.sentence, "green" if found.is_good else "bold yellow"))
    for doubt in found.doubts:
        console.print(Text(f"- {doubt}"))
