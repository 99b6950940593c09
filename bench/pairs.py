"""Two servers under the same load, in turn: rates, latencies, and ratios within each round."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from bench import wrk
from bench.many_callers import infer_request
from bench.results import Sample, Work, ratios, results_of, spread
from bench.servers import HOST, Peer


@dataclass(frozen=True)
class Pair:
    """What is compared with what, in which benchmark; ratios are of the first to the second."""

    bench: str
    first: str
    second: str
    wanted: float
    """Of the second's calls a second."""


def parser(prog: str, description: str, *, rounds: int) -> argparse.ArgumentParser:
    """Return the command line of a comparison: `--rounds`, `--seconds` and `--out`."""
    options = argparse.ArgumentParser(prog=prog, description=description)
    options.add_argument(
        "--rounds", type=_positive, default=rounds, help=f"turns of each (default: {rounds})"
    )
    options.add_argument(
        "--seconds", type=_positive, default=2, help="length of a turn (default: 2)"
    )
    options.add_argument("--out", type=Path, metavar="FILE", help="write all samples there as JSON")
    return options


def compare(
    pair: Pair, peers: tuple[Peer, Peer], works: Iterable[Work], options: argparse.Namespace
) -> None:
    """Measure, print medians and ratios, and write all samples where that is asked for."""
    started = datetime.now(UTC)
    samples: list[Sample] = []
    for work in works:
        turns = in_turn(pair, peers, work, rounds=options.rounds, seconds=options.seconds)
        found = list(turns)
        print(summary(pair, work, found), flush=True)
        samples += found
    if options.out is not None:
        results_of(samples, started=started).write(options.out)


def work_of(shape: tuple[int, int], clients: int) -> Work:
    """Return calls of that shape in binary, without weights, from so many clients."""
    return Work(shape=shape, weights=False, wire="binary", clients=clients)


def in_turn(
    pair: Pair, peers: tuple[Peer, Peer], work: Work, *, rounds: int, seconds: float
) -> Iterator[Sample]:
    """
    Give calls a second, p50 and p99 of each server in each round, after a warm-up of each.

    Every other round goes backwards, so that none is always the first.
    """
    rows, length = work.shape or (1, 1)
    requests, clients = [infer_request(rows, length)], work.clients or 1
    load = partial(wrk.closed, HOST, requests=requests, clients=clients)
    named = list(zip((pair.first, pair.second), peers, strict=True))
    for peer in peers:
        load(port=peer.port, seconds=1)
    for i in range(rounds):
        for name, peer in named[:: -1 if i % 2 else 1]:
            result = load(port=peer.port, seconds=seconds)
            if result.refused or result.lost:
                raise RuntimeError(f"{name}: {result.refused} refused, {result.lost} lost")
            yield Sample(pair.bench, work, name, i, "rate", "1/s", result.rate)
            yield Sample(pair.bench, work, name, i, "p50", "ms", result.p50_ms)
            yield Sample(pair.bench, work, name, i, "p99", "ms", result.p99_ms)


def summary(pair: Pair, work: Work, samples: Sequence[Sample]) -> str:
    """Return one line: the medians of both, and the median ratio with its range."""
    parts = []
    for quantity in ("rate", "p50", "p99"):
        found = [sample for sample in samples if sample.what == quantity]
        ratio = ratios(found, pair.first, pair.second)
        first, second = (
            spread([sample.value for sample in found if sample.who == who]).median
            for who in (pair.first, pair.second)
        )
        unit = "calls/s" if quantity == "rate" else f"ms {quantity}"
        digits = 0 if quantity == "rate" else 2
        wanted = f", wanted >= {pair.wanted}" if quantity == "rate" else ""
        parts.append(
            f"{first:.{digits}f} against {second:.{digits}f} {unit},"
            f" ratio {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}{wanted})"
        )
    return f"{work}: {'; '.join(parts)}"


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text}")
    return int(text)
