"""The load tester's generator against servers that answer, refuse, drop, stall and die."""

import os
import socket
import ssl
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from loadtest import oip
from loadtest.calls import CONNECTION_LOST, INTERRUPTED, NOT_SENT, TIMED_OUT
from loadtest.drive import closed_load, default_connections, open_load
from loadtest.endpoint import Endpoint
from loadtest.errors import Unreachable, UsageWrong
from loadtest.formats import encode
from loadtest.plan import Live, Plan
from loadtest.records import Records
from loadtest.summary import figures_of
from loadtest.target import discover
from loadtest.work import Tensors, Work, draw_tensors
from tests.support.load_stub import Stub

AT_ONCE = Plan(count=40, warmup_s=0.0, timeout_s=20.0)


def prepare(
    url: str, *, shape: tuple[str, str] = ("1", "8"), count: int = 3
) -> tuple[Endpoint, list[bytes], list[Tensors]]:
    """Return where calls go, the calls, and what they hold."""
    endpoint = Endpoint.parse(url)
    target = discover(endpoint, model=None)
    work = Work(*shape)
    tensors = draw_tensors(work, target.inputs, count, most_bytes=2**26, seed=0)
    messages = [encode(target, work, one) for one in tensors]
    return endpoint, [endpoint.post_bytes(m.path, m.body, m.headers) for m in messages], tensors


def outcomes(records: Records) -> Counter[int]:
    """Return how many calls ended how."""
    return records.outcomes


def test_closed_load_makes_as_many_calls_as_were_asked_for() -> None:
    """Each is answered once, by whichever client."""
    with Stub() as stub:
        endpoint, requests, _ = prepare(stub.url)

        records = closed_load(
            endpoint,
            requests,
            clients=3,
            plan=AT_ONCE,
            keep_calls=True,
        )

    assert outcomes(records) == {200: 40}
    assert list(records.calls.due) == list(records.calls.sent)
    assert (records.calls.latencies_s() > 0).all()


def test_open_load_is_due_as_arithmetic_says_whatever_the_server_does() -> None:
    """A server that is too slow by far delays no call's due time."""
    with Stub(delays_ms=[30]) as stub:
        endpoint, requests, _ = prepare(stub.url)

        records = open_load(
            endpoint,
            requests,
            rate=400,
            arrivals="constant",
            connections=2,
            plan=AT_ONCE,
            keep_calls=True,
        )

    assert outcomes(records) == {200: 40}
    np.testing.assert_allclose(sorted(records.calls.due), np.arange(40) / 400, atol=1e-9)


def test_open_load_goes_ahead_of_others_where_it_may_and_then_no_more() -> None:
    """Only the thread that sends, and only as long as it sends."""
    seen, before = set(), os.sched_getscheduler(0)

    def watch(live: Live) -> bool:
        seen.add(os.sched_getscheduler(0))
        return True

    with Stub(delays_ms=[1]) as stub:
        endpoint, requests, _ = prepare(stub.url)
        plan = Plan(seconds=1.0, warmup_s=0.0)
        open_load(endpoint, requests, rate=20, plan=plan, watch=watch)

    assert os.sched_getscheduler(0) == before
    ahead = os.SCHED_RR | os.SCHED_RESET_ON_FORK
    try:
        os.sched_setscheduler(0, ahead, os.sched_param(1))
    except PermissionError:
        assert seen == {before}
    else:
        os.sched_setscheduler(0, before, os.sched_param(0))
        assert seen == {ahead}


def test_waiting_for_a_connection_counts_in_latency() -> None:
    """One connection, 50 ms a call, 100 calls a second: each waits longer than the last."""
    plan = Plan(count=10, warmup_s=0.0)
    with Stub(delays_ms=[50]) as stub:
        endpoint, requests, _ = prepare(stub.url)

        records = open_load(
            endpoint,
            requests,
            rate=100,
            arrivals="constant",
            connections=1,
            plan=plan,
            keep_calls=True,
        )

    number = np.arange(10)
    assert (records.calls.latencies_s() >= 0.05 * (number + 1) - 0.01 * number - 1e-3).all()
    assert (records.calls.latencies_s(since="sent") >= 0.049).all()
    assert records.lag.total == 1  # only the first found a connection free


