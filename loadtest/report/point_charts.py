"""The charts of a page: which figures of which points each of them shows, and its words."""

import math
from collections.abc import Sequence

from loadtest.notation import Objective
from loadtest.report import charts
from loadtest.report.charts import Axis, Bar, Line, Marks, Segment, Spread
from loadtest.report.grouping import Curve, Map
from loadtest.report.markup import Markup, tag
from loadtest.report.measurement import STAGES, Point
from loadtest.report.sections import figure, table
from loadtest.report.verdict import doubts
from loadtest.report.words import NOTHING, count, hides, labels, ms, number, plural

MOST_LINES = 6
"""Percentile curves in one chart; of more, as many are drawn, evenly chosen."""

PERCENTILES = (("p50", "c1"), ("p90", "c2"), ("p99", "c3"), ("max", "slowest"))
OUTCOMES = ("good", "refused", "failed")

_HEAT_STEPS = 8


def latency_by_load(key: str, curve: Curve, objective: Objective | None) -> Markup:
    """Return percentiles over the load, the objective, and where saturation begins."""
    drawn = []
    for name, look in PERCENTILES:
        for label, tries in ((name, curve.last_tries), ("", curve.earlier_tries)):
            known = [(p.load, y) for p in tries if (y := p.latency_at(name))]
            if known:
                drawn.append(Line(label, known, look, joined=bool(label)))
    is_open = curve.points[0].model == "open"
    title = f"Latency by {'rate' if is_open else 'clients'}"
    if not drawn:
        return _nothing(title)
    marks = Marks(
        [] if objective is None else _limits(objective),
        curve.saturated_from,
    )
    names = labels(curve.points)
    words = charts.said([(n, p.latency_ms.p99) for n, p in zip(names, curve.points, strict=True)])
    saturation = (
        ""
        if curve.saturated_from is None
        else f" The server is saturated from {number(curve.saturated_from)} on."
    )
    return figure(
        key,
        title,
        f"p99 by load: {words}.{saturation}",
        "Half of the calls are faster than p50, 99 of 100 faster than p99."
        + (" Dots off the lines: earlier tries of a load." if curve.earlier_tries else ""),
        lambda frame: charts.lines(frame, load_axis(curve), drawn, marks),
    )


def _limits(objective: Objective) -> list[tuple[float, str]]:
    """Return each bound in ms with its words."""
    return [(bound, f"{figure} < {bound:g} ms") for figure, bound in objective.bounds_ms.items()]


def load_axis(curve: Curve) -> Axis:
    """Return the axis of a curve's loads."""
    is_open = curve.points[0].model == "open"
    title = "calls offered a second" if is_open else "clients that wait for their answers"
    return Axis(title, ticks=_load_ticks(curve))


def _load_ticks(curve: Curve) -> list[tuple[float, str]]:
    """Return the loads themselves where their names do not touch."""
    loads = sorted({p.load for p in curve.points})
    top = loads[-1]
    room = min((b - a for a, b in zip([0.0, *loads], loads, strict=False)), default=top)
    if room < 0.16 * top:
        return []
    return [(0.0, "0"), *((load, f"{load:.6g}") for load in loads)]


def percentile_curves(key: str, points: Sequence[Point], among: Sequence[Point]) -> Markup:
    """Return latency over 1 / (1 - p): each step to the right is ten times as rare."""
    title = "Latency by percentile"
    curves_of = [(point, point.curve()) for point in points]
    found = [(point, curve) for point, curve in curves_of if curve]
    if not found:
        return _nothing(title)
    chosen = _evenly(found, MOST_LINES)
    names = labels([point for point, _ in chosen], among)
    # Long names leave no room for the curves: numbers stand for them.
    is_long = max(map(len, names)) > _MOST_LINE_LETTERS
    steps = max(len(chosen) - 1, 1)
    drawn = [
        Line(
            str(i + 1) if is_long else name,
            curve,
            f"c{4 if len(chosen) == 1 else 1 + round(3 * i / steps)}",
            dotted=False,
        )
        for i, (name, (_, curve)) in enumerate(zip(names, chosen, strict=True))
    ]
    axis = Axis("percentile; each step is ten times as rare", log=True, ticks=PERCENTILE_TICKS)
    words = charts.said([(n, p.latency_ms.p99_9) for n, (p, _) in zip(names, chosen, strict=True)])
    left = len(found) - len(chosen)
    key_of_names = "; ".join(f"{i + 1}: {name}" for i, name in enumerate(names))
    return figure(
        key,
        title,
        f"p99.9: {words}.",
        (f"{key_of_names}. " if is_long else "")
        + "Each curve ends at its slowest call."
        + (f" {plural(left, 'curve')} more left out." if left else ""),
        lambda frame: charts.lines(frame, axis, drawn),
    )


_MOST_LINE_LETTERS = 13

PERCENTILE_TICKS = [
    (1.0, "0 %"),
    *((10.0**d, f"{100 * (1 - 10.0**-d):.{max(0, d - 2)}f} %") for d in range(1, 8)),
]


