"""Keys: who shows none learns nothing, and they are changed while the server runs."""

import contextlib
import http.client
import io
import logging
import os
import re
import secrets
import signal
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import pytest

from service.api.api_keys import MAX_FILE_BYTES, MAX_KEYS, ApiKeys
from service.errors import SettingsInvalid, Unauthorized
from service.transport.connection import MAX_HEAD_BYTES
from tests.support.layers import Layers
from tests.support.server import Server, until
from tests.system.test_main import serve

GOOD: dict[str, Any] = {"model": "tiny", "embeddings": [[0.5] * 8]}
KEY, OTHER = "k" * 30 + "-~", "AbC123._/+" * 4 + "=="
"""One of the least length, and one of every kind of character."""
BEARER = {"Authorization": f"Bearer {KEY}"}
OPEN = ("/v2/health/live", "/v2/health/ready", "/metrics")
"""What needs no key unless a setting says so."""
DESCRIPTION = (
    *("/", "/docs", "/openapi.json"),
    *("/docs/assets/swagger-ui-bundle.js", "/docs/assets/swagger-ui.css"),
)
"""What never needs one: the description of the interface, the same for every server."""


@pytest.fixture(scope="module")
def keyed(layers: Layers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server that asks for a key."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# who may call\n\nteam-a:{KEY}\n  team.b:{OTHER}  \r\n")
    with Server(layers.repository, api_keys_file=file) as running:
        yield running


