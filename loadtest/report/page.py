"""One measurement as one page: the verdict first, every figure in it, nothing loaded."""

import math
from collections.abc import Sequence

from loadtest.notation import Objective
from loadtest.report import charts
from loadtest.report.charts import Axis, Bar, Line, Marks, Segment, Spread
from loadtest.report.columns import COLUMNS
from loadtest.report.grouping import Curve, Map, alone, curves, maps
from loadtest.report.markup import Markup, join, tag
from loadtest.report.measurement import STAGES, Measurement, Point
from loadtest.report.sections import (
    figure,
    figures_table,
    findings_list,
    generator_facts,
    navigation,
    repeat,
    shell,
    sides,
    table,
    verdict_box,
)
from loadtest.report.verdict import best, doubts, findings, subject, verdict
from loadtest.report.words import NOTHING, arrivals, count, labels, ms, number, plural, shared

MOST_CURVES = 24
"""Kinds of work that get charts of their own; the tables hold all."""

MOST_LINES = 6
"""Percentile curves in one chart; of more, as many are drawn, evenly chosen."""

MOST_ROWS = 32

PERCENTILES = (("p50", "c1"), ("p90", "c2"), ("p99", "c3"), ("max", "slowest"))
OUTCOMES = ("good", "refused", "failed")

_HEAT_STEPS = 8

DUE = (
    "Latency counts from the moment a call was due, whether or not it could be sent then: "
    "a server that stalls shows."
)
SENT = (
    "Latency counts from the moment a call was sent, and a client sends its next when its last "
    "is answered: a stall delays what would have been sent, and hides most of itself."
)


def page(measurement: Measurement) -> str:
    """Return the whole page."""
    points = measurement.points
    objective = measurement.objective
    found_curves, found_maps, rest = curves(points), maps(points), alone(points)
    tops = [best(each.points, objective) for each in found_curves]
    picked = {top.id for top in tops if top is not None}
    body = [
        *(_curve(i, each, objective) for i, each in enumerate(found_curves[:MOST_CURVES])),
        _left_out(len(found_curves) - MOST_CURVES, "kind of work"),
        _side_by_side(rest, objective) if rest else None,
        _heat(found_maps) if found_maps else None,
        tag("h2", "All figures", id="figures"),
        figures_table(points, _UNITS, _OF_CALLS, among=points, picked=picked) if points else None,
        *(_more_figures(points, about, caption) for about, caption in _MORE),
        _outcomes(points),
        tag("h2", "How far to trust it", id="trust"),
        tag("p", _trust(points)),
        tag("div", generator_facts(measurement), _terms(), class_="sides"),
        tag("h2", "Machines and versions", id="machines"),
        sides(measurement),
        tag("h2", "Measure it again", id="again"),
        tag("p", "In a clone of Headwise, against a server like the one above:"),
        repeat(measurement.command),
    ]
    places = [(f"curve-{i}", each.title) for i, each in enumerate(found_curves[:MOST_CURVES])]
    places += [("kinds", "Kinds of work")] if rest else []
    places += [("map", "Batch by length")] if found_maps else []
    places += [
        ("figures", "All figures"),
        ("trust", "Trust"),
        ("machines", "Machines"),
        ("again", "Again"),
    ]
    title = f"Latency under load: {measurement.server.model or measurement.server.url}"
    return shell(
        title,
        tag(
            "header",
            tag("h1", title),
            tag("p", subject(measurement)),
            verdict_box(verdict(measurement)),
            findings_list(findings(measurement)),
            navigation(places),
        ),
        tag("main", *body),
        tag("footer", tag("p", _stamp(measurement), class_="soft")),
    )


_SHORT = [column for column in COLUMNS if column.heading and column.is_short]
_OF_CALLS = [column for column in COLUMNS if column.heading and column.about == "calls"]
_MORE = (
    ("stages", "What the server told of its stages, in milliseconds"),
    ("tester", "How the load tester kept its time, in milliseconds; cores; answers"),
)

_UNITS = (
    "Latencies in milliseconds. Shaded: more was offered than was answered"
    " well. Bold: the highest load that was not too much for it."
)


def _more_figures(points: Sequence[Point], about: str, caption: str) -> Markup | None:
    """Return a table of the columns that any point has something in."""
    columns = [
        column
        for column in COLUMNS
        if column.heading and column.about == about and any(column.of(p) for p in points)
    ]
    return figures_table(points, caption, columns, among=points) if columns else None


def _stamp(measurement: Measurement) -> str:
    return f"{measurement.tool}, {measurement.started} to {measurement.ended}"


def _left_out(amount: int, noun: str) -> Markup | None:
    if amount <= 0:
        return None
    return tag("p", f"{plural(amount, noun)} more: see all figures below.", class_="soft")


def _curve(index: int, curve: Curve, objective: Objective | None) -> Markup:
    key, points = f"curve-{index}", curve.points
    top = best(points, objective)
    return join(
        [
            tag("h2", curve.title, id=key),
            tag("p", _model(points[0]), class_="soft"),
            tag("p", _top(top, objective)),
            tag(
                "div",
                latency_by_load(f"{key}-latency", curve, objective),
                percentile_curves(f"{key}-percentiles", points, points),
                throughput(f"{key}-throughput", points, points),
                stage_split(f"{key}-stages", points, points),
                class_="charts",
            ),
            figures_table(
                points,
                f"{curve.title}: latencies in milliseconds",
                _SHORT,
                among=points,
                picked=set() if top is None else {top.id},
            ),
        ]
    )


def _top(top: Point | None, objective: Objective | None) -> str:
    if top is None:
        return f"No load {f'kept {objective.text}' if objective else 'stayed below saturation'}."
    reason = f"with {objective.text}" if objective else "before saturation"
    latency = top.latency_ms
    return (
        f"Highest load {reason}: {top.load_text}, p50 {ms(latency.p50)}, p99 {ms(latency.p99)},"
        f" slowest {ms(latency.max)}."
    )


