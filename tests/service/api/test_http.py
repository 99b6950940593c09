"""HTTP around the calls: media types, limits, problems, health, models, metrics, docs."""

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import orjson
import pytest
from safetensors.numpy import load, save

from service import __version__
from tests.support.layers import CONFIGS, Layers
from tests.support.processes import children_of, command_of
from tests.support.server import Server

GOOD: dict[str, Any] = {"model": "tiny", "embeddings": [[0.5] * 8] * 2}


@pytest.fixture(scope="module")
def strict(layers: Layers) -> Iterator[Server]:
    """Return a server with small limits."""
    with Server(
        layers.repository,
        max_body_bytes=2000,
        max_rows=3,
        max_length=5,
        max_answer_bytes=400,
        max_tokens=20,
        head_timeout_s=0.5,
        body_timeout_s=0.5,
        nonfinite="refuse",
    ) as running:
        yield running


def connect(server: Server) -> socket.socket:
    """Return a bare connection."""
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def check_problem(response: Any, status: int, code: str, *words: str) -> None:
    """Assert the one form of all errors."""
    assert response.status_code == status, response.text
    problem = response.json()
    assert sorted(problem) == ["code", "error"]
    assert problem["code"] == code
    for word in words:
        assert word in problem["error"]


@pytest.mark.parametrize("content_type", [None, "application/json; charset=utf-8", "form"])
def test_attention_reads_json_also_without_or_with_curls_own_type(
    server: Server, content_type: str | None
) -> None:
    """`curl -d` needs no header."""
    form = "application/x-www-form-urlencoded"
    headers = {"Content-Type": content_type.replace("form", form)} if content_type else {}

    response = server.post("/v1/attention", content=orjson.dumps(GOOD), headers=headers)

    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"


def test_attention_one_sequence_is_answered_one_rank_lower(server: Server) -> None:
    """[S][E] in gives [S][E] and [H][S][T] out."""
    answer = server.post("/v1/attention", json={**GOOD, "weights": True}).json()

    assert sorted(answer) == ["attention_weights", "model", "output", "version"]
    assert (answer["model"], answer["version"]) == ("tiny", 1)
    assert np.shape(answer["output"]) == (2, 8)
    assert np.shape(answer["attention_weights"]) == (2, 2, 2)


def test_attention_weights_are_absent_unless_asked_for(server: Server) -> None:
    """Asking for nothing extra gives nothing extra."""
    assert "attention_weights" not in server.post("/v1/attention", json=GOOD).json()


def test_attention_default_model_is_mha(server: Server) -> None:
    """A call that names no model goes to the default."""
    assert server.post("/v1/attention", json={"embeddings": [[0.5] * 24]}).json()["model"] == "mha"


def test_attention_null_counts_as_left_out(server: Server) -> None:
    """Clients with typed models send null for what they leave out."""
    nothing = dict.fromkeys(
        ["memory", "attend_mask", "pair_mask", "head_mask", "weights", "causal", "timeout_s"]
    )

    assert server.post("/v1/attention", json={**GOOD, **nothing}).json() == (
        server.post("/v1/attention", json=GOOD).json()
    )


@pytest.mark.fault("E5")
def test_attention_time_limit_of_the_body_overrides_that_of_the_header(server: Server) -> None:
    """A gateway sets the header for all calls; one of them may say otherwise."""
    headers = {"X-Request-Timeout-S": "0.000000001"}

    def status(body: dict[str, Any]) -> int:
        return server.post("/v1/attention", json=body, headers=headers).status_code

    assert status(GOOD) == 504
    assert status({**GOOD, "timeout_s": 60}) == 200


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", "application/json"),
        ("", "application/json"),
        ("application/*", "application/json"),
        ("application/x-safetensors", "application/x-safetensors"),
        ("text/html, application/x-safetensors;q=0.5", "application/x-safetensors"),
        ("application/x-safetensors;q=0.1, application/json;q=0.9", "application/json"),
        ("application/x-safetensors;q=x, application/json;q=0.1", "application/json"),
    ],
)
def test_attention_answers_in_the_format_that_is_accepted(
    server: Server, accept: str, kind: str
) -> None:
    """JSON in may be safetensors out."""
    response = server.post("/v1/attention", json=GOOD, headers={"Accept": accept})

    assert response.headers["content-type"] == kind
    if kind != "application/json":
        assert load(response.content)["output"].shape == (1, 2, 8)


