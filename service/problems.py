"""How an error looks on the wire: the one place where error kinds meet HTTP statuses."""

from typing import Final

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from service.errors import (
    DeadlineExceeded,
    DecodingFailed,
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
    UnknownModel,
    UnsupportedMediaType,
)

STATUSES: Final[dict[type[HeadwiseError], int]] = {
    Refused: 400,
    InvalidInput: 400,
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
CODE_HEADER: Final = b"x-error-code"

_CLOSING: Final = (TooLarge, TooSlow)
"""After these, part of the request's body may still be under way: the connection is closed."""


def status_of(error: HeadwiseError) -> int:
    """Return the HTTP status of the narrowest class that has one."""
    return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)


def to_response(error: HeadwiseError) -> Response:
    """Return `{"error", "code"}` with the error's status and headers."""
    message = str(error).encode("utf-8", "replace").decode()
    response = Response(
        orjson.dumps({"error": message, "code": error.code}),
        status_of(error),
        media_type="application/json",
        headers={CODE_HEADER.decode(): error.code},
    )
    if isinstance(error, NotNow) and error.retry_after_s is not None:
        response.headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, MethodNotAllowed):
        response.headers["allow"] = error.allowed
    if isinstance(error, _CLOSING):
        response.headers["connection"] = "close"
    return response


async def answer_problem(request: Request, error: Exception) -> Response:
    """Answer for our own errors."""
    if not isinstance(error, HeadwiseError):
        raise error
    return to_response(error)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer for what the router itself refuses: an unknown path, or a wrong verb."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return to_response(MethodNotAllowed(request.method, allowed=allowed))
    return to_response(NotFound("path: no such endpoint; / lists them"))


async def answer_validation_error(request: Request, error: Exception) -> Response:
    """Answer for FastAPI's own validation, whose default repeats the whole body."""
    if not isinstance(error, RequestValidationError):
        raise error
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    return to_response(InvalidInput(f"{where}: {problem['msg']}"))
