"""The access log: one line for each request, with all that was known of it."""

import concurrent.futures
import gzip
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from service.log_writer import LogWriter
from service.logs import Log
from service.telemetry.access_log import AccessLog
from service.telemetry.request_record import RequestRecord
from tests.service.test_logs import TIME
from tests.support.layers import Layers
from tests.support.server import ROOT, Server, until

FIELDS = [
    *("time", "level", "message"),
    *("method", "route", "model", "version", "rows", "tokens", "status", "code", "ms"),
    *("request_bytes", "answer_bytes", "request_id"),
]

KEY = "k" * 40
GOOD: dict[str, Any] = {"model": "tiny", "embeddings": [[0.5] * 8]}
SLOW: dict[str, Any] = {
    "content": save({"embeddings": np.zeros((4, 4096, 24), np.float32)}, {"causal": "true"}),
    "headers": {"Content-Type": "application/x-safetensors"},
}
FLOOD = 600
"""Requests whose lines are more than a pipe holds."""


def infer_body(rows: int, length: int, width: int = 8) -> dict[str, Any]:
    """Return a call of the protocol in JSON."""
    shape = [rows, length, width]
    entry = {"name": "embeddings", "shape": shape, "datatype": "FP32"}
    return {"inputs": [entry | {"data": [0.5] * (rows * length * width)}]}


def requests_of(log: str) -> list[dict[str, Any]]:
    """Return the lines of requests, every line being JSON."""
    lines = [orjson.loads(line) for line in log.splitlines()]
    return [line for line in lines if line["message"] == "request"]


INFER = "/v2/models/{name}/infer"
CLOSE = {"Connection": "close"}
"""What sends a small call past the fast path."""

RAGGED = {"model": "tiny", "embeddings": [[[0.5] * 8] * 2, [[0.5] * 8] * 3]}
PACKED = save(
    {"embeddings": np.zeros((5, 8), np.float32), "lengths": np.array([4, 1])}, {"model": "tiny"}
)
SAFETENSORS = {"Content-Type": "application/x-safetensors"}

CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "attention": (
        "POST",
        "/v1/attention",
        {"json": RAGGED},
        {"route": "/v1/attention", "model": "tiny", "rows": 2, "tokens": 5, "status": 200},
    ),
    "attention, one sequence": (
        "POST",
        "/v1/attention",
        {"json": GOOD},
        {"route": "/v1/attention", "model": "tiny", "rows": 1, "tokens": 1, "status": 200},
    ),
    "attention, safetensors": (
        "POST",
        "/v1/attention?model=tiny",
        {"content": PACKED, "headers": SAFETENSORS},
        {"route": "/v1/attention", "model": "tiny", "rows": 2, "tokens": 5, "status": 200},
    ),
    "infer": (
        "POST",
        "/v2/models/tiny/infer",
        {"json": infer_body(2, 3)},
        {"route": INFER, "model": "tiny", "rows": 2, "tokens": 6, "status": 200},
    ),
    "infer, ASGI": (
        "POST",
        "/v2/models/tiny/infer",
        {"json": infer_body(2, 3), "headers": CLOSE},
        {"route": INFER, "model": "tiny", "rows": 2, "tokens": 6, "status": 200},
    ),
    "infer, weights and version": (
        "POST",
        "/v2/models/tiny-weights/versions/1/infer",
        {"json": infer_body(1, 2)},
        {
            "route": "/v2/models/{name}/versions/{version}/infer",
            "model": "tiny",
            "rows": 1,
            "tokens": 2,
            "status": 200,
        },
    ),
    "wrong shape": (
        "POST",
        "/v2/models/tiny/infer",
        {"json": infer_body(1, 2, width=7)},
        {"route": INFER, "model": "tiny", "status": 400, "code": "invalid_input"},
    ),
    "attention, wrong shape": (
        "POST",
        "/v1/attention",
        {"json": GOOD | {"embeddings": [[0.5] * 7]}},
        {"route": "/v1/attention", "model": "tiny", "status": 400, "code": "invalid_input"},
    ),
    "no JSON": (
        "POST",
        "/v2/models/tiny/infer",
        {"content": b"{"},
        {"route": INFER, "model": "tiny", "status": 400, "code": "invalid_input"},
    ),
    "too late": (
        "POST",
        "/v2/models/tiny/infer",
        {"json": infer_body(2, 3), "headers": {"X-Request-Timeout-S": "0.000000001"}},
        {
            "route": INFER,
            "model": "tiny",
            "rows": 2,
            "tokens": 6,
            "status": 504,
            "code": "deadline_exceeded",
        },
    ),
    "attention, too late": (
        "POST",
        "/v1/attention",
        {"json": RAGGED | {"timeout_s": 1e-9}},
        {
            "route": "/v1/attention",
            "model": "tiny",
            "rows": 2,
            "tokens": 5,
            "status": 504,
            "code": "deadline_exceeded",
        },
    ),
    "unknown model": (
        "POST",
        "/v2/models/none/infer",
        {"json": infer_body(1, 2)},
        {"route": INFER, "status": 404, "code": "unknown_model", "request_bytes": 0},
    ),
    "wrong verb": (
        "PUT",
        "/v1/attention",
        {"json": GOOD},
        {"route": "/v1/attention", "status": 405, "code": "method_not_allowed", "request_bytes": 0},
    ),
    "unsupported": (
        "POST",
        "/v1/attention",
        {"content": b"abc", "headers": {"Content-Type": "text/plain"}},
        {
            "route": "/v1/attention",
            "status": 415,
            "code": "unsupported_media_type",
            "request_bytes": 0,
        },
    ),
    "listing": ("GET", "/v1/models", {}, {"route": "/v1/models", "status": 200}),
    "index": (
        "POST",
        "/v2/repository/index",
        {"json": {}},
        {"route": "/v2/repository/index", "status": 200},
    ),
    "disabled": (
        "POST",
        "/v2/logging",
        {"json": {}},
        {"route": "/v2/logging", "status": 403, "code": "disabled", "request_bytes": 0},
    ),
    "no such path": (
        "GET",
        "/nowhere",
        {},
        {"route": "unmatched", "status": 404, "code": "not_found"},
    ),
}
"""Method, path, what is sent, and what the line has beside what every line has."""


