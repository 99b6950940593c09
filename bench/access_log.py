"""
What the access log costs: default settings against HEADWISE_LOG_LEVEL=warning, in turn.

    python -m bench.access_log [--rounds N] [--seconds S] [--out FILE]

Two servers of the same layer take turns under the same load (wrk, closed), forwards in one
round and backwards in the next; each writes its log to a file, as a container's does.  A
ratio is of two loads of one round, and the median of the rounds is printed.  First the cost
of a line by itself is timed, in this process.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Final

from bench import wrk
from bench.many_callers import REPOSITORY, infer_request, publish
from bench.results import Sample, Work, ratios, results_of, spread
from bench.servers import HOST, Peer, headwise
from service.host.malloc import keep_blocks
from service.logs import configure
from service.telemetry.access_log import AccessLog
from service.telemetry.request_record import RequestRecord

BENCH: Final = "access_log"
DEFAULT: Final = "default"
WARNING: Final = "warning"
SHAPES: Final = ((1, 1), (1, 8))
CLIENTS: Final = (1, 16, 64)
WANTED: Final = 0.97
"""Of the calls a second without the access log."""

_LINES: Final = 100
"""Timed at once: fewer than make the writer write early."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print medians and ratios, and write all samples where that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.access_log", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each (default: 10)")
    parser.add_argument("--seconds", type=int, default=2, help="length of a turn (default: 2)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all samples there as JSON")
    options = parser.parse_args(argv)
    for name in ("rounds", "seconds"):
        if (value := getattr(options, name)) < 1:
            parser.error(f"--{name}: expected a whole number from 1 on, got {value}")
    started = datetime.now(UTC)
    wrk.fetch()
    publish()
    print(f"one line: {line_us():.2f} us on the event loop (wanted <= 3)", flush=True)
    samples: list[Sample] = []
    with headwise(REPOSITORY) as default, headwise(REPOSITORY, log_level="warning") as quiet:
        for shape in SHAPES:
            for clients in CLIENTS:
                work = Work(shape=shape, weights=False, wire="binary", clients=clients)
                found = list(in_turn({DEFAULT: default, WARNING: quiet}, work, options))
                print(summary(work, found), flush=True)
                samples += found
    if options.out is not None:
        results_of(samples, started=started).write(options.out)
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


def in_turn(peers: dict[str, Peer], work: Work, options: argparse.Namespace) -> Iterator[Sample]:
    """Give calls a second, p50 and p99 of each server in each round, after a warm-up of each."""
    rows, length = work.shape or (1, 1)
    requests, clients = [infer_request(rows, length)], work.clients or 1
    load = partial(wrk.closed, HOST, requests=requests, clients=clients)
    for peer in peers.values():
        load(port=peer.port, seconds=1)
    for i in range(options.rounds):
        for who in list(peers)[:: -1 if i % 2 else 1]:
            result = load(port=peers[who].port, seconds=options.seconds)
            if result.refused or result.lost:
                raise RuntimeError(f"{who}: {result.refused} refused, {result.lost} lost")
            yield Sample(BENCH, work, who, i, "rate", "1/s", result.rate)
            yield Sample(BENCH, work, who, i, "p50", "ms", result.p50_ms)
            yield Sample(BENCH, work, who, i, "p99", "ms", result.p99_ms)


def summary(work: Work, samples: Sequence[Sample]) -> str:
    """Return one line: both rates, and default over warning for each quantity."""
    parts = []
    for what in ("rate", "p50", "p99"):
        of = [sample for sample in samples if sample.what == what]
        ratio = ratios(of, DEFAULT, WARNING)
        medians = {
            who: spread([sample.value for sample in of if sample.who == who]).median
            for who in (DEFAULT, WARNING)
        }
        unit = "calls/s" if what == "rate" else f"ms {what}"
        digits = 0 if what == "rate" else 2
        wanted = f", wanted >= {WANTED}" if what == "rate" else ""
        parts.append(
            f"{medians[DEFAULT]:.{digits}f} against {medians[WARNING]:.{digits}f} {unit},"
            f" ratio {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}{wanted})"
        )
    return f"{work}: {'; '.join(parts)}"


if __name__ == "__main__":
    sys.exit(main())
