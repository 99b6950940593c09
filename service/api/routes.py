"""The endpoints without tensors: what is served, and how it fares."""

import dataclasses
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.api.described_tensors import described_inputs, described_outputs
from service.api.model_schemas import LIVE, MODEL, MODEL_LIST, READY
from service.api.openapi import HEALTH, MODELS, NAME_PARAMETER, VERSION_PARAMETER, responses
from service.api.routing import add_get, json_response
from service.api.server import Server
from service.errors import Draining, NotReady, UnknownModel
from service.inference.model import Model
from service.telemetry.metrics import CONTENT_TYPE

_TEXT: Final = {"schema": {"type": "string"}, "example": "headwise_ready 1.0\n"}


class Routes:
    """The endpoints of one server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def router(self) -> APIRouter:
        """Return every endpoint with what OpenAPI says of it."""
        router = APIRouter(redirect_slashes=False)
        models = APIRouter(redirect_slashes=False, tags=[MODELS])
        listed = responses(MODEL_LIST, None)
        add_get(models, "/v1/models", self.list_models, "List the models that are served", listed)
        schema = {"type": "string"}
        version = VERSION_PARAMETER | {"in": "query", "required": False, "schema": schema}
        add_get(
            models,
            "/v1/models/{name}",
            self.get_model,
            "Describe a model: layer, limits, parity",
            responses(MODEL, None, UnknownModel),
            parameters=[NAME_PARAMETER, version],
        )
        health = APIRouter(redirect_slashes=False, tags=[HEALTH])
        live = responses(LIVE, None)
        add_get(health, "/v2/health/live", self.live, "Whether the process answers", live)
        add_get(
            health,
            "/v2/health/ready",
            self.ready,
            "Whether calls are taken",
            responses(READY, None, NotReady, Draining),
        )
        exposition = {"200": {"description": "the metrics", "content": {"text/plain": _TEXT}}}
        add_get(health, "/metrics", self.metrics, "Metrics for Prometheus", exposition)
        for part in (models, health):
            router.include_router(part)
        return router

    async def list_models(self) -> Response:
        """Return every model that is served, in short, and which one is the default."""
        models = self._server.models
        short = [self._describe(model) for model in models if models.get(model.name) is model]
        return json_response({"models": short, "default": models.default_name})

    async def get_model(self, request: Request) -> Response:
        """
        Return one model in full: layer, limits, and the parity it was published with.

        The highest version that is served, or the one that the query names.
        """
        models = self._server.models
        name, version = request.path_params["name"], request.query_params.get("version")
        model = models.get(name, version)
        manifest = model.manifest
        return json_response(
            {
                **self._describe(model),
                "inputs": described_inputs(model.layer),
                "outputs": described_outputs(model.layer),
                "limits": dataclasses.asdict(self._server.limits)
                | {"max_body_bytes": self._server.settings.max_body_bytes},
                "parity": [dataclasses.asdict(row) for row in manifest.parity],
                "input_scale": manifest.input_scale,
                "source": manifest.source,
                "tensors": manifest.tensors,
                "proof": manifest.proof,
                "versions": manifest.versions,
                "proven_on": manifest.proven_on,
                "created": manifest.created,
            }
        )

    async def live(self) -> Response:
        """Say that the process answers."""
        return json_response({"live": True})

    async def ready(self) -> Response:
        """Say whether calls are taken: every warm-up passed, and the server is not stopping."""
        problem = self._server.models.problem
        if self._server.lifecycle.phase != "serving":
            raise Draining("the server is stopping", retry_after_s=1)
        if problem is not None:
            raise NotReady(problem, retry_after_s=1)
        broken = self._server.models.broken
        return json_response({"ready": True, "broken": broken} if broken else {"ready": True})

    async def metrics(self) -> Response:
        """Return the metrics in the Prometheus text format."""
        server, metrics = self._server, self._server.metrics
        metrics.ready = server.models.problem is None and server.lifecycle.phase == "serving"
        metrics.in_flight = server.lifecycle.in_flight
        metrics.served = [
            (model.name, str(model.version), model.manifest.precision, model.engine.provider)
            for model in server.models
        ]
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})

    def _describe(self, model: Model) -> dict[str, Any]:
        manifest = model.manifest
        return {
            "name": model.name,
            "version": model.version,
            "served_versions": [
                {
                    "version": other.version,
                    "default": other is self._server.models.get(model.name),
                    "ready": other.problem is None,
                }
                for other in self._server.models.versions_of(model.name)
            ],
            "ready": model.problem is None,
            "problem": model.problem,
            "layer": dataclasses.asdict(model.layer),
            "precision": manifest.precision,
            "provider": model.engine.provider,
            "tolerance": manifest.tolerance,
            "worst_output_error": manifest.worst_output_error,
            "worst_weights_error": manifest.worst_weights_error,
        }
