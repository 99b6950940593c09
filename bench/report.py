"""
Tables and plots of what the benchmarks wrote.

    python -m bench.report FILE... [--plots DIRECTORY]

Each file is one run and stands for itself: no figure is set against one of another run.
A terminal gets tables drawn, anything else Markdown.  The plots are SVG, named after
file, benchmark and quantity.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from bench.plots import write_plots
from bench.results import read
from bench.tables import heading, markdown, tables


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


if __name__ == "__main__":
    main()
