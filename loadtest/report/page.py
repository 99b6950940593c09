"""One measurement as one page: the verdict first, every figure in it, nothing loaded."""

from collections.abc import Sequence

from loadtest.notation import Objective
from loadtest.report.columns import COLUMNS
from loadtest.report.grouping import Curve, Map, alone, curves, maps
from loadtest.report.markup import Markup, join, tag
from loadtest.report.measurement import Measurement, Point
from loadtest.report.point_charts import (
    heat_map,
    latency_by_kind,
    latency_by_load,
    latency_over_time,
    p99_of_curves,
    percentile_curves,
    rate_over_time,
    stage_split,
    throughput,
)
from loadtest.report.sections import (
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
from loadtest.report.style import KIND_COLOURS
from loadtest.report.verdict import best, findings, subject, verdict
from loadtest.report.words import (
    THIN,
    THIN_MEANS,
    arrivals,
    count,
    labels,
    ms,
    number,
    plural,
    shared,
)

MOST_CURVES = 24
"""Kinds of work that get charts of their own; the tables hold all."""


MOST_ROWS = 32


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
    together = _together(found_curves)
    body = [
        *together,
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
        *(repeat(again.command) for again in measurement.resumed),
    ]
    places = [("together", "Kinds of work over load")] if together else []
    places += [(f"curve-{i}", each.title) for i, each in enumerate(found_curves[:MOST_CURVES])]
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


def _together(found: Sequence[Curve]) -> list[Markup]:
    """Return one chart of the kinds of work that were measured over the same kind of load."""
    drawn = []
    for model in ("open", "closed"):
        of_model = [curve for curve in found if curve.points[0].model == model]
        if 1 < len(of_model) <= len(KIND_COLOURS):
            drawn.append(p99_of_curves(f"together-{model}", of_model))
    if not drawn:
        return []
    return [
        tag("h2", "Kinds of work over load", id="together"),
        tag("div", *drawn, class_="charts"),
    ]


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
                latency_over_time(f"{key}-latency-over-time", points, points),
                rate_over_time(f"{key}-rate-over-time", points, points),
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
                latency_over_time("kinds-latency-over-time", shown, points),
                rate_over_time("kinds-rate-over-time", shown, points),
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
        ("other", "the server's total beyond its stages: reading the body, handing it on"),
        ("network", "latency from sending, less the server's total"),
        ("waiting", "from when a call was due until it was sent"),
        (THIN, THIN_MEANS.removeprefix(f"{THIN} ")),
    )
    rows = (tag("tr", tag("th", name, scope="row"), tag("td", what)) for name, what in terms)
    return tag("table", tag("caption", "What the words mean"), tag("tbody", *rows), class_="facts")
