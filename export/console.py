"""What the exporter shows: how far it is, how near the answers came, and where they were proven."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from service.contract import FP32_TOLERANCE, ParityRow

# Names of files and functions are shown as they are: `mine:x:` is no emoji.
out = Console(emoji=False)
err = Console(stderr=True, emoji=False)

_LONG_S = 5.0
"""A proof that takes longer is told of beforehand."""


@contextmanager
def progress(task: str) -> Iterator[Callable[[object, float], None]]:
    """Give what `pass_gate` calls; show a bar on a terminal, and everywhere how long it takes."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    begun = time.monotonic()

    def advance(cell: object, share: float) -> None:
        nonlocal begun
        if share == 0:
            begun = time.monotonic()
        elif cell is None:
            seconds = (time.monotonic() - begun) * (1 - share) / share
            if seconds >= _LONG_S:
                err.print(f"{task} takes about {_rounded(seconds)}", markup=False)
        shown.update(bar, completed=share)

    with Progress(*columns, console=err) as shown:
        bar = shown.add_task(task, total=1.0)
        yield advance


def _rounded(seconds: float) -> str:
    if seconds < 90:
        return f"{5 * math.ceil(seconds / 5)} s"
    return f"{math.ceil(seconds / 60)} minutes"


def print_parity(rows: tuple[ParityRow, ...]) -> None:
    """Print the largest difference from each reference."""
    table = Table(title=f"largest differences (allowed {FP32_TOLERANCE:g})")
    table.add_column("against")
    for column in ("checks", "output, relative", "weights, absolute"):
        table.add_column(column, justify="right")
    for reference in dict.fromkeys(row.reference for row in rows):
        checks = [row for row in rows if row.reference == reference]
        table.add_row(
            reference,
            str(len(checks)),
            f"{max(row.output_error for row in checks):.2e}",
            f"{max(row.weights_error or 0.0 for row in checks):.2e}",
        )
    out.print(table)
    references = {row.reference.split()[0] for row in rows}
    known = [f"{name}: {words}" for name, words in _REFERENCES.items() if name in references]
    out.print("; ".join(known), highlight=False, markup=False)


_REFERENCES = {
    "formula": "float64 numpy",
    "layer": "the PyTorch layer as exported",
    "torch": "torch.nn.MultiheadAttention",
    "module": "the module that came with the weights",
    "alone": "each sequence of a batch by itself",
    "check": "expected answers of a file",
}


def proof(proven_on: Mapping[str, str | int], versions: Mapping[str, str], error: float) -> str:
    """Say where a proof ran and how near it came to the bound."""
    if not proven_on:
        return f"not recorded; largest difference {error:.1e}"
    return (
        f"{proven_on['cpu']} ({proven_on['instructions']}), {proven_on['threads']} threads,"
        f" onnxruntime {versions.get('onnxruntime', 'unknown')}; largest difference {error:.1e}"
    )
