"""
The Open Inference Protocol's endpoints without tensors, and what its extensions add to them.

A protocol client asks for every output that a model declares, so each artifact is
two models to it: `<name>` declares the output alone, `<name>-weights` also the
attention weights.  Bodies are read raw: clients send JSON under any content type.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service import __version__
from service.api.log_settings import changed, described
from service.api.openapi import (
    NAME_PARAMETER,
    REGION_PARAMETER,
    VERSION_PARAMETER,
    json_body,
    problems,
    responses,
)
from service.api.schemas import (
    LOG_SETTINGS,
    MODEL_METADATA,
    MODEL_STATISTICS,
    REPOSITORY_INDEX,
    SERVER_METADATA,
    TRACE_SETTINGS,
)
from service.codecs.checks import check_known, kind_of
from service.codecs.offload import Offload
from service.codecs.oip_request import split_model_name
from service.contract import ATTENTION_WEIGHTS, EMBEDDINGS, MEMORY, OUTPUT, WEIGHTS_SUFFIX
from service.errors import (
    Disabled,
    Draining,
    InvalidInput,
    MethodNotAllowed,
    NotFound,
    NotReady,
    TooLarge,
    TooSlow,
    UnknownModel,
)
from service.inference.lifecycle import Lifecycle
from service.inference.models import Model, Models
from service.logs import LOGGER, event
from service.settings import Settings
from service.telemetry.statistics import Statistics
from service.transport.control import control_body

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

_TRACE: Final[dict[str, str | list[str]]] = {
    "trace_file": "",
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
}
_OFF: Final[tuple[object, ...]] = ("OFF", ["OFF"], [], None)

_MODEL: Final = "/v2/models/{name}"
_CUDA: Final = "/v2/cudasharedmemory"


@dataclass(frozen=True)
class _Tensor:
    """An input or output that a protocol model declares; a free axis is -1, the batch first."""

    name: str
    shape: tuple[int, ...]

    def metadata(self) -> dict[str, Any]:
        return {"name": self.name, "datatype": "FP32", "shape": self.shape}

    def config(self) -> dict[str, Any]:
        return {"name": self.name, "data_type": "TYPE_FP32", "dims": self.shape[1:]}


@dataclass(frozen=True)
class _Face:
    """One of the two models that an artifact is to protocol clients."""

    name: str
    model: Model

    def inputs(self) -> list[_Tensor]:
        """
        Return the required inputs.

        Masks are accepted and not declared: a tool that sends all that is declared
        could not know their shape.
        """
        layer = self.model.layer
        inputs = [_Tensor(EMBEDDINGS, (-1, -1, layer.embed_dim))]
        if layer.memory_dim is not None:
            inputs.append(_Tensor(MEMORY, (-1, -1, layer.memory_dim)))
        return inputs

    def outputs(self) -> list[_Tensor]:
        layer = self.model.layer
        outputs = [_Tensor(OUTPUT, (-1, -1, layer.embed_dim))]
        if self.name != self.model.name:
            outputs.append(_Tensor(ATTENTION_WEIGHTS, (-1, layer.num_heads, -1, -1)))
        return outputs


class OipRoutes:
    """The protocol's endpoints of one server."""

    def __init__(
        self,
        settings: Settings,
        models: Models,
        lifecycle: Lifecycle,
        statistics: Statistics,
        offload: Offload,
    ) -> None:
        self._settings = settings
        self._models = models
        self._lifecycle = lifecycle
        self._statistics = statistics
        self._offload = offload

    def router(self) -> APIRouter:
        """Return every endpoint with what OpenAPI says of it."""
        router = APIRouter(redirect_slashes=False)
        self._add_metadata(router)
        self._add_repository(router)
        self._add_settings(router)
        self._add_cuda_memory(router)
        return router

    def _add_metadata(self, router: APIRouter) -> None:
        add = router.add_api_route
        told = {"responses": responses(SERVER_METADATA, None)}
        add("/v2", self.server_metadata, methods=["GET"], openapi_extra=told)
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

    def _add_repository(self, router: APIRouter) -> None:
        _post(
            router,
            "/v2/repository/index",
            self.repository_index,
            json_body({"ready": {"type": "boolean", "default": False}}),
            responses(REPOSITORY_INDEX, None, *_BODY_ERRORS, NotReady),
        )
        errors = problems(*_BODY_ERRORS, Disabled, UnknownModel, NotReady)
        for verb, handler in (("load", self.load_model), ("unload", self.unload_model)):
            _post(
                router,
                f"/v2/repository/models/{{name}}/{verb}",
                handler,
                json_body({"parameters": {"type": "object"}}),
                errors,
                parameters=[NAME_PARAMETER],
            )

    def _add_settings(self, router: APIRouter) -> None:
        add = router.add_api_route
        told = responses(LOG_SETTINGS, None)
        add("/v2/logging", self.log_settings, methods=["GET"], openapi_extra={"responses": told})
        _post(
            router,
            "/v2/logging",
            self.change_log_settings,
            json_body(LOG_SETTINGS["properties"]),
            responses(LOG_SETTINGS, None, *_BODY_ERRORS, Disabled),
        )
        _only(router, "/v2/logging", "GET, POST")
        for path, parameters in (
            ("/v2/trace/setting", []),
            (_MODEL + "/trace/setting", [NAME_PARAMETER]),
        ):
            unknown = [UnknownModel, NotReady] if parameters else []
            get = responses(TRACE_SETTINGS, None, *unknown)
            add(
                path,
                self.trace_settings,
                methods=["GET"],
                openapi_extra={"parameters": parameters, "responses": get},
            )
            _post(
                router,
                path,
                self.change_trace_settings,
                json_body(TRACE_SETTINGS["properties"]),
                responses(TRACE_SETTINGS, None, *_BODY_ERRORS, *unknown),
                parameters=parameters,
            )
            _only(router, path, "GET, POST")

    def _add_cuda_memory(self, router: APIRouter) -> None:
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
        _post(router, _CUDA + "/unregister", self.unregister_cuda, {}, {})
        _post(
            router,
            region + "/unregister",
            self.unregister_cuda,
            {},
            {},
            parameters=[REGION_PARAMETER],
        )
        _post(
            router,
            region + "/register",
            self.register_cuda,
            {},
            problems(InvalidInput),
            parameters=[REGION_PARAMETER],
        )

    async def server_metadata(self) -> Response:
        """Return the server's name, its version and the extensions that work."""
        control = _CONTROL if self._settings.model_control else ()
        shared = _SHARED_MEMORY if self._settings.shared_memory else ()
        extensions = [*_EXTENSIONS, *control, *shared]
        return _json({"name": "headwise", "version": __version__, "extensions": extensions})

    async def model_metadata(self, request: Request) -> Response:
        """Return a model's required inputs and its outputs; -1 = any length."""
        face = self._face(request)
        return _json(
            {
                "name": face.name,
                "versions": [str(face.model.version)],
                "platform": PLATFORM,
                "inputs": [tensor.metadata() for tensor in face.inputs()],
                "outputs": [tensor.metadata() for tensor in face.outputs()],
            }
        )

    async def model_ready(self, request: Request) -> Response:
        """Say whether a model takes calls: its warm-up passed, and the server is not stopping."""
        face = self._face(request)
        if self._lifecycle.phase != "serving":
            raise Draining("the server is stopping", retry_after_s=1)
        self._models.require_ready(face.model)
        return _json({"name": face.name, "ready": True})

    async def model_config(self, request: Request) -> Response:
        """Return a model's configuration as Triton writes it; dims are without the batch."""
        face = self._face(request)
        return _json(
            {
                "name": face.name,
                "platform": "onnxruntime_onnx",
                "backend": "onnxruntime",
                "version_policy": {"latest": {"num_versions": 1}},
                "max_batch_size": self._settings.max_rows,
                "input": [tensor.config() for tensor in face.inputs()],
                "output": [tensor.config() for tensor in face.outputs()],
                "dynamic_batching": {},
            }
        )

    async def model_statistics(self, request: Request) -> Response:
        """Return what was counted of the protocol's calls to one model."""
        return self._statistics_of([self._face(request)])

    async def all_statistics(self) -> Response:
        """Return what was counted of the protocol's calls to every model that is served."""
        self._models.check_loaded()
        return self._statistics_of(face for model in self._models for face in _faces(model))

    async def repository_index(self, request: Request) -> Response:
        """List every model that is served or could be loaded; `{"ready": true}`: those ready."""
        asked = await self._document(request)
        check_known(asked, ("ready",), "body")
        only_ready = asked.get("ready", False)
        if not isinstance(only_ready, bool):
            raise InvalidInput(f"ready: expected true or false, got {kind_of(only_ready)}")
        listed = await self._models.index()
        return _json(
            [
                {
                    "name": name,
                    "version": str(one.version),
                    "state": "READY" if one.problem is None else "UNAVAILABLE",
                    "reason": one.problem or "",
                }
                for one in listed
                if one.problem is None or not only_ready
                for name in _names(one.name)
            ]
        )

    async def load_model(self, request: Request) -> Response:
        """Serve the highest version of an artifact in the repository, under both its names."""
        name = self._controlled(request)
        for parameter in await self._parameters(request):
            raise InvalidInput(
                f"parameters: {parameter[:64]!r} is not offered: an artifact is served as published"
            )
        await self._models.load(name)
        return Response()

    async def unload_model(self, request: Request) -> Response:
        """Serve an artifact no more, under either name; calls that are already in finish."""
        name = self._controlled(request)
        # No model depends on another, so it makes no difference what is said of dependents.
        check_known(await self._parameters(request), ("unload_dependents",), "parameters")
        await self._models.unload(name)
        return Response()

    async def log_settings(self) -> Response:
        """Return what is logged."""
        return _json(described(_logger().level))

    async def change_log_settings(self, request: Request) -> Response:
        """Change the log's level; the switches are nested, and so is what they change."""
        self._check_control("logging")
        asked = await self._document(request)
        _logger().setLevel(changed(_logger().level, asked))
        event("log level changed", log_level=logging.getLevelName(_logger().level).lower())
        return await self.log_settings()

    async def trace_settings(self, request: Request) -> Response:
        """Return that nothing is traced by this protocol; traces go by OpenTelemetry."""
        if "name" in request.path_params:
            self._face(request)
        return _json(_TRACE)

    async def change_trace_settings(self, request: Request) -> Response:
        """Accept what changes nothing."""
        asked = await self._document(request)
        check_known(asked, _TRACE, "trace")
        wrong = [key for key, value in asked.items() if value not in (None, _TRACE[key])]
        if asked.get("trace_level", "") in _OFF:
            wrong = []  # at what rate nothing is traced does not matter
        if wrong:
            raise InvalidInput(
                f"{wrong[0]}: expected {orjson.dumps(_TRACE[wrong[0]]).decode()}:"
                " traces go by OpenTelemetry, where the operator asks for them"
            )
        return await self.trace_settings(request)

    async def cuda_regions(self) -> Response:
        """Return the regions of CUDA memory that are registered: none ever is."""
        return _json([])

    async def cuda_region(self, request: Request) -> Response:
        """Say that no such region of CUDA memory is registered."""
        raise NotFound(f"region: none is registered, got {request.path_params['region'][:64]!r}")

    async def register_cuda(self, request: Request) -> Response:
        """Refuse to share CUDA memory."""
        raise InvalidInput("cudasharedmemory: not offered; send tensors in the body")

    async def unregister_cuda(self) -> Response:
        """Forget regions of CUDA memory, of which there are none."""
        return Response()

    def _face(self, request: Request) -> _Face:
        """
        Return the model that a path names.

        Raises:
            UnknownModel: no such name or version.
            NotReady: the models are still being loaded.
        """
        name = request.path_params["name"]
        plain, _ = split_model_name(name)
        return _Face(name, self._models.get(plain, request.path_params.get("version")))

    def _statistics_of(self, faces: "Iterator[_Face] | list[_Face]") -> Response:
        counted = [self._statistics.of(face.name, face.model.version) for face in faces]
        return _json({"model_stats": [one.document() for one in counted]})

    def _check_control(self, what: str) -> None:
        if not self._settings.model_control:
            raise Disabled(f"{what}: switched off; the operator's setting model_control allows it")

    def _controlled(self, request: Request) -> str:
        """Return the artifact to load or unload, by either of its names."""
        self._check_control("load, unload")
        return split_model_name(request.path_params["name"])[0]

    async def _parameters(self, request: Request) -> dict[str, Any]:
        asked = await self._document(request)
        check_known(asked, ("parameters",), "body")
        parameters = asked.get("parameters", {})
        if not isinstance(parameters, dict):
            raise InvalidInput(f"parameters: expected an object, got {kind_of(parameters)}")
        return parameters

    async def _document(self, request: Request) -> dict[str, Any]:
        """
        Return the JSON object in a request's body; an empty body is an empty object.

        Raises:
            InvalidInput: it is something else; and what `control_body` raises.
        """
        content = await control_body(request, self._settings, self._offload)
        if not content.strip():
            return {}
        try:
            document = orjson.loads(content)
        except orjson.JSONDecodeError:
            raise InvalidInput("body: expected a JSON object or nothing, got no JSON") from None
        if not isinstance(document, dict):
            raise InvalidInput(f"body: expected a JSON object, got {kind_of(document)}")
        return document


_BODY_ERRORS: Final = (InvalidInput, TooSlow, TooLarge)


class _Only:
    """Answers 405 at a path whose verbs are apart: the framework would tell only the first."""

    def __init__(self, allowed: str) -> None:
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise MethodNotAllowed(scope["method"], allowed=self._allowed)


def _only(router: APIRouter, path: str, allowed: str) -> None:
    router.add_route(path, _Only(allowed), include_in_schema=False)  # type: ignore[arg-type]


def _post(
    router: APIRouter,
    path: str,
    handler: Any,
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
        path, handler, methods=["POST"], response_class=Response, openapi_extra=extra
    )


def _faces(model: Model) -> Iterator[_Face]:
    return (_Face(name, model) for name in _names(model.name))


def _names(artifact: str) -> tuple[str, str]:
    return artifact, artifact + WEIGHTS_SUFFIX


def _logger() -> logging.Logger:
    return logging.getLogger(LOGGER)


def _json(document: object) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")
