"""Where one request ends and the next begins, however the bytes arrive."""

import asyncio
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.transport.connection import MAX_HEAD_BYTES
from tests.service.api.test_fast_path import connect, request
from tests.support.layers import Layers
from tests.support.server import Server
from tests.support.wire import App, Piece, answers_in

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"
LAST = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
HIDDEN = (
    b"POST /v2/repository/models/tiny/unload HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
)
GOOD = orjson.dumps({"model": "tiny", "embeddings": [[0.5] * 8] * 2})

OFFERS: dict[str, list[str]] = {
    "none": [],
    "h2c": ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"],
    "websocket": ["Upgrade: websocket", "Connection: upgrade", "Sec-WebSocket-Version: 13"],
    "foo": ["Connection: Upgrade", "Upgrade: foo"],
    "two lines": ["Upgrade: foo", "Connection: keep-alive, Upgrade", "upgrade: h2c"],
    "two connections": ["Upgrade: foo/2", "Connection: keep-alive", "Connection: upgrade"],
    "no connection": ["Upgrade: h2c"],
    "connection only": ["Connection: upgrade"],
}


def post(
    path: str,
    body: bytes,
    *lines: str,
    is_chunked: bool = False,
) -> bytes:
    """Return a POST of a body, by its length or in chunks of 7 bytes with a trailer."""
    framing = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {len(body)}"
    head = "\r\n".join([f"POST {path} HTTP/1.1", "Host: a", *lines, framing]).encode() + b"\r\n\r\n"
    if not is_chunked:
        return head + body
    chunks = [body[i : i + 7] for i in range(0, len(body), 7)]
    sent = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head + sent + b"0\r\nX-Trailer: 1\r\nContent-Encoding: gzip\r\n\r\n"


def talk(server: Server, *pieces: bytes, ends: bool = False) -> bytes:
    """
    Return all that the server sends on one connection until it closes it.

    Each piece is sent after something was answered to the one before; `ends`: the last
    piece ends the caller's output.
    """
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        received = b""
        for i, piece in enumerate(pieces):
            if i > 0:
                received += connection.recv(2**16)
            connection.sendall(piece)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        while more := connection.recv(2**16):
            received += more
    return received


def statuses(content: bytes) -> list[int]:
    """Return the status of each answer."""
    return [status for status, _ in answers_in(content)]


@pytest.fixture(scope="module")
def off(layers: Layers) -> Iterator[Server]:
    """Return a server without the fast path, to which a head must come soon."""
    with Server(layers.repository, fast_path="off", head_timeout_s=0.5) as running:
        yield running


@pytest.mark.fault("B1")
@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("offer", OFFERS)
def test_body_of_an_upgrade_offer_remains_a_body(
    server: Server, offer: str, *, is_chunked: bool
) -> None:
    """Whatever is offered, the hidden request in the body is not answered and the next one is."""
    unknown = post("/nope", HIDDEN, *OFFERS[offer], is_chunked=is_chunked)
    right = post("/v1/attention", GOOD, *OFFERS[offer], is_chunked=is_chunked)
    cut = unknown.index(b"\r\n\r\n") - 3

    for data in (unknown + right + LAST, right + unknown + LAST):
        assert sorted(statuses(talk(server, data))) == [200, 200, 404]
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start, end in ((0, cut), (cut, cut + 5), (cut + 5, len(unknown))):
            connection.sendall(unknown[start:end])
        connection.sendall(LAST)
        assert statuses(connection.makefile("rb").read()) == [404, 200]


@pytest.mark.fault("B1")
@pytest.mark.parametrize("name", ["h2c", "foo", "websocket"])
def test_infer_call_with_an_upgrade_offer_is_answered_as_without(server: Server, name: str) -> None:
    """The answer does not depend on the offer."""
    plain, offering = request(), request(*OFFERS[name])

    first, second = answers_in(talk(server, plain + offering + LAST))[:2]

    assert first == second
    assert first[0] == 200


@pytest.mark.fault("B2")
@pytest.mark.parametrize(
    "body",
    [
        b"\r\nupgrade:" + b" " * 40 + b"h2c\r\n\r\n",
        b"x: h2c\r\nUpgrade: h2c\r\n\r\n" * 3,
        HIDDEN,
        LIVE,
    ],
)
def test_late_body_of_a_refused_request_is_passed_over_whole(server: Server, body: bytes) -> None:
    """No byte of it is taken away, and none is read as a request: the next caller's call counts."""
    head = post("/nope", body)[: -len(body)]

    found = answers_in(talk(server, head, body + request(id="mine") + LAST))

    assert [status for status, _ in found] == [404, 200, 200]
    assert b'"id":"mine"' in found[1][1]


