"""CORS: pages of the origins that a setting names may call, from a real browser too."""

from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from service.errors import SettingsInvalid
from service.settings import Settings
from tests.support.layers import Layers
from tests.support.server import Server

KEY = "k" * 40
ORIGIN = "https://app.example.com"
ATTENTION = {"model": "tiny", "embeddings": [[0.5] * 8]}
INFER = {
    "inputs": [{"name": "embeddings", "shape": [1, 1, 8], "datatype": "FP32", "data": [0.5] * 8}]
}

pytestmark = pytest.mark.fault("E8")


@pytest.fixture(scope="module")
def crossed(layers: Layers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server with keys, whose callers may be pages of one origin."""
    file: Path = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"someone:{KEY}\n")
    origins = f"http://localhost:1, {ORIGIN}"
    with Server(layers.repository, api_keys_file=file, cors_origins=origins) as running:
        yield running


def preflight(
    server: Server, path: str, origin: str, method: str = "POST"
) -> tuple[int, dict[str, str], bytes]:
    """Return the answer to what a browser asks before a call: without a key."""
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "content-type,x-api-key",
    }
    answer = server.client.request("OPTIONS", server.url + path, headers=headers)
    return answer.status_code, dict(answer.headers), answer.content


@pytest.mark.parametrize("path", ["/v1/attention", "/v2/models/tiny/infer", "/v1/models"])
def test_preflight_of_a_named_origin_needs_no_key(crossed: Server, path: str) -> None:
    """A browser sends none with it; the answer lets the page send one."""
    status, headers, _ = preflight(crossed, path, ORIGIN)

    assert status == 200
    assert headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in headers["access-control-allow-methods"]
    assert headers["access-control-allow-headers"] == "content-type,x-api-key"


@pytest.mark.parametrize(
    ("origin", "method"), [("https://other.example", "POST"), (ORIGIN, "DELETE")]
)
def test_other_preflight_is_refused_in_the_form_of_every_error(
    crossed: Server, origin: str, method: str
) -> None:
    """The operator who looks reads which setting decides."""
    status, headers, content = preflight(crossed, "/v1/attention", origin, method)

    assert (status, orjson.loads(content)["code"]) == (400, "invalid_input")
    assert "HEADWISE_CORS_ORIGINS" in orjson.loads(content)["error"]
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    ("path", "body", "key", "status"),
    [
        ("/v1/attention", ATTENTION, KEY, 200),
        ("/v2/models/tiny/infer", INFER, KEY, 200),
        ("/v1/attention", {}, KEY, 400),
        ("/v1/attention", ATTENTION, "wrong", 401),
        ("/nowhere", {}, KEY, 404),
    ],
)
def test_page_may_read_answers_and_errors(
    crossed: Server, path: str, body: object, key: str, status: int
) -> None:
    """On every path, for the origin that is named and no other."""
    for origin, allowed in ((ORIGIN, ORIGIN), ("https://other.example", None)):
        for _ in range(3):  # the fast path remembers the head of a call
            headers = {"Origin": origin, "X-API-Key": key}
            answer = crossed.post(path, json=body, headers=headers)
            assert answer.status_code == status
            assert answer.headers.get("access-control-allow-origin") == allowed


def test_without_the_setting_nothing_is_said_of_origins(server: Server) -> None:
    """A browser then lets no page of another origin read anything."""
    status, headers, _ = preflight(server, "/v1/attention", ORIGIN)
    answer = server.post("/v1/attention", json=ATTENTION, headers={"Origin": ORIGIN})

    assert (status, answer.status_code) == (405, 200)
    for told in (headers, dict(answer.headers)):
        assert not [name for name in told if name.startswith("access-control")]


@pytest.mark.parametrize(
    "value", ["https://a.example/", "a.example", "https://A.example", "https://*.example", "x,,y"]
)
def test_what_no_browser_sends_as_origin_is_refused_at_the_start(value: str) -> None:
    """An origin with a slash at its end, say, would never match."""
    with pytest.raises(SettingsInvalid, match=r"HEADWISE_CORS_ORIGINS: .*scheme://host\[:port\]"):
        Settings.load([], {"HEADWISE_CORS_ORIGINS": value})
