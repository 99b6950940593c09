"""Numbers and names as a reader wants them: three digits that count, one way everywhere."""

from collections import Counter
from collections.abc import Sequence

from loadtest.notation import needed_calls
from loadtest.report.measurement import Point, Work

NOTHING = "\N{EN DASH}"
"""What stands where there is no number."""

THIN = "~"
"""What stands before a percentile that too few calls support."""

_GAP = "\N{NARROW NO-BREAK SPACE}"


HIDES = (
    "Closed load: a client that waits sends nothing, so stalls of the server hide in these figures"
    " (coordinated omission)."
)
"""Goes with every table that has points of a closed load."""


def hides(points: Sequence[Point]) -> str:
    """Return what is to be said of figures of a closed load; "" where there are none."""
    return HIDES if any(point.model == "closed" for point in points) else ""


def number(value: float | None) -> str:
    """Return a number with three significant digits, thousands set apart."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    size = abs(value)
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3
    return f"{value:,.{digits}f}".replace(",", _GAP)


def count(value: float | None) -> str:
    """Return a whole number, thousands set apart."""
    return NOTHING if value is None else f"{value:,.0f}".replace(",", _GAP)


THIN_MEANS = f"{THIN} too few calls to say; it takes " + ", ".join(
    f"{count(needed_calls(figure))} for {figure}" for figure in ("p95", "p99", "p99.9")
)


def ms(value: float | None) -> str:
    """Return a latency with its unit."""
    return NOTHING if value is None else f"{number(value)} ms"


def share(value: float) -> str:
    """Return a share as a percentage; what is not nothing is never shown as nothing."""
    percent = 100 * value
    if 0 < percent < 0.01:
        return "<0.01 %"
    return f"{percent:.3g} %" if percent < 99.5 or percent >= 100 else f"{percent:.2f} %"


def ratio(value: float | None) -> str:
    """Return a ratio with two digits behind the point, more below a tenth."""
    if value is None:
        return NOTHING
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def plural(amount: int, noun: str) -> str:
    """Return `1 call`, `2 calls`."""
    return f"{count(amount)} {noun}{'' if amount == 1 else 's'}"


def printable(text: str) -> str:
    """Return a text without what would steer a terminal or hide in a page."""
    return "".join(c if c.isprintable() or c == _GAP else f"\\x{ord(c):02x}" for c in text)


def shape(work: Work) -> str:
    """Return batch by length, or the file of the bodies."""
    if work.body:
        return work.body
    return f"{work.rows} × {work.length}"  # noqa: RUF001 (the sign itself)


def parts_of(point: Point) -> dict[str, str]:
    """Return everything that tells kinds of work and load apart, but for the load itself."""
    return {
        "shape": shape(point.work),
        "format": point.work.format,
        "weights": f"weights {point.work.weights}",
        "mask": f"mask {point.work.mask}",
        "model": f"{point.model} model",
        "arrivals": arrivals(point),
    }


def arrivals(point: Point) -> str:
    """Return when calls were due, of an open load."""
    name = {"poisson": "Poisson"}.get(point.arrivals or "", point.arrivals)
    return f"{name} arrivals" if name else ""


def shared(points: Sequence[Point]) -> str:
    """Return what all points have in common, the load among it."""
    every = [parts_of(point) | {"load": point.load_text} for point in points]
    return ", ".join(
        printable(value)
        for key, value in (every[0].items() if every else ())
        if value and all(other[key] == value for other in every)
    )


def labels(points: Sequence[Point], among: Sequence[Point] | None = None) -> list[str]:
    """
    Return what tells each point from the others `among` which it stands.

    Points that nothing tells apart are tries of the same load, numbered as they were measured.
    """
    if not points:
        return []
    every = [(point, parts_of(point)) for point in among or points]
    loads = {(point.model, point.load) for point, _ in every}
    # The unit of a load tells its model.
    told = {key: {parts[key] for _, parts in every} - {""} for key in parts_of(points[0])}
    telling = [key for key, values in told.items() if len(values) > 1 and key != "model"]
    plain = [(point.id, _label(point, parts, telling, len(loads) > 1)) for point, parts in every]
    times, found, again = Counter(label for _, label in plain), {}, Counter[str]()
    for name, label in plain:
        again[label] += 1
        found[name] = label if times[label] == 1 else f"{label}, try {again[label]}"
    return [found[point.id] for point in points]


def _label(point: Point, parts: dict[str, str], telling: Sequence[str], with_load: bool) -> str:
    found = [value for key in telling if (value := parts[key])]
    if with_load or not found:
        found.append(point.load_text)
    return printable(", ".join(found))
