"""Two measurements as one page: ratios first, then both sides' curves in the same drawings."""

from collections.abc import Sequence

from loadtest.report import charts
from loadtest.report.charts import Axis, Line, Spread
from loadtest.report.comparing import (
    Comparison,
    Pair,
    joint_verdict,
    typical,
)
from loadtest.report.grouping import Curve, curves
from loadtest.report.markup import Markup, join, tag
from loadtest.report.measurement import Measurement, Point
from loadtest.report.point_charts import PERCENTILE_TICKS, clipped, load_axis
from loadtest.report.sections import (
    figure,
    findings_list,
    navigation,
    repeat,
    shell,
    sides,
    table,
    verdict_box,
)
from loadtest.report.verdict import subject
from loadtest.report.words import hides, labels, ms, number, plural, ratio, shared

MOST_PAIRS = 12
"""Matching points whose percentile curves are drawn; the table holds all."""

MOST_ROWS = 32

CLEAR = {True: "clear", False: "within spread", None: "unknown"}
"""How a difference stands to how much each side differs from itself."""


def comparison_page(comparison: Comparison) -> str:
    """Return the whole page."""
    pairs = comparison.pairs
    by_load = [
        _both_by_load(i, curve, pairs) for i, curve in enumerate(curves([p.a for p in pairs]))
    ]
    body = [
        tag("h2", "Ratios", id="ratios"),
        tag("p", _HOW_TO_READ, class_="soft"),
        tag("div", _ratios(pairs), *by_load, class_="charts") if pairs else None,
        _table(pairs) if pairs else None,
        tag("h2", "Points of one side alone", id="alone"),
        _unmatched("A", comparison.only_a),
        _unmatched("B", comparison.only_b),
        *_drawn(pairs),
        tag("h2", "A: machines and versions", id="side-a"),
        sides(comparison.a),
        repeat(comparison.a.command),
        tag("h2", "B: machines and versions", id="side-b"),
        sides(comparison.b),
        repeat(comparison.b.command),
    ]
    places = [("ratios", "Ratios"), ("alone", "Points of one side alone")]
    places += [("curves", "Percentiles")] if pairs else []
    places += [("side-a", "Machines of A"), ("side-b", "Machines of B")]
    return shell(
        "Two measurements of latency under load",
        tag(
            "header",
            tag("h1", "Two measurements of latency under load"),
            tag("p", tag("strong", "A"), f": {subject(comparison.a)} {_when(comparison.a)}"),
            tag("p", tag("strong", "B"), f": {subject(comparison.b)} {_when(comparison.b)}"),
            verdict_box(joint_verdict(comparison)),
            findings_list(_findings(comparison)),
            navigation(places),
        ),
        tag("main", *body),
        tag("footer", tag("p", comparison.a.tool, class_="soft")),
    )


_HOW_TO_READ = (
    "A / B: below 1, A's calls took less time. A difference is clear where every window of the"
    " one side lies beyond every window of the other; else it is within the spread that each side"
    " shows by itself."
)


def _when(measurement: Measurement) -> str:
    return f"{measurement.started}."


def _findings(comparison: Comparison) -> list[tuple[str, str, str]]:
    pairs = comparison.pairs
    kept = sum(not pair.is_saturated for pair in pairs)
    note = f"geometric mean of {plural(kept, 'point')} that both kept up with"
    clear = sum(pair.is_clear("p50") is True for pair in pairs)
    return [
        ("p50, A / B", ratio(typical(comparison, "p50")), note),
        ("p99, A / B", ratio(typical(comparison, "p99")), note),
        ("Clear differences of p50", f"{clear} of {len(pairs)}", "beyond each side's own spread"),
    ]


def _pair_labels(pairs: Sequence[Pair]) -> list[str]:
    return labels([pair.a for pair in pairs])


def _ratios(pairs: Sequence[Pair]) -> Markup:
    shown = pairs[:MOST_ROWS]
    names = labels([pair.a for pair in shown], [pair.a for pair in pairs])
    looks = (("p50", "c1"), ("p99", "c4"))
    rows = [
        Spread(
            clipped(name),
            [(value, look) for statistic, look in looks if (value := pair.ratio(statistic))],
            f"{ratio(pair.ratio('p50'))} / {ratio(pair.ratio('p99'))}",
        )
        for name, pair in zip(names, shown, strict=True)
    ]
    words = "; ".join(f"{row.label}: {row.total}" for row in rows)
    more = f" {len(pairs) - MOST_ROWS} more are in the table." if len(pairs) > MOST_ROWS else ""
    return figure(
        "ratios-chart",
        "Latency of A over latency of B",
        f"Ratios of p50 / p99: {words}.",
        f"The numbers at the end are the ratios of p50 / p99.{more}",
        lambda frame: charts.spreads(
            frame, "A / B (logarithmic): left of 1, A is faster", rows, looks, around_one=True
        ),
    )


