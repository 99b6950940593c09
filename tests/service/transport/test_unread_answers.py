"""Answers that nobody reads: cut off, counted, and bounded in memory while they are under way."""

import json
import re
import socket
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.layers import Layers
from tests.support.server import Server, until
from tests.system.test_main import metric

TIMEOUT_S = 1
INFER = "/v2/models/{name}/infer"


def head(method: str, path: str, *lines: str, body_bytes: int = 0) -> bytes:
    """Return a request's head."""
    return "\r\n".join(
        [f"{method} {path} HTTP/1.1", "Host: a", *lines, f"Content-Length: {body_bytes}", "\r\n"]
    ).encode()


def infer(length: int, *, binary: bool = True) -> bytes:
    """Return a request for `length` x 8 outputs and 2 x `length` x `length` weights."""
    tensor = np.zeros((1, length, 8), "<f4")
    document: dict[str, Any] = {
        "inputs": [
            {
                "name": "embeddings",
                "datatype": "FP32",
                "shape": tensor.shape,
                "parameters": {"binary_data_size": tensor.nbytes},
            }
        ],
        "parameters": {"binary_data_output": binary},
    }
    text = json.dumps(document).encode()
    content = text + tensor.tobytes()
    line = f"Inference-Header-Content-Length: {len(text)}"
    path = "/v2/models/tiny-weights/infer"
    return head("POST", path, line, body_bytes=len(content)) + content


def attention(length: int, *, accept: str = "application/json") -> bytes:
    """Return the same question in JSON."""
    document = {"model": "tiny", "embeddings": [[0.0] * 8] * length, "weights": True}
    content = json.dumps(document).encode()
    line = f"Accept: {accept}"
    return head("POST", "/v1/attention", line, body_bytes=len(content)) + content


def answer_size(length: int) -> int:
    """Return the bytes of such an answer's tensors, in FP32."""
    return 4 * (8 * length + 2 * length * length)


class Caller:
    """A connection with the smallest buffer there is, which reads only when told."""

    def __init__(self, server: Server) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(60)
        self.socket.connect((host, int(port)))

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, content: bytes) -> None:
        """Send a request."""
        self.socket.sendall(content)

    def reset(self) -> None:
        """Leave without a word."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def is_cut_off(self) -> bool:
        """Return whether the connection ends by a reset, reading what is left of it."""
        try:
            while self.socket.recv(2**20):
                pass
        except ConnectionResetError:
            return True
        return False


def records(server: Server, route: str) -> list[dict[str, Any]]:
    """Return the log records of one route's requests."""
    lines = [json.loads(line) for line in server.whole_log().splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("route") == route]


def nth_record(server: Server, route: str, count: int) -> dict[str, Any]:
    """Return the record with that number (from 1) of a route, once it is there."""
    until(lambda: len(records(server, route)) >= count)
    return records(server, route)[count - 1]


def nothing_is_under_way(server: Server) -> bool:
    """Return whether no answer is, but that to this question."""
    bytes_under_way = metric(server, "headwise_unsent_answer_bytes")
    return bytes_under_way == 0 and metric(server, "headwise_requests_in_flight") == 1


@pytest.mark.fault("A4")
@pytest.mark.parametrize(
    ("route", "request_of_it", "size"),
    [
        pytest.param(INFER, lambda: infer(700), answer_size(700), id="fast path"),
        pytest.param(INFER, lambda: infer(2048), answer_size(2048), id="raw pieces"),
        pytest.param(INFER, lambda: infer(1024, binary=False), 10**7, id="JSON pieces"),
        pytest.param("/v1/attention", lambda: attention(1024), 10**7, id="JSON"),
        pytest.param(
            "/v1/attention",
            lambda: attention(700, accept="application/x-safetensors"),
            answer_size(700),
            id="one piece",
        ),
        pytest.param("/openapi.json", lambda: head("GET", "/openapi.json"), 10**4, id="GET"),
    ],
)
def test_answer_that_is_not_read_is_cut_off_counted_and_logged_whatever_way_it_went(
    layers: Layers, route: str, request_of_it: Callable[[], bytes], size: int
) -> None:
    """The system takes some megabytes of it; what it does not take is not kept for ever."""
    request, seen = request_of_it(), 0
    with Server(layers.repository, answer_timeout_s=TIMEOUT_S) as server, Caller(server) as caller:
        record: dict[str, Any] = {"status": 200}
        while record["status"] == 200:
            caller.send(request)
            seen += 1
            record = nth_record(server, route, seen)
        until(lambda: nothing_is_under_way(server))
        model = record["model"] or ""
        cut_off = metric(
            server, f'headwise_refusals_total{{code="client_stalled",model="{model}"}}'
        )
        counted = metric(server, f'headwise_requests_total{{route="{route}",status="499"}}')
        log, was_reset = server.log(), caller.is_cut_off()

    assert (record["status"], record["code"]) == (499, "client_stalled")
    assert record["answer_bytes"] < size or seen > 1
    assert (cut_off, counted) == (1, 1)
    assert was_reset
    assert "Traceback" not in log