@pytest.mark.fault("E6")
@pytest.mark.parametrize("name", CASES)
def test_line_has_every_field_whatever_became_of_the_request(server: Server, name: str) -> None:
    """What is known when a request is refused is in its line; what does not apply is null."""
    method, path, sent, expected = CASES[name]
    request_id = f"case-{time.monotonic_ns()}"
    headers = {"X-Request-ID": request_id} | sent.get("headers", {})
    request = httpx.Request(method, server.url + path, **(sent | {"headers": headers}))

    answer = server.client.send(request)

    log = server.whole_log()
    [line] = [line for line in requests_of(log) if line["request_id"] == request_id]
    assert list(line) == FIELDS
    model = expected.get("model")
    assert (
        line
        == {
            "time": line["time"],
            "level": "info",
            "message": "request",
            "method": method,
            "model": model,
            "version": None if model is None else 1,
            "rows": None,
            "tokens": None,
            "code": None,
            "ms": line["ms"],
            "request_bytes": len(request.content),
            "answer_bytes": len(answer.content),
            "request_id": answer.headers["x-request-id"],
        }
        | expected
    )
    assert answer.status_code == expected["status"]
    assert 0 < line["ms"] < 60_000


def test_line_has_the_body_as_it_came_over_the_wire(layers: Layers) -> None:
    """Compressed bytes count, both ways; what a refused body would have had does not."""
    with Server(layers.repository, compress_answers=True, max_body_bytes=20_000) as server:
        headers = {"Content-Encoding": "gzip", "Accept-Encoding": "gzip", "X-Request-ID": "packed"}
        content = gzip.compress(orjson.dumps(RAGGED))
        request = httpx.Request("POST", f"{server.url}/v1/attention", content=content)
        request.headers.update(headers)
        answer = server.client.send(request, stream=True)
        raw = b"".join(answer.iter_raw())
        refused = server.post("/v1/attention", content=b" " * 20_001)
        log = server.whole_log()

    [packed] = [line for line in requests_of(log) if line["request_id"] == "packed"]
    [large] = [line for line in requests_of(log) if line["status"] == 413]
    assert answer.status_code == 200
    assert (packed["request_bytes"], packed["answer_bytes"]) == (len(content), len(raw))
    assert refused.status_code == 413
    assert large["request_bytes"] == 0


