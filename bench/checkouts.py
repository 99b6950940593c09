"""
One checkout against another, such as a worktree of an older commit, in turn.

    git worktree add ../before COMMIT
    python -m bench.checkouts ../before [--rounds N] [--seconds S] [--out FILE]

Both serve the same layer, each as its own exporter published it, with their default settings, in
this environment, and write their logs to files.  A ratio above 1 means that this checkout answers
more calls a second.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench import wrk
from bench.many_callers import publish
from bench.pairs import Pair, compare, parser, work_of
from bench.servers import headwise

PAIR: Final = Pair("checkouts", "this", "other", wanted=0.97)
WORKS: Final = (
    *(work_of((1, length), clients) for length in (1, 8) for clients in (1, 16, 64)),
    work_of((8, 128), 4),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both checkouts."""
    command = parser("python -m bench.checkouts", __doc__ or "", rounds=5)
    command.add_argument("other", type=Path, metavar="DIRECTORY", help="the other checkout")
    options = command.parse_args(argv)
    if not (options.other / "service" / "__main__.py").is_file():
        command.error(f"{options.other}: expected a checkout of Headwise")
    wrk.fetch()
    # An older server need not read what a newer exporter writes.
    ours, theirs = publish(), publish(options.other)
    with headwise(ours) as this, headwise(theirs, checkout=options.other) as other:
        compare(PAIR, (this, other), WORKS, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
