"""Which heads are those of plain requests, and what they say."""

import pytest

from service.errors import InvalidInput
from service.transport.request_head import by_name, check_head, plain_head

PLAIN = b"POST /v2/models/mha/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 7\r\nX-One: 1\r\n\r\n"


def test_plain_head_says_what_the_request_says() -> None:
    """Names in lower case, values as they came, in their order."""
    head = plain_head(PLAIN)

    assert head is not None
    assert (head.method, head.path, head.body_bytes) == ("POST", "/v2/models/mha/infer", 7)
    assert head.headers == [(b"host", b"a"), (b"content-length", b"7"), (b"x-one", b"1")]


@pytest.mark.parametrize(
    ("found", "put"),
    [
        (b"HTTP/1.1", b"HTTP/1.0"),
        (b"HTTP/1.1", b"HTTP/9.9"),
        (b"/infer", b"/infer?model=mha"),
        (b"/infer", b"/inf%65r"),
        (b"/infer", b"/inf\xc3\xa9r"),
        (b"/v2", b"http://a/v2"),
        (b"Content-Length: 7\r\n", b""),
        (b"Content-Length: 7", b"Content-Length: -7"),
        (b"Content-Length: 7", b"Content-Length: 7\r\nContent-Length: 7"),
        (b"Content-Length: 7", b"Content-Length: 99999999999999999999999"),
        (b"Content-Length: 7", b"Transfer-Encoding: chunked"),
        (b"Content-Length: 7", b"Transfer-Encoding: chunked\r\nContent-Length: 7"),
        (b"X-One: 1", b"Connection: close"),
        (b"X-One: 1", b"Expect: 100-continue"),
        (b"X-One: 1", b"Connection: upgrade\r\nUpgrade: h2c"),
        (b"X-One: 1", b"X-One : 1"),
        (b"X-One: 1", b"X-One: 1\n X-Two: 2"),
        (b"\r\n\r\n", b"\r\n"),
        (b"\r\nX-One", b"\r\n\r\nX-One"),
        (b"\r\nX-One", b"\n\nX-One"),
        (b"7\r\nX-One: 1", b"0\n\nPOST /b HTTP/1.1\r\nContent-Length: 7"),
        (b"7\r\nX-One: 1", b"0\r\n\r\nPOST /b HTTP/1.1\r\nContent-Length: 7"),
        (b"POST", b"P\x00ST"),
        (b"Host: a\r\n", b""),
        (b"Host: a", b"Host: a\r\nHost: a"),
        (b"X-One: 1", b"Content-Encoding: gzip\r\ncontent-encoding: gzip"),
        (b"X-One: 1", b"Inference-Header-Content-Length: 1\r\nInference-Header-Content-Length: 1"),
    ],
)
def test_head_of_anything_else_is_not_plain(found: bytes, put: bytes) -> None:
    """Whoever reads it then knows all that HTTP may say."""
    assert plain_head(PLAIN.replace(found, put, 1)) is None


def test_repeated_fields_by_name_are_one_list() -> None:
    """Their order is that of the lines, as for any list."""
    headers = [(b"accept", b"a/b"), (b"x-one", b"1"), (b"accept", b"c/d, e/f")]

    assert by_name(headers) == {"accept": "a/b, c/d, e/f", "x-one": "1"}


def test_head_of_http_1_0_needs_no_host() -> None:
    """Only HTTP/1.1 asks for one."""
    check_head("1.0", [])
    with pytest.raises(InvalidInput, match="head: expected a host, got none"):
        check_head("1.1", [])
