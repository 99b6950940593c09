"""How the endpoints without tensors are added to a router."""

from typing import Any, Final

import orjson
from fastapi import APIRouter
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.errors import InvalidInput, MethodNotAllowed, TooLarge, TooSlow

BODY_ERRORS: Final = (InvalidInput, TooSlow, TooLarge)
"""What may be wrong with the body of any request."""


class _Only:
    """Answers 405 at a path whose verbs are apart: the framework would name only the first."""

    def __init__(self, allowed: str) -> None:
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise MethodNotAllowed(scope["method"], allowed=self._allowed)


def add_only(router: APIRouter, path: str, allowed: str) -> None:
    """Answer 405 at a path for all verbs but those that `allowed` names."""
    router.add_route(path, _Only(allowed), include_in_schema=False)  # type: ignore[arg-type]


def add_get(
    router: APIRouter,
    path: str,
    handler: Any,
    summary: str,
    answers: dict[str, Any],
    *,
    parameters: "list[dict[str, Any]] | None" = None,
) -> None:
    """Add a GET with its heading in the documentation, and its answers by status."""
    router.add_api_route(
        path,
        handler,
        methods=["GET"],
        summary=summary,
        response_class=Response,
        openapi_extra={"parameters": parameters or [], "responses": answers},
    )


def add_post(
    router: APIRouter,
    path: str,
    handler: Any,
    summary: str,
    body: dict[str, Any],
    answers: dict[str, Any],
    *,
    parameters: "list[dict[str, Any]] | None" = None,
) -> None:
    """Add a POST that answers JSON where `answers` say so, and else nothing."""
    extra: dict[str, Any] = {"parameters": parameters or [], "responses": answers}
    if body:
        extra["requestBody"] = body
    router.add_api_route(
        path,
        handler,
        methods=["POST"],
        summary=summary,
        response_class=Response,
        openapi_extra=extra,
    )


def json_response(document: object) -> Response:
    """Return a document as an answer."""
    return Response(orjson.dumps(document), media_type="application/json")
