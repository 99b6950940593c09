"""
One checkout against another, such as a worktree of an older commit, in turn.

    git worktree add ../before COMMIT
    python -m bench.checkouts ../before [--rounds N] [--seconds S] [--out FILE]

Both serve the same layer with their default settings, in this environment, and write their
logs to files.  A ratio above 1 means that this checkout answers more calls a second.
"""

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from bench import wrk
from bench.many_callers import REPOSITORY, publish
from bench.pairs import Pair, in_turn, summary
from bench.results import Sample, Work, results_of
from bench.servers import headwise

PAIR: Final = Pair("checkouts", "this", "other", wanted=0.97)
LOADS: Final = (
    *(((1, length), clients) for length in (1, 8) for clients in (1, 16, 64)),
    ((8, 128), 4),
)
"""Shape of a call, and how many clients make it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print medians and ratios, and write all samples where that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.checkouts", description=__doc__)
    parser.add_argument("other", type=Path, metavar="DIRECTORY", help="the other checkout")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: 5)")
    parser.add_argument("--seconds", type=int, default=2, help="length of a turn (default: 2)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all samples there as JSON")
    options = parser.parse_args(argv)
    if not (options.other / "service" / "__main__.py").is_file():
        parser.error(f"{options.other}: expected a checkout of Headwise")
    for name in ("rounds", "seconds"):
        if (value := getattr(options, name)) < 1:
            parser.error(f"--{name}: expected a whole number from 1 on, got {value}")
    started = datetime.now(UTC)
    wrk.fetch()
    publish()
    samples: list[Sample] = []
    with headwise(REPOSITORY) as this, headwise(REPOSITORY, checkout=options.other) as other:
        for shape, clients in LOADS:
            work = Work(shape=shape, weights=False, wire="binary", clients=clients)
            rounds = in_turn(
                PAIR, (this, other), work, rounds=options.rounds, seconds=options.seconds
            )
            found = list(rounds)
            print(summary(PAIR, work, found), flush=True)
            samples += found
    if options.out is not None:
        results_of(samples, started=started).write(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
