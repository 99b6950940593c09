"""How an error looks on the wire: the one place where error kinds meet HTTP statuses."""

from typing import Final

import orjson

from service.errors import (
    DeadlineExceeded,
    DecodingFailed,
    Disabled,
    Draining,
    Failed,
    HeadwiseError,
    InferenceFailed,
    InvalidInput,
    MethodNotAllowed,
    NotAcceptable,
    NotFound,
    NotNow,
    NotReady,
    QueueFull,
    Refused,
    TooLarge,
    TooSlow,
    Unauthorized,
    UnknownModel,
    UnsupportedMediaType,
)

STATUSES: Final[dict[type[HeadwiseError], int]] = {
    Refused: 400,
    InvalidInput: 400,
    Unauthorized: 401,
    Disabled: 403,
    UnknownModel: 404,
    NotFound: 404,
    MethodNotAllowed: 405,
    NotAcceptable: 406,
    TooSlow: 408,
    TooLarge: 413,
    UnsupportedMediaType: 415,
    NotNow: 503,
    QueueFull: 429,
    NotReady: 503,
    Draining: 503,
    DeadlineExceeded: 504,
    Failed: 500,
    InferenceFailed: 500,
    DecodingFailed: 500,
    HeadwiseError: 500,
}
INTERNAL: Final = "internal error; the log has it under the request id"
"""What a caller is told when something went wrong that nobody thought of."""

CODE_HEADER: Final = b"x-error-code"
CLOSE: Final = (b"connection", b"close")
"""The header that ends a connection."""

_CLOSING: Final = (TooLarge, TooSlow)
"""After these, part of the request's body may still be under way: the connection is closed."""


def status_of(error: HeadwiseError) -> int:
    """Return the HTTP status of the narrowest class that has one."""
    return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)


def answer_of(error: HeadwiseError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return status, headers and body `{"error", "code"}`."""
    message = str(error).encode("utf-8", "replace").decode()
    body = orjson.dumps({"error": message, "code": error.code})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (CODE_HEADER, error.code.encode()),
    ]
    if isinstance(error, NotNow) and error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allowed.encode()))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, _CLOSING):
        headers.append(CLOSE)
    return status_of(error), headers, body
