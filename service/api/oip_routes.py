"""The Open Inference Protocol's metadata, readiness and statistics."""

from collections.abc import Iterable
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service import __version__
from service.api.model_schemas import MODEL_CONFIG, MODEL_READY
from service.api.oip_models import ProtocolModel, protocol_model, protocol_models
from service.api.openapi import METADATA, NAME_PARAMETER, VERSION_PARAMETER, responses
from service.api.routing import add_get, json_response
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
        router = APIRouter(redirect_slashes=False, tags=[METADATA])
        metadata = responses(SERVER_METADATA, None)
        add_get(router, "/v2", self.server_metadata, "The server and its extensions", metadata)
        # Before the models' own paths: to the protocol no model can be called `stats`.
        add_get(
            router,
            "/v2/models/stats",
            self.all_statistics,
            "Statistics of every model",
            responses(MODEL_STATISTICS, None, NotReady),
        )
        for path, of, parameters in (
            (_MODEL, "a model", [NAME_PARAMETER]),
            (_MODEL + "/versions/{version}", "a version", [NAME_PARAMETER, VERSION_PARAMETER]),
        ):
            for end, handler, what, schema, errors in (
                ("", self.model_metadata, "Inputs and outputs of", MODEL_METADATA, [NotReady]),
                ("/ready", self.model_ready, "Readiness of", MODEL_READY, [NotReady, Draining]),
                ("/config", self.model_config, "Configuration of", MODEL_CONFIG, [NotReady]),
                ("/stats", self.model_statistics, "Statistics of", MODEL_STATISTICS, [NotReady]),
            ):
                answers = responses(schema, None, UnknownModel, *errors)
                add_get(router, path + end, handler, f"{what} {of}", answers, parameters=parameters)
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