@pytest.mark.parametrize("accept", ["text/html", "application/json;q=0", "image/*"])
def test_attention_unknown_accept_is_406(server: Server, accept: str) -> None:
    """A caller that can read neither format is told which there are."""
    response = server.post("/v1/attention", json=GOOD, headers={"Accept": accept})

    check_problem(response, 406, "not_acceptable", "header Accept: expected application/json")


def test_attention_unknown_media_type_is_415(server: Server) -> None:
    """Told by name, with what is read."""
    response = server.post("/v1/attention", content=b"x", headers={"Content-Type": "text/csv"})

    check_problem(response, 415, "unsupported_media_type", "header Content-Type", "'text/csv'")


@pytest.mark.parametrize("encoding", ["br", "zstd", "deflate, gzip"])
@pytest.mark.parametrize("path", ["/v1/attention", "/v2/models/tiny/infer"])
def test_encoded_body_is_415(server: Server, path: str, encoding: str) -> None:
    """Never read as if it were plain."""
    response = server.post(path, content=b"x", headers={"Content-Encoding": encoding})

    check_problem(response, 415, "unsupported_media_type", "header Content-Encoding")


def test_time_limit_header_is_checked_by_name(server: Server) -> None:
    """A wrong header is the caller's mistake, too."""
    for path in ("/v1/attention", "/v2/models/tiny/infer"):
        response = server.post(path, json=GOOD, headers={"X-Request-Timeout-S": "soon"})
        check_problem(response, 400, "invalid_input", "header X-Request-Timeout-S", "'soon'")


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_nonfinite_embeddings_answer_null_for_their_own_sequence(
    server: Server, literal: str
) -> None:
    """Rule 6: accepted, valid JSON, and no neighbour harmed."""
    row = "[" + ",".join(["0.5"] * 7)
    text = f'{{"model": "tiny", "embeddings": [[{row}, {literal}]], [{row}, 1]]]}}'

    response = server.post("/v1/attention", content=text.encode())

    output = orjson.loads(response.content)["output"]
    assert output[0] == [[None] * 8]
    assert None not in output[1][0]


def test_nonfinite_embeddings_are_refused_where_the_setting_says_so(strict: Server) -> None:
    """With the first position."""
    text = b'{"model": "tiny", "embeddings": [[0,0,0,0,0,0,0,0],[0,0,0,NaN,0,0,0,0]]}'

    response = strict.post("/v1/attention", content=text)

    check_problem(response, 400, "invalid_input", "embeddings: expected finite", "[0, 1, 3]")


@pytest.mark.parametrize("start", [b"", b"POST /v1/att", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_head_that_never_ends_is_408(strict: Server, start: bytes) -> None:
    """Neither a silent connection nor a slow head holds a place for long."""
    with connect(strict) as connection:
        connection.sendall(start)
        answer = connection.makefile("rb").read()

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"error":"head: expected within 0.5 s' in answer
    assert b'"code":"too_slow"' in answer


def test_second_head_on_a_kept_connection_is_timed_too(strict: Server) -> None:
    """The timer starts again with the first byte of the next head."""
    with connect(strict) as connection:
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        first = connection.recv(4096)
        time.sleep(1)  # idle longer than a head may take: no head has begun
        connection.sendall(b"GET /v2/hea")
        answer = connection.makefile("rb").read()

    assert first.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in answer  # after the rest of the first answer


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"embeddings": [[[0.5] * 8]] * 4}, "embeddings: at most 3 sequences, got 4"),
        ({"embeddings": [[0.5] * 8] * 6}, "embeddings: at most 5 tokens long, got 6"),
        (
            {"embeddings": [[[0.5] * 8] * 4] * 3},
            "call: at most 20 queries and keys with their padding, got 3 sequences of 4 and 4: 24",
        ),
        (
            {"embeddings": [[[0.5] * 8] * 5] * 2, "weights": True},
            "answer: at most 400 bytes, this call asks for 720",
        ),
    ],
)
def test_call_above_a_limit_is_413_with_limit_and_wish(
    strict: Server, changes: dict[str, Any], words: str
) -> None:
    """The caller learns both numbers."""
    response = strict.post("/v1/attention", json={**GOOD, **changes})

    check_problem(response, 413, "too_large", words)


