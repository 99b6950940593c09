"""The endpoints: bytes in, bytes out, everything else delegated."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, cast

import orjson
from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse

from service import json_codec, oip_codec, safetensors_codec
from service.calls import Answer, Call
from service.contract import EMBEDDINGS
from service.errors import (
    DeadlineExceeded,
    Draining,
    InferenceFailed,
    InvalidInput,
    NotAcceptable,
    NotReady,
    QueueFull,
    TooLarge,
    TooSlow,
    UnknownModel,
    UnsupportedMediaType,
)
from service.life import Life
from service.metrics import CONTENT_TYPE, Metrics
from service.models import Model, Models
from service.openapi import (
    ATTENTION_ANSWER,
    ATTENTION_REQUEST,
    ERROR,
    INFER_ANSWER,
    INFER_PARAMETERS,
    INFER_REQUEST,
    NAME_PARAMETER,
    OPTION_PARAMETERS,
    VERSION_PARAMETER,
    body,
    responses,
)
from service.options import from_query
from service.pieces import gathered
from service.settings import Settings
from service.shapes import Limits, to_call
from service.tracing import Tracing
from service.workers import INLINE_BYTES, Workers

_JSON_TYPES: Final = ("", "application/json", "application/x-www-form-urlencoded")
"""What is read as JSON: nothing said, JSON, or what curl says when nothing was said."""

_CALL_ERRORS: Final = (
    InvalidInput,
    UnknownModel,
    TooSlow,
    TooLarge,
    QueueFull,
    NotReady,
    Draining,
    DeadlineExceeded,
    InferenceFailed,
)


class Routes:
    """The endpoints of one server."""

    def __init__(
        self, settings: Settings, models: Models, life: Life, metrics: Metrics, tracing: Tracing
    ) -> None:
        self._settings = settings
        self._models = models
        self._life = life
        self._metrics = metrics
        self._tracing = tracing
        self._workers = Workers()
        self._limits = Limits(
            settings.max_rows,
            settings.max_length,
            settings.max_tokens,
            settings.max_answer_bytes,
            refuse_nonfinite=settings.nonfinite == "refuse",
        )

    def close(self) -> None:
        """End the workers, and send what is left to tell."""
        self._workers.close()
        self._tracing.close()

    def router(self) -> APIRouter:
        """Return every endpoint with what OpenAPI says of it."""
        router = APIRouter(redirect_slashes=False)
        add = router.add_api_route
        add("/", self.root, methods=["GET"], include_in_schema=False)
        add(
            "/v1/attention",
            self.attention,
            methods=["POST"],
            summary="Attend over a batch of embeddings",
            openapi_extra={
                "parameters": OPTION_PARAMETERS,
                "requestBody": body(
                    ATTENTION_REQUEST,
                    safetensors_codec.MEDIA_TYPE,
                    {"model": "tiny", "embeddings": [[1, 0, 0, 0, 0, 0, 0, 0]], "weights": True},
                ),
                "responses": responses(
                    ATTENTION_ANSWER,
                    safetensors_codec.MEDIA_TYPE,
                    *_CALL_ERRORS,
                    NotAcceptable,
                    UnsupportedMediaType,
                ),
            },
        )
        infer_extra = {
            "parameters": INFER_PARAMETERS,
            "requestBody": body(
                INFER_REQUEST,
                oip_codec.BINARY_MEDIA_TYPE,
                {
                    "inputs": [
                        {
                            "name": EMBEDDINGS,
                            "shape": [1, 1, 8],
                            "datatype": "FP32",
                            "data": [1, 0, 0, 0, 0, 0, 0, 0],
                        }
                    ]
                },
            ),
            "responses": responses(
                INFER_ANSWER, oip_codec.BINARY_MEDIA_TYPE, *_CALL_ERRORS, UnsupportedMediaType
            ),
        }
        for path in ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"):
            add(
                path,
                self.infer,
                methods=["POST"],
                summary="Infer, as the Open Inference Protocol v2 says",
                openapi_extra=infer_extra
                if "version" not in path
                else {**infer_extra, "parameters": [VERSION_PARAMETER, *INFER_PARAMETERS]},
            )
        listing = responses({"type": "object"}, None)
        one = {
            "parameters": [NAME_PARAMETER],
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

    async def attention(self, request: Request) -> Response:
        """
        Return the layer's output and, when asked, each head's attention weights.

        A query with nothing to attend to gets zero weights and the output bias.
        The answer comes in the format of the request unless `Accept` says otherwise.
        """
        started = time.monotonic()
        await self._check_takes_calls(request)
        format_in = _request_format(request)
        format_out = _answer_format(request, format_in)
        outer = from_query(request.query_params.multi_items(), request.headers)
        content = await self._body(request)
        if format_in == json_codec.MEDIA_TYPE:
            tensors, options, single = await self._workers.decode_json(
                len(content), json_codec.decode, content, outer, self._limits
            )
        else:
            tensors, options = await self._workers.run(
                len(content), lambda: safetensors_codec.decode(content, outer, self._limits)
            )
            single = False
        model = self._models.ready(self._models.get(options.model))
        call = to_call(tensors, options, model.layer, self._limits)
        answer = await self._answer(request, model, call)
        length: int | None = None
        if format_out == json_codec.MEDIA_TYPE:
            pieces = json_codec.encode(model.name, model.version, answer, single=single)
        else:
            length, pieces = safetensors_codec.encode(model.name, model.version, answer)
        reply = Reply(format_out, length, pieces, {})
        return await self._reply(request, reply, model, answer, started)

    async def infer(self, request: Request) -> Response:
        """
        Answer an inference request in JSON, binary tensors or both.

        `{name}` has the output alone; `{name}-weights` also has the attention weights.
        """
        started = time.monotonic()
        await self._check_takes_calls(request)
        name = str(request.path_params["name"])
        plain, with_weights = oip_codec.split_model_name(name)
        model = self._models.ready(self._models.get(plain, request.path_params.get("version")))
        timeout_s = from_query([], request.headers).get("timeout_s")
        content = await self._body(request)
        asked = await self._workers.decode_json(
            len(content),
            oip_codec.decode,
            content,
            request.headers.get(oip_codec.HEADER_LENGTH),
            with_weights,
            timeout_s if isinstance(timeout_s, float) else None,
        )
        call = to_call(asked.tensors, asked.options, model.layer, self._limits)
        answer = await self._answer(request, model, call)
        length, header_length, pieces = oip_codec.encode(name, model.version, asked, answer)
        if header_length is None:
            reply = Reply(json_codec.MEDIA_TYPE, length, pieces, {})
        else:
            headers = {oip_codec.HEADER_LENGTH: str(header_length)}
            reply = Reply(oip_codec.BINARY_MEDIA_TYPE, length, pieces, headers)
        return await self._reply(request, reply, model, answer, started)

    async def list_models(self) -> Response:
        """Return every model that is served, in short, and which one is the default."""
        short = [self._describe(model) for model in self._models]
        return _json({"models": short, "default": self._models.default_name})

    async def get_model(self, request: Request) -> Response:
        """Return one model in full: layer, limits, and the parity it was published with."""
        model = self._models.get(request.path_params["name"])
        manifest = model.artifact.manifest
        return _json(
            {
                **self._describe(model),
                "inputs": _described_inputs(model),
                "limits": dataclasses.asdict(self._limits)
                | {"max_body_bytes": self._settings.max_body_bytes},
                "parity": [dataclasses.asdict(row) for row in manifest.parity],
                "input_scale": manifest.input_scale,
                "source": manifest.source,
                "versions": manifest.versions,
                "created": manifest.created,
            }
        )

    async def live(self) -> Response:
        """Say that the process answers."""
        return _json({"live": True})

    async def ready(self) -> Response:
        """Say whether calls are taken: every warm-up passed, and the server is not stopping."""
        problem = self._models.problem
        if self._life.phase != "serving":
            raise Draining("the server is stopping", retry_after_s=1)
        if problem is not None:
            raise NotReady(problem, retry_after_s=1)
        return _json({"ready": True})

    async def metrics(self) -> Response:
        """Return the metrics in the Prometheus text format."""
        ready = self._models.problem is None and self._life.phase == "serving"
        self._metrics.ready.set(ready)
        self._metrics.in_flight.set(self._life.in_flight)
        self._metrics.model_info.clear()
        for model in self._models:
            precision = model.artifact.manifest.precision
            labels = (model.name, str(model.version), precision, model.engine.provider)
            self._metrics.model_info.labels(*labels).set(1)
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    def _describe(self, model: Model) -> dict[str, Any]:
        manifest = model.artifact.manifest
        return {
            "name": model.name,
            "version": model.version,
            "ready": model.problem is None,
            "problem": model.problem,
            "layer": dataclasses.asdict(model.layer) | {"head_dim": model.layer.head_dim},
            "precision": manifest.precision,
            "provider": model.engine.provider,
            "tolerance": manifest.tolerance,
            "worst_output_error": manifest.worst_output_error,
            "worst_weights_error": manifest.worst_weights_error,
        }

    async def _check_takes_calls(self, request: Request) -> None:
        """
        Return unless the server is draining.

        Raises:
            Draining: no new call is taken; the body has been read, because a connection
                that is closed over an unread body loses the answer, too.
        """
        try:
            self._life.check_takes_calls()
        except Draining:
            await self._body(request)
            raise

    async def _body(self, request: Request) -> bytes:
        """
        Return the whole body.

        Raises:
            UnsupportedMediaType: it is encoded.
            TooLarge: above the limit, by its own word or by what came.
            TooSlow: it did not arrive in time.
        """
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise UnsupportedMediaType(
                f"header Content-Encoding: expected none, got {encoding[:64]!r}"
            )
        limit = self._settings.max_body_bytes
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced[:20]) > limit:
            raise TooLarge(f"body: at most {limit} bytes, got {announced[:20]}")
        content, size = bytearray(), 0
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > limit:
                        raise TooLarge(f"body: at most {limit} bytes, got more")
                    content += chunk
        except TimeoutError:
            raise TooSlow(
                f"body: expected within {self._settings.body_timeout_s:g} s,"
                f" got {size} bytes by then"
            ) from None
        return bytes(content)

    async def _answer(self, request: Request, model: Model, call: Call) -> Answer:
        """
        Return the call's answer; a caller that leaves takes its call along.

        Raises:
            ClientDisconnect: nobody is there to answer to.
        """
        own_task = cast(asyncio.Task[None], asyncio.current_task())
        left = asyncio.create_task(_left(request))
        left.add_done_callback(lambda task: None if task.cancelled() else own_task.cancel())
        try:
            return await model.batcher.submit(call)
        except asyncio.CancelledError:
            if not left.done():
                raise
            own_task.uncancel()
            raise ClientDisconnect from None
        finally:
            left.cancel()

    async def _reply(
        self, request: Request, reply: "Reply", model: Model, answer: Answer, started: float
    ) -> Response:
        """Return the response, a large one in pieces, with its stages told and counted."""
        stages = {
            "queue": answer.stages.queue_s,
            "assembly": answer.stages.assembly_s,
            "compute": answer.stages.compute_s,
        }
        encode_started = time.monotonic()
        if _answer_bytes(answer) <= INLINE_BYTES:
            content = b"".join(reply.pieces)
            stages["encode"] = time.monotonic() - encode_started
            stages["total"] = time.monotonic() - started
            self._count(request, model, stages)
            response = Response(content, media_type=reply.media_type, headers=reply.headers)
        else:
            # What comes after the first byte is not known when the headers go out.
            stages["total"] = time.monotonic() - started
            body = self._stream(request, reply.pieces, model, stages, started, encode_started)
            response = StreamingResponse(body, media_type=reply.media_type, headers=reply.headers)
            if reply.length is not None:
                response.headers["content-length"] = str(reply.length)
        response.headers["server-timing"] = ", ".join(
            f"{stage};dur={seconds * 1e3:.3f}" for stage, seconds in stages.items()
        )
        return response

    async def _stream(
        self,
        request: Request,
        pieces: Iterator[bytes],
        model: Model,
        stages: dict[str, float],
        started: float,
        encode_started: float,
    ) -> AsyncIterator[bytes]:
        async for piece in self._workers.pieces(gathered(pieces)):
            yield piece
        now = time.monotonic()
        whole = {**stages, "encode": now - encode_started, "total": now - started}
        self._count(request, model, whole)

    def _count(self, request: Request, model: Model, stages: dict[str, float]) -> None:
        self._tracing.call(model.name, stages, request.headers)
        for stage, seconds in stages.items():
            self._metrics.stage_seconds.labels(stage, model.name).observe(seconds)


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a codec made of an answer; an unknown length is told as it comes."""

    media_type: str
    length: int | None
    pieces: Iterator[bytes]
    headers: dict[str, str]


