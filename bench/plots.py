"""
Plots of what the benchmarks wrote, drawn as the load tester draws its own.

A comparison has a row for each candidate and work, a file for each wire, with and without
weights; what grows has its measured points and the fits over their own range.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from bench.fits import Points, Power, line, power, power_range
from bench.growth import BENCHES, LINEAR, points_of
from bench.quantities import by_work, names_of, quantities, spreads_by_place
from bench.results import US, Results, Sample, Spread, Work, ratios, spread
from loadtest.report import charts
from loadtest.report.charts import Axis, Frame, Line
from loadtest.report.markup import Markup
from loadtest.report.style import DRAWING_STYLE
from loadtest.report.svg import standalone
from loadtest.report.words import number

_WIDTH: Final = 760.0
_AXES: Final = {
    "S": "S, length of one sequence (tokens)",
    "B": "B, sequences in one run",
    "H": "H, heads (E fixed)",
    "E": "E, width (H fixed)",
    "B·H·S²": "B·H·S², attention weights",
    "artifacts": "artifacts served",
}
_STEPS: Final = 200
"""Points by which a straight line is drawn, which is a curve on logarithmic axes."""


def plots(results: Results) -> dict[str, Markup]:
    """Return, by name, the drawings of each quantity of each benchmark."""
    made = {}
    for samples in quantities(results.samples):
        first = samples[0]
        name = _slug(first.bench, first.what)
        if first.bench in BENCHES:
            made[name] = _growth_plot(name, samples)
            continue
        for (wire, weights), panel in _panels(samples).items():
            named = [wire, None if weights is None else f"with{'' if weights else 'out'} weights"]
            words = [part for part in named if part]
            key = _slug(name, *words)
            made[key] = _comparison_plot(key, panel, ", ".join(words))
    return made


def write_plots(results: Results, directory: Path, stem: str) -> list[Path]:
    """Write each plot as `<stem>-<benchmark>-<quantity>….svg`; return the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, drawn in plots(results).items():
        path = directory / f"{stem}-{name}.svg"
        path.write_text(standalone(drawn, DRAWING_STYLE))
        paths.append(path)
    return paths


def growth_lines(samples: Sequence[Sample]) -> dict[str, Line]:
    """
    Return, by what each shows, the measured points with their ranges and the fits.

    A fit is drawn over the range that it was found in, and no further.
    """
    first = samples[0]
    places = spreads_by_place(samples)
    measured = Line(
        "",
        [(place, found.median) for place, found in places.items()],
        "c3",
        joined=False,
        ranges=[(place, found.low, found.high) for place, found in places.items()],
    )
    points = points_of(samples, first.bench, first.what)
    fits = _fits(points, first) if len(points) >= 3 else []
    return {f"{first.what}, median and range of the rounds": measured, **dict(fits)}


def _growth_plot(name: str, samples: Sequence[Sample]) -> Markup:
    first = samples[0]
    letter = BENCHES[first.bench]
    is_log = _is_log(first)
    drawn = growth_lines(samples)
    ticks = () if letter == "B·H·S²" else [(p, f"{p:g}") for p in spreads_by_place(samples)]
    axis = "; ".join(part for part in (_AXES[letter], _held(samples)) if part)
    title = f"{first.bench}: {first.what} over {axis}"
    return charts.lines(
        Frame(name, _WIDTH, title, "; ".join(drawn)),
        Axis(axis, log=is_log, ticks=ticks),
        list(drawn.values()),
        upright=Axis(f"{first.what} ({first.unit})", log=is_log),
        legend=[(label, each.look) for label, each in drawn.items()],
    )


def _fits(points: Points, first: Sample) -> Iterator[tuple[str, Line]]:
    """Give each fit with its words."""
    letter = BENCHES[first.bench]
    if first.bench in LINEAR:
        yield _straight(points, letter, first)
    if not _is_log(first):
        return
    kept = power_range(points)
    laws = [(kept, "b")] if kept is not None else []
    end = power(points[-3:])
    if first.bench not in LINEAR and (kept is None or kept.high < end.high):
        laws.append((end, "slowest"))
    for law, look in laws:
        yield _law(law, letter, look)