def _table(pairs: Sequence[Pair]) -> Markup:
    points = [pair.a for pair in pairs]
    caption = f"Latencies in milliseconds. {shared(points)}. {hides(points)}".strip()
    head = tag(
        "tr",
        tag("th", "point", scope="col"),
        *(
            tag("th", name, scope="col")
            for statistic in ("p50", "p90", "p99", "max", "good/s")
            for name in (f"{statistic} A", f"{statistic} B", "A / B")
        ),
        tag("th", "difference of p50", scope="col"),
        tag("th", "of p99", scope="col"),
    )
    rows = []
    for name, pair in zip(_pair_labels(pairs), pairs, strict=True):
        cells: list[str] = []
        for statistic in ("p50", "p90", "p99", "max"):
            cells += [number(side.latency_at(statistic)) for side in (pair.a, pair.b)]
            cells.append(ratio(pair.ratio(statistic)))
        cells += [number(pair.a.good_rate), number(pair.b.good_rate), ratio(pair.rate_ratio)]
        cells += [CLEAR[pair.is_clear("p50")], CLEAR[pair.is_clear("p99")]]
        rows.append(
            tag(
                "tr",
                tag("th", name + (" (saturated)" if pair.is_saturated else ""), scope="row"),
                *(
                    tag("td", cell, class_="pick" if i % 3 == 2 and i < 15 else None)
                    for i, cell in enumerate(cells)
                ),
                class_="saturated" if pair.is_saturated else None,
            )
        )
    return table(caption, head, rows, label="Ratios of all matching points")


def _unmatched(side: str, points: Sequence[Point]) -> Markup:
    if not points:
        return tag("p", f"{side} has none.")
    names = (tag("li", f"{point.id} ({point.model} model)") for point in points)
    return join([tag("p", f"Only {side} has:"), tag("ul", *names, class_="points")])


def _drawn(pairs: Sequence[Pair]) -> list[Markup]:
    if not pairs:
        return []
    chosen = list(zip(_pair_labels(pairs), pairs, strict=True))[:MOST_PAIRS]
    drawn = [_both_curves(i, name, pair) for i, (name, pair) in enumerate(chosen)]
    left = len(pairs) - len(chosen)
    return [
        tag("h2", "Latency by percentile", id="curves"),
        tag("p", "Solid: A. Dashed: B. Each curve ends at its slowest call.", class_="soft"),
        tag("div", *drawn, class_="charts"),
        tag("p", f"Percentile curves of {left} more points left out.") if left else join([]),
    ]


def _both_by_load(index: int, curve: Curve, pairs: Sequence[Pair]) -> Markup:
    other = {pair.a.id: pair.b for pair in pairs}
    drawn = []
    for side, points in (("A", curve.points), ("B", [other[p.id] for p in curve.points])):
        for statistic in ("p50", "p99"):
            known = [(p.load, y) for p in points if (y := p.latency_at(statistic))]
            if known:
                drawn.append(Line(f"{side} {statistic}", known, side.lower()))
    if not drawn:
        return join([])
    words = "; ".join(
        f"{name}: p99 {number(p.latency_ms.p99)} and {number(other[p.id].latency_ms.p99)} ms"
        for name, p in zip(labels(curve.points), curve.points, strict=True)
    )
    return figure(
        f"both-{index}",
        f"p50 and p99 by load: {curve.title}",
        f"A and B: {words}.",
        "Solid: A. Dashed: B. The lower line of a side is its p50.",
        lambda frame: charts.lines(frame, load_axis(curve), drawn),
    )


def _both_curves(index: int, name: str, pair: Pair) -> Markup:
    drawn = [
        Line(side, curve, side.lower(), dotted=False)
        for side, point in (("A", pair.a), ("B", pair.b))
        if (curve := point.curve())
    ]
    if not drawn:
        return join([])
    axis = Axis("percentile; each step is ten times as rare", log=True, ticks=PERCENTILE_TICKS)
    return figure(
        f"pair-{index}",
        name,
        f"Latency by percentile; p99: A {ms(pair.a.latency_ms.p99)},"
        f" B {ms(pair.b.latency_ms.p99)}.",
        "",
        lambda frame: charts.lines(frame, axis, drawn),
    )