@pytest.mark.fault("B1", "E8b")
def test_websocket_offer_is_ignored_without_a_warning(layers: Layers) -> None:
    """Nothing is missing: no protocol but HTTP is spoken here."""
    with Server(layers.repository) as server:
        offer = b"\r\n".join(line.encode() for line in OFFERS["websocket"])
        assert statuses(talk(server, LAST.replace(b"Host: a", b"Host: a\r\n" + offer))) == [200]
        log = server.log()

    assert "pgrade" not in log
    assert "WebSocket" not in log


def test_connect_is_refused_and_what_follows_is_not_read(server: Server) -> None:
    """A tunnel has no requests in it."""
    data = b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n" + LIVE

    assert statuses(talk(server, data)) == [405]


@pytest.mark.fault("B3")
def test_request_whose_body_stops_after_an_early_answer_gets_no_second_one(off: Server) -> None:
    """The connection is closed when the rest has not come in time, without another word."""
    assert statuses(talk(off, post("/nope", bytes(100_000))[:-99_990])) == [404]
    assert statuses(talk(off, post("/nope", bytes(100))[:-100], b"ten bytes.")) == [404]


def test_head_that_stops_behind_an_answered_request_is_answered_408(off: Server) -> None:
    """Its time counts from when nothing else was being answered."""
    assert statuses(talk(off, LIVE + LIVE[:20])) == [200, 408]


@pytest.mark.fault("B4")
@pytest.mark.parametrize("fast_path", ["auto", "off"])
@pytest.mark.parametrize(
    "data",
    [
        request(),
        post("/v1/attention", GOOD),
        post("/v1/attention", GOOD, is_chunked=True),
        post("/nope", GOOD),
        LIVE,
        request() + post("/v1/attention", GOOD) + LIVE,
        post("/v1/attention", GOOD, *OFFERS["foo"]),
    ],
)
def test_caller_that_ends_its_output_is_answered(
    server: Server, off: Server, data: bytes, fast_path: str
) -> None:
    """Half-closing is no leaving: everything that came whole is answered, then all is closed."""
    chosen = server if fast_path == "auto" else off
    expected = len(re.findall(rb"(?:GET|POST) \S+ HTTP/1.1", data))

    found = statuses(talk(chosen, data, ends=True))

    assert len(found) == expected
    assert set(found) <= {200, 404}


def test_whole_request_before_an_unfinished_one_is_answered(server: Server) -> None:
    """The end of the output takes nothing from what came before."""
    whole = post("/v1/attention", GOOD)

    for rest in (whole[:-1], whole[:20]):
        assert statuses(talk(server, whole + rest, ends=True)) == [200]


MALFORMED = {
    "no request": b"\x00\x01\x02\r\n\r\n",
    "no method": b"HELLO / HTTP/1.1\r\nHost: a\r\n\r\n",
    "no target": b"GET http:// HTTP/1.1\r\nHost: a\r\n\r\n",
    "another version": b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx",
    "length and chunks": post("/", b"", "Content-Length: 1", is_chunked=True),
    "two types": post("/v1/attention", GOOD, *["Content-Type: application/json"] * 2),
    "two encodings": post("/v1/attention", GOOD, "Content-Encoding: gzip", "content-encoding: br"),
    "two header lengths": request("Inference-Header-Content-Length: 7"),
    "two header lengths in an offer": request("Inference-Header-Content-Length: 7", *OFFERS["foo"]),
    "two timeouts": request("X-Request-Timeout-S: 1", "X-Request-Timeout-S: 2"),
    "another coding": post("/", b"x").replace(b"Content-Length: 1", b"Transfer-Encoding: gzip"),
    "a coding more": post("/", b"x", is_chunked=True).replace(b": chunked", b": gzip, chunked"),
    "two codings": post("/", b"x", "Transfer-Encoding: chunked", is_chunked=True),
    "old and chunked": post("/", b"x", is_chunked=True).replace(b"/1.1", b"/1.0"),
    "no chunk": post("/v1/attention", b"", is_chunked=True).replace(b"\r\n0\r\n", b"\r\nZZ\r\n"),
}


