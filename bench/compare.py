"""
Headwise against other servers, over HTTP: the same layer, the same load, in turn.

    python -m bench.compare [--full] [--peers NAMES] [--rounds N] [--seconds S] [--out FILE]

Each peer is started beside Headwise alone and takes turns with it, so that every ratio
is of two loads within a few seconds; what they cannot do is left out, and who cannot be
had is named with the reason.  The floors take turns, too: a bare echo of the same bytes
(bench/echo.py), and the engine's own run without any server.  The load is wrk's, in one
thread; its own rate against the echo stands beside the figures.
"""

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from bench import wrk
from bench.candidates import engine, product_gflops
from bench.inprocess import CONFIG
from bench.many_callers import GRAPH, REPOSITORY, publish
from bench.peers import messages
from bench.peers.catalogue import PEERS
from bench.peers.errors import Unavailable
from bench.peers.messages import Format
from bench.peers.peer import Peer, embeddings
from bench.results import US, Sample, Work, results_of
from bench.servers import HOST, echo, headwise
from bench.shared_request import shared_request
from bench.tables import markdown
from bench.turns import Candidate, embeddings_of
from service.host.cpu import cpu_budget

BENCH: Final = "compare"
ECHO: Final = "echo"
ENGINE: Final = "engine"
MIXED: Final = "1..64"

Load = Callable[[], wrk.Seen]


