"""What surrounds every request: its id, its one log record, its counters, its last resort."""

import logging
import re
import time
import uuid
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import Failed
from service.life import Life
from service.logs import event
from service.metrics import Metrics
from service.problems import CODE_HEADER, to_response

CLIENT_LEFT: Final = 499
"""The status that is counted and logged when the caller left before the answer."""

REQUEST_ID: Final = "x-request-id"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_PROBES = ("/v2/health/live", "/v2/health/ready", "/metrics")


class RequestFrame:
    """Gives each request an id and makes sure that it is answered, counted and logged once."""

    def __init__(self, app: ASGIApp, *, life: Life, metrics: Metrics) -> None:
        self._app = app
        self._life = life
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._life.request():
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        request_id = _request_id(Headers(scope=scope))
        seen = _Seen()

        async def framed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                seen.status, seen.code = message["status"], headers.get(CODE_HEADER)
                headers[REQUEST_ID] = request_id
                headers.setdefault("server-timing", f"total;dur={_ms_since(started)}")
                if self._life.phase != "serving":
                    headers["connection"] = "close"
            elif message["type"] == "http.response.body":
                seen.bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, framed_send)
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
        self._metrics.requests.labels(route, str(status)).inc()
        if seen.code is not None:
            self._metrics.refusals.labels(seen.code).inc()
        event(
            "request",
            level=logging.DEBUG if route in _PROBES else logging.INFO,
            method=scope["method"],
            route=route,
            status=status,
            code=seen.code,
            ms=_ms_since(started),
            answer_bytes=seen.bytes,
            request_id=request_id,
        )


class _Seen:
    """What has been sent so far."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.code: str | None = None
        self.bytes = 0


def _ms_since(started: float) -> float:
    return round((time.monotonic() - started) * 1e3, 3)


def _request_id(headers: Headers) -> str:
    """Return the caller's own id, else the trace id of its `traceparent`, else a new one."""
    own = headers.get(REQUEST_ID, "")
    if _REQUEST_ID.fullmatch(own):
        return own
    trace = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return trace[1] if trace else uuid.uuid4().hex
