"""The head of an HTTP request: what every one must hold, and what a plain one says."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import httptools

from service.errors import InvalidInput

END: Final = b"\r\n\r\n"
"""What ends a request head."""

_NOT_PLAIN: Final = {b"expect", b"origin", b"transfer-encoding", b"upgrade"}
_NOT_PLAIN_IN_PATH: Final = b"%?#"

_AT_MOST_ONE: Final = {
    b"host",
    b"content-length",
    b"content-type",
    b"content-encoding",
    b"transfer-encoding",
    b"inference-header-content-length",
    b"x-request-timeout-s",
}
"""Fields that decide where a body ends and what it means: two of them have no one meaning."""


@dataclass(frozen=True)
class Head:
    """What a plain request says before its body."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    """In their order, names in lower case."""
    body_bytes: int


def check_head(version: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """
    Refuse a head that two readers could understand differently (RFC 9112, 3.2 and 6.1).

    Names are in lower case.  What the parser itself refuses is not checked again.

    Raises:
        InvalidInput: another version than HTTP/1.0 or 1.1, no `Host` in HTTP/1.1, a field
            repeated that may be there once, or another transfer coding than chunked.
    """
    if version not in ("1.1", "1.0"):
        raise InvalidInput(f"head: expected HTTP/1.1, got HTTP/{version}")
    counts = Counter(name for name, _ in headers if name in _AT_MOST_ONE)
    for name, count in counts.items():
        if count > 1:
            raise InvalidInput(f"head: expected at most one {name.decode()}, got {count}")
    if version == "1.1" and b"host" not in counts:
        raise InvalidInput("head: expected a host, got none")
    if b"transfer-encoding" in counts:
        if version != "1.1":
            raise InvalidInput("head: expected transfer-encoding only in HTTP/1.1")
        if dict(headers)[b"transfer-encoding"].lower() != b"chunked":
            raise InvalidInput("head: expected transfer-encoding chunked, got another")


def by_name(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return each field's value; those of a repeated one make a list (RFC 9110, 5.3)."""
    named: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        named[name] = f"{named[name]}, {value}" if name in named else value
    return named


def plain_head(content: bytes | memoryview) -> Head | None:
    """
    Return what a head says if it is that of a plain request.

    One is plain when it is HTTP/1.1, gives its body's length, and wants nothing but an
    answer: no query, escaped path, expectation or upgrade, no page of a browser behind it
    (`Origin`), and no closing of the connection.
    """
    reader = _Reader()
    parser = httptools.HttpRequestParser(reader)
    try:
        parser.feed_data(content)
        check_head(parser.get_http_version(), reader.headers)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade, InvalidInput):
        return None
    names = {name for name, _ in reader.headers}
    is_plain = (
        reader.is_one_head
        and parser.get_http_version() == "1.1"
        and parser.should_keep_alive()
        and b"content-length" in names
        and _NOT_PLAIN.isdisjoint(names)
        and reader.url.startswith(b"/")
        and reader.url.isascii()
        and not any(character in reader.url for character in _NOT_PLAIN_IN_PATH)
    )
    if not is_plain:
        return None
    body_bytes = int(dict(reader.headers)[b"content-length"])
    method = parser.get_method().decode("ascii")
    return Head(method, reader.url.decode("ascii"), reader.headers, body_bytes)


class _Reader:
    """What the parser calls."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_one_head = False
        """It is one whole head, and nothing more."""
        self._messages = 0

    def on_message_begin(self) -> None:
        self._messages += 1
        self.is_one_head = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_one_head = self._messages == 1

    def on_body(self, body: bytes) -> None:
        self.is_one_head = False
