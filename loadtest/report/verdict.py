"""Whether the numbers can be trusted, and what they say in one sentence each."""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from loadtest.notation import Objective, needed_calls
from loadtest.report.measurement import (
    Capacity,
    Latency,
    Measurement,
    Point,
    keeps,
)
from loadtest.report.words import (
    count,
    labels,
    ms,
    number,
    plural,
    printable,
    share,
    shared,
)
from loadtest.trust import LOST, NO_ANSWER, is_trustworthy, lost_text

_HISTOGRAM_SHARE = 0.01
"""Figures and histogram may differ by this: the histogram keeps three digits."""


_MOST_DOUBTS = 12
"""More would push every figure off the first page."""


@dataclass(frozen=True)
class Verdict:
    """Whether all is well, in a sentence, and everything that is not."""

    is_good: bool
    sentence: str
    doubts: Sequence[str]


def verdict(measurement: Measurement) -> Verdict:
    """Return what has to be said before any number is believed."""
    every = [printable(doubt) for doubt in _doubts(measurement)]
    left = len(every) - _MOST_DOUBTS
    told = every[:_MOST_DOUBTS]
    if left > 0:
        told.append(f"{plural(left, 'warning')} more: the CSV file has them all.")
    if not measurement.points:
        return Verdict(False, "Nothing was measured.", told)
    if measurement.failure or not all(
        is_trustworthy(list(p.warnings)) and not flaws(p) for p in _judged(measurement)
    ):
        return Verdict(False, "These numbers are not to be trusted.", told)
    if told:
        return Verdict(False, "Read the numbers with care.", told)
    return Verdict(True, "Nothing speaks against these numbers.", [])


def _doubts(measurement: Measurement) -> list[str]:
    found = list(measurement.warnings)
    if measurement.interrupted:
        found.append("The measurement was interrupted: points may be missing.")
    if measurement.failure:
        found.append(f"The measurement ended early: {measurement.failure}.")
    found += [
        f"resumed at {again.started} on another machine or version: {again.client.summary}, where"
        f" it began on {measurement.client.summary}"
        for again in measurement.resumed
        if again.client != measurement.client
    ]
    for point in _judged(measurement):
        found += [f"{point.id}: {warning}" for warning in doubts(point)]
        found += _unsupported(point, measurement.objective)
    return found


def _unsupported(point: Point, objective: Objective | None) -> list[str]:
    """Return what an objective is held against that too few calls support."""
    if objective is None:
        return []
    calls = point.latency_ms.count
    return [
        f"{point.id}: {figure} of {plural(calls, 'call')} is held against {objective.text};"
        f" it takes {count(needed_calls(figure))}: measure for longer"
        for figure in objective.unsupported(calls)
    ]


def _judged(measurement: Measurement) -> Sequence[Point]:
    """Return the points that the result rests on: a search also tries what must not hold."""
    objective = measurement.objective
    if measurement.capacity is None or objective is None:
        return measurement.points
    return [point for point in measurement.points if keeps(point, objective)]


def doubts(point: Point) -> list[str]:
    """Return the load tester's own warnings about a point, and what does not add up in it."""
    return [*point.warnings, *flaws(point)]


def flaws(point: Point) -> list[str]:
    """Return what does not add up in a point; an honest raw file has none."""
    found = []
    if point.wrong and not any("wrong" in warning for warning in point.warnings):
        found.append(f"{count(point.wrong)} of {plural(point.checked, 'checked answer')} wrong")
    if not any(warning.startswith((LOST, NO_ANSWER)) for warning in point.warnings):
        told = lost_text(point.failures, point.offered)
        found += [told] if told else []
    if point.unanswered:
        found.append(f"{plural(point.unanswered, 'call')} neither answered nor counted as failed")
    if point.latency_ms.count != point.good:
        found.append(
            f"{count(point.latency_ms.count)} latencies for {plural(point.good, 'good answer')}"
        )
    if not _is_ordered(point.latency_ms):
        found.append("the percentiles are out of order")
    answered = [window.answered for window in point.windows if window.answered is not None]
    if answered and abs(sum(answered) / point.seconds - point.good_rate) > 0.01 * point.good_rate:
        found.append(
            f"{number(point.good_rate)} good answers a second, where the windows have"
            f" {count(sum(answered))} in {number(point.seconds)} s"
        )
    return found + _against_histogram(point)


def _is_ordered(latency: Latency) -> bool:
    rising = [
        *(latency.p50, latency.p90, latency.p95),
        *(latency.p99, latency.p99_9, latency.max),
    ]
    known = [value for value in rising if value is not None]
    return known == sorted(known)


