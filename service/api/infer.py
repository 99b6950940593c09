"""
The two endpoints that take tensors, the ASGI path: bytes in, bytes out, the rest delegated.

They stand before the framework's routes, not among them: of the time that a
small call takes, the framework's layers would take the greater part.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.openapi import ATTENTION, INFER, INFER_VERSION
from service.api.unsent_answers import UnsentAnswers
from service.codecs import attention_json, attention_safetensors, oip_request, oip_response
from service.codecs.chunks import Chunk, gathered
from service.codecs.compression import accepted, compress, decompress, encoding_of
from service.codecs.offload import JSON_PER_RAW_BYTE, Offload, Size
from service.codecs.options import from_query
from service.codecs.shared_memory import SharedMemory
from service.errors import (
    Draining,
    HeadwiseError,
    MethodNotAllowed,
    NotAcceptable,
    UnsupportedMediaType,
)
from service.inference.calls import Answer
from service.inference.lifecycle import Lifecycle
from service.inference.models import Model, Models
from service.inference.validation import Limits, answer_bytes, to_call
from service.settings import Settings
from service.telemetry.recorder import Recorder, stages_of, timing
from service.telemetry.statistics import ModelStatistics, Statistics
from service.transport.exchange import Exchange
from service.transport.problems import answer_of

_JSON_TYPES: Final = ("", "application/json", "application/x-www-form-urlencoded")
"""What is read as JSON: nothing said, JSON, or what curl says when nothing was said."""

Handler = Callable[[Exchange], Coroutine[None, None, None]]


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
    size: Size
    """How much work the pieces are."""


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
        lifecycle: Lifecycle,
        recorder: Recorder,
        offload: Offload,
        statistics: Statistics,
        shared_memory: SharedMemory,
        unsent: UnsentAnswers,
    ) -> None:
        self._rest = rest
        self._settings = settings
        self._limits = limits
        self._models = models
        self._lifecycle = lifecycle
        self._recorder = recorder
        self._offload = offload
        self._statistics = statistics
        self._shared_memory = shared_memory
        self._unsent = unsent

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
            # What waits, computes or encodes for a caller ends when the caller leaves.
            await exchange.while_there(handle(exchange))
        except HeadwiseError as error:
            status, headers, body = answer_of(error)
            if status == 500:
                exchange.record.failure = error
            await exchange.answer(headers, body, status=status)

    def _find(self, path: str) -> tuple[Endpoint, Handler] | None:
        if path == ATTENTION:
            return _ATTENTION, self._attention
        target = oip_request.infer_target(path)
        if target is None:
            return None
        name, version = target
        endpoint = _INFER if version is None else _INFER_VERSION
        return endpoint, lambda exchange: self._infer(exchange, name, version)

    async def _attention(self, exchange: Exchange) -> None:
        """Answer in the format of the request unless `Accept` says otherwise."""
        started = time.monotonic()
        await self._check_takes_calls(exchange)
        format_in = _request_format(exchange.headers.get("content-type", ""))
        format_out = _answer_format(exchange.headers.get("accept", ""), format_in)
        outer = from_query(exchange.query(), exchange.headers)
        content = await self._body(exchange)
        single = False
        if format_in == attention_json.MEDIA_TYPE:
            size = Size(json_bytes=len(content))
            tensors, options, single = await self._offload.decode(
                size, attention_json.decode, content, outer, self._limits
            )
        else:
            size = Size(raw_bytes=len(content))
            tensors, options = await self._offload.decode(
                size, attention_safetensors.decode, content, outer, self._limits
            )
        model = self._models.get(options.model)
        record = exchange.record
        record.model, record.version = model.name, model.version
        self._models.require_ready(model)
        call = to_call(tensors, options, model.layer, self._limits)
        record.rows, record.tokens = call.rows, call.tokens
        with self._unsent.reserved(answer_bytes(call, model.layer)):
            answer = await model.batcher.submit(call)
            length: int | None = None
            pieces: Iterator[Chunk]
            if format_out == attention_json.MEDIA_TYPE:
                size = Size(json_bytes=JSON_PER_RAW_BYTE * answer.nbytes)
                pieces = attention_json.encode(model.name, model.version, answer, single=single)
            else:
                size = Size(raw_bytes=answer.nbytes)
                length, pieces = attention_safetensors.encode(model.name, model.version, answer)
            reply = Reply([_content_type(format_out)], length, pieces, size)
            await self._reply(exchange, reply, model, answer, started)

    async def _infer(self, exchange: Exchange, name: str, version: str | None) -> None:
        """Answer as the protocol says, and count how it went for the model that it names."""
        started = time.monotonic()
        await self._check_takes_calls(exchange)
        plain, _ = oip_request.split_model_name(name)
        model = self._models.get(plain, version)
        exchange.record.model, exchange.record.version = model.name, model.version
        counted = self._statistics.of(name, model.version)
        try:
            await self._infer_counted(exchange, name, model, counted, started)
        except (Exception, asyncio.CancelledError):
            counted.failed(time.monotonic() - started)
            raise

    async def _infer_counted(
        self,
        exchange: Exchange,
        name: str,
        model: Model,
        counted: ModelStatistics,
        started: float,
    ) -> None:
        """Answer in JSON, binary tensors or both; `<name>-weights` also has the weights."""
        _, with_weights = oip_request.split_model_name(name)
        self._models.require_ready(model)
        model.batcher.check_room()  # a call that is refused anyhow is not read
        timeout_s = from_query([], exchange.headers).get("timeout_s")
        content = await self._body(exchange)
        header_length = exchange.headers.get(oip_request.HEADER_LENGTH)
        json_bytes = oip_request.json_size(header_length, len(content))
        asked = await self._offload.decode(
            Size(json_bytes=json_bytes, raw_bytes=len(content) - json_bytes),
            oip_request.decode,
            content,
            json_bytes,
            with_weights,
            timeout_s if isinstance(timeout_s, float) else None,
        )
        places = {tensor: self._shared_memory.place(slot) for tensor, slot in asked.slots.items()}
        if asked.borrowed:
            size = Size(raw_bytes=sum(places[tensor].byte_size for tensor in asked.borrowed))
            limit = self._settings.max_body_bytes
            asked = await self._offload.do(size, oip_request.borrow, asked, places, limit)
        call = to_call(asked.tensors, asked.options, model.layer, self._limits)
        exchange.record.rows, exchange.record.tokens = call.rows, call.tokens
        if asked.kept:
            oip_response.check_kept(asked, call, model.layer.num_heads)
        with self._unsent.reserved(answer_bytes(call, model.layer)):
            answer = await model.batcher.submit(call, on_run=counted.run)
            at_once, sent = oip_response.sizes(asked, answer)
            length, header_size, pieces = await self._offload.do(
                at_once, oip_response.encode, name, model.version, asked, answer, places
            )
            if header_size is None:
                headers = [_content_type(attention_json.MEDIA_TYPE)]
            else:
                headers = [
                    _content_type(oip_request.BINARY_MEDIA_TYPE),
                    (oip_request.HEADER_LENGTH.encode(), b"%d" % header_size),
                ]
            reply = Reply(headers, length, pieces, sent)
            await self._reply(exchange, reply, model, answer, started, counted)

    async def _check_takes_calls(self, exchange: Exchange) -> None:
        """
        Return when a call may be let in, whatever is in its body.

        Raises:
            QueueFull: answers under way take all the memory that they may.
            Draining: no new call is taken; the body has been read, because a connection
                that is closed over an unread body loses the answer, too.
        """
        try:
            self._lifecycle.check_takes_calls()
        except Draining:
            await self._body(exchange)
            raise
        self._unsent.check_room()

    async def _body(self, exchange: Exchange) -> bytes:
        """Return the whole body, decompressed."""
        settings = self._settings
        encoding = encoding_of(exchange.headers.get("content-encoding", ""))
        content = await exchange.body(
            limit_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
        )
        if encoding is None:
            return content
        limit = settings.max_decompressed_bytes
        return await self._offload.interruptible(decompress, content, encoding, limit)

    async def _reply(
        self,
        exchange: Exchange,
        reply: Reply,
        model: Model,
        answer: Answer,
        started: float,
        counted: ModelStatistics | None = None,
    ) -> None:
        """
        Send the answer, a large one in pieces, with its stages told and counted.

        The system has taken all of it when this returns.

        Raises:
            ClientDisconnect: the caller has left, or was cut off because it did not read.
        """
        stages = stages_of(answer)
        encode_started = time.monotonic()
        size = reply.size
        encoding: str | None = None
        if self._settings.compress_answers:
            encoding = accepted(exchange.headers.get("accept-encoding", ""))
        if size.is_small and encoding is None:
            content = b"".join(reply.pieces)
            now = time.monotonic()
            stages |= {"encode": now - encode_started, "total": now - started}
            headers = [*reply.headers, (b"content-length", b"%d" % len(content)), timing(stages)]
            await exchange.answer(headers, content)
            self._recorder.call(model.name, answer, stages, exchange.headers, counted)
            return
        # What comes after the first byte is not known when the headers go out.
        told = stages | {"total": time.monotonic() - started}
        headers = [*reply.headers, timing(told)]
        pieces = gathered(reply.pieces)
        if encoding is not None:
            pieces = compress(pieces, encoding)
            headers.append((b"content-encoding", encoding.encode()))
        elif reply.length is not None:
            headers.append((b"content-length", b"%d" % reply.length))
        await exchange.answer(headers, self._offload.pieces(pieces))
        now = time.monotonic()
        stages |= {"encode": now - encode_started, "total": now - started}
        self._recorder.call(model.name, answer, stages, exchange.headers, counted)


def _content_type(media_type: str) -> tuple[bytes, bytes]:
    return b"content-type", media_type.encode()


def _request_format(content_type: str) -> str:
    content_type = content_type.split(";")[0].strip().lower()
    if content_type in _JSON_TYPES:
        return attention_json.MEDIA_TYPE
    if content_type == attention_safetensors.MEDIA_TYPE:
        return content_type
    raise UnsupportedMediaType(
        f"header Content-Type: expected {attention_json.MEDIA_TYPE} or"
        f" {attention_safetensors.MEDIA_TYPE}, got {content_type[:64]!r}"
    )


def _answer_format(accept: str, request_format: str) -> str:
    """Return the offered format the caller likes best; nothing said = that of the request."""
    offers = [request_format, attention_json.MEDIA_TYPE, attention_safetensors.MEDIA_TYPE]
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
            f"header Accept: expected {attention_json.MEDIA_TYPE} or"
            f" {attention_safetensors.MEDIA_TYPE}, got {accept[:64]!r}"
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
