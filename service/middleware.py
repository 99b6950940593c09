"""What surrounds every request: its id, its one log record, its counters, its last resort."""

import logging
import time
from collections.abc import Collection
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import Failed, Unauthorized
from service.journal import (
    CLIENT_LEFT,
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

        async def framed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message["headers"] = list(message["headers"])
                named = dict(headers)
                seen.status, seen.code = message["status"], named.get(CODE_HEADER)
                headers.append((REQUEST_ID, request_id.encode()))
                if TIMING not in named:
                    headers.append(timing({"total": time.monotonic() - started}))
                if self._life.phase != "serving":
                    headers.append(CLOSE)
            elif message["type"] == "http.response.body":
                seen.bytes += len(message.get("body", b""))
            await send(message)

        try:
            if self._keys is not None and scope["path"] not in self._open_paths:
                seen.key = self._keys.name_of(scope["headers"])
            await self._app(scope, receive, framed_send)
        except Unauthorized as error:
            await to_response(error)(scope, receive, framed_send)
        except ClientDisconnect:
            seen.status, seen.code = CLIENT_LEFT, None
        except Exception:
            logging.getLogger("headwise").exception(
                "a request failed", extra={"fields": {"request_id": request_id}}
            )
            if seen.status is None:
                await to_response(Failed(INTERNAL))(scope, receive, framed_send)
        self._record(scope, seen, request_id, started)

    def _record(self, scope: Scope, seen: "_Seen", request_id: str, started: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        self._journal.request(
            method=scope["method"],
            route=route,
            status=seen.status or CLIENT_LEFT,
            code=None if seen.code is None else seen.code.decode(),
            started=started,
            answer_bytes=seen.bytes,
            request_id=request_id,
            key=seen.key,
            level=logging.DEBUG if route in _PROBES else logging.INFO,
        )


class _Seen:
    """What has been sent so far."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.code: bytes | None = None
        self.bytes = 0
        self.key: str | None = None
        """Whose key it was; never the key."""