def _against_histogram(point: Point) -> list[str]:
    recorded = point.recorded()
    total = 0 if recorded is None else int(recorded.get_total_count())
    if total != point.latency_ms.count:
        return [
            f"the histogram holds {count(total)} latencies, the figures {point.latency_ms.count}"
        ]
    if recorded is None:
        return []
    for name, percentile in (("p50", 50.0), ("p90", 90.0), ("p99", 99.0)):
        told = point.latency_at(name)
        held = recorded.get_value_at_percentile(percentile) / 1e3
        if told is not None and abs(told - held) > _HISTOGRAM_SHARE * max(told, held):
            return [f"{name} is told as {ms(told)}, the histogram says {ms(held)}"]
    return []


def subject(measurement: Measurement) -> str:
    """Return what was measured, in one sentence."""
    server = measurement.server
    name = " ".join(part for part in (server.name, server.version) if part) or "A server"
    what = f" serving {server.model}" if server.model else ""
    points = measurement.points
    common = shared(points)
    detail = f": {common}" if common else ""
    called = {point.address for point in points} - {"", urlsplit(server.url).hostname}
    address = f" ({', '.join(sorted(called))})" if called else ""
    return printable(
        f"{name}{what} at {server.url}{address}, {plural(len(points), 'point')}{detail}."
    )


def best(points: Sequence[Point], objective: Objective | None) -> Point | None:
    """Return the highest load that kept the objective, or that was not too much where none is."""
    fit = [
        point
        for point in points
        if (keeps(point, objective) if objective else not point.is_saturated)
        and point.latency_ms.p99 is not None
    ]
    return max(fit, key=lambda point: point.load, default=None)


def findings(measurement: Measurement) -> list[tuple[str, str, str]]:
    """Return the few figures that matter most: each a name, a value, and what it is of."""
    points = measurement.points
    one_kind = len({point.series for point in points}) == 1
    return [
        *_capacity(measurement.capacity),
        *(_highest if one_kind else _range)(points, measurement.objective),
        *_lost(points),
    ]


def _capacity(found: Capacity | None) -> list[tuple[str, str, str]]:
    if found is None:
        return []
    value = "none" if found.rate is None else f"{number(found.rate)}/s"
    broken = f"; {number(found.broken_at)}/s breaks it" if found.broken_at else ""
    return [("Capacity found", value, printable(f"keeps {found.slo}{broken}"))]


def _highest(points: Sequence[Point], objective: Objective | None) -> list[tuple[str, str, str]]:
    top = best(points, objective)
    if top is None:
        reason = f"keeps {objective.text}" if objective else "stays below saturation"
        return [(f"Load that {reason}", "none", f"of {plural(len(points), 'point')}")]
    is_met = any(point.is_saturated for point in points)
    reason = "before saturation" if is_met else "tried, not saturated"
    if objective is not None:
        reason = f"with {objective.text}"
    return [
        (f"Highest load {reason}", top.load_text, f"{number(top.good_rate)} good answers a second"),
        (
            "p50 / p99 there",
            f"{number(top.latency_ms.p50)} / {ms(top.latency_ms.p99)}",
            f"slowest call {ms(top.latency_ms.max)}",
        ),
    ]


def _range(points: Sequence[Point], objective: Objective | None) -> list[tuple[str, str, str]]:
    found = []
    if objective is not None:
        kept = sum(keeps(point, objective) for point in points)
        found.append(
            (f"Points with {objective.text}", f"{kept} of {len(points)}", "and not saturated")
        )
    known = [(p.latency_ms.p99, name) for p, name in zip(points, labels(points), strict=True)]
    ordered = sorted((value, name) for value, name in known if value is not None)
    if ordered:
        (low, fast), (high, slow) = ordered[0], ordered[-1]
        found.append(("p99 from", ms(low), fast))
        found.append(("p99 to", ms(high), slow))
    return found


def _lost(points: Sequence[Point]) -> list[tuple[str, str, str]]:
    offered = sum(point.offered for point in points)
    if not offered:
        return []
    refused = sum(point.refused for point in points)
    failed = sum(point.failed for point in points)
    note = f"{count(refused)} refused, {count(failed)} failed of {plural(offered, 'call')}"
    if any(point.is_saturated for point in points):
        # A search for the capacity goes beyond it, and says nothing bad of the server by that.
        kept = [point for point in points if not point.is_saturated]
        lost = sum(point.refused + point.failed for point in kept)
        note += f", {count(lost)} of them where it was not saturated"
    return [("Refused or failed", share((refused + failed) / offered), note)]
