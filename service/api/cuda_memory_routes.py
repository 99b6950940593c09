"""
The protocol's endpoints of CUDA shared memory, which is not offered.

They answer clients that ask for it, or always clean up.
"""

from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.api.openapi import REGION_PARAMETER, SHARED_MEMORY, problems, responses
from service.api.routing import add_get, add_post, json_response
from service.errors import InvalidInput, NotFound

_CUDA: Final = "/v2/cudasharedmemory"


class CudaMemoryRoutes:
    """The endpoints of one server."""

    def router(self) -> APIRouter:
        """Return every endpoint with what OpenAPI says of it."""
        router = APIRouter(redirect_slashes=False, tags=[SHARED_MEMORY])
        none = responses({"type": "array", "items": {}, "example": []}, None)
        region = _CUDA + "/region/{region}"
        named = [REGION_PARAMETER]
        add_get(router, _CUDA + "/status", self.cuda_regions, "Describe all CUDA regions", none)
        add_get(
            router,
            region + "/status",
            self.cuda_region,
            "Describe a CUDA region",
            problems(NotFound),
            parameters=named,
        )
        everything = "Unregister all CUDA regions"
        add_post(router, _CUDA + "/unregister", self.unregister_cuda, everything, {}, {})
        add_post(
            router,
            region + "/unregister",
            self.unregister_cuda,
            "Unregister a CUDA region",
            {},
            {},
            parameters=named,
        )
        add_post(
            router,
            region + "/register",
            self.register_cuda,
            "Register a CUDA region: refused",
            {},
            problems(InvalidInput),
            parameters=named,
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
