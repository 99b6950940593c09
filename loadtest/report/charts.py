"""
The charts of the reports, each from numbers to one drawing.

Every line and bar carries its name beside it, so that no colour has to be told from another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.report.markup import Markup, join
from loadtest.report.svg import (
    BOLD_LETTER,
    LETTER,
    LINE,
    Scale,
    apart,
    dot,
    drawing,
    even_scale,
    line,
    log_scale,
    path,
    rect,
    words,
    x_axis,
    y_axis,
)
from loadtest.report.words import count, ms, ratio

LEFT = 44
"""Room for the numbers of a vertical axis."""

BAR = 17
ROW = 24
LABEL_LETTERS = 26
"""Names of rows that are longer stand above their bar."""


@dataclass(frozen=True)
class Line:
    """A named line through points, and the classes of its looks."""

    label: str
    points: Sequence[tuple[float, float]]
    look: str
    dotted: bool = True
    """Whether each point was measured, and is drawn as a dot."""
    joined: bool = True
    ranges: Sequence[tuple[float, float, float]] = ()
    """(x, least, most) of what was measured, each an upright line."""


@dataclass(frozen=True)
class Axis:
    """What runs from left to right, or upwards."""

    title: str
    log: bool = False
    ticks: Sequence[tuple[float, str]] = ()
    """Places and their names; none = round numbers."""


LATENCY = Axis("latency, ms (logarithmic)", log=True)


@dataclass(frozen=True)
class Frame:
    """Where a chart stands in its page: its own key, its width in px, and its words."""

    key: str
    width: float
    title: str
    description: str


@dataclass(frozen=True)
class Marks:
    """What a chart of lines shows beside its lines."""

    limits: Sequence[tuple[float, str]] = ()
    """Bounds in ms, with their words."""
    saturated_from: float | None = None


def lines(
    frame: Frame,
    axis: Axis,
    drawn: Sequence[Line],
    marks: Marks = Marks(),
    *,
    upright: Axis = LATENCY,
    legend: Sequence[tuple[str, str]] = (),
) -> Markup:
    """
    Return lines over whatever the axis says; `upright` is what they show, by default latencies.

    Where a legend of (name, look) is given, lines need no labels of their own.
    """
    height = 300.0 if frame.width > 400 else 270.0
    top, bottom = 30.0, height - 48.0
    head = None
    if legend:
        head, end = _legend(legend, frame.width, y=9.0 + LINE + 4)
        height, top, bottom = height + end - top, end, bottom + end - top
    right = frame.width - max(len(each.label) for each in drawn) * BOLD_LETTER - 12
    xs = [x for each in drawn for x, _ in each.points]
    ys = [y for each in drawn for _, y in each.points]
    ys += [y for each in drawn for _, *ends in each.ranges for y in ends]
    y = (log_scale if upright.log else even_scale)(
        [*ys, *(limit for limit, _ in marks.limits)], bottom, top
    )
    x = _x_scale(axis, xs, right)
    parts = [words(0, 9, upright.title, class_="title"), *([] if head is None else [head])]
    if marks.saturated_from is not None:
        parts.append(_saturation(x, marks.saturated_from, xs, right, top, bottom))
    parts += [y_axis(y, LEFT, right, _short), x_axis(x, bottom, top, _ticks(axis, x), axis.title)]
    for limit, label in marks.limits:
        at = y(limit)
        parts.append(line(LEFT, at, right, at, "limit"))
        parts.append(words(LEFT + 6, at - 9, label, class_="limit-label halo"))
    for each in drawn:
        parts += [line(x(a), y(low), x(a), y(high), "span") for a, low, high in each.ranges]
        places = [(x(a), y(b)) for a, b in each.points]
        if each.joined:
            parts.append(path(places, f"line {each.look}"))
        if each.dotted:
            parts += [dot(a, b, f"dot {each.look}") for a, b in places]
    named = [each for each in drawn if each.label]
    ends = [y(each.points[-1][1]) for each in named]
    for each, place in zip(named, apart(ends, LINE, top, bottom), strict=True):
        parts.append(words(right + 8, place, each.label, class_=f"name {each.look}"))
    return drawing(frame.key, frame.width, height, frame.title, frame.description, *parts)


def _x_scale(axis: Axis, xs: Sequence[float], right: float) -> Scale:
    if axis.log:
        return Scale(min(xs), max(max(xs), min(xs) * 2), LEFT, right, log=True)
    return even_scale(xs, LEFT, right)


def _ticks(axis: Axis, x: Scale) -> list[tuple[float, str]]:
    most = max(2, int((x.end - x.start) / 62))
    if not axis.ticks:
        return [(value, _short(value)) for value in x.ticks(most)]
    return [(value, name) for value, name in axis.ticks if x.low <= value <= x.high * 1.001]


def _saturation(
    x: Scale, since: float, xs: Sequence[float], right: float, top: float, bottom: float
) -> Markup:
    """Return the part of the axis in which the server gave less than was asked."""
    below = [value for value in xs if value < since]
    start = x((max(below) + since) / 2) if below else x.start
    name = "saturated"
    fits = right - start > len(name) * LETTER + 8
    return join(
        [
            rect(start, top, right - start, bottom - top, "saturated"),
            words(
                start + 6 if fits else right - 4,
                top - 9,
                name,
                "start" if fits else "end",
                "saturated-label",
            ),
        ]
    )


def _short(value: float) -> str:
    """Return the number of a tick, without needless digits."""
    return f"{value:,.6g}".replace(",", "\N{NARROW NO-BREAK SPACE}")


@dataclass(frozen=True)
class Segment:
    """A part of a bar."""

    value: float
    look: str
    label: str
    """What is written in it, where there is room."""


@dataclass(frozen=True)
class Bar:
    """A named row: parts that add up, perhaps a mark that they should reach, and a total."""

    label: str
    segments: Sequence[Segment]
    total: str
    mark: float | None = None


def bars(
    frame: Frame, axis_title: str, rows: Sequence[Bar], legend: Sequence[tuple[str, str]]
) -> Markup:
    """Return one stacked bar a row, from zero; the legend is (name, look) of each part."""
    layout = _Rows.of(frame, [row.label for row in rows], [row.total for row in rows])
    sums = [sum(part.value for part in row.segments) for row in rows]
    x = even_scale([*sums, *(row.mark or 0.0 for row in rows)], layout.left, layout.right)
    head, top = _legend(legend, frame.width)
    parts = [head]
    bottom = top + layout.height
    ticks = [
        (value, _short(value)) for value in x.ticks(max(2, int((layout.right - layout.left) / 62)))
    ]
    parts.append(x_axis(x, bottom, top, ticks, axis_title))
    for i, row in enumerate(rows):
        y = layout.place(i, top)
        parts.append(layout.name(row.label, y))
        at, end = 0.0, x.start
        for part in row.segments:
            start, end = x(at), x(at + part.value)
            at += part.value
            if part.value <= 0:
                continue
            parts.append(rect(start, y - BAR / 2, end - start, BAR, f"bar {part.look}"))
            if end - start > len(part.label) * LETTER + 8:
                parts.append(words((start + end) / 2, y, part.label, "middle", f"on-{part.look}"))
        if row.mark is not None:
            at_mark = x(row.mark)
            parts.append(line(at_mark, y - BAR / 2 - 3, at_mark, y + BAR / 2 + 3, "mark"))
            end = max(end, at_mark)
        parts.append(words(end + 6, y, row.total, class_="value halo"))
    height = bottom + 48
    return drawing(frame.key, frame.width, height, frame.title, frame.description, *parts)


@dataclass(frozen=True)
class Spread:
    """A named row of dots on one line: each a value and its look."""

    label: str
    dots: Sequence[tuple[float, str]]
    total: str


def spreads(
    frame: Frame,
    axis_title: str,
    rows: Sequence[Spread],
    legend: Sequence[tuple[str, str]],
    *,
    around_one: bool = False,
) -> Markup:
    """
    Return one line of dots a row, on a logarithmic axis.

    `around_one` puts 1 in the middle and marks it: for ratios.
    """
    layout = _Rows.of(frame, [row.label for row in rows], [row.total for row in rows])
    values = [value for row in rows for value, _ in row.dots if value > 0]
    room = layout.right - layout.left
    if around_one:
        far = max([1.25, *(max(value, 1 / value) for value in values)]) * 1.08
        x = Scale(1 / far, far, layout.left, layout.right, log=True)
        places = [v for v in (0.1, 0.2, 0.5, 0.8, 1, 1.25, 2, 5, 10) if 1 / far <= v <= far]
        ticks = [(value, f"{value:g}") for value in _thinned(places, x)]
    else:
        x = log_scale(values, layout.left, layout.right)
        ticks = [(value, _short(value)) for value in x.ticks(max(2, int(room / 62)))]
    head, top = _legend(legend, frame.width, round_=True)
    bottom = top + layout.height
    parts = [head, x_axis(x, bottom, top, ticks, axis_title)]
    if around_one:
        parts.append(line(x(1), top, x(1), bottom, "mark"))
    for i, row in enumerate(rows):
        y = layout.place(i, top)
        parts.append(layout.name(row.label, y))
        at = [x(value) for value, _ in row.dots]
        if at:
            parts.append(line(min(at), y, max(at), y, "span"))
        parts += [dot(x(value), y, f"dot {look}", 4.5) for value, look in row.dots]
        # Beside the mark in the middle a number would be hard to read.
        beyond = x.end if around_one else max(at, default=x.start)
        parts.append(words(beyond + 10, y, row.total, class_="value halo"))
    height = bottom + 48
    return drawing(frame.key, frame.width, height, frame.title, frame.description, *parts)


def _thinned(places: Sequence[float], x: Scale) -> list[float]:
    """Return places whose names do not touch, those nearest to 1 first."""
    kept: list[float] = []
    for value in sorted(places, key=lambda v: abs(math.log(v))):
        if all(abs(x(value) - x(other)) > 32 for other in kept):
            kept.append(value)
    return sorted(kept)


@dataclass(frozen=True)
class _Rows:
    """Where the rows of a chart lie: names at the left while they are short, above when long."""

    left: float
    right: float
    step: float
    above: bool
    amount: int = field(default=0)

    @classmethod
    def of(cls, frame: Frame, names: Sequence[str], totals: Sequence[str]) -> "_Rows":
        longest = max(map(len, names), default=0)
        above = longest > LABEL_LETTERS or (longest > 16 and frame.width <= 400)
        left = 4.0 if above else longest * LETTER + 12
        right = frame.width - max(map(len, totals), default=0) * LETTER - 14
        return cls(left, right, ROW + LINE + 4 if above else ROW, above, len(names))

    @property
    def height(self) -> float:
        return self.amount * self.step + 6

    def place(self, index: int, top: float) -> float:
        """Return the middle of a row's bar."""
        return top + (index + 1) * self.step - ROW / 2 + 3

    def name(self, label: str, y: float) -> Markup:
        if self.above:
            return words(self.left, y - BAR / 2 - LINE / 2 - 2, label, class_="row")
        return words(self.left - 8, y, label, "end", "row")


def _legend(
    entries: Sequence[tuple[str, str]], width: float, *, round_: bool = False, y: float = 9.0
) -> tuple[Markup, float]:
    """Return what each look means, in as many lines as it takes, and where the chart begins."""
    parts: list[str] = []
    x = 4.0
    for name, look in entries:
        room = 18 + len(name) * LETTER + 14
        if x + room > width and x > 4:
            x, y = 4.0, y + LINE + 4
        if look == "mark":
            parts.append(line(x + 5, y - 7, x + 5, y + 7, "mark"))
        elif round_:
            parts.append(dot(x + 5, y, f"dot {look}", 4.5))
        else:
            parts.append(rect(x, y - 5.5, 11, 11, f"bar {look}"))
        parts.append(words(x + 17, y, name, class_="key"))
        x += room
    return join(parts), y + 16


def said(pairs: Sequence[tuple[str, float | None]], unit: str = "ms") -> str:
    """Return numbers in words, for those who do not see the drawing."""
    name = {"ms": ms, "/s": lambda v: f"{count(v)}/s", "": ratio}[unit]
    return "; ".join(f"{label} {name(value)}" for label, value in pairs)
