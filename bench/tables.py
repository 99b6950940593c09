"""Tables of what the benchmarks wrote: each run stands for itself."""

from dataclasses import dataclass

import rich.table

from bench.growth import BENCHES, fits_of, points_of
from bench.quantities import by_work, names_of, quantities, spreads_by_place
from bench.results import US, Results, Sample, Spread, ratios, spread


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
    for samples in quantities(results.samples):
        growth = samples[0].bench in BENCHES
        made.append(_growth_table(samples) if growth else _comparison(samples))
    return made


def _comparison(samples: list[Sample]) -> Table:
    first, names = samples[0], names_of(samples)
    to = US if US in names and len(names) > 1 else None
    rows = []
    for work, own in by_work(samples).items():
        cells = [_compared(own, who, None if who == to else to) for who in names]
        rows.append((str(work), *cells))
    what = "median (least..most)" + (f", ratio to {to} in the same round" if to else "")
    return Table(f"{first.bench}: {first.what} in {first.unit}, {what}", ("", *names), tuple(rows))


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
    places = spreads_by_place(samples)
    rows = tuple((_number(place), _told(found)) for place, found in places.items())
    return Table(
        f"{first.bench}: {first.what} in {first.unit}, median (least..most)",
        (axis, f"{first.what}, {first.unit}"),
        rows,
        tuple(fits_of(points_of(samples, first.bench, first.what), first.bench, first.unit)),
    )


def _told(found: Spread) -> str:
    return f"{_number(found.median)} ({_number(found.low)}..{_number(found.high)})"


def _number(value: float) -> str:
    """Return three digits, or all before the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