def test_line_of_a_call_that_the_queue_refused_has_its_size(layers: Layers) -> None:
    """Who sees 429 in the log sees what was too much."""
    with (
        Server(layers.repository, max_queue_calls=2) as server,
        concurrent.futures.ThreadPoolExecutor(12) as pool,
    ):
        calls = [pool.submit(server.post, "/v1/attention?model=mha", **SLOW) for _ in range(12)]
        statuses = [call.result().status_code for call in calls]
        log = server.whole_log()

    refused = [line for line in requests_of(log) if line["status"] == 429]
    assert len(refused) == statuses.count(429) > 0
    for line in refused:
        assert (line["model"], line["rows"], line["tokens"]) == ("mha", 4, 4 * 4096)
        assert line["code"] == "queue_full"


def test_line_names_the_key_only_where_there_are_keys(layers: Layers, tmp_path: Path) -> None:
    """Null for who showed none; the key itself is nowhere."""
    file = tmp_path / "keys"
    file.write_text(f"team-a:{KEY}\n")
    with Server(layers.repository, api_keys_file=file) as server:
        shown = {"X-API-Key": KEY}
        statuses = [
            server.post("/v2/models/tiny/infer", json=infer_body(1, 2), headers=headers).status_code
            for headers in (shown, shown | CLOSE, {})
        ]
        log = server.whole_log()

    lines = requests_of(log)[:3]
    assert statuses == [200, 200, 401]
    assert [line["key"] for line in lines] == ["team-a", "team-a", None]
    assert [line["model"] for line in lines] == ["tiny", "tiny", None]
    assert all(list(line) == [*FIELDS, "key"] for line in lines)
    assert KEY not in log


def test_probe_has_a_line_at_debug_only(layers: Layers) -> None:
    """Health checks would drown everything else."""
    with Server(layers.repository, log_level="debug") as server:
        server.get("/metrics")
        log = server.whole_log()

    probes = [line for line in requests_of(log) if line["level"] == "debug"]
    assert {line["route"] for line in probes} == {"/metrics", "/v2/health/ready"}
    assert all(line["model"] is None for line in probes)


# Failures on our side

FAULTY = """
import sys
from service.inference import engine, models
from service.api import routes
from service.__main__ import main
from service.errors import DecodingFailed, InferenceFailed

run = engine.OnnxEngine.run

def faulty(self, inputs, **options):
    if inputs.embeddings[0, 0, 0] == 666:
        raise InferenceFailed("the runtime refused a batch") from MemoryError("planted cause")
    if inputs.embeddings[0, 0, 0] == 667:
        raise ZeroDivisionError("planted bug")
    if inputs.embeddings[0, 0, 0] == 668:
        raise StopIteration("planted end")
    if inputs.embeddings[0, 0, 0] == 669:
        raise SystemExit("planted exit")
    return run(self, inputs, **options)

async def index(self):
    raise DecodingFailed("a planted failure of a route") from OSError("planted cause")

async def listing(self):
    raise ZeroDivisionError("planted bug")

engine.OnnxEngine.run = faulty
models.Models.index = index
routes.Routes.list_models = listing
sys.exit(main([]))
"""


@pytest.fixture(scope="module")
def faulty(layers: Layers) -> Iterator[Server]:
    """Return a server whose engine fails where the first number is 666 to 669."""
    with Server(layers.repository, command=("-c", FAULTY)) as running:
        yield running


