"""What a server keeps of the keys that it was shown: searched for in its memory and its outputs."""

import contextlib
import secrets
import socket
import ssl
from http.client import HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.api.api_keys import ApiKeys
from service.errors import SettingsInvalid
from service.transport.receiving import Received, joined
from tests.service.api.test_fast_path import request as infer_request
from tests.service.telemetry.test_tracing import Collector, collector, needs_otel
from tests.service.transport.test_tls import Files, tls_server, trusting
from tests.support.layers import Layers
from tests.support.server import Server, until

__all__ = ["collector"]

MOST_COPIES = 2
"""Of a key in freed memory that has not been used again."""


def body_of(head: str, content: bytes = b"") -> bytes:
    """Return a request of this head."""
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def requests_with(header: str) -> list[bytes]:
    """Return one request of each kind that shows a key in this header."""
    attention = orjson.dumps({"model": "tiny", "embeddings": [[0.5] * 8]})
    return [
        body_of(f"POST /v1/attention HTTP/1.1\r\nHost: a\r\n{header}\r\n", attention),
        infer_request(header),
        infer_request(header, wire="json"),
        infer_request(header, path="/v2/models/nope/infer"),
        body_of(f"GET /v1/models HTTP/1.1\r\nHost: a\r\n{header}\r\n"),
        body_of(f"GET /v2/health/ready HTTP/1.1\r\nHost: a\r\n{header}\r\n"),
        body_of(f"POST /v2/repository/index HTTP/1.1\r\nHost: a\r\n{header}\r\n"),
        body_of(f"GET /nowhere HTTP/1.1\r\nHost: a\r\n{header}\r\n"),
    ]


class Caller:
    """Sends whole requests, and keeps some of its connections open."""

    def __init__(self, server: Server, context: ssl.SSLContext | None) -> None:
        self._address = urlsplit(server.url).hostname, urlsplit(server.url).port
        self._context = context
        self._open: list[socket.socket] = []

    def close(self) -> None:
        """Close what is still open."""
        for connection in self._open:
            connection.close()

    def _connect(self) -> socket.socket:
        plain = socket.create_connection(self._address, timeout=60)
        if self._context is None:
            return plain
        return self._context.wrap_socket(plain, server_hostname="127.0.0.1")

    def call(self, data: bytes) -> int:
        """Send a request and close the connection; return the status."""
        with self._connect() as connection:
            connection.sendall(data)
            return self._status(connection)

    def call_and_stay(self, data: bytes) -> int:
        """Send a request and leave the connection open, and idle."""
        connection = self._connect()
        self._open.append(connection)
        connection.sendall(data)
        return self._status(connection)

    def call_in_parts(self, data: bytes) -> int:
        """Send a head, and then the body."""
        end = data.index(b"\r\n\r\n") + 4
        with self._connect() as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(data[: end - 2])
            connection.sendall(data[end - 2 : end])
            connection.sendall(data[end:])
            return self._status(connection)

    def call_at_once(self, data: bytes) -> None:
        """Send a request three times in one piece."""
        with self._connect() as connection:
            connection.sendall(data * 3)
            answers = b""
            while answers.count(b"HTTP/1.1 ") < 3:
                answers += connection.recv(2**16)

    def begin(self, data: bytes) -> None:
        """Send the beginning of a request, and wait."""
        self._open.append(self._connect())
        self._open[-1].sendall(data)

    def leave(self, data: bytes) -> None:
        """Send less than a request and hang up."""
        with self._connect() as connection:
            connection.sendall(data[:-1])

    def _status(self, connection: socket.socket) -> int:
        response = HTTPResponse(connection)
        response.begin()
        response.read()
        return response.status


def use(caller: Caller, key: str) -> set[int]:
    """Show a key in all ways, in requests of all kinds; return what was answered."""
    statuses = set()
    for header in (f"X-API-Key: {key}", f"Authorization: Bearer {key}"):
        for data in requests_with(header):
            statuses |= {caller.call(data), caller.call_and_stay(data), caller.call_in_parts(data)}
            caller.call_at_once(data)
            caller.leave(data)
    return statuses


