"""What the pages of one measurement and of two have in common: the shell, tables, machines."""

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from loadtest.report.charts import Frame
from loadtest.report.columns import Column, Value
from loadtest.report.markup import Markup, tag
from loadtest.report.measurement import Measurement, Point
from loadtest.report.style import STYLE
from loadtest.report.verdict import Verdict
from loadtest.report.words import NOTHING, THIN, count, hides, labels, number, printable

WIDE = 552.0
NARROW = 356.0
"""Every chart is drawn twice; the sheet shows the one that fits."""

_MOST_FACTS = 60
"""Of what a server tells of itself, so much is shown; the raw file has all."""


def shell(title: str, *parts: str | None) -> str:
    """Return a whole page, which may load nothing and run nothing."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'; img-src data:",
        ),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', *parts), lang='en')}\n"


def navigation(places: Sequence[tuple[str, str]]) -> Markup:
    """Return links to the parts of the page: (key, name) each."""
    entries = (tag("li", tag("a", name, href=f"#{key}")) for key, name in places)
    return tag("nav", tag("ul", *entries), aria_label="Parts of this page")


def verdict_box(found: Verdict) -> Markup:
    """Return the verdict, and every doubt with it."""
    sign = "\N{HEAVY CHECK MARK}" if found.is_good else "\N{WARNING SIGN}"
    doubts = tag("ul", *(tag("li", doubt) for doubt in found.doubts)) if found.doubts else None
    return tag(
        "div",
        tag("p", tag("strong", f"{sign} {found.sentence}")),
        doubts,
        class_="verdict" if found.is_good else "verdict doubtful",
    )


def findings_list(found: Sequence[tuple[str, str, str]]) -> Markup:
    """Return the few figures that matter most."""
    return tag(
        "dl",
        *(
            tag(
                "div",
                tag("dt", name),
                tag("dd", tag("div", value, class_="value"), tag("div", note, class_="soft")),
            )
            for name, value, note in found
        ),
        class_="findings",
    )


def figure(
    key: str,
    title: str,
    description: str,
    caption: str,
    draw: Callable[[Frame], Markup],
) -> Markup:
    """Return a chart in both widths, under its title."""
    drawn = [
        tag("div", draw(Frame(f"{key}-{name}", width, title, description)), class_=name)
        for name, width in (("wide", WIDE), ("narrow", NARROW))
    ]
    below = tag("figcaption", caption) if caption else None
    return tag("figure", tag("h3", title), *drawn, below, id=key)


def figures_table(
    points: Sequence[Point],
    caption: str,
    columns: Sequence[Column],
    *,
    among: Sequence[Point],
    picked: Collection[str] = (),
) -> Markup:
    """Return the figures of points, a line each; saturated ones shaded, those picked by id bold."""
    head = tag(
        "tr",
        tag("th", "point", scope="col"),
        *(tag("th", column.heading, scope="col") for column in columns),
    )
    rows = [
        tag(
            "tr",
            tag("th", label + (" (saturated)" if point.is_saturated else ""), scope="row"),
            *(_figure(column, point) for column in columns),
            class_="saturated" if point.is_saturated else "pick" if point.id in picked else None,
        )
        for point, label in zip(points, labels(points, among), strict=True)
    ]
    if hidden := hides(points):
        caption = f"{caption.rstrip('.')}. {hidden}"
    return table(caption, head, rows)


def _figure(column: Column, point: Point) -> Markup:
    """Return a cell; what too few calls support stands back."""
    value = column.of(point)
    if value is None or column.is_supported(point):
        return tag("td", cell(value))
    return tag("td", THIN + cell(value), class_="thin")


def cell(value: Value) -> str:
    """Return a figure as tables show it."""
    if isinstance(value, int):
        return count(value)
    return number(value) if not isinstance(value, str) else value


def table(
    caption: str, head: Markup, rows: Sequence[Markup], *, label: str = "", kind: str = "figures"
) -> Markup:
    """
    Return a table that scrolls by itself where the page is too narrow, by keyboard, too.

    Who cannot see it is told the label, else the caption.
    """
    made = tag(
        "table", tag("caption", caption), tag("thead", head), tag("tbody", *rows), class_=kind
    )
    return tag(
        "div", made, class_="scroll", role="region", aria_label=label or caption, tabindex="0"
    )


def sides(measurement: Measurement) -> Markup:
    """Return both machines with their versions."""
    client, server = measurement.client, measurement.server
    asked = facts(
        "The side that asked",
        {
            "tool": measurement.tool,
            "commit": client.commit,
            "processor": client.cpu,
            "cores": client.cores,
            "memory": None if client.memory_gb is None else f"{number(client.memory_gb)} GB",
            "Python": client.python,
            "kernel": client.kernel,
        },
    )
    told = dict(_flat(server.details))
    answered = facts(
        "The side that answered",
        {
            "address": server.url,
            "server": server.name,
            "version": server.version,
            "model": server.model,
        }
        | dict(list(told.items())[:_MOST_FACTS]),
    )
    left = len(told) - _MOST_FACTS
    more = tag("p", f"{left} more facts are in the raw file.", class_="soft") if left > 0 else None
    return tag("div", asked, tag("div", answered, more), class_="sides")


def facts(title: str, pairs: Mapping[str, Any]) -> Markup:
    """Return a table of names and values."""
    rows = (
        tag("tr", tag("th", name, scope="row"), tag("td", _shown(value)))
        for name, value in pairs.items()
    )
    return tag("table", tag("caption", title), tag("tbody", *rows), class_="facts")


def generator_facts(measurement: Measurement) -> Markup:
    """Return how far the load tester itself was from its limits."""
    points = measurement.points
    null_rate = measurement.generator.null_calls_per_s
    busiest = max((sum(p.statuses.values()) / p.seconds for p in points), default=None)
    lags = [p.lag_ms for p in points if p.lag_ms is not None]
    cores = [p.cpu_share for p in points if p.cpu_share is not None]
    return facts(
        "The load tester itself",
        {
            "calls/s against an endpoint that computes nothing": number(null_rate),
            "most answers/s in any point": number(busiest),
            "sent late by, p99, at worst": _most_ms([lag.p99 for lag in lags]),
            "sent late by, at most": _most_ms([lag.max for lag in lags]),
            "most cores used in any point": number(max(cores, default=None)),
        },
    )


def repeat(command: Sequence[str]) -> Markup:
    """Return the command that measures the same again."""
    return tag("pre", tag("code", shlex.join(map(printable, command))))


def _most_ms(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{number(max(known))} ms" if known else NOTHING


def _shown(value: Any) -> str:
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of a JSON value with the way to each; short lists are one leaf."""
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in _flat(item, f"{name}.{key}")]
    if isinstance(value, list):
        if all(not isinstance(item, Mapping | list) for item in value):
            return [(name.removeprefix("."), ", ".join(map(str, value)))]
        return [leaf for i, item in enumerate(value) for leaf in _flat(item, f"{name}[{i}]")]
    return [] if value is None else [(name.removeprefix("."), value)]