@pytest.mark.fault("C5")
@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (666, "MemoryError: planted cause"),
        (667, "ZeroDivisionError: planted bug"),
        (668, "StopIteration: planted end"),
        (669, "SystemExit: planted exit"),
    ],
)
@pytest.mark.parametrize("way", ["attention", "infer", "infer, ASGI"])
def test_failure_has_an_error_line_with_cause_and_id_before_its_own(
    faulty: Server, way: str, number: int, cause: str
) -> None:
    """Every 500 can be looked up by the id in its answer."""
    method, path, sent, expected = CASES[way]
    body = orjson.loads(orjson.dumps(sent["json"]))
    if way == "attention":
        body["embeddings"][0][0][0] = number
    else:
        body["inputs"][0]["data"][0] = number
    request_id = f"failure-{time.monotonic_ns()}"
    headers = {"X-Request-ID": request_id} | sent.get("headers", {})

    answer = faulty.client.request(method, faulty.url + path, json=body, headers=headers)

    lines = [orjson.loads(line) for line in faulty.whole_log().splitlines()]
    error, line = [line for line in lines if line.get("request_id") == request_id]
    assert answer.status_code == 500
    assert answer.json()["code"] == "internal"
    assert "planted" not in answer.text
    assert (error["level"], error["message"]) == ("error", "a request failed")
    assert (error["cause"], error["model"]) == (cause, "tiny")
    assert cause in error["exception"]
    assert "Traceback" in error["exception"]
    assert (line["message"], line["status"], line["code"]) == ("request", 500, "internal")
    assert (line["model"], line["rows"], line["tokens"]) == (
        "tiny",
        expected["rows"],
        expected["tokens"],
    )


@pytest.mark.fault("C5")
@pytest.mark.parametrize(
    ("method", "path", "cause"),
    [
        ("POST", "/v2/repository/index", "OSError: planted cause"),
        ("GET", "/v1/models", "ZeroDivisionError: planted bug"),
    ],
)
def test_failure_of_a_route_without_tensors_has_an_error_line(
    faulty: Server, method: str, path: str, cause: str
) -> None:
    """One that Headwise raised itself, and one that nobody thought of."""
    request_id = f"failure-{time.monotonic_ns()}"

    answer = faulty.client.request(
        method, faulty.url + path, json={}, headers={"X-Request-ID": request_id}
    )

    faulty.wait_for_log(f'"message":"request".*{request_id}')
    lines = [orjson.loads(line) for line in faulty.log().splitlines()]
    error, line = [line for line in lines if line.get("request_id") == request_id]
    assert answer.status_code == line["status"] == 500
    assert (error["message"], error["cause"]) == ("a request failed", cause)
    assert answer.json()["code"] == line["code"] == "internal"
    assert "planted bug" not in answer.text


