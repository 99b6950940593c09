"""The protocol's model repository: what there is, and loading and unloading it."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.api.control import check_control, json_object
from service.api.oip_models import protocol_names
from service.api.openapi import NAME_PARAMETER, REPOSITORY, json_body, problems, responses
from service.api.routing import BODY_ERRORS, add_post, json_response
from service.api.schemas import REPOSITORY_INDEX
from service.api.server import Server
from service.codecs.checks import check_known, kind_of
from service.codecs.oip_request import split_model_name
from service.errors import Disabled, InvalidInput, NotReady, UnknownModel


class RepositoryRoutes:
    """The endpoints of one server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def router(self) -> APIRouter:
        """Return every endpoint with what OpenAPI says of it."""
        router = APIRouter(redirect_slashes=False, tags=[REPOSITORY])
        add_post(
            router,
            "/v2/repository/index",
            self.repository_index,
            "List the models in the repository",
            json_body({"ready": {"type": "boolean", "default": False}}),
            responses(REPOSITORY_INDEX, None, *BODY_ERRORS, NotReady),
        )
        errors = problems(*BODY_ERRORS, Disabled, UnknownModel, NotReady)
        for verb, handler, summary in (
            ("load", self.load_model, "Load a model"),
            ("unload", self.unload_model, "Unload a model"),
        ):
            add_post(
                router,
                f"/v2/repository/models/{{name}}/{verb}",
                handler,
                summary,
                json_body({"parameters": {"type": "object"}}),
                errors,
                parameters=[NAME_PARAMETER],
            )
        return router

    async def repository_index(self, request: Request) -> Response:
        """List every model that is served or could be loaded; `{"ready": true}`: those ready."""
        body = await json_object(request, self._server)
        check_known(body, ("ready",), "body")
        only_ready = body.get("ready", False)
        if not isinstance(only_ready, bool):
            raise InvalidInput(f"ready: expected true or false, got {kind_of(only_ready)}")
        listed = await self._server.models.index()
        return json_response(
            [
                {
                    "name": name,
                    "version": str(one.version),
                    "state": "READY" if one.problem is None else "UNAVAILABLE",
                    "reason": one.problem or "",
                }
                for one in listed
                if one.problem is None or not only_ready
                for name in protocol_names(one.name)
            ]
        )

    async def load_model(self, request: Request) -> Response:
        """Serve the highest version of an artifact in the repository, under both its names."""
        name = self._controlled(request)
        for parameter in await self._parameters(request):
            raise InvalidInput(
                f"parameters: {parameter[:64]!r} is not offered: an artifact is served as published"
            )
        await self._server.models.load(name)
        return Response()

    async def unload_model(self, request: Request) -> Response:
        """Serve an artifact no more, under either name; calls that are already in finish."""
        name = self._controlled(request)
        # No model depends on another, so it makes no difference what is said of dependents.
        check_known(await self._parameters(request), ("unload_dependents",), "parameters")
        await self._server.models.unload(name)
        return Response()

    def _controlled(self, request: Request) -> str:
        """Return the artifact to load or unload, by either of its names."""
        check_control(self._server, "load, unload")
        return split_model_name(request.path_params["name"])[0]

    async def _parameters(self, request: Request) -> dict[str, Any]:
        body = await json_object(request, self._server)
        check_known(body, ("parameters",), "body")
        parameters = body.get("parameters", {})
        if not isinstance(parameters, dict):
            raise InvalidInput(f"parameters: expected an object, got {kind_of(parameters)}")
        return parameters
