"""The load tester's memory does not grow with the number of calls."""

import gc
import tracemalloc
from array import array

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram

from loadtest.calls import Calls
from loadtest.connection import Connection
from loadtest.drive import closed_load
from loadtest.histogram import Histogram
from loadtest.plan import Live, Plan
from loadtest.records import Records
from loadtest.summary import PERCENTILES, figures_of
from tests.loadtest.test_drive import prepare
from tests.support.load_stub import Stub

RATE = 2000
CHUNK = 2000
GROWTH_BYTES = 512 * 1024
"""What a million calls more may cost: the buckets of longer windows, no calls."""
TIMING = b"decode;dur=0.04, queue;dur=0.1, compute;dur=0.9, encode;dur=0.05, total;dur=1.2"


class Feed:
    """A load of 2 000 calls a second for two hours, as the loop hands calls on."""

    def __init__(self) -> None:
        self.records = Records(1.0, 7200.0)
        self._random = np.random.default_rng(0)
        self._made = 0

    def calls(self, number: int) -> None:
        """Fold so many calls more, among them refusals with words of their own."""
        for first in range(self._made, self._made + number, CHUNK):
            due = 1 + (first + np.arange(CHUNK)) / RATE
            done = due + self._random.gamma(4, 0.001, CHUNK)
            outcome = np.where(self._random.random(CHUNK) < 0.01, 429, 200).astype(np.int16)
            calls = Calls()
            for name in ("due", "sent"):
                getattr(calls, name).frombytes(due.tobytes())
            for name in ("done", "read"):
                getattr(calls, name).frombytes(done.tobytes())
            calls.total_s.frombytes((done - due).tobytes())
            calls.outcome.frombytes(outcome.tobytes())
            for at in range(0, CHUNK, 50):
                self.records.add_timing(TIMING)
                self.records.add_code(f"code-{first + at}")
            self.records.fold(calls, array("d", (done - due).tobytes()))
        self._made += number


@pytest.mark.fault("F8")
def test_memory_is_the_same_after_a_hundred_thousand_calls_and_after_a_million() -> None:
    """Whatever they are answered with; the figures take no more either."""
    feed = Feed()
    tracemalloc.start()
    try:
        feed.calls(100_000)
        early, _ = tracemalloc.get_traced_memory()
        feed.calls(900_000)
        late, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    found = figures_of(feed.records)
    assert found["offered"] == 1_000_000
    assert late - early < GROWTH_BYTES
    assert len(found["windows"]) <= 60
    assert len(found["codes"]) <= 101
    assert len(feed.records.calls) == 0


@pytest.mark.fault("F8")
def test_folded_in_parts_or_at_once_the_figures_are_the_same() -> None:
    """And those of the calls themselves, to a thousandth."""
    random = np.random.default_rng(1)
    due = 1 + np.sort(random.random(20_000)) * 30
    took = random.lognormal(-5, 1, due.size)
    rows = list(zip(due.tolist(), (due + took).tolist(), strict=True))
    rows.sort(key=lambda row: row[1])

    def folded(size: int) -> Records:
        records = Records(1.0, 30.0)
        records.seconds = 30.0
        for first in range(0, len(rows), size):
            calls = Calls()
            for begun, done in rows[first : first + size]:
                calls.add(begun, begun, done, done, float("nan"), 200)
            records.fold(calls, array("d"))
        return records

    parts, whole = figures_of(folded(333)), figures_of(folded(len(rows)))
    assert parts == whole
    exact = np.sort(took) * 1e3
    for name, share in PERCENTILES.items():
        rank = max(1, int(share * due.size / 100 + 0.5))
        assert whole["latency_ms"][name] == pytest.approx(exact[rank - 1], rel=1e-3)
    assert whole["latency_ms"]["mean"] == pytest.approx(exact.mean(), rel=1e-3)
    assert whole["latency_ms"]["max"] == pytest.approx(exact[-1], rel=1e-3)
    for window in whole["windows"]:
        inside = (due >= 1 + window["at_s"]) & (due < 1 + window["at_s"] + window["seconds"])
        assert window["count"] == inside.sum()
        came = due + took - 1
        answered = (came >= window["at_s"]) & (came < window["at_s"] + window["seconds"])
        assert window["answered"] == answered.sum()


@pytest.mark.fault("F8")
def test_connections_that_end_leave_nothing_behind() -> None:
    """While a load runs, nothing collects what refers to itself."""
    alive: list[int] = []

    def count(live: Live) -> bool:
        assert not gc.isenabled()
        alive.append(sum(isinstance(one, Connection) for one in gc.get_objects()))
        return len(alive) < 4

    with Stub(closes=True, refuse=3) as stub:
        endpoint, requests, _ = prepare(stub.url)
        records = closed_load(
            endpoint, requests, clients=2, plan=Plan(seconds=3600, warmup_s=0), watch=count
        )

    assert records.offered > 20
    assert max(alive) <= 4


@pytest.mark.parametrize("us", [0, 1, 2047, 2048, 2049, 123_456, 3_599_999_999, 10**12])
def test_bucket_is_that_of_an_hdr_histogram(us: int) -> None:
    """What the raw file holds is read by whoever reads those."""
    made = Histogram()
    made.add(np.array([us / 1e6]))
    known = HdrHistogram(1, 3_600_000_000, 3)
    known.record_value(min(us, 3_600_000_000))

    assert made.encode() == known.encode().decode()
