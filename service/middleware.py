"""What surrounds every request: its id, its one log record, its counters, its last resort."""

import logging
import random
import re
import time
from collections.abc import Collection, Mapping
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import Failed, Unauthorized
from service.keys import Keys
from service.life import Life
from service.logs import event
from service.metrics import Metrics
from service.problems import CODE_HEADER, to_response

CLIENT_LEFT: Final = 499
"""The status that is counted and logged when the caller left before the answer."""

_REQUEST_ID: Final = b"x-request-id"
_TIMING: Final = b"server-timing"
_VALID_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")

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
        metrics: Metrics,
        keys: Keys | None,
        open_paths: Collection[str],
    ) -> None:
        self._app = app
        self._life = life
        self._metrics = metrics
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._life.request():
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        request_id = _request_id(dict(scope["headers"]))
        seen = _Seen()

        async def framed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message["headers"] = list(message["headers"])
                named = dict(headers)
                seen.status, seen.code = message["status"], named.get(CODE_HEADER)
                headers.append((_REQUEST_ID, request_id.encode()))
                if _TIMING not in named:
                    headers.append((_TIMING, b"total;dur=%.3f" % _ms_since(started)))
                if self._life.phase != "serving":
                    headers.append((b"connection", b"close"))
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
                await to_response(Failed("internal error; the log has it under the request id"))(
                    scope, receive, framed_send
                )
        self._record(scope, seen, request_id, started)

    def _record(self, scope: Scope, seen: "_Seen", request_id: str, started: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        status = seen.status or CLIENT_LEFT
        self._metrics.requests[route, str(status)] += 1
        code = seen.code and seen.code.decode()
        if code:
            self._metrics.refusals[code] += 1
        event(
            "request",
            level=logging.DEBUG if route in _PROBES else logging.INFO,
            method=scope["method"],
            route=route,
            status=status,
            code=code,
            ms=_ms_since(started),
            answer_bytes=seen.bytes,
            request_id=request_id,
            **({} if self._keys is None else {"key": seen.key}),
        )


class _Seen:
    """What has been sent so far."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.code: bytes | None = None
        self.bytes = 0
        self.key: str | None = None
        """Whose key it was; never the key."""


def _ms_since(started: float) -> float:
    return round((time.monotonic() - started) * 1e3, 3)


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    """Return the caller's own id, else the trace id of its `traceparent`, else a new one."""
    own = headers.get(_REQUEST_ID)
    if own is not None and _VALID_ID.fullmatch(own):
        return own.decode()
    trace = _TRACEPARENT.fullmatch(headers.get(b"traceparent", b""))
    # Not a secret, and so not worth asking the system for randomness.
    return trace[1].decode() if trace else f"{random.getrandbits(128):032x}"