def test_call_just_within_every_limit_is_answered(strict: Server) -> None:
    """A limit is what may be reached."""
    response = strict.post("/v1/attention", json={**GOOD, "embeddings": [[[0.5] * 8] * 5] * 2})

    assert response.status_code == 200


def test_memory_above_the_limit_is_413(strict: Server) -> None:
    """Keys count like queries."""
    body = {"model": "cross", "embeddings": [[0.5] * 12], "memory": [[0.5] * 6] * 6}

    check_problem(strict.post("/v1/attention", json=body), 413, "too_large", "memory: at most 5")


def test_announced_body_above_the_limit_is_413_before_it_is_sent(strict: Server) -> None:
    """A gigabyte is refused by its announcement alone, and the connection closed."""
    with connect(strict) as connection:
        connection.sendall(
            b"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Length: 1073741824\r\n\r\n"
        )
        answer = connection.makefile("rb").read()

    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()
    assert b"body: at most 2000 bytes, got 1073741824" in answer


def test_chunked_body_above_the_limit_is_413(strict: Server) -> None:
    """A body that announces nothing is counted as it comes."""
    response = strict.post("/v1/attention", content=iter([b" " * 1500] * 2))

    check_problem(response, 413, "too_large", "body: at most 2000 bytes, got more")


def test_body_that_never_arrives_is_408(strict: Server) -> None:
    """A slow sender holds a connection for a limited time."""
    with connect(strict) as connection:
        connection.sendall(b"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        answer = connection.makefile("rb").read()

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"body: expected within 0.5 s, got 1 bytes by then" in answer


def test_client_that_leaves_mid_body_is_counted_and_harms_nothing(server: Server) -> None:
    """No traceback, no 500: a status of its own."""
    with connect(server) as connection:
        connection.sendall(b"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")

    server.wait_for_log(r'"route":"/v1/attention".*"status":499')
    assert "Traceback" not in server.log()
    assert server.post("/v1/attention", json=GOOD).status_code == 200


def test_connection_is_kept_after_a_refused_call(server: Server) -> None:
    """A 4xx costs no new connection."""
    ports = set()
    for body in (GOOD, {"x": 1}, GOOD):
        response = server.post("/v1/attention", json=body)
        stream = response.extensions["network_stream"]
        ports.add(stream.get_extra_info("client_addr"))

    assert len(ports) == 1


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "word"),
    [
        ("GET", "/nope", 404, "not_found", "path: no such endpoint"),
        ("GET", "/docs/assets/../../x", 404, "not_found", "path: no such endpoint"),
        ("GET", "/docs/assets/nope.js", 404, "not_found", "path: no such endpoint"),
        ("POST", "/v1/attention/", 404, "not_found", "path: no such endpoint"),
        ("GET", "/v1/attention", 405, "method_not_allowed", "method: expected POST, got GET"),
        (
            "DELETE",
            "/v1/models",
            405,
            "method_not_allowed",
            "method: expected GET, HEAD, got DELETE",
        ),
        ("GET", "/v1/models/nope", 404, "unknown_model", "model: expected one of"),
    ],
)
def test_wrong_path_or_verb_has_the_one_error_form(
    server: Server, method: str, path: str, status: int, code: str, word: str
) -> None:
    """FastAPI's own `detail` breaks protocol clients."""
    response = server.client.request(method, server.url + path)

    check_problem(response, status, code, word)
    assert ("allow" in response.headers) is (status == 405)


def test_live_and_ready_answer_as_the_protocol_says(server: Server) -> None:
    """Bodies for KServe, statuses for Triton's clients."""
    assert server.get("/v2/health/live").json() == {"live": True}
    assert server.get("/v2/health/ready").json() == {"ready": True}


