"""What surrounds every request on the ASGI path: its record, its key, unexpected errors."""

import asyncio
import time
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.api_keys import without_keys
from service.api.cross_origin import CrossOrigin
from service.api.error_handlers import to_response
from service.api.requests import begin, end, open_paths
from service.api.server import Server
from service.errors import Draining, Failed, Unauthorized
from service.telemetry.request_record import CLIENT_LEFT, RECORD, UNMATCHED, RequestRecord
from service.transport.coalescing import WHOLE, Delivery
from service.transport.exchange import CONNECTION, Connection, delivered
from service.transport.plain_connection import PlainConnection
from service.transport.problems import CLOSE, CODE_HEADER, INTERNAL
from service.transport.standard_headers import (
    REQUEST_ID,
    TIMING,
    caller_request_id,
    new_request_id,
    server_timing,
)

_EXTENSIONS: Final = "extensions"
_REFUSAL: Final = "headwise.refusal"
"""The key of the ASGI scope that holds why a request's key does not suffice; None = it does."""


class RequestFrame:
    """
    Gives each request an id and makes sure that it is answered, counted and logged once.

    Where the server has keys, a request without one is answered 401 unless its path needs
    none: it does not reach the application, and its body is not read.
    HEAD is answered as GET is, without the body.
    """

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server
        self._open_paths = open_paths(server)
        origins = server.settings.origins
        # Around the check of keys: a preflight request has none, and a page may read a 401.
        self._guarded: ASGIApp = CrossOrigin(self._answer, origins) if origins else self._answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if CONNECTION in scope.setdefault(_EXTENSIONS, {}):
            await self._serve(scope, receive, send)
            return
        connection = scope[_EXTENSIONS][CONNECTION] = PlainConnection(receive, send)
        try:
            await self._serve(scope, connection.receive, connection.send)
        finally:
            await connection.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = caller_request_id(dict(scope["headers"])) or new_request_id()
        record = RequestRecord(scope["method"], UNMATCHED, request_id, time.monotonic())
        scope[RECORD] = record
        scope[_REFUSAL] = self._take_key(scope)
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        exchange = _FramedExchange(self._server, record, scope[_EXTENSIONS][CONNECTION])
        receive, send = exchange.framed(receive, send)
        begin(self._server)
        delivery = WHOLE
        try:
            await self._guarded(scope, receive, send)
        except ClientDisconnect:
            delivery = exchange.delivery()
        except asyncio.CancelledError:
            # The server ends, and the time for accepted requests has passed.
            if record.status is None:
                stopping = Draining("the server is stopping", retry_after_s=1)
                await to_response(stopping)(scope, receive, send)
            else:
                delivery = exchange.delivery()
        finally:
            record.route = getattr(scope.get("route"), "path", UNMATCHED)
            end(self._server, record, delivery)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """
        Have the request answered; an unexpected error is kept in the record and answered 500.

        Raises:
            ClientDisconnect: the caller has left, or was cut off.
        """
        record: RequestRecord = scope[RECORD]
        try:
            if scope[_REFUSAL] is not None:
                await to_response(scope[_REFUSAL])(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except ClientDisconnect:
            raise
        except Exception as error:
            record.failure = error
            if record.status is None:
                await to_response(Failed(INTERNAL))(scope, receive, send)

    def _take_key(self, scope: Scope) -> Unauthorized | None:
        """
        Take the key out of a request's headers, and its name into the record.

        Return why it does not suffice; None = it does, or none is needed.
        """
        headers, keys = scope["headers"], self._server.keys
        scope["headers"] = without_keys(headers)
        if keys is not None and scope["path"] not in self._open_paths:
            try:
                scope[RECORD].key = keys.name_of(headers)
            except Unauthorized as error:
                return error.with_traceback(None)  # its frames hold the headers
        return None


class _FramedExchange:
    """Fills in a request's record as its body is received and its answer is sent."""

    def __init__(self, server: Server, record: RequestRecord, connection: Connection) -> None:
        self._server = server
        self._record = record
        self._connection = connection
        self._is_all_written = False

    def framed(self, receive: Receive, send: Send) -> tuple[Receive, Send]:
        """Return what the application receives and sends with."""
        record = self._record

        async def framed_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                record.request_bytes += len(message.get("body", b""))
            return message

        async def framed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._start(message)
            elif record.method == "HEAD":
                message = {**message, "body": b""}
            await send(message)
            if message["type"] == "http.response.body":
                await self._written(message)

        return framed_receive, framed_send

    def delivery(self) -> Delivery:
        """Return how far the answer got of a request whose caller has left."""
        delivery = self._connection.delivery()
        if self._is_all_written or not delivery.is_whole:
            return delivery
        self._record.status, self._record.code = CLIENT_LEFT, None  # not all of it was written
        return WHOLE

    def _start(self, message: Message) -> None:
        """Add the headers that every answer has."""
        record = self._record
        headers = message["headers"] = list(message["headers"])
        by_name = dict(headers)
        code = by_name.get(CODE_HEADER)
        record.status = message["status"]
        record.code = None if code is None else code.decode()
        headers.append((REQUEST_ID, record.request_id.encode()))
        if TIMING not in by_name:
            headers.append(server_timing({"total": time.monotonic() - record.started}))
        if self._server.lifecycle.phase != "serving":
            headers.append(CLOSE)

    async def _written(self, message: Message) -> None:
        if self._connection.is_lost:
            raise ClientDisconnect
        self._record.answer_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            self._is_all_written = True
            # A request is over once its answer is delivered: one that is not counts as 499.
            await delivered(self._connection)
