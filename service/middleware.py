"""What surrounds every request: its id, its one log record, its counters, its last resort."""

import logging
import time
from collections.abc import Collection
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import Failed, Unauthorized
from service.exchange import CONNECTION, Connection, delivered
from service.journal import (
    CLIENT_LEFT,
    CLIENT_STALLED,
    INTERNAL,
    REQUEST_ID,
    TIMING,
    Journal,
    new_request_id,
    own_request_id,
    timing,
)
from service.keys import Keys
from service.life import Life
from service.problems import CLOSE, CODE_HEADER, to_response

HEALTH: Final = ("/v2/health/live", "/v2/health/ready")
"""Answered without a key: what asks is an orchestrator, which has none."""
METRICS: Final = "/metrics"
_PROBES: Final = (*HEALTH, METRICS)


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
        life: Life,
        journal: Journal,
        keys: Keys | None,
        open_paths: Collection[str],
    ) -> None:
        self._app = app
        self._life = life
        self._journal = journal
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._life.begin()
        try:
            await self._serve(scope, receive, send)
        finally:
            self._life.end()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        request_id = own_request_id(dict(scope["headers"])) or new_request_id()
        seen = _Seen()
        connection: Connection = scope["extensions"][CONNECTION]

        async def framed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message["headers"] = list(message["headers"])
                named = dict(headers)
                seen.status = message["status"]
                if code := named.get(CODE_HEADER):
                    seen.code = code.decode()
                headers.append((REQUEST_ID, request_id.encode()))
                if TIMING not in named:
                    headers.append(timing({"total": time.monotonic() - started}))
                if self._life.phase != "serving":
                    headers.append(CLOSE)
            await send(message)
            if message["type"] == "http.response.body":
                if connection.is_lost:
                    raise ClientDisconnect
                seen.bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    seen.is_all_written = True
                    # Not over before it is sent: else nobody would know of one that is not.
                    await delivered(connection)

        try:
            await self._answer(scope, receive, framed_send, seen, request_id)
        except ClientDisconnect:
            delivery = connection.delivery()
            if not (seen.is_all_written and delivery.is_whole):
                seen.status = CLIENT_LEFT
                seen.code = CLIENT_STALLED if delivery.is_stalled else None
                seen.bytes = max(0, seen.bytes - delivery.unsent_bytes)
        self._record(scope, seen, request_id, started)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, seen: "_Seen", request_id: str
    ) -> None:
        """
        Have the request answered; an error that nobody thought of is logged and answered 500.

        Raises:
            ClientDisconnect: the caller has left, or was cut off.
        """
        try:
            if self._keys is not None and scope["path"] not in self._open_paths:
                seen.key = self._keys.name_of(scope["headers"])
            await self._app(scope, receive, send)
        except Unauthorized as error:
            await to_response(error)(scope, receive, send)
        except ClientDisconnect:
            raise
        except Exception:
            logging.getLogger("headwise").exception(
                "a request failed", extra={"fields": {"request_id": request_id}}
            )
            if seen.status is None:
                await to_response(Failed(INTERNAL))(scope, receive, send)

    def _record(self, scope: Scope, seen: "_Seen", request_id: str, started: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        self._journal.request(
            method=scope["method"],
            route=route,
            status=seen.status or CLIENT_LEFT,
            code=seen.code,
            started=started,
            answer_bytes=seen.bytes,
            request_id=request_id,
            key=seen.key,
            level=logging.DEBUG if route in _PROBES else logging.INFO,
        )


class _Seen:
    """What has been written so far."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.code: str | None = None
        self.bytes = 0
        self.is_all_written = False
        self.key: str | None = None
        """Whose key it was; never the key."""