def test_models_list_tells_layer_precision_and_provider_in_use(server: Server) -> None:
    """What is served, and on what."""
    listing = server.get("/v1/models").json()

    models = {model["name"]: model for model in listing["models"]}
    assert listing["default"] == "mha"
    assert sorted(models) == sorted(CONFIGS)
    cross = models["cross"]["layer"]
    assert (cross["embed_dim"], cross["num_heads"], cross["head_dim"]) == (12, 3, 4)
    assert (cross["memory_dim"], cross["biases"]) == (6, [])
    for model in models.values():
        assert (model["ready"], model["precision"], model["provider"]) == (True, "fp32", "cpu")
        assert 0 < model["worst_output_error"] <= model["tolerance"] == 1e-5


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_model_tells_its_parity_limits_and_inputs(server: Server, name: str) -> None:
    """The published proof, and what a call may hold."""
    model = server.get(f"/v1/models/{name}").json()

    assert {row["reference"] for row in model["parity"]} == {"formula", "layer", "torch", "alone"}
    assert model["limits"]["max_rows"] == 256
    assert model["limits"]["max_body_bytes"] == 64 * 2**20
    assert ("memory" in model["inputs"]) is (name == "cross")
    assert ("causal" in model["inputs"]) is (name != "cross")
    assert "true = this key takes part" in model["inputs"]["attend_mask"]
    assert {"torch", "onnx", "onnxruntime"} <= set(model["versions"])


def test_metrics_count_calls_stages_and_refusals(server: Server) -> None:
    """Prometheus reads what happened."""
    server.post("/v1/attention", json=GOOD)
    server.post("/v1/attention", json={"model": "tiny", "embeddings": [[0.5] * 7]})

    response = server.get("/metrics")

    assert response.headers["content-type"].startswith("text/plain")
    for pattern in (
        r'headwise_requests_total{route="/v1/attention",status="200"} [1-9]',
        r'headwise_requests_total{route="/v1/attention",status="400"} [1-9]',
        r'headwise_refusals_total{code="invalid_input",model="tiny"} [1-9]',
        r'headwise_build_info{onnxruntime=".+",provider="cpu",python="3.+",version=".+"} 1',
        r'headwise_stage_seconds_count{model="tiny",stage="compute"} [1-9]',
        r"headwise_ready 1",
        r"process_resident_memory_bytes [1-9]",
    ):
        assert re.search(pattern, response.text), pattern


def test_answer_carries_stage_times_and_request_id(server: Server) -> None:
    """A caller sees where the time went, and finds the call in the log."""
    response = server.post("/v1/attention", json=GOOD, headers={"X-Request-ID": "my-7"})

    stages = re.findall(r"(\w+);dur=[\d.]+", response.headers["server-timing"])
    assert stages == ["queue", "assembly", "compute", "encode", "total"]
    assert response.headers["x-request-id"] == "my-7"
    record = orjson.loads(server.wait_for_log(r'.*"request_id":"my-7".*')[0])
    assert (record["route"], record["status"]) == ("/v1/attention", 200)


@pytest.mark.parametrize(
    ("headers", "pattern"),
    [
        ({}, r"[0-9a-f]{32}"),
        ({"X-Request-ID": "x" * 200}, r"[0-9a-f]{32}"),
        ({"X-Request-ID": "two words"}, r"[0-9a-f]{32}"),
        ({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}, "ab" * 16),
        ({"traceparent": "00-zz-01"}, r"[0-9a-f]{32}"),
    ],
)
def test_request_id_is_the_callers_trace_or_new(
    server: Server, headers: dict[str, str], pattern: str
) -> None:
    """A header that could garble the log is replaced."""
    response = server.client.get(server.url + "/v2/health/live", headers=headers)

    assert re.fullmatch(pattern, response.headers["x-request-id"])


def test_docs_work_without_network(server: Server) -> None:
    """Every asset of the page comes from this server."""
    page = server.client.get(
        server.url + "/", headers={"Accept": "text/html,*/*;q=0.8"}, follow_redirects=True
    )

    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert page.url.path == "/docs"
    assert {link for link in links if not link.startswith("data:")} == {
        "docs/assets/swagger-ui-bundle.js",
        "docs/assets/swagger-ui.css",
    }
    for link in links:
        if not link.startswith("data:"):
            assert server.client.get(page.url.join(link)).status_code == 200
    assert "url: 'openapi.json'" in page.text


