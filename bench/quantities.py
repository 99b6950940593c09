"""Samples put together: by quantity, by candidate, by work, by place on an axis."""

from collections.abc import Sequence

from bench.growth import place_of
from bench.results import US, Sample, Spread, Work, spread


def quantities(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of one benchmark and quantity together."""
    parts: dict[tuple[str, str, str], list[Sample]] = {}
    for sample in samples:
        parts.setdefault((sample.bench, sample.what, sample.unit), []).append(sample)
    return list(parts.values())


def names_of(samples: Sequence[Sample]) -> list[str]:
    """Return the name of each candidate once, Headwise first."""
    found = list(dict.fromkeys(sample.who for sample in samples))
    return sorted(found, key=lambda who: who != US)


def by_work(samples: Sequence[Sample]) -> dict[Work, list[Sample]]:
    """Return the samples of each work together, in their order."""
    parts: dict[Work, list[Sample]] = {}
    for sample in samples:
        parts.setdefault(sample.work, []).append(sample)
    return parts


def spreads_by_place(samples: Sequence[Sample]) -> dict[float, Spread]:
    """Return the spread at each place of the axis, ascending."""
    seen: dict[float, list[float]] = {}
    for sample in samples:
        seen.setdefault(place_of(sample.work, sample.bench), []).append(sample.value)
    return {place: spread(values) for place, values in sorted(seen.items())}
