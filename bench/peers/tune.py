"""What a peer's documentation leaves open, tried: each candidate in turn, round after round."""

import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.peers.check import Wrong
from bench.peers.peer import Peer, Tuning
from bench.servers import HOST
from loadtest.drive import closed_load
from loadtest.endpoint import Endpoint
from loadtest.plan import Plan
from loadtest.records import Records

ROUNDS = 3
SECONDS = 2.0
CLIENTS = 16
_WARM_UP_S = 0.5


def tune(peer: Peer, graph: Path, *, threads: int) -> Iterator[str]:
    """
    Give a line for each candidate: calls a second of many clients, and one client's median.

    Many clients send lengths 1..64, one client [1, 8], both in binary.  Ratios are of one round,
    and the median of the rounds is told: the machine changes from round to round.

    Raises:
        Unavailable: one cannot be started.
        Wrong: an answer's status is not 200.
    """
    lengths = np.random.default_rng(0).permutation(np.arange(1, 65))
    mixed = [peer.request("binary", 1, int(length), weights=False) for length in lengths]
    single = [peer.request("binary", 1, 8, weights=False)]
    rates: dict[Tuning, list[float]] = {tuning: [] for tuning in peer.candidates}
    medians: dict[Tuning, list[float]] = {tuning: [] for tuning in peer.candidates}
    for _ in range(ROUNDS):
        for tuning in peer.candidates:
            with peer.start(graph, threads, tuning) as running:
                rates[tuning].append(_load(peer, running.port, mixed, CLIENTS).rate)
                one = _load(peer, running.port, single, 1)
                medians[tuning].append(float(np.median(one.calls.latencies_s())) * 1e3)
    first = peer.candidates[0]
    for tuning in peer.candidates:
        chosen = " (chosen)" if tuning == peer.tuning else ""
        more = statistics.median(a / b for a, b in zip(rates[tuning], rates[first], strict=True))
        longer = statistics.median(
            a / b for a, b in zip(medians[tuning], medians[first], strict=True)
        )
        yield (
            f"{peer.name}, {tuning}{chosen}: {CLIENTS} clients"
            f" {statistics.median(rates[tuning]):.0f} calls/s, {more:.2f} of the first;"
            f" one client {statistics.median(medians[tuning]):.2f} ms, {longer:.2f} of the first"
        )


def _load(peer: Peer, port: int, requests: list[bytes], clients: int) -> Records:
    plan = Plan(seconds=SECONDS, warmup_s=_WARM_UP_S)
    records = closed_load(
        Endpoint("http", HOST, port), requests, clients=clients, plan=plan, keep_calls=True
    )
    if set(records.outcomes) != {200}:
        raise Wrong(f"{peer.name}: expected status 200 alone, got {dict(records.outcomes)}")
    return records