def test_openapi_describes_every_endpoint_and_its_examples_work(server: Server) -> None:
    """`/docs` is true to what the service accepts."""
    document = server.get("/openapi.json").json()

    assert document["info"]["version"] == __version__
    assert set(document["paths"]) == {
        "/",
        "/v1/attention",
        "/v1/models",
        "/v1/models/{name}",
        "/v2/models/{name}/infer",
        "/v2/models/{name}/versions/{version}/infer",
        "/v2/health/live",
        "/v2/health/ready",
        "/metrics",
        "/v2",
        "/v2/models/stats",
        *(
            f"/v2/models/{{name}}{version}{end}"
            for version in ("", "/versions/{version}")
            for end in ("", "/ready", "/config", "/stats")
        ),
        "/v2/repository/index",
        "/v2/repository/models/{name}/load",
        "/v2/repository/models/{name}/unload",
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/models/{name}/trace/setting",
        *(
            f"/v2/{kind}sharedmemory{end}"
            for kind in ("cuda", "system")
            for end in (
                "/status",
                "/unregister",
                "/region/{region}/status",
                "/region/{region}/register",
                "/region/{region}/unregister",
            )
        ),
    }
    for path in ("/v1/attention", "/v2/models/{name}/infer"):
        post = document["paths"][path]["post"]
        answer = post["responses"]["200"]["content"]["application/json"]
        for example in post["requestBody"]["content"]["application/json"]["examples"].values():
            response = server.post(path.replace("{name}", "tiny"), json=example["value"])
            assert response.status_code == 200, response.text
            assert set(answer["schema"]["required"]) <= set(response.json())
            assert set(response.json()) <= set(answer["schema"]["properties"])
        assert {"400", "404", "408", "413", "429", "503", "504"} <= set(post["responses"])


def test_openapi_properties_are_the_keys_that_are_accepted(server: Server) -> None:
    """No key is documented and refused, or accepted and undocumented."""
    document = server.get("/openapi.json").json()
    content = document["paths"]["/v1/attention"]["post"]["requestBody"]["content"]
    documented = set(content["application/json"]["schema"]["properties"])

    refused = server.post("/v1/attention", json={"zzzzzzzz": 1}).json()["error"]

    assert set(refused.split("expected ")[1].split(", ")) == documented


def test_request_log_says_nothing_of_probes(server: Server) -> None:
    """Health checks would drown everything else."""
    server.get("/v2/health/ready")
    server.get("/metrics")
    server.post("/v1/attention", json=GOOD)

    log = server.whole_log()
    assert '"/v2/health/ready"' not in log
    assert '"/metrics"' not in log


@pytest.mark.parametrize(
    "text",
    [
        '"timeout_s": 1' + "0" * 400,
        '"weights": ' + "[" * 900 + "]" * 900,
        '"model": ' + "[" * 900 + "]" * 900,
        '"causal": ' + '{"a": ' * 900 + "1" + "}" * 900,
        '"priority": 1' + "0" * 400,
    ],
    ids=lambda text: text[:12],
)
def test_option_of_absurd_size_is_refused_by_name(server: Server, text: str) -> None:
    """Neither digits without end nor arrays without end are our fault."""
    body = '{"model": "tiny", "embeddings": [[0,0,0,0,0,0,0,0]], ' + text + "}"
    if '"model": [' in text:
        body = body.replace('"model": "tiny", ', "")

    response = server.post("/v1/attention", content=body.encode())

    check_problem(response, 400, "invalid_input", text.split('"')[1])


def test_mixed_lengths_are_limited_before_they_are_padded(server: Server) -> None:
    """A small request never makes the server take much memory."""
    before = resident_mb(server)
    lengths = np.array([1] * 100_000 + [30_000])
    few = np.array([1] * 200 + [4096])
    packed = save({"embeddings": np.zeros((130_000, 1), np.float32), "lengths": lengths})
    wide = save({"embeddings": np.zeros((4296, 1), np.float32), "lengths": few})
    ragged = {"model": "tiny", "embeddings": [[[1]]] * 3000 + [[[1]] * 3000]}
    headers = {"Content-Type": "application/x-safetensors"}

    answers = [
        server.post("/v1/attention?model=tiny", content=packed, headers=headers),
        server.post("/v1/attention?model=tiny", content=wide, headers=headers),
        server.post("/v1/attention", json=ragged),
    ]

    for answer in answers:
        check_problem(answer, 413, "too_large", "at most")
    assert resident_mb(server) - before < 50


