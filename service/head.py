"""The head of an HTTP request, read on its own."""

from dataclasses import dataclass
from typing import Final

import httptools

END: Final = b"\r\n\r\n"
"""What ends a head."""

_ODD: Final = {b"expect", b"transfer-encoding", b"upgrade"}
_ODD_IN_PATH: Final = b"%?#"


@dataclass(frozen=True)
class Head:
    """What a plain request says before its body."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    """In their order, names in lower case."""
    body_bytes: int


def plain_head(content: bytes) -> Head | None:
    """
    Return what a head says if it is that of a plain request.

    One is plain when it is HTTP/1.1, gives its body's length, and wants nothing but an
    answer: no query, escaped path, expectation or upgrade, and no closing of the connection.
    """
    reader = _Reader()
    parser = httptools.HttpRequestParser(reader)
    try:
        parser.feed_data(content)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    names = [name for name, _ in reader.headers]
    is_plain = (
        reader.is_all
        and parser.get_http_version() == "1.1"
        and parser.should_keep_alive()
        and names.count(b"content-length") == 1
        and _ODD.isdisjoint(names)
        and reader.url.startswith(b"/")
        and reader.url.isascii()
        and not any(character in reader.url for character in _ODD_IN_PATH)
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
        self.is_all = False
        """It is a whole head, and nothing more."""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_all = True

    def on_body(self, body: bytes) -> None:
        self.is_all = False

    def on_message_begin(self) -> None:
        self.is_all = False