def _model(point: Point) -> str:
    if point.model == "open":
        return f"Open model, {arrivals(point)}. {DUE}"
    return f"Closed model. {SENT}"


def _side_by_side(points: Sequence[Point], objective: Objective | None) -> Markup:
    shown = points[:MOST_ROWS]
    common = shared(points)
    return join(
        [
            tag("h2", "Kinds of work side by side", id="kinds"),
            tag("p", f"All of it: {common}." if common else "", class_="soft"),
            tag(
                "div",
                latency_by_kind("kinds-latency", shown, points),
                percentile_curves("kinds-percentiles", shown, points),
                throughput("kinds-throughput", shown, points),
                stage_split("kinds-stages", shown, points),
                class_="charts",
            ),
            _left_out(len(points) - MOST_ROWS, "kind of work"),
            figures_table(
                points,
                f"Kinds of work: latencies in milliseconds{_against(objective)}",
                _SHORT,
                among=points,
            ),
        ]
    )


def _against(objective: Objective | None) -> str:
    return f"; the objective is {objective.text}" if objective else ""


def latency_by_load(key: str, curve: Curve, objective: Objective | None) -> Markup:
    """Return percentiles over the load, the objective, and where saturation begins."""
    drawn = []
    for name, look in PERCENTILES:
        pairs = [(p.load, p.latency_at(name)) for p in curve.points]
        known = [(x, y) for x, y in pairs if y]
        if known:
            drawn.append(Line(name, known, look))
    is_open = curve.points[0].model == "open"
    title = f"Latency by {'rate' if is_open else 'clients'}"
    if not drawn:
        return _nothing(title)
    marks = Marks(
        [] if objective is None else _limits(objective),
        curve.saturated_from,
    )
    words = charts.said([(p.load_text, p.latency_ms.p99) for p in curve.points])
    saturation = (
        ""
        if curve.saturated_from is None
        else f" The server is saturated from {number(curve.saturated_from)} on."
    )
    return figure(
        key,
        title,
        f"p99 by load: {words}.{saturation}",
        "Half of the calls are faster than p50, 99 of 100 faster than p99.",
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
    told = [(n, p) for n, p in zip(names, points, strict=True) if p.stages_ms is not None]
    if not told:
        return _nothing(title, "The server told no times of its stages (Server-Timing).")
    parts = {name: _parts(point) for name, point in told}
    rows = [
        Bar(clipped(name), _shares(parts[name]), ms(point.latency_ms.mean)) for name, point in told
    ]
    known = {stage for means in parts.values() for stage, _ in means}
    legend = [(stage, stage) for stage in (*STAGES, "rest") if stage in known]
    words = "; ".join(
        f"{name}: {charts.said(parts[name])}, of {ms(point.latency_ms.mean)}"
        for name, point in told
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


def _heat(found: Sequence[Map]) -> Markup:
    return join(
        [
            tag("h2", "p99 by batch and length", id="map"),
            tag(
                "p",
                "Milliseconds; darker is slower, by the logarithm, in each map alone.",
                class_="soft",
            ),
            *(heat_map(each) for each in found[:MOST_CURVES]),
            _left_out(len(found) - MOST_CURVES, "map"),
        ]
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
    label = f"p99 in milliseconds: {found.title}"
    return table(caption, head, body, label=label, kind="heat")


def _outcomes(points: Sequence[Point]) -> Markup | None:
    """Return what the server said to each call that it did not answer well."""
    rows = [
        tag("tr", tag("th", name, scope="row"), tag("td", what), tag("td", count(amount)))
        for name, point in zip(labels(points), points, strict=True)
        for what, amount in [
            *(
                (f"status {status}", n)
                for status, n in point.statuses.items()
                if not status.startswith("2")
            ),
            *((f"code {code}", n) for code, n in point.codes.items()),
            *point.failures.items(),
        ]
    ]
    if not rows:
        return None
    title = "Refusals and failures, apart from the latencies"
    head = tag("tr", *(tag("th", name, scope="col") for name in ("point", "what", "calls")))
    return table(title, head, rows)


def _trust(points: Sequence[Point]) -> str:
    seconds = sum(point.seconds for point in points)
    spread = max((ratio for ratio in map(window_ratio, points) if ratio), default=None)
    steady = (
        ""
        if spread is None
        else f" Between windows of one point, p50 differed by up to a factor of {number(spread)}."
    )
    checked, wrong = sum(p.checked for p in points), sum(p.wrong for p in points)
    answers = (
        " No answer was checked."
        if not checked
        else f" {plural(checked, 'answer')} checked, {count(wrong)} wrong."
    )
    return f"{number(seconds)} s measured, in {plural(len(points), 'point')}.{steady}{answers}"


def window_ratio(point: Point) -> float | None:
    """Return p50 of a point's slowest window over that of its fastest."""
    known = [window.p50 for window in point.windows if window.p50]
    return max(known) / min(known) if len(known) > 1 else None


def _terms() -> Markup:
    terms = (
        ("good", "answered with a status of success"),
        ("refused", "429, 503 or 504: not now"),
        ("failed", "any other status, or no answer"),
        (
            "saturated",
            "over 1 % refused or failed, or over 5 % (beyond those always under way) not answered"
            " by the end",
        ),
        ("sent p50, p99", "latency from the moment a call really went out"),
        ("lag", "how late a call went out that had a connection"),
    )
    rows = (tag("tr", tag("th", name, scope="row"), tag("td", what)) for name, what in terms)
    return tag("table", tag("caption", "What the words mean"), tag("tbody", *rows), class_="facts")


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