def copies(server: Server, keys: dict[str, str]) -> dict[str, int]:
    """Return how often each key stands in the process's writable memory, in any encoding."""
    process = Path("/proc") / str(server.process.pid)
    counts = dict.fromkeys(keys, 0)
    try:
        memory = (process / "mem").open("rb", buffering=0)
    except PermissionError:
        pytest.skip("this machine lets no process read the memory of its child")
    with memory:
        for line in (process / "maps").read_text().splitlines():
            addresses, rights = line.split()[:2]
            if "w" not in rights:
                continue
            begin, end = (int(address, 16) for address in addresses.split("-"))
            # What is reserved for stacks, or belongs to a device, cannot always be read.
            with contextlib.suppress(OSError, OverflowError):
                memory.seek(begin)
                content = memory.read(end - begin)
                for name, key in keys.items():
                    for encoding in ("ascii", "utf-16-le", "utf-32-le"):
                        counts[name] += content.count(key.encode(encoding))
    return counts


def write_keys(path: Path, keys: dict[str, str]) -> None:
    """Replace the file of keys by one of these."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{name}:{key}\n" for name, key in keys.items()))
    new.replace(path)


@pytest.mark.fault("D1")
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_key_shown_to_a_server_is_not_in_its_memory(
    layers: Layers, tmp_path: Path, scheme: str
) -> None:
    """Right, wrong or withdrawn, on open connections and closed ones: only digests are kept."""
    keys = {name: secrets.token_hex(20) for name in ("right", "gone", "wrong", "others")}
    file = tmp_path / "keys"
    write_keys(file, {name: keys[name] for name in ("right", "gone", "others")})
    context = None
    if scheme == "http":
        starting = Server(layers.repository, api_keys_file=file)
    else:
        files = Files(tmp_path)
        files.make_authority("ca")
        files.make("server", "ca")
        starting = tls_server(layers, files, api_keys_file=file)
        context = trusting(files)
    with starting as server, contextlib.closing(Caller(server, context)) as caller:
        first = {name: use(caller, keys[name]) for name in ("right", "gone", "wrong")}
        write_keys(file, {name: keys[name] for name in ("right", "others")})
        server.wait_for_log('"message":"keys reloaded","keys":2')
        withdrawn = use(caller, keys["gone"])
        data = requests_with(f"X-API-Key: {keys['others']}")
        with contextlib.closing(Caller(server, context)) as others:
            for number in range(125):
                for other in data:
                    # Eight kinds on one connection at a time: 1 000 calls.
                    assert others.call(other) in (200, 404), number
        found = copies(server, {name: keys[name] for name in ("right", "gone", "wrong")})
        unfinished = body_of(f"GET / HTTP/1.1\r\nX-API-Key: {keys['right']}\r\nX-More: 1\r\n")[:-2]
        caller.begin(unfinished)
        until(lambda: copies(server, keys)["right"] > found["right"])  # the search finds keys

    assert first == {"right": {200, 404}, "gone": {200, 404}, "wrong": {200, 401}}
    assert withdrawn == {200, 401}
    assert max(found.values()) <= MOST_COPIES, found


@pytest.mark.fault("D1")
@needs_otel
def test_key_is_in_no_output(layers: Layers, tmp_path: Path, collector: Collector) -> None:
    """Neither log, metrics, error bodies nor spans hold a key from the headers meant for it."""
    keys = {name: secrets.token_hex(20) for name in ("right", "wrong")}
    file = tmp_path / "keys"
    write_keys(file, {"right": keys["right"]})
    answers = []
    with Server(layers.repository, api_keys_file=file, tracing="true", log_level="debug") as server:
        for key in keys.values():
            for header in (f"X-API-Key: {key}", f"Authorization: Bearer {key}"):
                wrong = infer_request(header, body=lambda content: content[:-4])
                answers += [answer_to(server, data) for data in [*requests_with(header), wrong]]
        until(lambda: bool(collector.bodies))
        answers.append(server.get("/metrics").content)
        log = server.log()

    outputs = [*answers, *collector.bodies, log.encode()]
    for key in keys.values():
        assert not [output for output in outputs if key.encode() in output]


@pytest.mark.fault("D1")
def test_key_in_a_path_or_query_is_in_neither_log_nor_metrics(
    layers: Layers, tmp_path: Path
) -> None:
    """A caller that puts it in the wrong place is refused, and only itself learns what it sent."""
    key, stray = secrets.token_hex(20), secrets.token_hex(20)
    file = tmp_path / "keys"
    write_keys(file, {"right": key})
    with Server(layers.repository, api_keys_file=file, log_level="debug") as server:
        for shown in (f"X-API-Key: {key}\r\n", ""):
            for target in (f"/v1/models?key={stray}", f"/v2/models/{stray}/infer", f"/{stray}"):
                for method in ("GET", "POST"):
                    head = f"{method} {target} HTTP/1.1\r\nHost: a\r\n{shown}"
                    answer_to(server, body_of(head))
        metrics, log = server.get("/metrics").text, server.log()

    assert stray not in metrics
    assert stray not in log


def answer_to(server: Server, data: bytes) -> bytes:
    """Return all that is answered to a request, head and body."""
    end = data.index(b"\r\n") + 2
    closing = data[:end] + b"Connection: close\r\n" + data[end:]
    address = urlsplit(server.url).hostname, urlsplit(server.url).port
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(closing)
        return connection.makefile("rb").read()


@pytest.mark.fault("D1")
def test_file_of_keys_is_overwritten_in_memory_once_it_is_read(tmp_path: Path) -> None:
    """Right or wrong, at the start or later."""
    file, key = tmp_path / "keys", "k" * 40
    file.write_text(f"a:{key}\n")
    keys = ApiKeys(file)
    buffers = [bytes(keys._buffer)]
    for content in (f"a:{key}\nb:{key[1:]}\n", f"wrong {key}\n", "#" * 70_000):
        file.write_text(content)
        keys.refresh(retry=False)
        buffers.append(bytes(keys._buffer))

    assert [set(buffer) for buffer in buffers] == [{0}] * 4
    assert keys.name_of([(b"x-api-key", key[1:].encode())]) == "b"


LINES = st.lists(
    st.sampled_from(
        [b"a", b":", b" ", b"\t", b"\r", b"\n", b"\x0b", b"#", b"=", b"\xc3", b"k" * 32, b"l" * 40]
    )
)


@settings(max_examples=200, deadline=None)
@given(LINES.map(b"".join))
def test_file_of_keys_is_read_line_by_line_as_python_splits_it(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    """A file means the same whether it is parsed in place or cut into lines."""
    file = tmp_path_factory.getbasetemp() / "any-keys"
    file.write_bytes(content)
    lines = [line.strip() for line in content.splitlines()]
    wanted = [line.partition(b":") for line in lines if line and not line.startswith(b"#")]

    try:
        found = ApiKeys(file)
    except SettingsInvalid as error:
        [_, told] = str(error).split(str(file))
        number = int(told.split(":")[0].removeprefix(" line ")) if "line" in told else None
        assert number is None or (lines[number - 1] and not lines[number - 1].startswith(b"#"))
        return
    for name, colon, key in wanted:
        assert colon
        assert found.name_of([(b"x-api-key", key)]) == name.decode()


@given(st.lists(st.binary(max_size=40)))
def test_received_parts_are_joined_in_their_order(parts: list[bytes]) -> None:
    """Nothing is lost or moved."""
    assert joined([Received(part) for part in parts]) == b"".join(parts)  # type: ignore[misc]
