"""
Tables and plots of what the benchmarks wrote.

    python -m bench.report FILE... [--plots DIRECTORY]

Each file is one run and stands for itself: no figure is set against one of another run.
A terminal gets tables drawn, anything else Markdown.  The plots are SVG, named after
file, benchmark and quantity.  Needs the extra `bench` (matplotlib) for plots alone.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import rich.table
from rich.console import Console

from bench.fits import Points, Power, line, power, power_range
from bench.growth import BENCHES, LINEAR, fits_of, place_of, points_of
from bench.results import Results, Sample, Spread, Work, ratios, read, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

US: Final = "headwise"
"""Whom all others are set against, where it took part."""

_COLOURS: Final = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C6D1F",
)
"""Okabe and Ito's, told apart by the colour-blind too, but yellow; the last for an eighth."""

_MARKERS: Final = "osD^vPX*"

_AXES: Final = {
    "S": "S, length of one sequence (tokens)",
    "B": "B, sequences in one run",
    "H": "H, heads (E fixed)",
    "E": "E, width (H fixed)",
    "B·H·S²": "B·H·S², attention weights",
    "artifacts": "artifacts served",
}

_STYLE: Final[dict[Any, Any]] = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.columnspacing": 1.2,
    "legend.handletextpad": 0.3,
    "figure.constrained_layout.use": True,
    # The same samples make the same bytes.
    "svg.hashsalt": "headwise",
}


@dataclass(frozen=True)
class Table:
    """A title, a head, rows of text, and sentences below."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """Return it in Markdown, the title as a heading of the third level."""
        lines = [self.head, ("---",) * len(self.head), *self.rows]
        table = "\n".join(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in lines)
        notes = "".join(f"\n- {note}" for note in self.notes)
        return f"### {self.title}\n\n{table}\n" + (f"{notes}\n" if notes else "")

    def drawn(self) -> rich.table.Table:
        """Return it as rich draws it."""
        table = rich.table.Table(
            title=self.title, caption="\n".join(self.notes) or None, title_justify="left"
        )
        for i, name in enumerate(self.head):
            table.add_column(name, justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def main(argv: list[str] | None = None) -> None:
    """Print the tables of each file, and write its plots where that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.report")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--plots", type=Path, metavar="DIRECTORY", help="write SVG plots there")
    arguments = parser.parse_args(argv)
    console = Console()
    for file in arguments.files:
        try:
            results = read(file)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        if console.is_terminal:
            console.print(heading(results), markup=False, highlight=False)
            for table in tables(results):
                console.print(table.drawn())
        else:
            print(markdown(results))
        if arguments.plots is not None:
            for path in write_plots(results, arguments.plots, file.stem):
                print(f"written: {path}", file=sys.stderr)


def markdown(results: Results) -> str:
    """Return where the figures are from, then every table."""
    return "\n".join([heading(results), *(table.markdown() for table in tables(results))])


def heading(results: Results) -> str:
    """Return one line on machine, versions and commit, and one on each who is missing."""
    machine = results.machine
    versions = ", ".join(f"{name} {number}" for name, number in results.versions.items())
    lines = [
        f"`{results.command}` ({results.started}, commit {results.commit}):"
        f" {machine.cores} cores of {machine.cpu}, {machine.memory_mb / 1024:.0f} GB,"
        f" {' '.join(machine.flags) or 'no vector extensions known'}; {versions}.",
        *(f"Not measured: {who} ({reason})." for who, reason in results.missing.items()),
    ]
    return "\n".join(lines) + "\n"


def tables(results: Results) -> list[Table]:
    """Return a table for each quantity of each benchmark, in the order of the samples."""
    made = []
    for samples in _quantities(results.samples):
        growth = samples[0].bench in BENCHES
        made.append(_growth_table(samples) if growth else _comparison(samples))
    return made


def plots(results: Results) -> "dict[str, Figure]":
    """Return, by name, a figure for each quantity of each benchmark."""
    import matplotlib

    made = {}
    with matplotlib.rc_context(_STYLE):
        for samples in _quantities(results.samples):
            first = samples[0]
            name = re.sub(r"[^a-z0-9]+", "-", f"{first.bench} {first.what}".lower())
            draw = _growth_plot if first.bench in BENCHES else _comparison_plot
            made[name] = draw(samples)
    return made


def write_plots(results: Results, directory: Path, stem: str) -> list[Path]:
    """Write each plot as `<stem>-<benchmark>-<quantity>.svg`; return the paths."""
    import matplotlib

    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in plots(results).items():
        path = directory / f"{stem}-{name}.svg"
        with matplotlib.rc_context(_STYLE):
            figure.savefig(path, metadata={"Date": None})
        paths.append(path)
    return paths