@dataclass(frozen=True)
class Task:
    """One load, and whom it is for."""

    work: Work
    peers: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What is measured, in how many rounds, and for how long each time."""

    tasks: tuple[Task, ...]
    rounds: int
    seconds: int


_SMALL: Final = Work(shape=(1, 8), wire="binary", weights=False)
_EVERYONE: Final = tuple(PEERS)

QUICK: Final = Plan(
    (
        Task(replace(_SMALL, clients=1), _EVERYONE),
        Task(replace(_SMALL, clients=16), _EVERYONE),
        Task(replace(_SMALL, shape=None, lengths=MIXED, clients=64), _EVERYONE),
        Task(replace(_SMALL, shape=(1, 128), wire="json", clients=16), _EVERYONE),
    ),
    rounds=2,
    seconds=1,
)


def _full() -> Iterator[Task]:
    for clients in (1, 4, 16, 64):
        for shape in ((1, 1), (1, 8), (1, 128)):
            yield Task(replace(_SMALL, shape=shape, clients=clients), _EVERYONE)
        yield Task(replace(_SMALL, shape=None, lengths=MIXED, clients=clients), _EVERYONE)
    for shape in ((1, 32), (8, 128), (1, 512), (4, 512), (1, 2048)):
        yield Task(replace(_SMALL, shape=shape, clients=4), ("plain", "triton"))
    for shape in ((1, 8), (1, 128)):
        yield Task(replace(_SMALL, shape=shape, wire="json", clients=16), _EVERYONE)
    for shape in ((1, 8), (1, 128), (8, 128)):
        yield Task(replace(_SMALL, shape=shape, weights=True, clients=4), ("plain", "triton"))
    for shape in ((8, 128), (4, 512)):
        yield Task(replace(_SMALL, shape=shape, wire="shared", clients=4), ())


FULL: Final = Plan(tuple(_full()), rounds=3, seconds=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and write all samples."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("--full", action="store_true", help="every shape and wire: some 25 minutes")
    parser.add_argument("--peers", metavar="NAMES", help=f"some of {','.join(PEERS)}; default: all")
    parser.add_argument("--rounds", type=int, help="turns of each (default: 2; 3 with --full)")
    parser.add_argument("--seconds", type=int, help="length of a turn (default: 1)")
    parser.add_argument("--out", type=Path, default=Path(".bench/compare.json"))
    asked = parser.parse_args(argv)
    names = asked.peers.split(",") if asked.peers else list(PEERS)
    if unknown := [name for name in names if name not in PEERS]:
        parser.error(f"--peers: expected some of {', '.join(PEERS)}, got {', '.join(unknown)}")
    for option in ("rounds", "seconds"):
        if (value := getattr(asked, option)) is not None and value < 1:
            parser.error(f"--{option}: expected a whole number from 1 on, got {value}")
    started = datetime.now(UTC)
    wrk.fetch()
    publish()
    plan = FULL if asked.full else QUICK
    plan = replace(plan, rounds=asked.rounds or plan.rounds, seconds=asked.seconds or plan.seconds)
    samples: list[Sample] = []
    missing: dict[str, str] = {}
    # No two rounds have one number: Headwise beside one peer is not Headwise beside another.
    rounds = itertools.count()
    _say_speed()
    samples += _floors(plan, rounds)
    for name in names:
        tasks = [task for task in plan.tasks if name in task.peers]
        try:
            samples += _against(PEERS[name], tasks, plan, rounds)
        except Unavailable as reason:
            missing[name] = str(reason)
            _say(f"{name}: not measured: {reason}")
    _say_speed()
    results = results_of(samples, started=started, missing=missing)
    results.write(asked.out)
    _say("\n" + markdown(results))
    _say(f"written: {asked.out}; plots: python -m bench.report {asked.out}")
    return 0


def _say_speed() -> None:
    """Say how fast the machine is now: it may have neighbours."""
    _say(f"machine: {product_gflops(cpu_budget().threads):.0f} GFLOP/s in one large product")


def _against(
    peer: Peer, tasks: Sequence[Task], plan: Plan, rounds: Iterator[int]
) -> Iterator[Sample]:
    """Give what peer and Headwise did, in turn."""
    peer.install(_say)
    with headwise(REPOSITORY) as ours, peer.start(GRAPH, cpu_budget().threads) as theirs:
        _say(f"{peer.name}: {peer.version}, ready after {theirs.start_s:.1f} s; {peer.tuning}")
        for task in tasks:
            if task.work.wire not in peer.formats or (task.work.weights and not peer.can_weights):
                _say(f"{peer.name}: has no {task.work}")
                continue
            loads = {
                US: _load(ours.port, _own_requests(task.work), task.work, plan),
                peer.name: _load(theirs.port, _requests(task.work, peer), task.work, plan),
            }
            yield from _in_turn(loads, task.work, itertools.islice(rounds, plan.rounds))
        yield Sample(BENCH, Work(), peer.name, 0, "memory", "MB", theirs.resident_mb())
        yield Sample(BENCH, Work(), peer.name, 0, "start", "s", theirs.start_s)
        yield Sample(BENCH, Work(), US, 0, "memory", "MB", ours.resident_mb())


def _floors(plan: Plan, rounds: Iterator[int]) -> Iterator[Sample]:
    """Give what the wire and the engine make by themselves, in turn with Headwise."""
    make = partial(engine, GRAPH, CONFIG, cpu_budget().threads)
    with (
        headwise(REPOSITORY, shared_memory=True) as ours,
        echo() as floor,
        Candidate(make) as alone,
        contextlib.ExitStack() as lent,
    ):
        for task in plan.tasks:
            work = task.work
            if work.shape is None or work.wire == "json":
                continue
            x = embeddings_of(work.shape, CONFIG.embed_dim)
            if work.wire == "shared":
                request = shared_request(ours.port, x, {"output": x.nbytes}, model="mha")
                requests = [lent.enter_context(request)]
                loads = {US: _load(ours.port, requests, work, plan)}
            else:
                requests = _own_requests(work)
                loads = {
                    US: _load(ours.port, requests, work, plan),
                    ECHO: _load(floor.port, requests, work, plan),
                }
            for i in itertools.islice(rounds, plan.rounds):
                yield from _in_turn(loads, work, [i])
                timing = alone.time(
                    x, weights=bool(work.weights), seconds=plan.seconds / 2, warm_up=2
                )
                yield Sample(BENCH, work, ENGINE, i, "rate", "1/s", 1 / timing.median_s)
                yield Sample(BENCH, work, ENGINE, i, "p50", "ms", timing.median_s * 1e3)


def _in_turn(loads: dict[str, Load], work: Work, rounds: Iterable[int]) -> Iterator[Sample]:
    """Give rate, p50 and p99 of each load in each round, in turn forwards and backwards."""
    for i in rounds:
        told = []
        for who in list(loads)[:: -1 if i % 2 else 1]:
            seen = loads[who]()
            told.append(f"{who} {seen.rate:.0f}/s p50 {seen.p50_ms:.2f} p99 {seen.p99_ms:.2f} ms")
            if seen.refused or seen.lost:
                raise Unavailable(f"{who}: {work}: {seen.refused} refused, {seen.lost} lost")
            yield Sample(BENCH, work, who, i, "rate", "1/s", seen.rate)
            yield Sample(BENCH, work, who, i, "p50", "ms", seen.p50_ms)
            yield Sample(BENCH, work, who, i, "p99", "ms", seen.p99_ms)
        _say(f"{work}: {'; '.join(told)}")


def _load(port: int, requests: Sequence[bytes], work: Work, plan: Plan) -> Load:
    """Return the load, once it has warmed the server up."""
    clients = work.clients or 1
    wrk.closed(HOST, port, requests, clients=clients, seconds=1)
    return partial(wrk.closed, HOST, port, requests, clients=clients, seconds=plan.seconds)


def _requests(work: Work, peer: Peer) -> list[bytes]:
    return [
        peer.request(_format(work), rows, length, weights=bool(work.weights))
        for rows, length in _shapes(work)
    ]


def _own_requests(work: Work) -> list[bytes]:
    """Return the same for Headwise, by the protocol."""
    path = f"/v2/models/mha{'-weights' if work.weights else ''}/infer"
    return [
        messages.oip_request(
            _format(work), path, embeddings(rows, length), weights=bool(work.weights)
        )
        for rows, length in _shapes(work)
    ]


def _shapes(work: Work) -> list[tuple[int, int]]:
    if work.shape is not None:
        return [work.shape]
    lengths = np.random.default_rng(0).permutation(np.arange(1, 65))
    return [(1, int(length)) for length in lengths]


def _format(work: Work) -> Format:
    return "json" if work.wire == "json" else "binary"


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