def resident_mb(server: Server) -> float:
    """Return the server's resident memory."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.fault("E8b")
def test_preface_of_http2_is_answered_in_words(server: Server) -> None:
    """A client of gRPC, or one with prior knowledge of HTTP/2, gets no riddle of the parser's."""
    with connect(server) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        answer = connection.makefile("rb").read()

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"head: expected a request of HTTP/1.1, got HTTP/2 (as gRPC uses)" in answer


def test_client_that_offers_http2_keeps_its_body(server: Server) -> None:
    """Java's client offers it with every first request."""
    content = orjson.dumps(GOOD)
    head = (
        b"POST /v1/attention HTTP/1.1\r\nHost: x\r\nConnection: close, Upgrade, HTTP2-Settings\r\n"
        b"Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
        b"Content-Length: %d\r\n\r\n" % len(content)
    )
    with connect(server) as connection:
        connection.sendall(head + content)
        answer = connection.makefile("rb").read()

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"output":' in answer


def test_large_json_is_read_in_another_process_that_may_end(server: Server) -> None:
    """Its answer is right, its mistakes are told, and its end costs one answer at most."""
    block = np.random.default_rng(0).standard_normal((100, 250, 24)).astype(np.float32)
    good = orjson.dumps({"model": "mha", "embeddings": block}, option=orjson.OPT_SERIALIZE_NUMPY)
    bad = good[:-3] + b',"x"]]]}'

    first = server.post("/v1/attention", content=good)
    wrong = server.post("/v1/attention", content=bad)
    readers = [
        child
        for child in children_of(server.process.pid)
        if b"reader_process" in (command_of(child) or b"")
    ]
    os.kill(readers[0], signal.SIGKILL)
    server.post("/v1/attention", content=good)  # may be the one that meets the end
    again = server.post("/v1/attention", content=good)

    assert len(good) > 4 * 2**20
    assert np.shape(first.json()["output"]) == (100, 250, 24)
    check_problem(wrong, 400, "invalid_input", "body: expected JSON")
    assert again.json() == first.json()


def test_openapi_says_no_validation_error_and_every_path_parameter(server: Server) -> None:
    """What the framework would add is not what is answered."""
    document = server.get("/openapi.json").json()

    for path, verbs in document["paths"].items():
        for operation in verbs.values():
            named = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path))
            assert "422" not in operation["responses"]
    assert "text/plain" in document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v2/models/none/infer", 404), ("/v1/attention?modle=tiny", 400)],
)
def test_connection_is_kept_after_a_refusal_over_an_unread_body(
    server: Server, path: str, status: int
) -> None:
    """What the refused call still sends is passed over; the next one is served on it."""
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    connection.request("POST", path, body=bytes(2**21))
    refused = connection.getresponse()
    refused.read()
    kept = connection.sock

    connection.request("POST", "/v1/attention", body=orjson.dumps(GOOD))
    answer = connection.getresponse()

    assert (refused.status, answer.status) == (status, 200)
    assert answer.read()
    assert connection.sock is kept
    connection.close()


def test_connection_stays_open_when_the_rest_of_a_refused_body_has_come(layers: Layers) -> None:
    """It is no head that never ends: long after, the next call is served on it."""
    with Server(layers.repository, head_timeout_s=0.2) as server:
        connection = HTTPConnection(urlsplit(server.url).netloc, timeout=30)
        connection.putrequest("POST", "/v2/models/none/infer")
        connection.putheader("Content-Length", "1000")
        connection.endheaders()
        refused = connection.getresponse()
        refused.read()
        kept = connection.sock
        connection.send(bytes(1000))
        time.sleep(0.6)  # three times as long as a head may take
        connection.request("GET", "/v2/health/live")
        answer = connection.getresponse()
        answer.read()

        still_open = connection.sock
        connection.close()

    assert (refused.status, answer.status) == (404, 200)
    assert still_open is kept
