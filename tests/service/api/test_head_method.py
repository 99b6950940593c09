"""HEAD: answered as GET is, without the body (RFC 9110, 9.3.2)."""

import re
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from tests.service.api.test_fast_path import connect
from tests.support.layers import Layers
from tests.support.server import Server

KEY = "k" * 40
OF_EACH_ANSWER = {"date", "x-request-id", "server-timing"}

pytestmark = pytest.mark.fault("E8")


@pytest.fixture(scope="module")
def keyed(layers: Layers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server that asks for a key."""
    file: Path = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"someone:{KEY}\n")
    with Server(layers.repository, api_keys_file=file) as running:
        yield running


def paths(server: Server) -> list[str]:
    """Return a path of every route, one that there is not, and one that takes POST only."""
    document = server.get("/openapi.json").json()["paths"]
    named = [path.format(name="tiny", version="1", region="r") for path in document]
    assets = [f"/docs/assets/{file}" for file in ("swagger-ui-bundle.js", "swagger-ui.css")]
    return [*named, "/docs", "/openapi.json", *assets, "/v2/models/none", "/nowhere"]


@pytest.mark.parametrize("key", [KEY, None], ids=["with its key", "without a key"])
def test_head_is_answered_as_get_without_the_body(keyed: Server, key: str | None) -> None:
    """Status and headers of every path, Content-Length included; keys are asked for alike."""
    headers = {} if key is None else {"X-API-Key": key}
    for path in paths(keyed):
        get = keyed.client.get(keyed.url + path, headers=headers)
        head = keyed.client.head(keyed.url + path, headers=headers)

        left_out = OF_EACH_ANSWER | ({"content-length"} if path == "/metrics" else set())
        told = [{k: v for k, v in a.headers.items() if k not in left_out} for a in (get, head)]
        assert (head.status_code, told[1]) == (get.status_code, told[0]), path
        assert head.content == b""
        if path != "/metrics":
            assert int(head.headers["content-length"]) == len(get.content), path


def test_request_after_head_on_one_connection_has_its_own_answer(server: Server) -> None:
    """No byte of a body follows that the caller would take for the next answer."""
    ask = b"%b /v2/health/live HTTP/1.1\r\nHost: a\r\n%b\r\n"
    with connect(server) as connection:
        connection.sendall(ask % (b"HEAD", b"") + ask % (b"GET", b"Connection: close\r\n"))
        answers = connection.makefile("rb").read()

    first, second, body = answers.split(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"HTTP/1.1 200 ")
    assert body == b'{"live":true}'


def test_head_is_logged_as_what_it_is(server: Server) -> None:
    """With its own method, the route of GET, and no byte of a body."""
    server.client.head(server.url + "/v1/models", headers={"X-Request-ID": "a-head"})

    line = orjson.loads(server.wait_for_log(r'.*"request_id":"a-head".*')[0])
    assert (line["method"], line["route"]) == ("HEAD", "/v1/models")
    assert (line["status"], line["answer_bytes"]) == (200, 0)


def test_405_names_head_beside_get(server: Server) -> None:
    """What `Allow` says is what is answered."""
    for path in ("/v1/models", "/v2/logging", "/docs"):
        allowed = server.client.delete(server.url + path).headers["allow"]
        assert re.match("GET, HEAD(, POST)?$", allowed)