# The end, and a standard error that is not well


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Load:
    """Four callers that call until the server is gone, and the ids that were answered."""

    def __init__(self, server: Server, pool: concurrent.futures.Executor) -> None:
        self._server = server
        self.answered: list[list[str]] = [[] for _ in range(4)]
        self._calls = [pool.submit(self._call, name) for name in range(4)]

    def wait(self) -> None:
        """Return once every caller has lost the server."""
        for call in self._calls:
            call.result()

    def _call(self, name: int) -> None:
        with httpx.Client(timeout=60) as client:
            for i in range(10**6):
                request_id = f"load-{name}-{i}"
                try:
                    client.post(
                        self._server.url + "/v2/models/tiny/infer",
                        json=infer_body(1, 1),
                        headers={"X-Request-ID": request_id},
                    )
                except httpx.TransportError:
                    return
                self.answered[name].append(request_id)


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ([signal.SIGTERM], 0),
        ([signal.SIGINT], 0),
        ([signal.SIGTERM, signal.SIGTERM], 128 + signal.SIGTERM),
    ],
)
def test_end_under_load_loses_no_line(
    layers: Layers, signals: list[signal.Signals], code: int
) -> None:
    """Each answered request has its line, in its caller's order, however the process ends."""
    grace_s = 0 if len(signals) == 1 else 300
    with (
        Server(layers.repository, grace_s=grace_s) as server,
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
        running = Load(server, pool)
        until(lambda: all(len(ids) > 50 for ids in running.answered))
        for number in signals:
            server.process.send_signal(number)
            if len(signals) > 1:
                server.wait_for_log('"message":"stopping"')
        running.wait()
        assert server.process.wait(60) == code

    logged: list[list[str]] = [[] for _ in range(4)]
    for line in requests_of(server.log()):
        if line["request_id"].startswith("load-"):
            logged[int(line["request_id"].split("-")[1])].append(line["request_id"])
    for ids, found in zip(running.answered, logged, strict=True):
        # The last request may have its line though its answer did not get through.
        assert found[: len(ids)] == ids
        assert len(found) <= len(ids) + 1
    assert server.log().endswith("\n")


def test_refused_start_says_why_after_the_log(layers: Layers) -> None:
    """The last line is the one to read."""
    environ = {
        "HEADWISE_REPOSITORY": str(layers.repository / "none"),
        "HEADWISE_PORT": "0",
    }

    ended = subprocess.run(
        [sys.executable, "-m", "service"],
        env={**os.environ, **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    first, *_, last = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert orjson.loads(first)["message"] == "starting"
    assert last.startswith("error: ")


def start(repository: Path, port: int, **options: Any) -> "subprocess.Popen[bytes]":
    """Return a server process on that port, whose standard error is the test's to choose."""
    named = {"HEADWISE_REPOSITORY": str(repository), "HEADWISE_PORT": str(port)}
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HEADWISE_")}
    environ = {**clean, **named, "HEADWISE_GRACE_S": "0"}
    return subprocess.Popen([sys.executable, "-m", "service"], env=environ, cwd=ROOT, **options)


def check_serves_and_ends(process: "subprocess.Popen[bytes]", port: int, count: int) -> None:
    """Assert that so many calls are answered, and that the end is clean."""
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            until(lambda: client.get("/v2/health/ready").status_code == 200)
            for _ in range(count):
                answer = client.post("/v2/models/tiny/infer", json=infer_body(1, 1))
                assert answer.status_code == 200
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_server_whose_log_nobody_reads_any_more_goes_on(layers: Layers) -> None:
    """A broken pipe: what collected the log has ended."""
    read_end, write_end = os.pipe()
    port = free_port()
    process = start(layers.repository, port, stderr=write_end)
    os.close(write_end)
    os.read(read_end, 1)
    os.close(read_end)

    check_serves_and_ends(process, port, 20)


def test_server_without_standard_error_goes_on(layers: Layers) -> None:
    """Its descriptor was closed; nothing that is opened later gets the log."""
    port = free_port()
    process = start(layers.repository, port, preexec_fn=lambda: os.close(2))

    check_serves_and_ends(process, port, 20)


def test_server_whose_log_is_stuck_goes_on(layers: Layers) -> None:
    """A full pipe: what was buffered meanwhile is there when somebody reads again."""
    read_end, write_end = os.pipe()
    port = free_port()
    process = start(layers.repository, port, stderr=write_end)
    os.close(write_end)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            until(lambda: client.get("/v2/health/ready").status_code == 200)
            for _ in range(FLOOD):
                assert client.get("/v1/models").status_code == 200
        process.send_signal(signal.SIGTERM)
        with open(read_end, "rb") as reader:
            log = reader.read().decode()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()

    assert len(log) > 2 * 64 * 1024
    assert len(requests_of(log)) == FLOOD
    assert '"message":"stopped"' in log.splitlines()[-1]


# One line a request, whatever callers send


class Kept:
    """An access log of info and above that keeps what it wrote in a file."""

    def __init__(self, path: Path, *, is_text: bool) -> None:
        self._file = path.open("w+b")
        self._writer = LogWriter(self._file.fileno(), notice=lambda lines: b"")
        self._log = AccessLog(Log(self._writer, is_text=is_text), names_keys=True)

    def line_of(self, record: RequestRecord) -> str:
        """Return all that was written for a request."""
        start = os.fstat(self._file.fileno()).st_size
        self._log.write(record)
        self._writer.flush(60)
        self._file.seek(start)
        return self._file.read().decode()

    def close(self) -> None:
        """Write no more."""
        self._writer.close()
        self._file.close()


ANY = st.text(st.characters(), max_size=40)
RECORDS = st.builds(
    RequestRecord,
    method=st.none() | ANY,
    route=ANY,
    request_id=ANY,
    started=st.just(0.0),
    key=st.none() | ANY,
    request_bytes=st.integers(0, 2**70),
    model=st.none() | ANY,
    version=st.none() | st.integers(0, 2**70),
    rows=st.none() | st.integers(0, 2**40),
    tokens=st.none() | st.integers(0, 2**40),
    status=st.integers(100, 599),
    code=st.none() | ANY,
    answer_bytes=st.integers(0, 2**70),
)


@pytest.fixture
def _at_info() -> Iterator[None]:
    """Have requests logged in this process."""
    logger = logging.getLogger("headwise")
    level = logger.level
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(level)


@pytest.mark.usefixtures("_at_info")
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(record=RECORDS)
def test_any_record_is_one_line_of_json(tmp_path: Path, record: RequestRecord) -> None:
    """Every value comes back as it was, also what is no UTF-8."""
    kept = Kept(tmp_path / "json", is_text=False)

    line = kept.line_of(record)

    kept.close()
    assert line.count("\n") == 1
    found = json.loads(line)
    assert list(found) == [*FIELDS, "key"]
    for name in ("method", "route", "model", "version", "rows", "tokens", "status", "code", "key"):
        assert found[name] == getattr(record, name)
    for name in ("request_bytes", "answer_bytes", "request_id"):
        assert found[name] == getattr(record, name)


@pytest.mark.usefixtures("_at_info")
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(record=RECORDS)
def test_any_record_is_one_line_of_text(tmp_path: Path, record: RequestRecord) -> None:
    """Nothing in it ends the line or commands the terminal."""
    kept = Kept(tmp_path / "text", is_text=True)

    line = kept.line_of(record)

    kept.close()
    assert line.endswith("\n")
    assert line[:-1].isprintable()


@pytest.mark.usefixtures("_at_info")
def test_warning_has_no_line_of_a_request(tmp_path: Path) -> None:
    """The level is looked up for each line: it may change at any time."""
    kept = Kept(tmp_path / "json", is_text=False)
    record = RequestRecord("GET", "/v1/models", "a", 0.0, status=200)
    logger = logging.getLogger("headwise")

    lines = []
    for level in (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG):
        logger.setLevel(level)
        lines.append(bool(kept.line_of(record)))

    kept.close()
    assert lines == [True, False, False, True]


@pytest.mark.usefixtures("_at_info")
def test_text_has_the_same_in_columns(tmp_path: Path) -> None:
    """For a person at a terminal: lines of calls and of others stand under each other."""
    kept = Kept(tmp_path / "text", is_text=True)
    call = RequestRecord("POST", INFER, "a" * 32, time.monotonic(), "team", 612, "tiny", 1, 2, 6)
    call.status, call.answer_bytes = 429, 80
    call.code = "queue_full"
    listing = RequestRecord("GET", "/v1/models", "b" * 32, time.monotonic())
    listing.status, listing.answer_bytes = 200, 1234

    lines = [kept.line_of(call), kept.line_of(listing)]

    kept.close()
    number = r"\d+\.\d{3} ms"
    assert re.fullmatch(
        rf"{TIME} request POST 429 +{number} tiny/1 +2 rows +6 tokens +612 B in +80 B out +"
        rf"a{{32}} team +{INFER.replace('{', '[{]')} queue_full\n",
        lines[0],
    )
    assert re.fullmatch(
        rf"{TIME} request GET  200 +{number} - +- rows +- tokens +0 B in +1234 B out +"
        rf"b{{32}} - +/v1/models\n",
        lines[1],
    )
    assert lines[0].index(INFER) == lines[1].index("/v1/models")


HEADER = st.binary(min_size=1, max_size=60).filter(lambda b: not set(b) & set(b"\r\n\0"))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(request_id=HEADER, other=HEADER, name=st.text(min_size=1, max_size=30))
def test_any_request_has_one_line_of_json_under_the_id_in_its_answer(
    server: Server, request_id: bytes, other: bytes, name: str
) -> None:
    """Whatever a caller puts into a header or a model's name."""
    path = f"/v2/models/{quote(name, safe='')}/infer".encode()
    head = b"POST %s HTTP/1.1\r\nHost: a\r\nX-Request-ID: %s\r\ntraceparent: %s\r\n" % (
        path,
        request_id,
        other,
    )
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}")
        answer = connection.makefile("rb").read()
    status = int(answer.split(b" ")[1])
    shown = [line for line in answer.split(b"\r\n") if line.lower().startswith(b"x-request-id:")]
    log = server.whole_log()

    lines = requests_of(log)
    if not shown:
        # What is no HTTP at all is answered in plain text, before any of this.
        assert status == 400
        return
    given_id = shown[0].split(b":", 1)[1].strip().decode()
    assert [line["status"] for line in lines if line["request_id"] == given_id][-1] == status
