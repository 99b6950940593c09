"""The Open Inference Protocol's metadata, readiness and statistics."""

from collections.abc import Iterable
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service import __version__
from service.api.oip_models import ProtocolModel, protocol_model, protocol_models
from service.api.openapi import NAME_PARAMETER, VERSION_PARAMETER, responses
from service.api.routing import json_response
from service.api.schemas import MODEL_METADATA, MODEL_STATISTICS, SERVER_METADATA
from service.api.server import Server
from service.errors import Draining, NotReady, UnknownModel

PLATFORM: Final = "onnx_onnxv1"
"""What the protocol calls a model in ONNX's format."""

_EXTENSIONS: Final = (
    "binary_tensor_data",
    "parameters",
    "statistics",
    "model_configuration",
)

_CONTROL: Final = ("model_repository", "logging")

_SHARED_MEMORY: Final = ("system_shared_memory",)

_MODEL: Final = "/v2/models/{name}"


class OipRoutes:
    """What the protocol's clients ask of a server and its models."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def router(self) -> APIRouter:
        """Return every endpoint with what OpenAPI says of it."""
        router = APIRouter(redirect_slashes=False)
        add = router.add_api_route
        add(
            "/v2",
            self.server_metadata,
            methods=["GET"],
            openapi_extra={"responses": responses(SERVER_METADATA, None)},
        )
        stats = responses(MODEL_STATISTICS, None, NotReady)
        # Before the models' own paths: to the protocol no model can be called `stats`.
        add(
            "/v2/models/stats",
            self.all_statistics,
            methods=["GET"],
            openapi_extra={"responses": stats},
        )
        for path, parameters in (
            (_MODEL, [NAME_PARAMETER]),
            (_MODEL + "/versions/{version}", [NAME_PARAMETER, VERSION_PARAMETER]),
        ):
            for end, handler, schema, errors in (
                ("", self.model_metadata, MODEL_METADATA, [NotReady]),
                ("/ready", self.model_ready, {"type": "object"}, [NotReady, Draining]),
                ("/config", self.model_config, {"type": "object"}, [NotReady]),
                ("/stats", self.model_statistics, MODEL_STATISTICS, [NotReady]),
            ):
                extra = {
                    "parameters": parameters,
                    "responses": responses(schema, None, UnknownModel, *errors),
                }
                add(path + end, handler, methods=["GET"], openapi_extra=extra)
        return router

    async def server_metadata(self) -> Response:
        """Return the server's name, its version and the extensions that work."""
        control = _CONTROL if self._server.settings.model_control else ()
        shared = _SHARED_MEMORY if self._server.settings.shared_memory else ()
        extensions = [*_EXTENSIONS, *control, *shared]
        return json_response({"name": "headwise", "version": __version__, "extensions": extensions})

    async def model_metadata(self, request: Request) -> Response:
        """Return a model's versions, required inputs and outputs; -1 = any length."""
        declared, *lower = self._models_of(request)
        versions = [str(model.served.version) for model in reversed([declared, *lower])]
        return json_response(
            {
                "name": declared.name,
                "versions": versions,
                "platform": PLATFORM,
                "inputs": [tensor.metadata() for tensor in declared.inputs()],
                "outputs": [tensor.metadata() for tensor in declared.outputs()],
            }
        )

    async def model_ready(self, request: Request) -> Response:
        """Say whether a model takes calls: its warm-up passed, and the server is not stopping."""
        declared = protocol_model(self._server.models, request)
        if self._server.lifecycle.phase != "serving":
            raise Draining("the server is stopping", retry_after_s=1)
        self._server.models.require_ready(declared.served)
        return json_response({"name": declared.name, "ready": True})

    async def model_config(self, request: Request) -> Response:
        """Return a model's configuration as Triton writes it; dims are without the batch."""
        declared = protocol_model(self._server.models, request)
        return json_response(
            {
                "name": declared.name,
                "platform": "onnxruntime_onnx",
                "backend": "onnxruntime",
                "version_policy": {"latest": {"num_versions": self._server.settings.versions_kept}},
                "max_batch_size": self._server.settings.max_rows,
                "input": [tensor.config() for tensor in declared.inputs()],
                "output": [tensor.config() for tensor in declared.outputs()],
                "dynamic_batching": {},
            }
        )

    async def model_statistics(self, request: Request) -> Response:
        """Return what was counted of the protocol's calls to a model, by version."""
        return self._statistics_of(self._models_of(request))

    async def all_statistics(self) -> Response:
        """Return what was counted of the protocol's calls to every model that is served."""
        self._server.models.check_loaded()
        models = self._server.models
        return self._statistics_of(
            declared for model in models for declared in protocol_models(model)
        )

    def _models_of(self, request: Request) -> list[ProtocolModel]:
        """
        Return the version that a path names; of one that names none all, the highest first.

        Raises:
            UnknownModel: no such name or version.
            NotReady: the models are still being loaded.
        """
        declared = protocol_model(self._server.models, request)
        if "version" in request.path_params:
            return [declared]
        versions = self._server.models.versions_of(declared.served.name)
        return [ProtocolModel(declared.name, model) for model in versions]

    def _statistics_of(self, models: Iterable[ProtocolModel]) -> Response:
        statistics = [self._server.statistics.of(m.name, m.served.version) for m in models]
        return json_response({"model_stats": [one.document() for one in statistics]})