def test_answer_has_come_when_the_kernel_has_it() -> None:
    """A generator that is kept from reading for a while makes no server look slower."""
    plan = Plan(seconds=1.0, warmup_s=0.0)

    def dawdle(live: Live) -> bool:
        time.sleep(0.1)
        return True

    with Stub(delays_ms=[20]) as stub:
        endpoint, requests, _ = prepare(stub.url)

        records = closed_load(
            endpoint,
            requests,
            clients=2,
            plan=plan,
            watch=dawdle,
            keep_calls=True,
        )

    assert max(records.calls.latencies_s()) < 0.1
    assert max(np.diff(sorted(records.calls.sent))) > 0.1


def test_calls_of_the_warm_up_are_not_measured() -> None:
    """They are made, and counted nowhere unless they are still under way when it ends."""
    plan = Plan(seconds=0.4, warmup_s=0.4)
    with Stub() as stub:
        endpoint, requests, _ = prepare(stub.url)

        records = open_load(
            endpoint,
            requests,
            rate=100,
            arrivals="constant",
            plan=plan,
            keep_calls=True,
        )

    seen = records.calls
    due = np.array(seen.due)
    assert (due >= 0.4 - 1e-9).sum() == 40
    assert (np.array(seen.read)[due < 0.4 - 1e-9] >= 0.4).all()
    assert records.seconds == pytest.approx(0.4)


def test_refusals_are_counted_by_status_and_code() -> None:
    """They are no failures of the tester's, and have no latency."""
    with Stub(refuse=4) as stub:
        endpoint, requests, _ = prepare(stub.url)

        records = closed_load(
            endpoint,
            requests,
            clients=1,
            plan=AT_ONCE,
            keep_calls=True,
        )

    assert outcomes(records) == {200: 30, 429: 10}
    assert records.codes == {"queue_full": 10}
    assert len(records.calls.latencies_s()) == 30


def test_lost_connections_are_counted_and_made_anew() -> None:
    """One that is lost costs one call, no more."""
    with Stub(drop=8) as stub:
        endpoint, requests, _ = prepare(stub.url)

        records = closed_load(endpoint, requests, clients=2, plan=AT_ONCE)

    assert outcomes(records) == {200: 35, CONNECTION_LOST: 5}


@pytest.mark.parametrize("spec", [{"chunked": True}, {"closes": True}])
def test_other_ways_to_end_an_answer_are_understood(spec: dict[str, bool]) -> None:
    """Chunks without a length, and connections that serve one call."""
    with Stub(**spec) as stub:
        endpoint, requests, tensors = prepare(stub.url)

        records = closed_load(endpoint, requests, clients=2, plan=AT_ONCE, keep=40)

    assert outcomes(records) == {200: 40}
    for index, body, header_length in records.bodies:
        found = oip.decode(body, header_length)["y"]
        np.testing.assert_array_equal(found, tensors[index].inputs["x"])


def test_large_calls_are_sent_in_parts_and_come_back_whole() -> None:
    """8 MB both ways, more than a socket takes at once."""
    with Stub() as stub:
        endpoint, requests, tensors = prepare(stub.url, shape=("64", "4096"), count=2)

        records = closed_load(
            endpoint, requests, clients=2, plan=Plan(count=4, warmup_s=0.0), keep=4
        )

    assert outcomes(records) == {200: 4}
    for index, body, header_length in records.bodies:
        found = oip.decode(body, header_length)["y"]
        np.testing.assert_array_equal(found, tensors[index].inputs["x"])


def test_server_that_never_answers_ends_the_load_all_the_same() -> None:
    """Calls time out, those that wait for them too, and every one is counted."""
    plan = Plan(count=20, warmup_s=0.0, timeout_s=0.3)
    with Stub(silent=True) as stub:
        endpoint, requests, _ = prepare(stub.url)

        records = open_load(
            endpoint, requests, rate=200, arrivals="constant", connections=4, plan=plan
        )

    found = outcomes(records)
    assert set(found) <= {TIMED_OUT, NOT_SENT}
    assert found[TIMED_OUT] >= 4
    assert records.offered == 20
    assert figures_of(records)["latency_ms"]["count"] == 0