def throughput(key: str, points: Sequence[Point], among: Sequence[Point]) -> Markup:
    """Return what became of the offered calls, by the second."""
    rows = [
        Bar(
            clipped(name),
            [Segment(value, outcome, number(value)) for outcome, value in outcomes(point)],
            number(point.good_rate),
            point.offered_rate if point.model == "open" else None,
        )
        for name, point in zip(labels(points, among), points, strict=True)
    ]
    legend = [(name, name) for name in OUTCOMES]
    if any(point.rate for point in points):
        legend.append(("offered", "mark"))
    words = "; ".join(
        f"{name}: {number(p.good_rate)} good, {number(p.refused / p.seconds)} refused,"
        f" {number(p.failed / p.seconds)} failed a second"
        for name, p in zip(labels(points, among), points, strict=True)
    )
    return figure(
        key,
        "Throughput",
        f"{words}.",
        "The number at the end is of good answers a second.",
        lambda frame: charts.bars(frame, "calls a second", rows, legend),
    )


def outcomes(point: Point) -> list[tuple[str, float]]:
    """Return (outcome, calls a second)."""
    return [
        ("good", point.good_rate),
        ("refused", point.refused / point.seconds),
        ("failed", point.failed / point.seconds),
    ]


def stage_split(key: str, points: Sequence[Point], among: Sequence[Point]) -> Markup:
    """Return where the mean latency went: means alone may be added up."""
    title = "Where the time goes"
    names = labels(points, among)
    told = [
        (name, point, _parts(point))
        for name, point in zip(names, points, strict=True)
        if point.stages_ms is not None
    ]
    if not told:
        return _nothing(title, "The server told no times of its stages (Server-Timing).")
    rows = [
        Bar(clipped(name), _shares(parts), ms(point.latency_ms.mean)) for name, point, parts in told
    ]
    known = {stage for _, _, parts in told for stage, _ in parts}
    legend = [(stage, stage) for stage in (*STAGES, "rest") if stage in known]
    words = "; ".join(
        f"{name}: {charts.said(parts)}, of {ms(point.latency_ms.mean)}"
        for name, point, parts in told
    )
    return figure(
        key,
        title,
        f"Mean times of stages: {words}.",
        "In milliseconds; means, since only they add up. Rest: the network, reading the body,"
        " waiting to be sent.",
        lambda frame: charts.bars(frame, "share of the mean latency, %", rows, legend),
    )


def _parts(point: Point) -> list[tuple[str, float]]:
    """Return (stage, mean in ms), with what no stage accounts for at the end."""
    means = [] if point.stages_ms is None else point.stages_ms.means()
    return [*means, ("rest", point.rest_ms or 0.0)]


def _shares(means: Sequence[tuple[str, float]]) -> list[Segment]:
    """Return bars of one length, so that fast and slow points can be read side by side."""
    whole = sum(value for _, value in means) or 1.0
    return [Segment(100 * value / whole, stage, number(value)) for stage, value in means]


def latency_by_kind(key: str, points: Sequence[Point], among: Sequence[Point]) -> Markup:
    """Return percentiles of kinds of work that were measured under one load each."""
    names = labels(points, among)
    rows = []
    for name, point in zip(names, points, strict=True):
        pairs = [(point.latency_at(statistic), look) for statistic, look in PERCENTILES]
        dots = [(value, look) for value, look in pairs if value]
        rows.append(Spread(clipped(name), dots, number(point.latency_ms.p99)))
    if not any(row.dots for row in rows):
        return _nothing("Latency by kind of work")
    words = charts.said([(n, p.latency_ms.p99) for n, p in zip(names, points, strict=True)])
    return figure(
        key,
        "Latency by kind of work",
        f"p99: {words}.",
        "The number at the end is p99.",
        lambda frame: charts.spreads(frame, "latency, ms (logarithmic)", rows, PERCENTILES),
    )


def heat_map(found: Map) -> Markup:
    """Return a table whose cells are coloured; what holds a doubt says so with an asterisk."""
    known = [p.latency_ms.p99 for p in found.points.values() if p.latency_ms.p99]
    low, high = min(known, default=1.0), max(known, default=1.0)

    def cell_of(rows: int, length: int) -> Markup:
        point = found.points.get((rows, length))
        value = None if point is None else point.latency_ms.p99
        if point is None or not value:
            return tag("td", NOTHING, class_="none")
        part = math.log(value / low) / math.log(high / low) if high > low else 0.0
        step = min(int(part * _HEAT_STEPS), _HEAT_STEPS - 1)
        sign = "*" if doubts(point) or point.is_saturated else ""
        return tag("td", number(value) + sign, class_=f"q{step}")

    head = tag(
        "tr",
        tag("th", "batch \\ length", scope="col"),
        *(tag("th", count(length), scope="col") for length in found.lengths),
    )
    body = [
        tag(
            "tr",
            tag("th", count(rows), scope="row"),
            *(cell_of(rows, length) for length in found.lengths),
        )
        for rows in found.rows
    ]
    is_marked = any(doubts(p) or p.is_saturated for p in found.points.values())
    caption = found.title + ("; * saturated or in doubt" if is_marked else "")
    if hidden := hides(list(found.points.values())):
        caption += f". {hidden}"
    label = f"p99 in milliseconds: {found.title}"
    return table(caption, head, body, label=label, kind="heat")


def _nothing(title: str, why: str = "No call was answered well.") -> Markup:
    return tag("figure", tag("h3", title), tag("p", why, class_="soft"))


def _evenly(
    items: Sequence[tuple[Point, list[tuple[float, float]]]], most: int
) -> list[tuple[Point, list[tuple[float, float]]]]:
    """Return so many of them, first and last included."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


_MOST_LETTERS = 34


def clipped(name: str) -> str:
    """Return a name that a chart has room for; tables have it whole."""
    return name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}…"
