"""
The two endpoints that take tensors: bytes in, bytes out, everything else delegated.

They stand before the framework's routes, not among them: of the time that a
small call takes, the framework's layers would take the greater part.
"""

import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from service import json_codec, oip_codec, safetensors_codec
from service.calls import Answer
from service.errors import (
    Draining,
    HeadwiseError,
    MethodNotAllowed,
    NotAcceptable,
    UnsupportedMediaType,
)
from service.exchange import Exchange
from service.life import Life
from service.metrics import Metrics
from service.models import Model, Models
from service.openapi import ATTENTION, INFER, INFER_VERSION
from service.options import from_query
from service.pieces import Chunk, gathered
from service.problems import answer_of
from service.settings import Settings
from service.shapes import Limits, to_call
from service.tracing import Tracing
from service.workers import Size, Workers

_JSON_TYPES: Final = ("", "application/json", "application/x-www-form-urlencoded")
"""What is read as JSON: nothing said, JSON, or what curl says when nothing was said."""

Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True)
class Endpoint:
    """A path of the documentation, as the request's log record and its counter name it."""

    path: str


_ATTENTION: Final = Endpoint(ATTENTION)
_INFER: Final = Endpoint(INFER)
_INFER_VERSION: Final = Endpoint(INFER_VERSION)


@dataclass(frozen=True)
class Reply:
    """What a codec made of an answer; an unknown length is told as it comes."""

    headers: list[tuple[bytes, bytes]]
    length: int | None
    pieces: Iterator[Chunk]


