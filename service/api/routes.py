"""The endpoints without tensors: what is served, how it fares, and where to read about it."""

import dataclasses
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from service.api.openapi import NAME_PARAMETER, VERSION_PARAMETER, responses
from service.api.routing import json_response
from service.api.schemas import ERROR
from service.api.server import Server
from service.errors import Draining, NotReady, UnknownModel
from service.inference.model import Model
from service.telemetry.metrics import CONTENT_TYPE


class Routes:
    """The endpoints of one server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def router(self) -> APIRouter:
        """Return every endpoint with what OpenAPI says of it."""
        router = APIRouter(redirect_slashes=False)
        add = router.add_api_route
        add("/", self.root, methods=["GET"], include_in_schema=False)
        listing = responses({"type": "object"}, None)
        schema = {"type": "string"}
        version = VERSION_PARAMETER | {"in": "query", "required": False, "schema": schema}
        one = {
            "parameters": [NAME_PARAMETER, version],
            "responses": responses({"type": "object"}, None, UnknownModel),
        }
        add("/v1/models", self.list_models, methods=["GET"], openapi_extra={"responses": listing})
        add("/v1/models/{name}", self.get_model, methods=["GET"], openapi_extra=one)
        add("/v2/health/live", self.live, methods=["GET"])
        add(
            "/v2/health/ready",
            self.ready,
            methods=["GET"],
            openapi_extra={
                "responses": {
                    "503": {
                        "description": "not ready, and why",
                        "content": {"application/json": {"schema": ERROR}},
                    }
                }
            },
        )
        add("/metrics", self.metrics, methods=["GET"], response_class=PlainTextResponse)
        return router

    async def root(self) -> Response:
        """Lead to the documentation."""
        return RedirectResponse("/docs")

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
                "inputs": _described_inputs(model),
                "limits": dataclasses.asdict(self._server.limits)
                | {"max_body_bytes": self._server.settings.max_body_bytes},
                "parity": [dataclasses.asdict(row) for row in manifest.parity],
                "input_scale": manifest.input_scale,
                "source": manifest.source,
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
            "layer": dataclasses.asdict(model.layer) | {"head_dim": model.layer.head_dim},
            "precision": manifest.precision,
            "provider": model.engine.provider,
            "tolerance": manifest.tolerance,
            "worst_output_error": manifest.worst_output_error,
            "worst_weights_error": manifest.worst_weights_error,
        }


def _described_inputs(model: Model) -> dict[str, str]:
    """Say what a call to this model may hold."""
    layer = model.layer
    keys = "T" if layer.is_cross else "S"
    memory = {"memory": f"FP32 [B, T, {layer.memory_dim}], required"} if layer.is_cross else {}
    causal = {} if layer.is_cross else {"causal": "boolean: attend to keys t <= s only"}
    return {
        "embeddings": f"FP32 [B, S, {layer.embed_dim}], required",
        **memory,
        "attend_mask": f"BOOL, or integers 0 and 1, [B, {keys}]: true = this key takes part",
        "pair_mask": f"BOOL, or integers 0 and 1, [B or 1, {layer.num_heads} or 1, S, {keys}]:"
        " true = this query may attend to this key",
        "head_mask": f"FP32 [{layer.num_heads}] or [B, {layer.num_heads}]:"
        " multiplies each head's output",
        **causal,
    }
