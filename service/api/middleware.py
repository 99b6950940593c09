"""What surrounds every request: its id, its record, its counters, its last resort."""

import logging
import time
from collections.abc import Collection
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.api_keys import ApiKeys, without_keys
from service.api.error_handlers import to_response
from service.errors import Failed, Unauthorized
from service.inference.lifecycle import Lifecycle
from service.telemetry.recorder import (
    CLIENT_LEFT,
    CLIENT_STALLED,
    REQUEST_ID,
    TIMING,
    Recorder,
    new_request_id,
    own_request_id,
    timing,
)
from service.telemetry.request_record import RECORD, RequestRecord
from service.transport.exchange import CONNECTION, Connection, delivered
from service.transport.problems import CLOSE, CODE_HEADER, INTERNAL

HEALTH: Final = ("/v2/health/live", "/v2/health/ready")
"""Answered without a key: what asks is an orchestrator, which has none."""
METRICS: Final = "/metrics"
_PROBES: Final = (*HEALTH, METRICS)
_UNMATCHED: Final = "unmatched"
"""The route of a request for which there is none."""


class RequestFrame:
    """
    Gives each request an id and makes sure that it is answered, counted and logged once.

    With `keys`, who shows none of them learns nothing at all but what `open_paths` tell:
    nothing behind the frame sees the call, and its body is not read.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        lifecycle: Lifecycle,
        recorder: Recorder,
        keys: ApiKeys | None,
        open_paths: Collection[str],
    ) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._recorder = recorder
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._lifecycle.begin()
        try:
            await self._serve(scope, receive, send)
        finally:
            self._lifecycle.end()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        request_id = own_request_id(dict(scope["headers"])) or new_request_id()
        record = RequestRecord(scope["method"], _UNMATCHED, request_id, started)
        scope[RECORD] = record
        connection: Connection = scope["extensions"][CONNECTION]
        is_all_written = False

        async def framed_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                record.request_bytes += len(message.get("body", b""))
            return message

        async def framed_send(message: Message) -> None:
            nonlocal is_all_written
            if message["type"] == "http.response.start":
                headers = message["headers"] = list(message["headers"])
                named = dict(headers)
                code = named.get(CODE_HEADER)
                record.status = message["status"]
                record.code = None if code is None else code.decode()
                headers.append((REQUEST_ID, request_id.encode()))
                if TIMING not in named:
                    headers.append(timing({"total": time.monotonic() - started}))
                if self._lifecycle.phase != "serving":
                    headers.append(CLOSE)
            await send(message)
            if message["type"] == "http.response.body":
                if connection.is_lost:
                    raise ClientDisconnect
                record.answer_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    is_all_written = True
                    # Not over before it is sent: else nobody would know of one that is not.
                    await delivered(connection)

        try:
            await self._answer(scope, framed_receive, framed_send, record)
        except ClientDisconnect:
            delivery = connection.delivery()
            if not (is_all_written and delivery.is_whole):
                record.status = CLIENT_LEFT
                record.code = CLIENT_STALLED if delivery.is_stalled else None
                record.answer_bytes = max(0, record.answer_bytes - delivery.unsent_bytes)
        self._record(record, scope)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, record: RequestRecord
    ) -> None:
        """
        Have the request answered; an error that nobody expected is kept and answered 500.

        Raises:
            ClientDisconnect: the caller has left, or was cut off.
        """
        try:
            record.key = self._name_of_key(scope)
            await self._app(scope, receive, send)
        except Unauthorized as error:
            await to_response(error)(scope, receive, send)
        except ClientDisconnect:
            raise
        except Exception as error:
            record.failure = error
            if record.status is None:
                await to_response(Failed(INTERNAL))(scope, receive, send)

    def _name_of_key(self, scope: Scope) -> str | None:
        """
        Return whose key the request shows, None where it needs none; its headers hold none then.

        Raises:
            Unauthorized: it needs one and shows no valid one.
        """
        headers = scope["headers"]
        scope["headers"] = without_keys(headers)
        if self._keys is None or scope["path"] in self._open_paths:
            return None
        return self._keys.name_of(headers)

    def _record(self, record: RequestRecord, scope: Scope) -> None:
        if record.status is None:
            record.status = CLIENT_LEFT
        record.route = getattr(scope.get("route"), "path", _UNMATCHED)
        level = logging.DEBUG if record.route in _PROBES else logging.INFO
        self._recorder.request(record, level=level)