@pytest.mark.fault("B6", "B7")
@pytest.mark.parametrize("fast_path", ["auto", "off"])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_request_is_refused_once_after_those_before(
    server: Server, off: Server, name: str, fast_path: str
) -> None:
    """400 in the form of every error, in its turn; then the connection is closed."""
    chosen = server if fast_path == "auto" else off
    bad = MALFORMED[name]
    for before in (b"", LIVE, request(), post("/v1/attention", GOOD, *OFFERS["foo"])):
        *answered, (status, body) = answers_in(talk(chosen, before + bad + LIVE))

        assert [code for code, _ in answered] == [200] * bool(before)
        assert status == 400
        assert orjson.loads(body)["code"] == "invalid_input"
        assert b"HELLO" not in body


@pytest.mark.fault("B3")
def test_malformed_chunk_after_an_early_answer_gets_no_second_one(server: Server) -> None:
    """One request, one answer."""
    head = post("/nope", b"", is_chunked=True).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"

    assert statuses(talk(server, head, b"ZZ\r\n" + LIVE)) == [404]


def test_trailer_fields_are_not_header_fields(server: Server) -> None:
    """What a trailer says of encodings counts as little in one read as in several."""
    data = post("/v1/attention", GOOD, is_chunked=True)

    assert statuses(talk(server, data + LAST)) == [200, 200]


@pytest.mark.fault("B6")
def test_repeated_list_field_is_one_list(server: Server) -> None:
    """Two `Accept` lines are one with both."""
    both = ["Accept: text/html", "Accept: application/x-safetensors", "Accept: image/png"]

    found = talk(server, post("/v1/attention", GOOD, *both) + LAST)

    assert b"content-type: application/x-safetensors" in found.lower()


def test_long_call_of_a_caller_that_ended_its_output_is_answered(server: Server) -> None:
    """The interim response that tells whether the caller has left takes nothing from the final."""
    x = np.zeros((64, 512, 24))
    body = orjson.dumps({"model": "mha", "embeddings": x}, option=orjson.OPT_SERIALIZE_NUMPY)

    found = talk(server, post("/v1/attention", body), ends=True)

    assert statuses(found) == [200]


@dataclass(frozen=True)
class Sent:
    """A request and the status of its answer."""

    content: bytes
    status: int


