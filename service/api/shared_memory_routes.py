"""
The protocol's endpoints of system shared memory: register a region, forget it, list what is there.

Bodies are read raw: clients send their JSON under a form's content type, or none.
"""

from typing import Any, Final

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.api.control import json_object
from service.api.openapi import (
    REGION_PARAMETER,
    SHARED_MEMORY,
    json_body,
    problems,
    responses,
)
from service.api.routing import add_get, add_post
from service.api.server import Server
from service.codecs.checks import check_known
from service.errors import Disabled, InvalidInput, NotFound, TooLarge, TooSlow

MAX_BODY_BYTES: Final = 64 * 1024

_ALL: Final = "/v2/systemsharedmemory"
_ONE: Final = _ALL + "/region/{region}"
_KEYS: Final = ("key", "offset", "byte_size")
_BYTES: Final = {"type": "integer", "minimum": 0}
_REGION: Final[dict[str, Any]] = {
    "key": {"type": "string", "description": "/ and the name of the segment in /dev/shm"},
    "offset": _BYTES | {"default": 0},
    "byte_size": _BYTES,
}


class SharedMemoryRoutes:
    """The endpoints of one server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def router(self) -> APIRouter:
        """Return every endpoint with what OpenAPI says of it."""
        router = APIRouter(redirect_slashes=False, tags=[SHARED_MEMORY])
        region = {"type": "object", "properties": {"name": {"type": "string"}, **_REGION}}
        listed = {"type": "array", "items": region}
        for path, which, parameters, errors in (
            (_ALL, "all regions", [], []),
            (_ONE, "a region", [REGION_PARAMETER], [NotFound]),
        ):
            add_get(
                router,
                path + "/status",
                self.status,
                f"Describe {which}",
                responses(listed, None, *errors),
                parameters=parameters,
            )
            add_post(
                router,
                path + "/unregister",
                self.unregister,
                f"Unregister {which}",
                {},
                {},
                parameters=parameters,
            )
        add_post(
            router,
            _ONE + "/register",
            self.register,
            "Register a region",
            json_body(_REGION),
            problems(InvalidInput, Disabled, TooSlow, TooLarge),
            parameters=[REGION_PARAMETER],
        )
        return router

    async def status(self, request: Request) -> Response:
        """List the regions that are registered, or the one that the path names."""
        listed = self._server.shared_memory.status(request.path_params.get("region"))
        return Response(orjson.dumps(listed), media_type="application/json")

    async def register(self, request: Request) -> Response:
        """Give a part of a shared memory segment a name that calls can use."""
        self._server.shared_memory.check_offered()
        body = await json_object(
            request, self._server, is_optional=False, limit_bytes=MAX_BODY_BYTES
        )
        check_known(body, _KEYS, "body")
        self._server.shared_memory.register(
            request.path_params["region"],
            body.get("key"),
            body.get("offset", 0),
            body.get("byte_size"),
        )
        return Response()

    async def unregister(self, request: Request) -> Response:
        """Forget the region that the path names, or all; calls that are already in finish."""
        self._server.shared_memory.unregister(request.path_params.get("region"))
        return Response()