@pytest.mark.parametrize("is_open", [True, False])
def test_server_that_dies_ends_the_load_all_the_same(is_open: bool) -> None:
    """What was answered stays answered; the rest is counted as lost."""
    plan = Plan(seconds=2.0, warmup_s=0.0, timeout_s=0.3)
    with Stub(delays_ms=[5]) as stub:
        endpoint, requests, _ = prepare(stub.url)

        def kill(live: Live) -> bool:
            if live.good:
                stub.process.kill()
            return True

        if is_open:
            records = open_load(endpoint, requests, rate=100, plan=plan, watch=kill)
        else:
            records = closed_load(endpoint, requests, clients=2, plan=plan, watch=kill)

    found = outcomes(records)
    assert found[200] > 0
    assert found[CONNECTION_LOST] + found[NOT_SENT] > 0
    assert set(found) <= {200, CONNECTION_LOST, NOT_SENT}


def test_load_can_be_stopped_and_tells_what_it_has() -> None:
    """Calls that are under way may still be answered; those that are not are counted."""
    told: list[Live] = []

    def stop(live: Live) -> bool:
        told.append(live)
        return live.good < 10

    plan = Plan(seconds=3600, warmup_s=0.0)
    with Stub(delays_ms=[1, 1, 1, 60_000]) as stub:
        endpoint, requests, _ = prepare(stub.url)

        records = open_load(endpoint, requests, rate=200, plan=plan, watch=stop)

    found = outcomes(records)
    assert records.interrupted
    assert found[200] >= 10
    assert found[INTERRUPTED] > 0
    assert 0 < records.seconds < 3600
    assert told[-1].p50_ms >= 1


def test_nobody_there_is_told_with_the_address() -> None:
    """Before any clock starts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    endpoint = Endpoint.parse(f"http://127.0.0.1:{port}")

    with pytest.raises(
        Unreachable,
        match=rf"^http://127.0.0.1:{port}: Connection refused: no server listens there$",
    ):
        closed_load(endpoint, [b""], clients=1)
    with pytest.raises(
        Unreachable,
        match=rf"^http://127.0.0.1:{port}: Connection refused: no server listens there$",
    ):
        discover(endpoint, model=None)


def test_open_load_has_connections_for_a_seconds_calls() -> None:
    """Neither too few for a quiet server nor more than files may be open."""
    assert [default_connections(rate) for rate in (1, 100, 5000)] == [32, 100, 512]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host", "URL: expected http://host:port or https://host:port, got 'ftp://host'"),
        (
            "http://host:x",
            "URL: Port could not be cast to integer value as 'x', got 'http://host:x'",
        ),
        ("http://u@host", "URL: expected no user, query or fragment, got 'http://u@host'"),
    ],
)
def test_url_that_is_none_is_refused(url: str, message: str) -> None:
    """With what was expected, and what came."""
    with pytest.raises(UsageWrong) as caught:
        Endpoint.parse(url)

    assert str(caught.value) == message


@pytest.mark.parametrize(
    "header", ["open sesame", "a b: open sesame", "Host: open sesame", "X: open sesame\r\nY: z"]
)
def test_header_that_cannot_be_sent_is_refused_without_its_value(header: str) -> None:
    """The value may be a secret."""
    with pytest.raises(UsageWrong, match=r"^--header: ") as caught:
        Endpoint.parse("http://host", (header,))

    assert "sesame" not in str(caught.value)


def test_authority_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """By the option's name."""
    (tmp_path / "text").write_text("no certificate")

    with pytest.raises(UsageWrong, match=r"^--ca-file: .*: no such file$"):
        Endpoint.parse("https://host", ca_file=tmp_path / "nothing")
    with pytest.raises(UsageWrong, match=r"^--ca-file: .*: no certificate in it$"):
        Endpoint.parse("https://host", ca_file=tmp_path / "text").tls()
    assert isinstance(Endpoint.parse("https://host").tls(), ssl.SSLContext)
