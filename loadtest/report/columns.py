"""Every figure of a point under one name: the columns of tables and of the CSV file."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from loadtest.notation import is_supported
from loadtest.report.measurement import BEYOND_STAGES, STAGES, Measurement, Point
from loadtest.report.verdict import doubts
from loadtest.report.words import printable

Value = str | float | int | None


@dataclass(frozen=True)
class Column:
    """
    One figure: its name in CSV with its unit, its heading in tables, and where it is from.

    A heading of "" = not in tables.
    """

    name: str
    heading: str
    of: Callable[[Point], Value]
    is_short: bool = False
    """Whether it is in the short tables, too."""
    about: Literal["calls", "stages", "tester"] = "calls"
    """Which table it is in."""
    statistic: str = "mean"
    """Which statistic of the good calls it is, as in `p99`."""

    def is_supported(self, point: Point) -> bool:
        """Return whether a point has as many good calls as the statistic takes."""
        return is_supported(self.statistic, point.latency_ms.count)


def _latency(name: str, heading: str, *, is_short: bool = True) -> Column:
    field = name.replace(".", "_")
    return Column(
        f"latency_{field}_ms",
        heading,
        lambda p: _of(p.latency_ms, field),
        is_short=is_short,
        statistic=name,
    )


def _sent(name: str) -> Column:
    field = name.replace(".", "_")
    heading = f"sent {name}" if name in ("p50", "p99") else ""
    return Column(f"sent_{field}_ms", heading, lambda p: _of(p.sent_ms, field), statistic=name)


def _stage(stage: str, statistic: str) -> Column:
    def of(point: Point) -> Value:
        stages = point.stages_ms
        return None if stages is None else _of(getattr(stages, stage), statistic)

    name, heading = f"{stage}_{statistic}_ms", f"{stage} {statistic}"
    heading = "" if statistic == "p50" else heading  # or the table would not fit a page
    return Column(name, heading, of, about="stages", statistic=statistic)


def _beyond(part: str) -> Column:
    return Column(f"{part}_mean_ms", f"{part} mean", lambda p: p.parts_ms.get(part), about="stages")


def _decode(name: str) -> Column:
    return Column(f"decode_{name}_ms", "", lambda p: _of(p.decode_ms, name))


def _lag(name: str) -> Column:
    return Column(f"lag_{name}_ms", f"lag {name}", lambda p: _of(p.lag_ms, name), about="tester")


def _of(value: object, field: str) -> Value:
    found: Value = getattr(value, field, None)
    return found


COLUMNS: Sequence[Column] = (
    Column("id", "", lambda p: p.id),
    Column("load_model", "", lambda p: p.model),
    Column("arrivals", "", lambda p: p.arrivals),
    Column("rate_per_s", "", lambda p: p.rate),
    Column("clients", "", lambda p: p.clients),
    Column("rows", "", lambda p: p.work.rows),
    Column("length", "", lambda p: p.work.length),
    Column("weights", "", lambda p: p.work.weights),
    Column("mask", "", lambda p: p.work.mask),
    Column("format", "", lambda p: p.work.format),
    Column("warmup_s", "", lambda p: p.warmup_s),
    Column("seconds", "seconds", lambda p: p.seconds),
    Column("offered", "offered", lambda p: p.offered),
    Column("good", "good", lambda p: p.good),
    Column("good_per_s", "good/s", lambda p: p.good_rate, is_short=True),
    Column("refused", "refused", lambda p: p.refused, is_short=True),
    Column("failed", "failed", lambda p: p.failed, is_short=True),
    Column("unanswered", "", lambda p: p.unanswered),
    Column("saturated", "", lambda p: int(p.is_saturated)),
    Column("latency_count", "", lambda p: p.latency_ms.count),
    _latency("mean", "mean", is_short=False),
    _latency("p50", "p50"),
    _latency("p90", "p90"),
    _latency("p95", "p95"),
    _latency("p99", "p99"),
    _latency("p99.9", "p99.9"),
    _latency("max", "max"),
    *(_sent(name) for name in ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")),
    *(
        _stage(stage, statistic)
        for stage in (*STAGES, "total")
        for statistic in ("mean", "p50", "p99")
    ),
    *map(_beyond, BEYOND_STAGES),
    *(_decode(name) for name in ("mean", "p50", "p99")),
    *(_lag(name) for name in ("p50", "p99", "max")),
    Column("cpu_share", "cores used", lambda p: p.cpu_share, about="tester"),
    Column("checked", "checked", lambda p: p.checked, about="tester"),
    Column("wrong", "wrong", lambda p: p.wrong, about="tester"),
    Column("statuses", "", lambda p: json.dumps(p.statuses)),
    Column("codes", "", lambda p: json.dumps(p.codes)),
    Column("failures", "", lambda p: json.dumps(p.failures)),
    Column("warnings", "", lambda p: "; ".join(doubts(p))),
)

_FORMULA = ("=", "+", "-", "@")
"""How a text begins that a spreadsheet would compute."""


def as_csv(measurement: Measurement) -> str:
    """
    Return a line of headings and one a point, figures with all their digits.

    Texts that a spreadsheet would take for a formula get an apostrophe before them.
    """
    server = measurement.server
    own: dict[str, Value] = {
        "server_url": server.url,
        "server": " ".join(part for part in (server.name, server.version) if part),
        "served_model": server.model,
        "started": measurement.started,
    }
    written = io.StringIO()
    sheet = csv.writer(written, lineterminator="\n")
    sheet.writerow([*own, *(column.name for column in COLUMNS)])
    for point in measurement.points:
        row = [*own.values(), *(column.of(point) for column in COLUMNS)]
        sheet.writerow([_cell(value) for value in row])
    return written.getvalue()


def _cell(value: Value) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        return repr(value)
    shown = printable(value)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown
