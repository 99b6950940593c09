"""How the framework's own refusals, and ours inside it, become answers."""

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from service.errors import Failed, HeadwiseError, InvalidInput, MethodNotAllowed, NotFound
from service.telemetry.request_record import RECORD
from service.transport.problems import INTERNAL, answer_of, status_of


def to_response(error: HeadwiseError) -> Response:
    """Return the same as a response of the framework's."""
    status, headers, body = answer_of(error)
    response = Response(body, status)
    response.raw_headers = headers
    return response


async def answer_problem(request: Request, error: Exception) -> Response:
    """Answer for our own errors."""
    if not isinstance(error, HeadwiseError):
        raise error
    if status_of(error) == 500:
        request.scope[RECORD].failure = error
    return to_response(error)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer for what the router itself refuses: an unknown path, or a wrong verb."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return to_response(MethodNotAllowed(request.method, allowed=allowed))
    return to_response(
        NotFound(
            f"path: no such endpoint, got {request.url.path[:64]!r}; expected POST /v1/attention,"
            " POST /v2/models/{name}/infer, or another that /docs lists"
        )
    )


async def answer_validation_error(request: Request, error: Exception) -> Response:
    """Answer for FastAPI's own validation, whose default repeats the whole body."""
    if not isinstance(error, RequestValidationError):
        raise error
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    return to_response(InvalidInput(f"{where}: {problem['msg']}"))


async def answer_failure(request: Request, error: Exception) -> Response:
    """Answer for an error that no handler expects; the middleware around it logs the cause."""
    return to_response(Failed(INTERNAL))