async def _left(request: Request) -> None:
    """Return when the caller has left; its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _request_format(request: Request) -> str:
    content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if content_type in _JSON_TYPES:
        return json_codec.MEDIA_TYPE
    if content_type == safetensors_codec.MEDIA_TYPE:
        return content_type
    raise UnsupportedMediaType(
        f"header Content-Type: expected {json_codec.MEDIA_TYPE} or"
        f" {safetensors_codec.MEDIA_TYPE}, got {content_type[:64]!r}"
    )


def _answer_format(request: Request, request_format: str) -> str:
    """Return the offered format the caller likes best; nothing said = that of the request."""
    offers = [request_format, json_codec.MEDIA_TYPE, safetensors_codec.MEDIA_TYPE]
    accept = request.headers.get("accept", "").strip() or "*/*"
    best, best_quality = None, 0.0
    for part in accept.split(","):
        kind, _, parameters = part.strip().lower().partition(";")
        quality = _quality(parameters)
        offer = next((o for o in offers if kind.strip() in (o, "application/*", "*/*")), None)
        if offer is not None and quality > best_quality:
            best, best_quality = offer, quality
    if best is None:
        raise NotAcceptable(
            f"header Accept: expected {json_codec.MEDIA_TYPE} or"
            f" {safetensors_codec.MEDIA_TYPE}, got {accept[:64]!r}"
        )
    return best


def _quality(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.strip().partition("=")
        if name == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


def _answer_bytes(answer: Answer) -> int:
    weights = answer.attention_weights
    return answer.output.nbytes + (0 if weights is None else weights.nbytes)


def _described_inputs(model: Model) -> dict[str, str]:
    """Say what a call to this model may hold."""
    layer = model.layer
    keys = "T" if layer.is_cross else "S"
    memory = {"memory": f"FP32 [B, T, {layer.memory_dim}], required"} if layer.is_cross else {}
    causal = {} if layer.is_cross else {"causal": "boolean: attend to keys t <= s only"}
    return {
        "embeddings": f"FP32 [B, S, {layer.embed_dim}], required",
        **memory,
        "attend_mask": f"BOOL [B, {keys}]: true = this key takes part",
        "pair_mask": f"BOOL [B or 1, {layer.num_heads} or 1, S, {keys}]:"
        " true = this query may attend to this key",
        "head_mask": f"FP32 [{layer.num_heads}] or [B, {layer.num_heads}]:"
        " multiplies each head's output",
        **causal,
    }


def _json(document: dict[str, Any]) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")
