"""Drawing with numbers: scales, axes, paths and labels as SVG elements; pure functions all."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from loadtest.report.markup import Markup, join, tag

LETTER = 6.3
"""Width in px of a letter of 12 px, on average and rounded up."""

BOLD_LETTER = 8.6
"""The same of a bold one."""

LINE = 14
"""Height in px of a line of text."""


@dataclass(frozen=True)
class Scale:
    """From numbers to pixels, evenly or by their logarithms."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return where a number lies; what is outside is drawn at the edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """Return round numbers within the scale, as many as there is room for."""
        return _log_ticks(self.low, self.high, most) if self.log else self._even_ticks(most)

    def _even_ticks(self, most: int) -> list[float]:
        step = _round_up((self.high - self.low) / max(1, most))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def _round_up(size: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, ..."""
    decade = 10.0 ** math.floor(math.log10(size))
    return next(decade * f for f in (1, 2, 5, 10, 20) if decade * f >= size * (1 - 1e-9))


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**d for d in decades for f in factors]
        found = [value for value in found if low * 0.999 <= value <= high * 1.001]
        if len(found) <= most:
            return found
    every = math.ceil(len(found) / most)
    return found[::every]


def log_scale(values: Iterable[float], start: float, end: float) -> Scale:
    """Return a logarithmic scale with a little air around all values."""
    known = [value for value in values if value > 0] or [1.0]
    low, high = min(known), max(known)
    air = max((high / low) ** 0.06, 1.15)
    return Scale(low / air, high * air, start, end, log=True)


def even_scale(values: Iterable[float], start: float, end: float) -> Scale:
    """Return a linear scale from zero to a little above all values."""
    return Scale(0.0, max([*values, 0.0]) * 1.02 or 1.0, start, end)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """Return a straight line."""
    return tag("line", x1=_px(x1), y1=_px(y1), x2=_px(x2), y2=_px(y2), class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str) -> Markup:
    """Return a rectangle; a width below a hair is a hair."""
    return tag(
        "rect", x=_px(x), y=_px(y), width=_px(max(width, 0.5)), height=_px(height), class_=class_
    )


def dot(x: float, y: float, class_: str, r: float = 3.5) -> Markup:
    """Return a filled circle."""
    return tag("circle", cx=_px(x), cy=_px(y), r=r, class_=class_)


def words(x: float, y: float, content: str, anchor: str = "start", class_: str = "") -> Markup:
    """Return a line of text whose middle is at y."""
    return tag(
        "text",
        content,
        x=_px(x),
        y=_px(y),
        text_anchor=None if anchor == "start" else anchor,
        class_=class_ or None,
        dy="0.35em",
    )


def path(points: Sequence[tuple[float, float]], class_: str) -> Markup:
    """Return a line through points."""
    moves = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return tag("path", d=f"M{moves}", class_=class_)


def x_axis(
    scale: Scale, y: float, top: float, ticks: Sequence[tuple[float, str]], title: str
) -> Markup:
    """Return an axis below a drawing that begins at `top`: fine lines, numbers, what they mean."""
    marks: list[str] = []
    for value, label in ticks:
        at = scale(value)
        marks.append(line(at, top, at, y, "grid"))
        # Words at either end stay inside the drawing.
        half = len(label) * LETTER / 2
        anchor = "middle"
        if at + half > max(scale.start, scale.end) + _OVERHANG:
            anchor = "end"
        marks.append(words(at, y + LINE, label, anchor, "tick"))
    marks.append(line(scale.start, y, scale.end, y, "axis"))
    marks.append(words((scale.start + scale.end) / 2, y + 2.4 * LINE, title, "middle", "title"))
    return join(marks)


_OVERHANG = 8
"""How far in px the last number may reach beyond the axis."""


def y_axis(scale: Scale, x: float, right: float, name: Callable[[float], str]) -> Markup:
    """Return fine lines to the right edge, with their numbers left of x."""
    marks: list[str] = []
    room = max(3, int(abs(scale.end - scale.start) / 26))
    for value in scale.ticks(room):
        at = scale(value)
        marks.append(line(x, at, right, at, "grid"))
        marks.append(words(x - 6, at, name(value), "end", "tick"))
    return join(marks)


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places as near as may be to those wanted, at least `gap` from each other."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [min(max(wanted[i], low), high) for i in order]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    if places and places[-1] > high:
        places[-1] = high
        for i in range(len(places) - 2, -1, -1):
            places[i] = min(places[i], places[i + 1] - gap)
    found = [0.0] * len(wanted)
    for place, i in zip(places, order, strict=True):
        found[i] = place
    return found


def drawing(
    key: str, width: float, height: float, title: str, description: str, *marks: str
) -> Markup:
    """Return a whole drawing that says in words what it shows; `key` is its own in the page."""
    return tag(
        "svg",
        tag("title", title, id=f"{key}-t"),
        tag("desc", description, id=f"{key}-d"),
        *marks,
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        role="img",
        aria_labelledby=f"{key}-t",
        aria_describedby=f"{key}-d",
        style=f"max-width:{width * _GROWTH:.0f}px",
    )


def standalone(drawn: Markup, style: str) -> str:
    """Return a drawing as a file of its own, with its sheet in it."""
    start = '<svg xmlns="http://www.w3.org/2000/svg"'
    inner = drawn.removeprefix("<svg").partition(">")
    return f"{start}{inner[0]}>{tag('style', Markup(style))}{inner[2]}\n"


_GROWTH = 1.12
"""How much larger than drawn it may become."""


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
