"""The charts of a page: which figures of which points each of them shows, and its words."""

import math
from collections.abc import Sequence
from typing import TypeVar

from loadtest.notation import Objective
from loadtest.report import charts
from loadtest.report.charts import Axis, Bar, Line, Marks, Segment, Spread
from loadtest.report.grouping import Curve, Map
from loadtest.report.markup import Markup, tag
from loadtest.report.measurement import BEYOND_STAGES, STAGES, Point
from loadtest.report.sections import figure, table
from loadtest.report.verdict import doubts
from loadtest.report.words import NOTHING, count, hides, labels, ms, number, plural

MOST_LINES = 6
"""Percentile curves in one chart; of more, as many are drawn, evenly chosen."""

Item = TypeVar("Item")

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
    return [
        (bound.limit, f"{figure} {bound.sign} {bound.limit:g} ms")
        for figure, bound in objective.bounds_ms.items()
    ]


def p99_of_curves(key: str, found: Sequence[Curve]) -> Markup:
    """Return p99 over the load of several kinds of work in one chart, such as JSON and binary."""
    points = [point for curve in found for point in curve.last_tries]
    firsts = [curve.last_tries[0] for curve in found]
    # Of what they share nothing is said, and the load is the axis.
    names = [
        kind.removesuffix(f", {point.load_text}")
        for kind, point in zip(labels(firsts, points), firsts, strict=True)
    ]
    is_long = max(map(len, names)) > _MOST_LINE_LETTERS
    drawn = []
    for i, curve in enumerate(found):
        known = [(p.load, p.latency_ms.p99) for p in curve.last_tries]
        pairs = [(load, p99) for load, p99 in known if p99]
        if pairs:
            drawn.append(Line(str(i + 1) if is_long else names[i], pairs, f"k{i + 1}"))
    if not drawn:
        return _nothing("p99 of all kinds of work")
    told = "; ".join(f"{i + 1}: {name}" for i, name in enumerate(names))
    words = "; ".join(
        f"{name}: {charts.said([(p.load_text, p.latency_ms.p99) for p in curve.last_tries])}"
        for name, curve in zip(names, found, strict=True)
    )
    return figure(
        key,
        "p99 of all kinds of work",
        f"{words}.",
        f"{told}." if is_long else "",
        lambda frame: charts.lines(frame, load_axis(found[0]), drawn),
    )


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
    drawn, names = _lines([(point, point.curve()) for point in points], among)
    if not drawn:
        return _nothing("Latency by percentile")
    axis = Axis("percentile; each step is ten times as rare", log=True, ticks=PERCENTILE_TICKS)
    words = charts.said([(n, p.latency_ms.p99_9) for n, p in _named(points, among)])
    return figure(
        key,
        "Latency by percentile",
        f"p99.9: {words}.",
        f"{names}Each curve ends at its slowest call.",
        lambda frame: charts.lines(frame, axis, drawn),
    )


_SECONDS = Axis("seconds since the measured part began")
_RATE = Axis("good answers a second")


def latency_over_time(key: str, points: Sequence[Point], among: Sequence[Point]) -> Markup:
    """Return p99 of the calls that were due in each window."""
    drawn, names = _lines(
        [(p, [(w.at_s, w.p99) for w in p.windows if w.p99]) for p in points], among
    )
    if not drawn:
        return _nothing("p99 over time", "No call was answered well in any window.")
    words = charts.said([(n, _slowest_window(p)) for n, p in _named(points, among)])
    return figure(
        key,
        "p99 over time",
        f"p99 of the slowest window: {words}.",
        f"{names}Of the calls that were due in each window; one without a good answer has none.",
        lambda frame: charts.lines(frame, _SECONDS, drawn),
    )


def rate_over_time(key: str, points: Sequence[Point], among: Sequence[Point]) -> Markup:
    """Return the good answers that came in each window, by the second; a stall shows as none."""
    drawn, names = _lines(
        [(p, [(w.at_s, w.rate or 0.0) for w in p.windows]) for p in points], among
    )
    if not drawn:
        return _nothing("Good answers over time", "There are no windows.")
    words = "; ".join(
        f"{n} {number(min((w.rate or 0.0 for w in p.windows), default=None))}/s"
        for n, p in _named(points, among)
    )
    return figure(
        key,
        "Good answers over time",
        f"Fewest in a window: {words}.",
        f"{names}Where a line falls to the ground, nothing was answered.",
        lambda frame: charts.lines(frame, _SECONDS, drawn, upright=_RATE),
    )


def _slowest_window(point: Point) -> float | None:
    return max((window.p99 for window in point.windows if window.p99), default=None)


def _named(points: Sequence[Point], among: Sequence[Point]) -> list[tuple[str, Point]]:
    return list(zip(labels(points, among), points, strict=True))


def _lines(
    curves: Sequence[tuple[Point, Sequence[tuple[float, float]]]], among: Sequence[Point]
) -> tuple[list[Line], str]:
    """
    Return a line for each point that has one, `MOST_LINES` at most, and what is to be said of it.

    Names too long to stand beside a line are numbered, and the words tell them.
    """
    found = [(point, curve) for point, curve in curves if curve]
    chosen = _evenly(found, MOST_LINES)
    names = labels([point for point, _ in chosen], among)
    is_long = max(map(len, names), default=0) > _MOST_LINE_LETTERS
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
    left = len(found) - len(chosen)
    told = "; ".join(f"{i + 1}: {name}" for i, name in enumerate(names)) if is_long else ""
    return drawn, (f"{told}. " if told else "") + (
        f"{plural(left, 'curve')} more left out. " if left else ""
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
    told = [(n, p) for n, p in zip(names, points, strict=True) if p.parts_ms]
    if not told:
        return _nothing(title, "The server told no times of its stages (Server-Timing).")
    rows = [
        Bar(clipped(name), _shares(point.parts_ms), ms(point.latency_ms.mean))
        for name, point in told
    ]
    known = {part for _, point in told for part in point.parts_ms}
    legend = [(part, part) for part in (*STAGES, *BEYOND_STAGES) if part in known]
    words = "; ".join(
        f"{name}: {charts.said(list(point.parts_ms.items()))}, of {ms(point.latency_ms.mean)}"
        for name, point in told
    )
    return figure(
        key,
        title,
        f"Mean times of stages: {words}.",
        "In milliseconds; means, since only they add up. "
        + " ".join(_BEYOND_MEANS[part] for part in BEYOND_STAGES if part in known),
        lambda frame: charts.bars(frame, "share of the mean latency, %", rows, legend),
    )


_BEYOND_MEANS = {
    "other": "Other: the server's own time that no stage names, such as reading the body.",
    "network": "Network: the way there and back, and both kernels.",
    "waiting": "Waiting: from when a call was due until it was sent.",
    "rest": "Rest: the network, reading the body.",
}


def _shares(parts: dict[str, float]) -> list[Segment]:
    """Return bars of one length, so that fast and slow points can be read side by side."""
    whole = sum(parts.values()) or 1.0
    return [Segment(100 * value / whole, part, number(value)) for part, value in parts.items()]


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


def _evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Return so many of them, first and last included."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


_MOST_LETTERS = 34


def clipped(name: str) -> str:
    """Return a name that a chart has room for; tables have it whole."""
    return name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}…"