def test_answer_that_is_read_slowly_is_not_cut_off(layers: Layers) -> None:
    """A caller that takes a little all the time gets all of it, however long that takes."""
    with Server(layers.repository, answer_timeout_s=TIMEOUT_S) as server, Caller(server) as caller:
        caller.send(infer(1024))
        size, stalls = 0, 0.0
        while size < answer_size(1024):
            # Between two reads the server looks at its metrics for us: some time passes.
            size += len(caller.socket.recv(40_000))
            stalls += metric(server, 'headwise_refusals_total{code="client_stalled",model="tiny"}')
        until(lambda: nothing_is_under_way(server))
        [record] = records(server, INFER)

    assert stalls == 0
    assert record["status"] == 200


@pytest.mark.fault("A4")
def test_answers_under_way_are_bounded_and_others_are_served_meanwhile(layers: Layers) -> None:
    """As many as the budget has room for; then 429 that says so, and room when a caller leaves."""
    one = answer_size(2048)
    limits: dict[str, Any] = {"max_answer_bytes": one, "max_unsent_bytes": 2 * one + answer_size(8)}
    with Server(layers.repository, **limits) as server:
        callers = [Caller(server) for _ in range(2)]
        for caller in callers:
            caller.send(infer(2048))
        until(lambda: metric(server, "headwise_unsent_answer_bytes") == 2 * one)
        with Caller(server) as late, Caller(server) as modest:
            late.send(infer(2048))
            refused = late.socket.recv(2**16)
            modest.send(infer(8))
            served = modest.socket.recv(2**16)
        for caller in callers:
            caller.reset()
        until(lambda: nothing_is_under_way(server))
        with Caller(server) as again:
            again.send(infer(2048))
            after = again.socket.recv(100)
        until(lambda: nothing_is_under_way(server))

    assert refused.startswith(b"HTTP/1.1 429 ")
    assert re.search(rb"\r\nretry-after: [1-9]", refused)
    assert b'"code":"queue_full"' in refused
    assert b"answers: at most %d bytes may be" % limits["max_unsent_bytes"] in refused
    assert served.startswith(b"HTTP/1.1 200 ")
    assert after.startswith(b"HTTP/1.1 200 ")


def test_budget_that_is_used_up_refuses_before_the_body_is_read(layers: Layers) -> None:
    """What cannot be answered now need not be sent; readiness is another matter."""
    one = answer_size(2048)
    limits: dict[str, Any] = {"max_answer_bytes": one, "max_unsent_bytes": one}
    with Server(layers.repository, **limits) as server, Caller(server) as holder:
        holder.send(infer(2048))
        until(lambda: metric(server, "headwise_unsent_answer_bytes") == one)
        answers = []
        for path in ("/v1/attention", "/v2/models/tiny/infer"):
            with Caller(server) as late:
                late.send(head("POST", path, body_bytes=1000))
                answers.append(late.socket.recv(2**16))
        ready = server.get("/v2/health/ready").status_code

    assert [answer.split(b"\r\n")[0] for answer in answers] == [
        b"HTTP/1.1 429 Too Many Requests"
    ] * 2
    assert ready == 200


@pytest.mark.fault("A5")
@pytest.mark.parametrize(
    "request_of_it",
    [lambda: attention(2048), lambda: infer(2048), lambda: infer(2048, binary=False)],
    ids=["JSON", "protocol, binary", "protocol, JSON"],
)
def test_caller_that_leaves_amid_its_answer_ends_it(
    layers: Layers, request_of_it: Callable[[], bytes]
) -> None:
    """Nothing more is encoded; the log has 499 and what was sent, not what would have been."""
    with Server(layers.repository) as server, Caller(server) as caller:
        caller.send(request_of_it())
        received = 0
        while received < 1000:  # more than the head, which may come alone
            received += len(caller.socket.recv(1000))
        caller.reset()
        until(lambda: nothing_is_under_way(server))
        [record] = [r for route in (INFER, "/v1/attention") for r in records(server, route)]
        encoded = metric(server, 'headwise_stage_seconds_count{model="tiny",stage="encode"}')

    assert (record["status"], record["code"]) == (499, None)
    assert 0 < record["answer_bytes"] < answer_size(2048) / 2
    assert encoded == 0