class Inference:
    """
    Answers the calls with tensors, and passes every other request on.

    It is the one who closes the workers; the models are the application's.
    """

    def __init__(
        self,
        rest: ASGIApp,
        settings: Settings,
        limits: Limits,
        models: Models,
        life: Life,
        metrics: Metrics,
        tracing: Tracing,
        workers: Workers,
    ) -> None:
        self._rest = rest
        self._settings = settings
        self._limits = limits
        self._models = models
        self._life = life
        self._metrics = metrics
        self._tracing = tracing
        self._workers = workers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        found = self._find(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await self._rest(scope, receive, send)
            return
        scope["route"], handle = found
        exchange = Exchange(scope, receive, send)
        try:
            if scope["method"] != "POST":
                raise MethodNotAllowed(scope["method"], allowed="POST")
            await handle(exchange)
        except HeadwiseError as error:
            status, headers, body = answer_of(error)
            await exchange.answer(headers, body, status=status)

    def _find(self, path: str) -> tuple[Endpoint, Handler] | None:
        if path == ATTENTION:
            return _ATTENTION, self._attention
        if not (path.startswith("/v2/models/") and path.endswith("/infer")):
            return None
        match path.split("/")[3:]:
            case [name, "infer"]:
                return _INFER, lambda exchange: self._infer(exchange, name, None)
            case [name, "versions", version, "infer"]:
                return _INFER_VERSION, lambda exchange: self._infer(exchange, name, version)
            case _:
                return None

    async def _attention(self, exchange: Exchange) -> None:
        """Answer in the format of the request unless `Accept` says otherwise."""
        started = time.monotonic()
        await self._check_takes_calls(exchange)
        format_in = _request_format(exchange.headers.get("content-type", ""))
        format_out = _answer_format(exchange.headers.get("accept", ""), format_in)
        outer = from_query(exchange.query(), exchange.headers)
        content = await self._body(exchange)
        single = False
        if format_in == json_codec.MEDIA_TYPE:
            size = Size(json_bytes=len(content))
            tensors, options, single = await self._workers.decode(
                size, json_codec.decode, content, outer, self._limits
            )
        else:
            size = Size(raw_bytes=len(content))
            tensors, options = await self._workers.decode(
                size, safetensors_codec.decode, content, outer, self._limits
            )
        model = self._models.ready(self._models.get(options.model))
        call = to_call(tensors, options, model.layer, self._limits)
        answer = await exchange.while_there(model.batcher.submit(call))
        length: int | None = None
        pieces: Iterator[Chunk]
        if format_out == json_codec.MEDIA_TYPE:
            pieces = json_codec.encode(model.name, model.version, answer, single=single)
        else:
            length, pieces = safetensors_codec.encode(model.name, model.version, answer)
        reply = Reply([_content_type(format_out)], length, pieces)
        await self._reply(exchange, reply, model, answer, started)

    async def _infer(self, exchange: Exchange, name: str, version: str | None) -> None:
        """Answer in JSON, binary tensors or both; `<name>-weights` also has the weights."""
        started = time.monotonic()
        await self._check_takes_calls(exchange)
        plain, with_weights = oip_codec.split_model_name(name)
        model = self._models.ready(self._models.get(plain, version))
        model.batcher.check_room()  # a call that is refused anyhow is not read
        timeout_s = from_query([], exchange.headers).get("timeout_s")
        content = await self._body(exchange)
        header_length = exchange.headers.get(oip_codec.HEADER_LENGTH)
        json_bytes = oip_codec.json_size(header_length, len(content))
        asked = await self._workers.decode(
            Size(json_bytes=json_bytes, raw_bytes=len(content) - json_bytes),
            oip_codec.decode,
            content,
            json_bytes,
            with_weights,
            timeout_s if isinstance(timeout_s, float) else None,
        )
        call = to_call(asked.tensors, asked.options, model.layer, self._limits)
        answer = await exchange.while_there(model.batcher.submit(call))
        length, header_size, pieces = oip_codec.encode(name, model.version, asked, answer)
        if header_size is None:
            headers = [_content_type(json_codec.MEDIA_TYPE)]
        else:
            headers = [
                _content_type(oip_codec.BINARY_MEDIA_TYPE),
                (oip_codec.HEADER_LENGTH.encode(), b"%d" % header_size),
            ]
        await self._reply(exchange, Reply(headers, length, pieces), model, answer, started)

    async def _check_takes_calls(self, exchange: Exchange) -> None:
        """
        Return unless the server is draining.

        Raises:
            Draining: no new call is taken; the body has been read, because a connection
                that is closed over an unread body loses the answer, too.
        """
        try:
            self._life.check_takes_calls()
        except Draining:
            await self._body(exchange)
            raise

    async def _body(self, exchange: Exchange) -> bytes:
        settings = self._settings
        return await exchange.body(
            limit_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
        )

    async def _reply(
        self, exchange: Exchange, reply: Reply, model: Model, answer: Answer, started: float
    ) -> None:
        """Send the answer, a large one in pieces, with its stages told and counted."""
        stages = {
            "queue": answer.stages.queue_s,
            "assembly": answer.stages.assembly_s,
            "compute": answer.stages.compute_s,
        }
        encode_started = time.monotonic()
        size = Size(raw_bytes=answer.nbytes) if reply.length else Size(json_bytes=answer.nbytes)
        if size.is_small:
            content = b"".join(reply.pieces)
            now = time.monotonic()
            stages |= {"encode": now - encode_started, "total": now - started}
            self._count(exchange, model, stages)
            headers = [*reply.headers, (b"content-length", b"%d" % len(content)), _timing(stages)]
            await exchange.answer(headers, content)
            return
        # What comes after the first byte is not known when the headers go out.
        told = stages | {"total": time.monotonic() - started}
        headers = [*reply.headers, _timing(told)]
        if reply.length is not None:
            headers.append((b"content-length", b"%d" % reply.length))
        await exchange.answer(headers, self._workers.pieces(gathered(reply.pieces)))
        now = time.monotonic()
        stages |= {"encode": now - encode_started, "total": now - started}
        self._count(exchange, model, stages)

    def _count(self, exchange: Exchange, model: Model, stages: dict[str, float]) -> None:
        self._tracing.call(model.name, stages, exchange.headers)
        self._metrics.of_model(model.name).call(stages)


def _content_type(media_type: str) -> tuple[bytes, bytes]:
    return b"content-type", media_type.encode()


def _timing(stages: dict[str, float]) -> tuple[bytes, bytes]:
    told = [f"{stage};dur={seconds * 1e3:.3f}" for stage, seconds in stages.items()]
    return b"server-timing", ", ".join(told).encode()


def _request_format(content_type: str) -> str:
    content_type = content_type.split(";")[0].strip().lower()
    if content_type in _JSON_TYPES:
        return json_codec.MEDIA_TYPE
    if content_type == safetensors_codec.MEDIA_TYPE:
        return content_type
    raise UnsupportedMediaType(
        f"header Content-Type: expected {json_codec.MEDIA_TYPE} or"
        f" {safetensors_codec.MEDIA_TYPE}, got {content_type[:64]!r}"
    )


def _answer_format(accept: str, request_format: str) -> str:
    """Return the offered format the caller likes best; nothing said = that of the request."""
    offers = [request_format, json_codec.MEDIA_TYPE, safetensors_codec.MEDIA_TYPE]
    accept = accept.strip() or "*/*"
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