def _quantities(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of one benchmark and quantity together."""
    parts: dict[tuple[str, str, str], list[Sample]] = {}
    for sample in samples:
        parts.setdefault((sample.bench, sample.what, sample.unit), []).append(sample)
    return list(parts.values())


def _comparison(samples: list[Sample]) -> Table:
    first, whos = samples[0], _whos(samples)
    to = US if US in whos and len(whos) > 1 else None
    rows = []
    for work, own in _by_work(samples).items():
        cells = [_compared(own, who, None if who == to else to) for who in whos]
        rows.append((str(work), *cells))
    what = "median (least..most)" + (f", ratio to {to} in the same round" if to else "")
    return Table(f"{first.bench}: {first.what} in {first.unit}, {what}", ("", *whos), tuple(rows))


def _compared(samples: list[Sample], who: str, to: str | None) -> str:
    values = [sample.value for sample in samples if sample.who == who]
    if not values:
        return "-"
    found = _told(spread(values))
    if to is None or to not in {sample.who for sample in samples}:
        return found
    try:
        return f"{found}, {ratios(samples, who, to).median:.2f}x"
    except ValueError:  # never in the same round: nothing that could be set against another
        return found


def _growth_table(samples: list[Sample]) -> Table:
    first = samples[0]
    axis = BENCHES[first.bench]
    spreads = _spreads(samples)
    rows = tuple((_number(place), _told(found)) for place, found in spreads.items())
    return Table(
        f"{first.bench}: {first.what} in {first.unit}, median (least..most)",
        (axis, f"{first.what}, {first.unit}"),
        rows,
        tuple(fits_of(points_of(samples, first.bench, first.what), first.bench, first.unit)),
    )


def _spreads(samples: list[Sample]) -> dict[float, Spread]:
    """Return the spread at each place of the axis, ascending."""
    seen: dict[float, list[float]] = {}
    for sample in samples:
        seen.setdefault(place_of(sample.work, sample.bench), []).append(sample.value)
    return {place: spread(values) for place, values in sorted(seen.items())}


def _growth_plot(samples: list[Sample]) -> "Figure":
    """Points with their spread and the fitted line over its range, on the axes where it is one."""
    first = samples[0]
    axis = BENCHES[first.bench]
    is_power = first.bench != "growth: artifacts"
    figure, axes = _figure(1)
    ax = axes[0]
    spreads = _spreads(samples)
    places = list(spreads)
    medians = [found.median for found in spreads.values()]
    _dots(ax, places, list(spreads.values()), 0, f"{first.what}, median and range of the rounds")
    points = list(zip(map(float, places), medians, strict=True))
    if len(points) >= 3:
        for draw in _fitted(points, axis, first, is_power=is_power):
            draw(ax)
    if is_power:
        ax.set_xscale("log", base=2 if axis != "B·H·S²" else 10)
        ax.set_yscale("log")
        _plain_numbers(ax.yaxis)
        if axis != "B·H·S²":
            ax.set_xticks(places, [f"{place:g}" for place in places])
            ax.minorticks_off()
    else:
        ax.set_xticks(places, [f"{place:g}" for place in places])
        ax.set_ylim(bottom=0)
    ax.set_xlabel(_AXES[axis])
    ax.set_ylabel(f"{first.what} ({first.unit})")
    ax.set_title(f"{first.bench.removeprefix('growth: ').capitalize()}: {_held(samples)}")
    ax.legend(loc="upper left")
    return figure


def _fitted(
    points: Points, axis: str, first: Sample, *, is_power: bool
) -> "Iterator[Callable[[Axes], object]]":
    """Yield what draws each fit."""
    if not is_power or first.bench in LINEAR:
        found = line(points)
        low, high = points[0][0], points[-1][0]
        places = [low + (high - low) * i / 200 for i in range(201)]
        if is_power:  # evenly along a logarithmic axis
            places = [low * (high / low) ** (i / 200) for i in range(201)]
        label = f"{found.start:.3g} {first.unit} + {found.slope:.3g} {first.unit} · {axis}"
        pairs = [(x, found.start + found.slope * x) for x in places]
        # A start below 0 has no place on a logarithmic axis.
        pairs = [(x, y) for x, y in pairs if y > 0 or not is_power]
        yield lambda ax: ax.plot(*zip(*pairs, strict=True), color=_COLOURS[2], label=label)
    if not is_power:
        return
    kept = power_range(points)
    laws = [(kept, "-", 1)] if kept is not None else []
    end = power(points[-3:])
    if first.bench not in LINEAR and (kept is None or kept.high < end.high):
        laws.append((end, "--", 3))
    for law, style, colour in laws:
        yield _drawn_law(law, axis, style, _COLOURS[colour])


def _drawn_law(law: Power, axis: str, style: str, colour: str) -> "Callable[[Axes], object]":
    label = f"{axis}^{law.exponent:.2f} over {law.count} points, off by {law.residual:.0%} at most"
    places = [law.low, law.high]
    values = [law.at(x) for x in places]
    return lambda ax: ax.plot(places, values, style, color=colour, linewidth=2, label=label)


def _held(samples: list[Sample]) -> str:
    """Return what all samples have in common."""
    works = {sample.work for sample in samples}
    shapes = [work.shape for work in works if work.shape is not None]
    told = []
    for name, found in (
        ("B", {shape[0] for shape in shapes}),
        ("S", {shape[1] for shape in shapes}),
        ("H", {work.heads for work in works} - {None}),
        ("E", {work.width for work in works} - {None}),
    ):
        told += [f"{name} = {value}" for value in found if len(found) == 1]
    weights = {work.weights for work in works}
    if weights == {True}:
        told.append("with weights")
    return ", ".join(told) or f"{samples[0].what}"


def _comparison_plot(samples: list[Sample]) -> "Figure":
    """
    Dots with their spread: work along the axis, a panel for each wire, with and without weights.

    Times are drawn as ratios to Headwise's, since from shape to shape they differ a
    hundredfold and from one candidate to the next by a tenth.
    """
    first, whos = samples[0], _whos(samples)
    is_time = first.unit in ("s", "ms", "us") and US in whos and len(whos) > 1
    panels: dict[tuple[str | None, bool | None], list[Sample]] = {}
    for sample in samples:
        panels.setdefault((sample.work.wire, sample.work.weights), []).append(sample)
    widest = max(len(_by_work(own)) for own in panels.values())
    figure, axes = _figure(len(panels), width=max(8.0, 1.1 * widest + 2))
    for ax, ((wire, weights), own) in zip(axes, panels.items(), strict=True):
        works = _by_work(own)
        for i, who in enumerate(whos):
            at, found = [], []
            for place, of_work in enumerate(works.values()):
                one = _drawn_spread(of_work, who, as_ratio=is_time)
                if one is not None:
                    at.append(place + 0.7 * ((i + 0.5) / len(whos) - 0.5))
                    found.append(one)
            _dots(ax, at, found, i, who)
        ax.set_xticks(range(len(works)), [_tick(work) for work in works])
        ax.set_xlim(-0.5, len(works) - 0.5)
        ax.grid(visible=False, axis="x")
        for place in range(1, len(works)):
            ax.axvline(place - 0.5, color="#EEEEEE", linewidth=1, zorder=0)
        if is_time:
            ax.axhline(1, color=_COLOURS[0], linewidth=1, zorder=1)
        if first.unit == "%":
            ax.set_ylim(bottom=0)
        else:
            ax.set_yscale("log")
            _plain_numbers(ax.yaxis)
        ax.set_ylabel(
            f"{first.what}, ratio to {US}\n(above 1: slower)"
            if is_time
            else f"{first.what} ({first.unit})"
        )
        told = [wire, None if weights is None else f"with{'' if weights else 'out'} weights"]
        ax.set_title(", ".join(part for part in told if part) or first.bench, loc="left")
    axes[-1].set_xlabel("[rows, length]")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(5, len(labels)))
    return figure


def _drawn_spread(samples: list[Sample], who: str, *, as_ratio: bool) -> Spread | None:
    try:
        if as_ratio:
            return ratios(samples, who, US)
        return spread([sample.value for sample in samples if sample.who == who])
    except ValueError:  # not measured here
        return None


def _figure(panels: int, width: float = 8.0) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 1.0 + 4.0 * panels))
    axes = figure.subplots(panels, 1, squeeze=False)
    return figure, list(axes[:, 0])


def _dots(ax: "Axes", at: Sequence[float], found: list[Spread], i: int, label: str) -> None:
    medians = [one.median for one in found]
    below = [one.median - one.low for one in found]
    above = [one.high - one.median for one in found]
    ax.errorbar(
        at,
        medians,
        yerr=[below, above],
        # A ninth has the first one's colour, and another mark.
        fmt=_MARKERS[(i + i // len(_COLOURS)) % len(_MARKERS)],
        color=_COLOURS[i % len(_COLOURS)],
        markersize=6,
        capsize=2,
        elinewidth=1,
        label=label,
        zorder=3,
    )


def _plain_numbers(axis: object) -> None:
    """Write 0.5 and 200 on a logarithmic axis, not powers of ten."""
    from matplotlib.axis import Axis
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if isinstance(axis, Axis):
        axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _tick(work: Work) -> str:
    parts = [
        None if work.shape is None else str(list(work.shape)),
        work.lengths,
        work.clients and f"{work.clients} client{'s' if work.clients > 1 else ''}",
    ]
    return "\n".join(part for part in parts if part)


def _whos(samples: list[Sample]) -> list[str]:
    """Return everybody once, ourselves first."""
    found = list(dict.fromkeys(sample.who for sample in samples))
    return sorted(found, key=lambda who: who != US)


def _by_work(samples: list[Sample]) -> dict[Work, list[Sample]]:
    parts: dict[Work, list[Sample]] = {}
    for sample in samples:
        parts.setdefault(sample.work, []).append(sample)
    return parts


def _told(found: Spread) -> str:
    return f"{_number(found.median)} ({_number(found.low)}..{_number(found.high)})"


def _number(value: float) -> str:
    """Return three digits, or all before the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
