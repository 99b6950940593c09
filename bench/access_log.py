"""
What the access log costs: default settings against HEADWISE_LOG_LEVEL=warning, in turn.

    python -m bench.access_log [--rounds N] [--seconds S] [--out FILE]

Two servers of the same layer take turns under the same load (wrk, closed), forwards in one
round and backwards in the next; each writes its log to a file, as a container's does.  A
ratio is of two loads of one round, and the median of the rounds is printed.  First the cost
of a line by itself is timed, in this process.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from timeit import timeit
from typing import Final

from bench import wrk
from bench.many_callers import REPOSITORY, publish
from bench.pairs import Pair, compare, parser, work_of
from bench.servers import headwise
from service.host.malloc import keep_blocks
from service.logs import configure
from service.telemetry.access_log import AccessLog
from service.telemetry.request_record import RequestRecord

PAIR: Final = Pair("access_log", "default", "warning", wanted=0.97)
SHAPES: Final = ((1, 1), (1, 8))
CLIENTS: Final = (1, 16, 64)

_LINES: Final = 100
"""Timed at once: fewer than make the writer write early."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a line by itself, then both servers."""
    options = parser("python -m bench.access_log", __doc__ or "", rounds=10).parse_args(argv)
    wrk.fetch()
    publish()
    print(f"one line: {line_us():.2f} us on the event loop (wanted <= 3)", flush=True)
    works = [work_of(shape, clients) for shape in SHAPES for clients in CLIENTS]
    with headwise(REPOSITORY) as default, headwise(REPOSITORY, log_level="warning") as quiet:
        compare(PAIR, (default, quiet), works, options)
    return 0


def line_us() -> float:
    """Return what a request's record and line take of its caller's time: the median, in us."""
    keep_blocks()  # as the server has it
    with tempfile.TemporaryFile("w+") as file:
        log = configure("json", "info", file)
        access_log = AccessLog(log, names_keys=False)

        def write() -> None:
            record = RequestRecord(
                "POST", "/v2/models/{name}/infer", "0" * 32, time.monotonic(), None, 612, "mha"
            )
            record.version, record.rows, record.tokens = 1, 1, 1
            record.status, record.answer_bytes = 200, 3200
            access_log.write(record)

        taken = []
        for _ in range(100):
            log.writer.flush()
            taken.append(timeit(write, number=_LINES) / _LINES * 1e6)
        log.writer.close()
    return statistics.median(taken)


if __name__ == "__main__":
    sys.exit(main())
