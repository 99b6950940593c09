"""Which points belong together: curves over load, kinds of work side by side, shapes in a map."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from loadtest.report.measurement import Point
from loadtest.report.words import parts_of, printable, shape

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Curve:
    """
    Points that differ in load alone, from the lowest on; at least two loads.

    Tries of one load follow each other as they were measured.
    """

    title: str
    points: Sequence[Point]

    @property
    def saturated_from(self) -> float | None:
        """The lowest load from which on every point is saturated; None = none is."""
        found = None
        for point in reversed(self.points):
            if not point.is_saturated:
                break
            found = point.load
        return found

    @property
    def last_tries(self) -> list[Point]:
        """One point a load, the last that was measured."""
        return list({point.load: point for point in self.points}.values())

    @property
    def earlier_tries(self) -> list[Point]:
        """The points of loads that were tried again."""
        last = {point.id for point in self.last_tries}
        return [point for point in self.points if point.id not in last]


@dataclass(frozen=True)
class Map:
    """Points that differ in batch and length alone; at least two of them."""

    title: str
    rows: Sequence[int]
    lengths: Sequence[int]
    points: dict[tuple[int, int], Point]


def curves(points: Sequence[Point]) -> list[Curve]:
    """Return a curve for each kind of work that was measured under several loads."""
    found = []
    for members in _by(points, lambda p: p.series):
        if len({p.load for p in members}) > 1:
            ordered = sorted(members, key=lambda p: p.load)
            found.append(Curve(_title(ordered[0]), ordered))
    return found


def alone(points: Sequence[Point]) -> list[Point]:
    """Return the points of all other kinds of work."""
    return [
        point
        for members in _by(points, lambda p: p.series)
        if len({p.load for p in members}) == 1
        for point in members
    ]


def maps(points: Sequence[Point]) -> list[Map]:
    """Return a map for all points of fixed shapes that share the rest, load included."""
    fixed = [p for p in points if p.work.rows.isdecimal() and p.work.length.isdecimal()]
    found = []
    for members in _by(fixed, lambda p: (p.model, p.arrivals, p.load, *_rest(p))):
        cells = {(int(p.work.rows), int(p.work.length)): p for p in members}
        if len(cells) > 1:
            first = members[0]
            title = f"{', '.join(_rest(first))}, {first.load_text}, {first.model} model"
            rows, lengths = {r for r, _ in cells}, {n for _, n in cells}
            found.append(Map(printable(title), sorted(rows), sorted(lengths), cells))
    return found


def _by(points: Sequence[Point], key: Callable[[Point], Key]) -> list[list[Point]]:
    groups: dict[Key, list[Point]] = {}
    for point in points:
        groups.setdefault(key(point), []).append(point)
    return list(groups.values())


def _rest(point: Point) -> tuple[str, str, str]:
    parts = parts_of(point)
    return parts["format"], parts["weights"], parts["mask"]


def _title(point: Point) -> str:
    return printable(f"{shape(point.work)}, {', '.join(_rest(point))}")
