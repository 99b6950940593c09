"""Counters that stand at 0 before their first event: to Prometheus, a new one has no increase."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from service.api.expected import CALL_CODES, CODES
from service.telemetry.metrics import STAGES
from tests.service.api.test_fast_path import connect
from tests.support.layers import Layers
from tests.support.server import Server

KEY = "k" * 40
GOOD = {"model": "tiny", "embeddings": [[0.5] * 8]}
INFER = {
    "inputs": [{"name": "embeddings", "shape": [1, 1, 8], "datatype": "FP32", "data": [0.5] * 8}]
}

pytestmark = pytest.mark.fault("E8c")

BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "a call": orjson.dumps(GOOD),
    "an infer call": orjson.dumps(INFER),
    "another model": orjson.dumps({**GOOD, "model": "none"}),
    "another width": orjson.dumps({**GOOD, "embeddings": [[0.5] * 7]}),
    "too many rows": orjson.dumps({**GOOD, "embeddings": [[[0.5] * 8]] * 9}),
    "no time": orjson.dumps({**GOOD, "embeddings": [[0.5] * 8] * 900, "timeout_s": 1e-9}),
    "too large": b" " * 100_001,
}
HEADERS: list[dict[str, str]] = [
    {},
    {"Content-Type": "text/plain"},
    {"Accept": "image/png"},
    {"Content-Encoding": "br"},
    {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"},
]


def samples(server: Server) -> dict[str, float]:
    """Return every sample of Headwise's own with its value."""
    text = server.get("/metrics").text
    found = re.findall(r"^(headwise_\S+?(?:{.*})?) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


@pytest.fixture
def strict(layers: Layers, tmp_path: Path) -> Iterator[Server]:
    """Return a new server with keys, low limits and nothing switched on."""
    (tmp_path / "keys").write_text(f"someone:{KEY}\n")
    with Server(
        layers.repository,
        api_keys_file=tmp_path / "keys",
        cors_origins="https://a.example",
        max_rows=8,
        max_body_bytes=100_000,
    ) as running:
        yield running


def test_whatever_is_asked_for_counts_what_was_at_zero_before(strict: Server) -> None:
    """Every path with every verb, bodies and headers right and wrong, with and without a key."""
    before = samples(strict)
    document = strict.get("/openapi.json").json()["paths"]
    paths = [
        *(path.format(name="tiny", version="1", region="r") for path in document),
        *(path.format(name="none", version="7", region="r") for path in document),
        *("/docs", "/openapi.json", "/docs/assets/swagger-ui.css", "/docs/assets/x", "/nowhere"),
    ]
    for path in dict.fromkeys(paths):
        for verb in ("GET", "HEAD", "POST", "PUT", "OPTIONS"):
            strict.client.request(verb, strict.url + path)
            strict.client.request(verb, strict.url + path, headers={"X-API-Key": KEY})
        for content in BODIES.values():
            strict.post(path, content=content, headers={"X-API-Key": KEY})
    for path in ("/v1/attention", "/v2/models/tiny/infer"):
        for headers in HEADERS:
            for verb in ("POST", "OPTIONS"):
                strict.client.request(
                    verb,
                    strict.url + path,
                    content=BODIES["a call"],
                    headers={**headers, "X-API-Key": KEY},
                )
    for path, headers in (
        ("/", {"Accept": "text/html"}),
        ("/docs/assets/swagger-ui.css", {"If-Modified-Since": "Fri, 01 Jan 2100 00:00:00 GMT"}),
    ):
        strict.client.get(strict.url + path, headers=headers)
    for head in (b"nonsense\r\n\r\n", b"GET /%b HTTP/1.1\r\n\r\n" % (b"x" * 70_000)):
        with connect(strict) as connection:
            connection.sendall(head)
            connection.makefile("rb").read()

    after = samples(strict)

    counted = {name for name in after if name.startswith(("headwise_req", "headwise_ref"))}
    assert counted <= set(before), sorted(counted - set(before))
    statuses = {
        re.findall('status="(.*)"', name)[0]
        for name, value in after.items()
        if name.startswith("headwise_requests_total") and value > before[name]
    }
    assert {"200", "304", "307", "400", "401", "403", "404", "405", "406", "413", "415"} <= statuses


def test_codes_and_stages_stand_at_zero_for_every_model(layers: Layers) -> None:
    """Before any call, each model has all codes of calls, and each stage."""
    with Server(layers.repository) as new:
        found = samples(new)

    for code in CODES:
        name = f'headwise_refusals_total{{code="{code}",model=""}}'
        assert found[name] == 0 or code == "not_ready"  # to those who waited for this server
    for model in ("mha", "tiny", "cross"):
        for code in CALL_CODES:
            assert found[f'headwise_refusals_total{{code="{code}",model="{model}"}}'] == 0
        for stage in STAGES:
            assert found[f'headwise_stage_seconds_count{{model="{model}",stage="{stage}"}}'] == 0
        for where in ("queued", "running"):
            assert found[f'headwise_cancelled_total{{model="{model}",where="{where}"}}'] == 0
    for status in ("200", "400", "413", "429", "499", "500", "503", "504"):
        for route in ("/v1/attention", "/v2/models/{name}/infer"):
            assert found[f'headwise_requests_total{{route="{route}",status="{status}"}}'] == 0


def test_model_that_is_loaded_later_has_its_counters_from_then_on(
    layers: Layers, tmp_path: Path
) -> None:
    """Not before: a model that nobody serves is no label."""
    repository = tmp_path / "repository"
    shutil.copytree(layers.artifact("tiny"), repository / "tiny" / "1")
    with Server(repository, model_control=True) as server:
        before = samples(server)
        shutil.copytree(layers.artifact("mha"), repository / "mha" / "1")
        assert server.post("/v2/repository/models/mha/load").status_code == 200
        after = samples(server)
        unknown = server.post("/v1/attention", json={**GOOD, "model": "gone"})
        named = {
            re.findall('model="(.*?)"', name)[0] for name in samples(server) if "model=" in name
        }

    assert not [name for name in before if 'model="mha"' in name]
    assert after['headwise_refusals_total{code="queue_full",model="mha"}'] == 0
    assert after['headwise_stage_seconds_count{model="mha",stage="total"}'] == 0
    assert unknown.status_code == 404
    assert named == {"", "tiny", "mha"}


def test_refusals_of_one_model_are_told_from_those_of_another(server: Server) -> None:
    """By the model that was called, on either path."""
    name = 'headwise_refusals_total{{code="invalid_input",model="{}"}}'
    before = samples(server)
    server.post("/v1/attention", json={**GOOD, "model": "mha"})
    server.post("/v2/models/mha-weights/infer", json=INFER)
    after = samples(server)

    assert after[name.format("mha")] == before[name.format("mha")] + 2
    assert after[name.format("tiny")] == before[name.format("tiny")]
