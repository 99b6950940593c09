"""
All that is known of Headwise's speed, in one run: `make bench`.

    python -m bench.suite [--full] [--out DIRECTORY]

Against other servers and against the floors (bench/compare.py), and the engine against
PyTorch (bench/inprocess.py); with --full every shape and wire, and how time and memory
grow (bench/growth.py).  Samples are written as JSON, tables as Markdown, plots as SVG.
The first run installs the other servers, each in an environment of its own: several GB.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import compare, growth, inprocess
from bench.plots import write_plots
from bench.results import read
from bench.tables import markdown

Part = Callable[[list[str]], object]

PARTS: dict[str, Part] = {
    "compare": compare.main,
    "inprocess": inprocess.main,
    "growth": growth.main,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all parts, then write tables and plots."""
    parser = argparse.ArgumentParser(prog="python -m bench.suite", description=__doc__)
    parser.add_argument("--full", action="store_true", help="half an hour; else some 3 minutes")
    parser.add_argument("--out", type=Path, default=Path(".bench"), metavar="DIRECTORY")
    asked = parser.parse_args(argv)
    names = list(PARTS) if asked.full else ["compare", "inprocess"]
    tables = []
    for i, name in enumerate(names, start=1):
        print(f"\n[{i}/{len(names)}] {name}", flush=True)
        started = time.monotonic()
        file = asked.out / f"{name}.json"
        flags = {"compare": ["--full"] if asked.full else []}
        own = flags.get(name, [] if asked.full else ["--quick"])
        PARTS[name]([*own, "--out", str(file)])
        results = read(file)
        tables.append(markdown(results))
        write_plots(results, asked.out, name)
        print(f"[{i}/{len(names)}] {name}: {time.monotonic() - started:.0f} s", flush=True)
    report = asked.out / "report.md"
    report.write_text("\n".join(tables))
    print(f"\ntables: {report}; samples and plots: {asked.out}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
