"""
The endpoints that take tensors, as an ASGI application in front of all others.

They stand before the framework's routes, not among them: the framework's layers would take
the greater part of a small call's time.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from service.api import oip_infer, v1_attention
from service.api.infer import (
    AdmittedCall,
    Reply,
    computed,
    finish,
    model_of,
    record_answer,
    released,
)
from service.api.openapi import ATTENTION, INFER, INFER_VERSION
from service.api.server import Server
from service.codecs import oip_request, oip_response
from service.codecs.chunks import gathered
from service.codecs.compression import ENCODINGS, compress
from service.codecs.size import Size
from service.errors import Draining, HeadwiseError, MethodNotAllowed
from service.inference.calls import Answer
from service.inference.model import Model
from service.telemetry.statistics import ModelStatistics
from service.transport.body_memory import HeldBody
from service.transport.exchange import Exchange, read_body
from service.transport.negotiation import best_offer
from service.transport.problems import answer_of
from service.transport.standard_headers import server_timing

Handler = Callable[[Exchange], Coroutine[None, None, None]]


@dataclass(frozen=True)
class Endpoint:
    """A path of the documentation, as the request's log record and its counter name it."""

    path: str


_ATTENTION: Final = Endpoint(ATTENTION)
_INFER: Final = Endpoint(INFER)
_INFER_VERSION: Final = Endpoint(INFER_VERSION)


class TensorCalls:
    """Answers the calls with tensors, and passes every other request on."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        found = self._find(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
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
        """Answer a call of `v1_attention`."""
        server = self._server
        await self._check_takes_calls(exchange)
        formats = v1_attention.format_of(exchange)
        with server.bodies.held() as held:
            content = self._body(exchange, formats.size_of, held)
            admitted, is_single = await v1_attention.read_call(
                server, exchange, formats, await content, held
            )
        with released(server, admitted):
            answer = await computed(admitted)
            encode_started = time.monotonic()
            reply = v1_attention.reply_of(admitted, answer, formats, is_single=is_single)
            await self._send(exchange, admitted, answer, reply, encode_started)

    async def _infer(self, exchange: Exchange, name: str, version: str | None) -> None:
        """Answer a call of `oip_infer`, and count how it went for the model that it names."""
        server, record = self._server, exchange.record
        await self._check_takes_calls(exchange)
        artifact, _ = oip_request.split_model_name(name)
        model = model_of(server, record, artifact, version)
        statistics = server.statistics.of(name, model.version)
        try:
            await self._infer_counted(exchange, name, model, statistics)
        except (Exception, asyncio.CancelledError):
            statistics.failed(time.monotonic() - record.started)
            raise

    async def _infer_counted(
        self, exchange: Exchange, name: str, model: Model, statistics: ModelStatistics
    ) -> None:
        server = self._server
        # The body of a call that would be refused anyway is not read.
        server.models.require_ready(model)
        model.batcher.check_room()
        with server.bodies.held() as held:
            content = self._body(exchange, partial(oip_infer.size_of, exchange), held)
            admitted, request, places = await oip_infer.read_call(
                server, exchange, name, model, statistics, await content, held
            )
        with released(server, admitted):
            if request.kept:
                oip_response.check_kept(request, admitted.call, model.layer)
            answer = await computed(admitted)
            encode_started = time.monotonic()
            at_once, sent = oip_response.sizes(request, answer)
            reply = await server.offload.do(
                at_once, oip_infer.reply_of, name, admitted, request, answer, places, sent
            )
            await self._send(exchange, admitted, answer, reply, encode_started)

    async def _check_takes_calls(self, exchange: Exchange) -> None:
        """
        Return when a call may be let in, whatever is in its body.

        Raises:
            QueueFull: answers under way take all the memory that they may.
            Draining: no new call is taken; the body has been read, because a connection
                that is closed over an unread body loses the answer, too.
        """
        try:
            self._server.lifecycle.check_takes_calls()
        except Draining:
            with self._server.bodies.held() as held:
                await self._body(exchange, partial(Size, 0), held)
            raise
        self._server.unsent.check_room()

    async def _body(
        self, exchange: Exchange, size_of: Callable[[int], Size], held: HeldBody
    ) -> bytes:
        settings = self._server.settings
        return await read_body(
            exchange,
            self._server.offload,
            limit_bytes=settings.max_body_bytes,
            decompressed_limit_bytes=settings.max_decompressed_bytes,
            timeout_s=settings.body_timeout_s,
            size_of=size_of,
            hold=held.hold,
        )

    async def _send(
        self,
        exchange: Exchange,
        admitted: AdmittedCall,
        answer: Answer,
        reply: Reply,
        encode_started: float,
    ) -> None:
        """
        Send the answer, a large one in chunks, and count it.

        The system has taken all of it when this returns.

        Raises:
            ClientDisconnect: the caller has left, or was cut off because it did not read.
        """
        encoding = None
        if self._server.settings.compress_answers:
            encoding = best_offer(exchange.headers.get("accept-encoding", ""), ENCODINGS)
        if reply.size.is_small and encoding is None:
            content = b"".join(reply.chunks)
            stages, timing = finish(admitted, answer, encode_started)
            length = (b"content-length", b"%d" % len(content))
            await exchange.answer([*reply.headers, length, timing], content)
        else:
            await self._stream(exchange, admitted, answer, reply, encoding)
            stages, _ = finish(admitted, answer, encode_started)
        record_answer(self._server, admitted, answer, stages, exchange.headers)

    async def _stream(
        self,
        exchange: Exchange,
        admitted: AdmittedCall,
        answer: Answer,
        reply: Reply,
        encoding: str | None,
    ) -> None:
        """Send the answer in chunks, each made while the one before is sent."""
        # Sending takes its own time, which is not known when the headers are sent.
        total = time.monotonic() - admitted.record.started
        headers = [*reply.headers, server_timing(answer.stages.by_name() | {"total": total})]
        chunks = gathered(reply.chunks)
        if encoding is not None:
            chunks = compress(chunks, encoding)
            headers.append((b"content-encoding", encoding.encode()))
        elif reply.length is not None:
            headers.append((b"content-length", b"%d" % reply.length))
        made = self._server.offload.chunks(chunks)
        if exchange.http_version != "1.0" or headers[-1][0] == b"content-length":
            await exchange.answer(headers, made)
            return
        # Before HTTP/1.1 there are no chunks (RFC 9112, 6.1): the length must be known.
        content = b"".join([bytes(chunk) async for chunk in made])
        await exchange.answer([*headers, (b"content-length", b"%d" % len(content))], content)
