"""Sweeps: every load with every shape, weights mode and format."""

from collections.abc import Callable, Container, Iterable, Sequence

from loadtest.point import Point
from loadtest.work import Format, Mask, Work


def works(
    shapes: Sequence[tuple[str, str]],
    weights: Sequence[str],
    masks: Sequence[Mask],
    formats: Sequence[Format],
) -> list[Work]:
    """Return the cross product, the format changing fastest."""
    return [
        Work(rows, length, weight, mask, form)
        for rows, length in shapes
        for weight in weights
        for mask in masks
        for form in formats
    ]


def points(
    of: Callable[[Work, float | None, int | None], Point],
    kinds: Iterable[Work],
    rates: Sequence[float],
    clients: Sequence[int],
) -> list[Point]:
    """Return each kind of work at each rate, then with each number of clients."""
    found = []
    for work in kinds:
        found += [of(work, rate, None) for rate in rates]
        found += [of(work, None, number) for number in clients]
    return found


def left(wanted: Iterable[Point], done: Container[str]) -> list[Point]:
    """Return the points, each once, whose ids are not `done`."""
    return [point for point in {p.id: p for p in wanted}.values() if point.id not in done]
