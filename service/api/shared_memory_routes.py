"""
The protocol's endpoints of system shared memory: register a region, forget it, list what is there.

Bodies are read raw: clients send their JSON under a form's content type, or none.
"""

from typing import Any, Final

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.api.openapi import REGION_PARAMETER, json_body, problems, responses
from service.codecs.checks import check_known
from service.codecs.json_reader import Reader
from service.codecs.offload import Offload
from service.codecs.shared_memory import SharedMemory
from service.codecs.simdjson_reader import read
from service.errors import Disabled, InvalidInput, NotFound, TooLarge, TooSlow
from service.settings import Settings
from service.transport.control import control_body

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

    def __init__(self, settings: Settings, shared_memory: SharedMemory, offload: Offload) -> None:
        self._settings = settings
        self._offload = offload
        self._shared_memory = shared_memory

    def router(self) -> APIRouter:
        """Return every endpoint with what OpenAPI says of it."""
        router = APIRouter(redirect_slashes=False)
        add = router.add_api_route
        region = {"type": "object", "properties": {"name": {"type": "string"}, **_REGION}}
        listed = {"type": "array", "items": region}
        for path, parameters, errors in ((_ALL, [], []), (_ONE, [REGION_PARAMETER], [NotFound])):
            told = {"parameters": parameters, "responses": responses(listed, None, *errors)}
            add(path + "/status", self.status, methods=["GET"], openapi_extra=told)
            add(
                path + "/unregister",
                self.unregister,
                methods=["POST"],
                response_class=Response,
                openapi_extra={"parameters": parameters},
            )
        add(
            _ONE + "/register",
            self.register,
            methods=["POST"],
            response_class=Response,
            openapi_extra={
                "parameters": [REGION_PARAMETER],
                "requestBody": json_body(_REGION),
                "responses": problems(InvalidInput, Disabled, TooSlow, TooLarge),
            },
        )
        return router

    async def status(self, request: Request) -> Response:
        """List the regions that are registered, or the one that the path names."""
        listed = self._shared_memory.status(request.path_params.get("region"))
        return Response(orjson.dumps(listed), media_type="application/json")

    async def register(self, request: Request) -> Response:
        """Give a part of a shared memory segment a name that calls can use."""
        self._shared_memory.check_offered()
        body = await control_body(
            request, self._settings, self._offload, limit_bytes=MAX_BODY_BYTES
        )
        asked = read(body, _region)
        self._shared_memory.register(
            request.path_params["region"],
            asked.get("key"),
            asked.get("offset", 0),
            asked.get("byte_size"),
        )
        return Response()

    async def unregister(self, request: Request) -> Response:
        """Forget the region that the path names, or all; calls that are already in finish."""
        self._shared_memory.unregister(request.path_params.get("region"))
        return Response()


def _region(reader: Reader) -> dict[str, Any]:
    root = reader.root()
    check_known(root, _KEYS, "body")
    return {key: reader.plain(node) for key, node in root.items()}
