"""
A request's record, from its beginning to its one end.

Whatever answers a request (the ASGI application, the fast path, the connection itself) calls
`begin` and `end` once each: it is in flight in between, and counted and logged at its end.
"""

import logging
import time
from collections.abc import Collection
from typing import Final

from service.api import documentation
from service.api.server import Server
from service.telemetry.request_record import CLIENT_LEFT, CLIENT_STALLED, UNMATCHED, RequestRecord
from service.transport.coalescing import WHOLE, Delivery
from service.transport.standard_headers import new_request_id

HEALTH: Final = ("/v2/health/live", "/v2/health/ready")
"""Answered without a key: orchestrators, which call these, have none."""
METRICS: Final = "/metrics"
PROBES: Final = frozenset((*HEALTH, METRICS))
"""The routes of requests that are logged at `debug` only."""


def open_paths(server: Server) -> Collection[str]:
    """Return the paths that need no key: probes, and the description of the interface."""
    probes = HEALTH if server.settings.metrics_need_key else PROBES
    return {*probes, *documentation.PATHS}


def begin(server: Server) -> None:
    """Count a request as in flight; `end` must follow, once."""
    server.lifecycle.begin()


def end(server: Server, record: RequestRecord, delivery: Delivery = WHOLE) -> bool:
    """
    Count and log a request that is over; return whether all of its answer was sent.

    `record` has the status, the code and the bytes of the answer as it was written.  Where
    not all of that was sent, the request ends as one whose caller has left.
    """
    if not delivery.is_whole:
        record.status = CLIENT_LEFT
        record.code = CLIENT_STALLED if delivery.is_stalled else None
        record.answer_bytes = max(0, record.answer_bytes - delivery.unsent_bytes)
    elif record.status is None:
        record.status = CLIENT_LEFT
    server.lifecycle.end()
    level = logging.DEBUG if record.route in PROBES else logging.INFO
    server.recorder.request(record, level=level)
    return delivery.is_whole


def head_refused(server: Server, status: int, code: str, answer_bytes: int) -> None:
    """Count and log a request whose head was refused; the application never sees it."""
    record = RequestRecord(
        None,
        UNMATCHED,
        new_request_id(),
        time.monotonic(),
        status=status,
        code=code,
        answer_bytes=answer_bytes,
    )
    begin(server)
    end(server, record)