def call(
    server: Server,
    headers: list[tuple[str, bytes]],
    path: str = "/v1/attention",
    content: bytes = orjson.dumps(GOOD),
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Return the answer to a POST with these very headers, also such as no client would send."""
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    connection.putrequest("POST", path)
    for name, value in [*headers, ("Content-Length", str(len(content)).encode())]:
        connection.putheader(name, value)
    connection.endheaders(content)
    answer = connection.getresponse()
    status, told, body = answer.status, answer.headers, answer.read()
    connection.close()
    return status, told, body


@pytest.mark.parametrize(
    "headers",
    [
        [("Authorization", b"Bearer " + KEY.encode())],
        [("Authorization", b"bearer " + OTHER.encode())],
        [("authorization", b"BEARER   " + KEY.encode() + b"  ")],
        [("X-API-Key", KEY.encode())],
        [("x-api-key", OTHER.encode())],
        [("X-API-Key", KEY.encode()), ("Authorization", b"Bearer " + KEY.encode())],
        [("X-API-Key", KEY.encode()), ("X-API-Key", KEY.encode())],
        [("X-API-Key", KEY.encode()), ("Authorization", b"Basic dTpw")],
    ],
    ids=lambda headers: ", ".join(f"{n}: {v[:8].decode()}" for n, v in headers),
)
@pytest.mark.parametrize("path", ["/v1/attention", "/v2/repository/index"])
def test_key_in_either_header_opens(
    keyed: Server, headers: list[tuple[str, bytes]], path: str
) -> None:
    """The same key twice is one key; an `Authorization` of another scheme is none."""
    content = orjson.dumps(GOOD) if path == "/v1/attention" else b""

    status, _, body = call(keyed, headers, path, content)

    assert status == 200, body


NONE, WRONG, SEVERAL = "got none", "got one that is not valid", "got several"


@pytest.mark.parametrize(
    ("headers", "what"),
    [
        ([], NONE),
        ([("Authorization", KEY.encode())], NONE),
        ([("Authorization", b"Basic " + KEY.encode())], NONE),
        ([("Authorization", b"Bearer\t" + KEY.encode())], NONE),
        ([("Authorization", b"")], NONE),
        ([("Cookie", KEY.encode())], NONE),
        ([("Authorization", b"Bearer")], WRONG),
        ([("Authorization", b"Bearer ")], WRONG),
        ([("X-API-Key", b"")], WRONG),
        ([("X-API-Key", KEY[:-1].encode())], WRONG),
        ([("X-API-Key", KEY.encode() + b"x")], WRONG),
        ([("X-API-Key", KEY.upper().encode())], WRONG),
        ([("X-API-Key", b"Bearer " + KEY.encode())], WRONG),
        ([("X-API-Key", b"team-a:" + KEY.encode())], WRONG),
        ([("X-API-Key", f"{KEY},{OTHER}".encode())], WRONG),
        ([("X-API-Key", "schlüssel".encode("latin-1") * 4)], WRONG),
        ([("X-API-Key", b"\xff\xfe" * 16)], WRONG),
        ([("X-API-Key", KEY.encode() * 1_500)], WRONG),
        ([("Authorization", b"Bearer " + b"k" * 50_000)], WRONG),
        ([("X-API-Key", KEY.encode()), ("X-API-Key", OTHER.encode())], SEVERAL),
        ([("X-API-Key", OTHER.encode()), ("Authorization", b"Bearer " + KEY.encode())], SEVERAL),
        ([("X-API-Key", KEY.encode()), ("Authorization", b"Bearer ")], SEVERAL),
        ([("Authorization", b"Bearer x"), ("Authorization", b"Bearer " + KEY.encode())], SEVERAL),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
@pytest.mark.parametrize("path", ["/v1/attention", "/v2/models/tiny/infer", "/v2"])
def test_key_that_is_missing_wrong_or_not_the_only_one_is_refused(
    keyed: Server, headers: list[tuple[str, bytes]], what: str, path: str
) -> None:
    """The answer says which headers are looked at, and repeats nothing of what was in them."""
    status, told, body = call(keyed, headers, path)

    assert status == 401
    assert orjson.loads(body) == {
        "error": "key: expected one in the header Authorization (as Bearer KEY) or X-API-Key,"
        f" {what}",
        "code": "unauthorized",
    }
    assert told["www-authenticate"] == "Bearer"
    assert told["content-type"] == "application/json"
    assert re.fullmatch("[0-9a-f]{32}", told["x-request-id"])


def test_without_a_key_every_path_and_verb_is_answered_alike(keyed: Server) -> None:
    """Neither what there is nor what there is not is told, but by health and metrics."""
    document = keyed.client.get(keyed.url + "/openapi.json", headers=BEARER).json()
    paths = [
        *(path.format(name="tiny", version=1, region="r") for path in document["paths"]),
        *(path.format(name="none", version=7, region="r") for path in document["paths"]),
        *("/docs/", "/docs/assets/", "/docs/assets/redoc.standalone.js", "/nowhere"),
        *("/docs/../v1/models", "/docs/assets/../../v1/models", "/docs%2f..%2fv1/models", "//"),
        *("/v2/health", "/v2/health/", "/v2/health/live/", "//v2/health/live", "/V2/HEALTH/LIVE"),
        *("/v2/health/live/../../../v1/models", "/v2/health/live%2f..", "/v1/models?x=/metrics"),
        *("/metrics/", "/metrics/../v1/models", "/v1/models;/metrics", "/v1/models#/metrics"),
    ]
    kept = HTTPConnection(urlsplit(keyed.url).netloc, timeout=30)
    seen = set()

    for path in {*paths} - {*OPEN, *DESCRIPTION}:
        for verb in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            kept.request(verb, path)
            answer = kept.getresponse()
            headers = {*answer.headers} - {"date"}
            seen.add((answer.status, answer.read(), *sorted(headers)))

    kept.close()
    assert len(seen) == 1
    assert next(iter(seen))[0] == 401


@pytest.mark.fault("E8")
@pytest.mark.parametrize("path", [*OPEN, *DESCRIPTION])
def test_probes_and_the_description_need_no_key(keyed: Server, path: str) -> None:
    """An orchestrator's probe has none, nor has a browser; neither does a wrong one harm."""
    assert keyed.get(path).status_code == 200
    assert keyed.client.get(keyed.url + path, headers={"X-API-Key": "x"}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/attention", "/v2/models/tiny/infer", "/nowhere"])
def test_body_of_a_call_without_key_is_not_waited_for_and_the_connection_is_kept(
    keyed: Server, path: str
) -> None:
    """The refusal comes before the body does; what still comes is passed over."""
    content = bytes(2**21)
    connection = HTTPConnection(urlsplit(keyed.url).netloc, timeout=30)
    connection.putrequest("POST", path)
    connection.putheader("Content-Length", str(len(content)))
    connection.endheaders()
    refused = connection.getresponse()
    refused.read()
    kept = connection.sock

    kept.sendall(content)
    connection.request("POST", "/v1/attention", body=orjson.dumps(GOOD), headers=BEARER)
    answer = connection.getresponse()
    answer.read()
    connection.request("POST", "/v1/attention", body=orjson.dumps(GOOD))
    again = connection.getresponse()
    again.read()

    assert (refused.status, answer.status, again.status) == (401, 200, 401)
    assert connection.sock is kept
    connection.close()


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-API-Key: ",
        b"GET /v1/models?",
        b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"1\r\nx\r\n0\r\nX-Trailer: ",
    ],
    ids=["header", "path", "trailer"],
)
def test_head_that_does_not_end_is_refused_before_it_fills_the_memory(
    keyed: Server, begin: bytes
) -> None:
    """Nobody has to show a key for it, and so it must be small."""
    address = urlsplit(keyed.url).hostname, urlsplit(keyed.url).port
    sent, most = 0, 64 * 2**20
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(begin)
        with contextlib.suppress(ConnectionError):
            while sent < most:
                sent += connection.send(b"a" * 2**16)

    assert sent < most
    assert keyed.get("/v2/health/live").status_code == 200