BODIES = [
    HIDDEN,
    LIVE + HIDDEN,
    request(),
    b"\r\nupgrade: h2c\r\n\r\n",
    b"\r\nupgrade:    h2c\r\n\r\n" + LIVE,
    b"0\r\n\r\n" + LIVE,
    b"",
    b"{",
]
LOOKS_LIKE_A_REQUEST = (HIDDEN + b" " * 32)[: len(HIDDEN) // 32 * 32 + 32]
"""Raw FP32 numbers, eight a token."""


@st.composite
def requests(draw: st.DrawFn) -> Sent:
    """Draw a request that is answered without closing the connection."""
    lines = OFFERS[draw(st.sampled_from(sorted(OFFERS)))]
    is_chunked = draw(st.booleans())
    kind = draw(st.sampled_from(["fast", "raw", "infer", "attention", "wrong", "unknown", "get"]))
    if kind == "fast":
        return Sent(request(length=draw(st.integers(1, 9)), id=draw(st.sampled_from("ab"))), 200)
    if kind == "raw":
        return Sent(raw_infer(LOOKS_LIKE_A_REQUEST, lines), 200)
    if kind == "infer":
        return Sent(request(*lines, wire=draw(st.sampled_from(["binary", "json"]))), 200)
    if kind == "attention":
        return Sent(post("/v1/attention", GOOD, *lines, is_chunked=is_chunked), 200)
    if kind == "get":
        body = draw(st.sampled_from(BODIES))
        data = post("/v2/health/live", body, *lines, is_chunked=is_chunked)
        return Sent(data.replace(b"POST", b"GET", 1), 200)
    path, status = ("/nope", 404) if kind == "unknown" else ("/v2/models/tiny/infer", 400)
    body = draw(st.sampled_from(BODIES))
    return Sent(post(path, body, *lines, is_chunked=is_chunked), status)


def raw_infer(numbers: bytes, lines: list[str]) -> bytes:
    """Return an infer call of these bytes as they are."""
    entry = {
        "name": "embeddings",
        "datatype": "FP32",
        "shape": [1, len(numbers) // 32, 8],
        "parameters": {"binary_data_size": len(numbers)},
    }
    header = orjson.dumps({"inputs": [entry]})
    length = f"Inference-Header-Content-Length: {len(header)}"
    return post("/v2/models/tiny/infer", header + numbers, length, *lines)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[Sent], list[Piece]]:
    """Draw a few requests and how their bytes arrive."""
    sent = draw(st.lists(requests(), min_size=1, max_size=4))
    content = b"".join(one.content for one in sent)
    edges = [end.end() for end in re.finditer(rb"\r\n\r\n", content)]
    edges += np.cumsum([len(one.content) for one in sent]).tolist()
    at = st.integers(0, len(content)) | st.sampled_from(edges)
    cuts = sorted({0, len(content), *draw(st.lists(at, max_size=6))})
    turns = st.sampled_from([0, 1, 5, 40])
    return sent, [Piece(content[start:end], draw(turns)) for start, end in pairwise(cuts)]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """Return the loop of the application in this process."""
    with asyncio.Runner() as running:
        yield running


@pytest.fixture(scope="module")
def app(layers: Layers, runner: asyncio.Runner) -> Iterator[App]:
    """Return an application in this process."""

    async def made(**chosen: Any) -> App:
        return App(layers.repository, **chosen)

    application = runner.run(made())
    yield application
    runner.run(application.models.close())


@pytest.mark.fault("B1", "B2", "B4")
@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(streams())
def test_stream_cut_anywhere_is_answered_as_in_one_piece_without_the_fast_path(
    app: App, runner: asyncio.Runner, stream: tuple[list[Sent], list[Piece]]
) -> None:
    """The same statuses and bodies in the same order, and one for each request."""
    sent, pieces = stream
    whole = [Piece(b"".join(piece.content for piece in pieces))]

    cut = answers_in(runner.run(app.converse(pieces, uses_fast_path=True)))
    reference = answers_in(runner.run(app.converse(whole, uses_fast_path=False)))

    assert [status for status, _ in cut] == [one.status for one in sent]
    assert cut == reference


@pytest.mark.fault("B2")
def test_late_body_that_is_a_whole_call_is_not_answered(app: App, runner: asyncio.Runner) -> None:
    """After an early answer the body goes on: the fast path is offered no part of it."""
    body = request()
    pieces = [
        Piece(post("/nope", body)[: -len(body)], turns=200),
        Piece(body, turns=200),
        Piece(LIVE),
    ]

    (refused, _), answered = answers_in(runner.run(app.converse(pieces, uses_fast_path=True)))

    assert refused == 404
    assert answered == (200, b'{"live":true}')


def test_trailer_above_the_limit_is_413(app: App, runner: asyncio.Runner) -> None:
    """What follows the last chunk is kept no longer than a head would be."""
    data = post("/v1/attention", GOOD, is_chunked=True)[:-2]
    more = [Piece(b"a" * 1000, turns=1)] * (MAX_HEAD_BYTES // 1000 + 1)

    found = runner.run(app.converse([Piece(data + b"X-Long: "), *more], uses_fast_path=True))

    assert statuses(found) == [413]
    assert b"trailer: at most" in found


@pytest.mark.fault("B6", "B7")
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(streams(), st.sampled_from(sorted(MALFORMED)), st.data())
def test_malformed_end_of_a_stream_is_refused_alike_wherever_it_is_cut(
    app: App,
    runner: asyncio.Runner,
    stream: tuple[list[Sent], list[Piece]],
    name: str,
    data: st.DataObject,
) -> None:
    """As in one piece without the fast path: what came before has its answers, then one 400."""
    sent, pieces = stream
    bad = MALFORMED[name] + LIVE
    cut = data.draw(st.integers(0, len(bad)))
    pieces = [*pieces[:-1], Piece(pieces[-1].content + bad[:cut], turns=1), Piece(bad[cut:])]
    whole = [Piece(b"".join(piece.content for piece in pieces))]

    found = answers_in(runner.run(app.converse(pieces, uses_fast_path=True)))
    reference = answers_in(runner.run(app.converse(whole, uses_fast_path=False)))

    assert [status for status, _ in found] == [*(one.status for one in sent), 400]
    assert found == reference