def _straight(points: Points, letter: str, first: Sample) -> tuple[str, Line]:
    found = line(points)
    low, high = points[0][0], points[-1][0]
    shares = [i / _STEPS for i in range(_STEPS + 1)]
    if _is_log(first):  # evenly along a logarithmic axis
        places = [low * (high / low) ** share for share in shares]
    else:
        places = [low + (high - low) * share for share in shares]
    pairs = [(x, found.start + found.slope * x) for x in places]
    # A start below 0 has no place on a logarithmic axis.
    kept = [(x, y) for x, y in pairs if y > 0 or not _is_log(first)]
    label = f"{found.start:.3g} {first.unit} + {found.slope:.3g} {first.unit} · {letter}"
    return label, Line("", kept, "encode", dotted=False)


def _law(law: Power, letter: str, look: str) -> tuple[str, Line]:
    label = f"{letter}^{law.exponent:.2f} over {law.count} points"
    label += f", off by {law.residual:.0%} at most"
    return label, Line("", [(x, law.at(x)) for x in (law.low, law.high)], look, dotted=False)


def _is_log(first: Sample) -> bool:
    """Return whether both axes are logarithmic: not where a start is what matters."""
    return first.bench != "growth: artifacts"


def _held(samples: Sequence[Sample]) -> str:
    """Return what all samples have in common; "" for nothing."""
    works = {sample.work for sample in samples}
    shapes = [work.shape for work in works if work.shape is not None]
    shared = []
    for name, found in (
        ("B", {shape[0] for shape in shapes}),
        ("S", {shape[1] for shape in shapes}),
        ("H", {work.heads for work in works} - {None}),
        ("E", {work.width for work in works} - {None}),
    ):
        shared += [f"{name} = {value}" for value in found if len(found) == 1]
    if {work.weights for work in works} == {True}:
        shared.append("with weights")
    return ", ".join(shared)


def _panels(samples: Sequence[Sample]) -> dict[tuple[str | None, bool | None], list[Sample]]:
    """Return the samples of each wire, with and without weights."""
    found: dict[tuple[str | None, bool | None], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.work.wire, sample.work.weights), []).append(sample)
    return found


def _comparison_plot(name: str, samples: Sequence[Sample], panel: str) -> Markup:
    """
    Return a row of dots for each work and candidate: median, least and most.

    Times are drawn as ratios to Headwise's, since from shape to shape they differ a
    hundredfold and from one candidate to the next by a tenth.
    """
    first, names = samples[0], names_of(samples)
    as_ratio = first.unit in ("s", "ms", "us") and US in names and len(names) > 1
    rows = []
    for work, of_work in by_work(samples).items():
        for who in names:
            found = _spread(of_work, who, as_ratio=as_ratio)
            if found is None:
                continue
            look = "a" if who == US else "b"
            dots = [(found.low, "slowest"), (found.high, "slowest"), (found.median, look)]
            label = f"{_place(work)} {who}".strip()
            rows.append(charts.Spread(label, dots, number(found.median)))
    what = (
        f"{first.what}, ratio to {US} (above 1: slower)"
        if as_ratio
        else f"{first.what} ({first.unit}, logarithmic)"
    )
    title = ", ".join(part for part in (f"{first.bench}: {what}", panel) if part)
    return charts.spreads(
        Frame(name, _WIDTH, title, f"{title}; number of rows: {len(rows)}"),
        title,
        rows,
        [(US, "a"), ("others", "b"), ("least and most of the rounds", "slowest")],
        around_one=as_ratio,
    )


def _spread(samples: Sequence[Sample], who: str, *, as_ratio: bool) -> Spread | None:
    try:
        if as_ratio:
            return ratios(samples, who, US)
        return spread([sample.value for sample in samples if sample.who == who])
    except ValueError:  # not measured here
        return None


def _place(work: Work) -> str:
    parts = [
        None if work.shape is None else str(list(work.shape)),
        work.lengths,
        work.clients and f"{work.clients} client{'s' if work.clients > 1 else ''}",
    ]
    return " ".join(part for part in parts if part)


def _slug(*parts: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower())