def test_head_above_its_limit_is_answered_413(keyed: Server) -> None:
    """The caller learns why; a head of half that size is read."""
    head = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Long: "
    address = urlsplit(keyed.url).hostname, urlsplit(keyed.url).port
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(head + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\n\r\n")
        read = connection.makefile("rb").read()
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(head)
        for _ in range(MAX_HEAD_BYTES // 1024):
            connection.sendall(b"a" * 1024)
        refused = connection.makefile("rb").read()

    assert read.startswith(b"HTTP/1.1 200 ")
    assert refused.startswith(b"HTTP/1.1 413 ")
    assert b'{"error":"head: at most 65536 bytes, got more","code":"too_large"}' in refused


def test_refusals_are_counted_and_the_log_has_the_name_but_no_key(keyed: Server) -> None:
    """The operator sees who called, and that somebody tried."""
    before = metric(keyed)
    by_name = {"X-Request-ID": "named", **BEARER}
    keyed.post("/v1/attention", json=GOOD, headers=by_name)
    for wrong in (f"{KEY}x", "wrong-key-that-nobody-has"):
        keyed.get("/v1/models?key=none")
        keyed.client.get(keyed.url + "/v1/models", headers={"X-API-Key": wrong})

    named = keyed.wait_for_log(r'.*"request_id":"named".*')[0]
    until(lambda: metric(keyed) == before + 4)
    assert orjson.loads(named)["key"] == "team-a"
    log = keyed.whole_log()
    assert '"code":"unauthorized"' in log
    for secret in (KEY, OTHER, "wrong-key"):
        assert secret not in log


def metric(server: Server) -> int:
    """Return how many calls were refused for their key."""
    found = re.search(
        r'^headwise_refusals_total{code="unauthorized",model=""} (\d+)',
        server.get("/metrics").text,
        re.M,
    )
    return int(found[1]) if found else 0


def test_metrics_need_a_key_where_the_setting_says_so(layers: Layers, tmp_path: Path) -> None:
    """Health still needs none."""
    file = tmp_path / "keys"
    file.write_text(f"a:{KEY}")
    with Server(layers.repository, api_keys_file=file, metrics_need_key=True) as server:
        without, with_key = (
            server.get("/metrics"),
            server.client.get(server.url + "/metrics", headers=BEARER),
        )
        document = server.client.get(server.url + "/openapi.json", headers=BEARER).json()

    assert (without.status_code, with_key.status_code) == (401, 200)
    assert "401" in document["paths"]["/metrics"]["get"]["responses"]


def test_openapi_tells_of_keys_where_they_are_asked_for(keyed: Server, server: Server) -> None:
    """Each call but the open ones, with both ways to show one; elsewhere nothing is told."""
    document = keyed.client.get(keyed.url + "/openapi.json", headers=BEARER).json()

    for path, verbs in document["paths"].items():
        for operation in verbs.values():
            is_open = path in (*OPEN, *DESCRIPTION)
            assert ("401" in operation["responses"]) != is_open
            assert ("security" in operation) != is_open
    assert document["components"]["securitySchemes"] == {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    for word in ("security", '"401"'):
        assert word not in server.get("/openapi.json").text


def test_without_the_setting_nobody_looks_for_a_key(server: Server) -> None:
    """What a proxy adds for others does no harm."""
    answer = server.post("/v1/attention", json=GOOD, headers={"Authorization": "Bearer x"})

    assert answer.status_code == 200
    assert '"key":' not in server.whole_log()


def status_of(server: Server, key: str) -> int:
    """Return what a call with this key is answered."""
    return server.post("/v1/attention", json=GOOD, headers={"X-API-Key": key}).status_code


def mount(directory: Path, **files: str) -> None:
    """Put files there as Kubernetes does: a folder aside, and one link that is swapped."""
    version = directory / f"..{secrets.token_hex(4)}"
    version.mkdir()
    for name, content in files.items():
        (version / name).write_text(content)
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(Path("..data") / name)
    (directory / "..new").symlink_to(version.name)
    (directory / "..new").rename(directory / "..data")


def test_keys_are_rotated_through_a_swapped_link_without_losing_a_call(
    layers: Layers, tmp_path: Path
) -> None:
    """The old one is valid until it is taken out, the new one from when it is put in."""
    directory = tmp_path / "mount"
    directory.mkdir()
    mount(directory, keys=f"a:{KEY}\n")
    with Server(layers.repository, api_keys_file=directory / "keys") as server:
        first = status_of(server, KEY), status_of(server, OTHER)
        mount(directory, keys=f"a:{KEY}\na:{OTHER}\n")
        between = []

        def is_known() -> bool:
            between.append(status_of(server, KEY))
            return status_of(server, OTHER) == 200

        until(is_known)
        mount(directory, keys=f"a:{OTHER}\n")
        until(lambda: status_of(server, KEY) == 401)
        last = status_of(server, OTHER)

    assert (first, set(between), last) == ((200, 401), {200}, 200)


def test_keys_rewritten_within_one_tick_and_size_are_noticed(
    layers: Layers, tmp_path: Path
) -> None:
    """Neither the file's time nor its size has to change."""
    file = tmp_path / "keys"
    file.write_text(f"a:{KEY}\n")
    before = file.stat()
    with Server(layers.repository, api_keys_file=file) as server:
        new = KEY[::-1]
        file.write_text(f"a:{new}\n")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

        until(lambda: status_of(server, new) == 200)
        old = status_of(server, KEY)

    assert old == 401


@pytest.mark.parametrize("spoil", ["empty", "wrong line", "gone", "directory"])
def test_keys_that_cannot_be_read_again_leave_the_old_ones_valid(
    layers: Layers, tmp_path: Path, spoil: str
) -> None:
    """The log tells it once, and again to who asks by SIGHUP; a mended file is taken up."""
    file = tmp_path / "keys"
    file.write_text(f"a:{KEY}\n")
    with Server(layers.repository, api_keys_file=file) as server:
        if spoil == "empty":
            file.write_text("")
        elif spoil == "wrong line":
            file.write_text(f"a:{OTHER}\nb{OTHER}\n")
        else:
            file.unlink()
        if spoil == "directory":
            file.mkdir()
        told = server.wait_for_log(r'.*"message":"keys not reloaded".*')[0]
        statuses = status_of(server, KEY), status_of(server, OTHER)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: server.log().count('"message":"keys not reloaded"') == 2)
        if spoil == "directory":
            file.rmdir()
        file.write_text(f"a:{OTHER}\n")
        until(lambda: status_of(server, OTHER) == 200)
        log, old = server.log(), status_of(server, KEY)

    assert orjson.loads(told)["level"] == "error"
    assert f"api_keys_file: {file}" in orjson.loads(told)["problem"]
    assert statuses == (200, 401)
    assert old == 401
    assert '"message":"keys reloaded","keys":1' in log
    assert KEY not in log
    assert OTHER not in log


def test_sighup_takes_up_keys_and_says_so(layers: Layers, tmp_path: Path) -> None:
    """Whoever sends it learns that the file is good, although it is as it was."""
    file = tmp_path / "keys"
    file.write_text(f"a:{KEY}\n")
    with Server(layers.repository, api_keys_file=file) as server:
        server.process.send_signal(signal.SIGHUP)

        server.wait_for_log('"message":"keys reloaded","keys":1')


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", ": expected 1 to 100 keys, got 0"),
        (b"# only this\n\n", ": expected 1 to 100 keys, got 0"),
        (KEY.encode(), " line 1: expected name:key"),
        (f"a:{KEY}\n{OTHER}".encode(), " line 2: expected name:key"),
        (b"a:" + b"x" * 31, " line 1: after the colon, expected a key of 32 to 256 characters"),
        (b"a:" + b"x" * 257, "32 to 256 characters, got 257"),
        (b"a: " + KEY.encode(), " line 1: after the colon, expected letters, digits and"),
        (b"a:" + KEY.encode() + b" # mine", "expected letters, digits and . _ ~ + / -"),
        (b"a:=" + KEY.encode(), "with = at the end only"),
        (b"a:" + b"\xc3\xbc" * 16, "expected letters, digits and"),
        (f":{KEY}".encode(), " line 1: before the colon, expected 1 to 64 letters"),
        (f"a b:{KEY}".encode(), "before the colon"),
        (f"{'n' * 65}:{KEY}".encode(), "before the colon"),
        (b"\xef\xbb\xbfa:" + KEY.encode(), "before the colon"),
        (f"a:{KEY}\nb:{KEY}".encode(), " line 2: expected a key of its own, got that of an ear"),
        (b"".join(b"a:%040d\n" % n for n in range(MAX_KEYS + 1)), "1 to 100 keys, got 101"),
        (b"#" * (MAX_FILE_BYTES + 1), ": expected at most 65536 bytes, got more"),
    ],
    ids=range(17),
)
def test_file_of_keys_that_is_wrong_is_told_by_its_line(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    """Where, and what was expected; never what stands there, which may be a key."""
    file = tmp_path / "keys"
    file.write_bytes(content)

    with pytest.raises(SettingsInvalid) as caught:
        ApiKeys(file)

    assert str(caught.value).startswith(f"api_keys_file: {file}")
    assert problem in str(caught.value)
    assert "xxxx" not in str(caught.value)
    assert KEY not in str(caught.value)
    assert OTHER not in str(caught.value)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Return what is logged in this process."""
    logger, stream = logging.getLogger("headwise"), io.StringIO()
    handler = logging.StreamHandler(stream)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_file_that_is_wrong_is_told_once_and_again_to_who_asks(
    tmp_path: Path, log: io.StringIO
) -> None:
    """It is looked at every second; the log is not filled with it."""
    file = tmp_path / "keys"
    file.write_text(f"a:{KEY}\n")
    keys = ApiKeys(file)
    told = []

    file.write_text("wrong\n")
    for retry in (False, False, True, False):
        keys.refresh(retry=retry)
        told.append(log.getvalue().count("keys not reloaded"))
    file.write_text(f"a:{KEY}\n")
    for retry in (False, False, True, False):
        keys.refresh(retry=retry)
        told.append(log.getvalue().count("keys reloaded"))

    assert told == [1, 1, 2, 2, 1, 1, 2, 2]
    assert keys.name_of([(b"x-api-key", KEY.encode())]) == "a"


def test_file_of_keys_may_hold_as_many_as_it_says(tmp_path: Path) -> None:
    """The first and the last are found, each by its name."""
    file = tmp_path / "keys"
    file.write_text("".join(f"name-{n}:{n:040d}\n" for n in range(MAX_KEYS)))
    keys = ApiKeys(file)

    names = [keys.name_of([(b"x-api-key", b"%040d" % n)]) for n in (0, 50, MAX_KEYS - 1)]

    assert names == ["name-0", "name-50", f"name-{MAX_KEYS - 1}"]
    with pytest.raises(Unauthorized):
        keys.name_of([(b"x-api-key", b"%040d" % MAX_KEYS)])


def test_keys_are_not_kept_in_memory(tmp_path: Path) -> None:
    """Only what cannot be turned back."""
    file = tmp_path / "keys"
    file.write_text(f"a:{KEY}\n")

    kept = vars(ApiKeys(file))

    assert "digest" in repr(kept)
    assert KEY not in repr(kept)


def test_file_of_keys_that_is_a_pipe_holds_nobody_up(tmp_path: Path) -> None:
    """Nobody may ever write into it."""
    os.mkfifo(tmp_path / "keys")

    with pytest.raises(SettingsInvalid, match="expected a plain file"):
        ApiKeys(tmp_path / "keys")


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"HEADWISE_API_KEYS_FILE": "/nonexistent/keys"}, "keys: No such file or directory"),
        ({"HEADWISE_API_KEYS_FILE": "/dev/null"}, "api_keys_file: /dev/null: expected a plain"),
        ({"HEADWISE_METRICS_NEED_KEY": "true"}, "metrics_need_key: expected api_keys_file beside"),
    ],
)
def test_start_without_the_keys_it_needs_exits_2_with_one_line(
    layers: Layers, environ: dict[str, str], problem: str
) -> None:
    """Nothing is served open that was meant to be closed."""
    ended = serve("--repository", str(layers.repository), "--port", "0", **environ)

    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert problem in line


def test_httpx_client_with_a_key_is_served(keyed: Server) -> None:
    """As the README shows it."""
    with httpx.Client(base_url=keyed.url, headers=BEARER) as client:
        assert client.get("/v1/models").json()["default"] == "mha"
        assert client.get("/docs").status_code == 200
