"""
The protocol's endpoints of CUDA shared memory, which is not offered.

They answer clients that ask for it, or always clean up.
"""

from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.api.openapi import (
    REGION_PARAMETER,
    problems,
    responses,
)
from service.api.routing import add_post, json_response
from service.errors import InvalidInput, NotFound

_CUDA: Final = "/v2/cudasharedmemory"


class CudaMemoryRoutes:
    """The endpoints of one server."""

    def router(self) -> APIRouter:
        """Return every endpoint with what OpenAPI says of it."""
        router = APIRouter(redirect_slashes=False)
        add = router.add_api_route
        none = responses({"type": "array", "items": {}}, None)
        region = _CUDA + "/region/{region}"
        add(
            _CUDA + "/status",
            self.cuda_regions,
            methods=["GET"],
            openapi_extra={"responses": none},
        )
        one = {"parameters": [REGION_PARAMETER], "responses": problems(NotFound)}
        add(
            region + "/status",
            self.cuda_region,
            methods=["GET"],
            response_class=Response,
            openapi_extra=one,
        )
        add_post(router, _CUDA + "/unregister", self.unregister_cuda, {}, {})
        add_post(
            router,
            region + "/unregister",
            self.unregister_cuda,
            {},
            {},
            parameters=[REGION_PARAMETER],
        )
        add_post(
            router,
            region + "/register",
            self.register_cuda,
            {},
            problems(InvalidInput),
            parameters=[REGION_PARAMETER],
        )
        return router

    async def cuda_regions(self) -> Response:
        """Return the regions of CUDA memory that are registered: none ever is."""
        return json_response([])

    async def cuda_region(self, request: Request) -> Response:
        """Say that no such region of CUDA memory is registered."""
        raise NotFound(f"region: expected none, got {request.path_params['region'][:64]!r}")

    async def register_cuda(self, request: Request) -> Response:
        """Refuse to share CUDA memory."""
        raise InvalidInput(
            "cudasharedmemory: not offered; expected tensors in the body, got a region"
        )

    async def unregister_cuda(self) -> Response:
        """Forget regions of CUDA memory, of which there are none."""
        return Response()
