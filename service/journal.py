"""What is kept of every request: its counters, its one log record, its span."""

import logging
import random
import re
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from service.calls import Answer
from service.logs import event
from service.metrics import Metrics
from service.statistics import ModelStatistics
from service.tracing import Tracing

CLIENT_LEFT: Final = 499
"""The status that is counted and logged when the caller left before the answer."""

CLIENT_STALLED: Final = "client_stalled"
"""The code beside it when the caller did not read its answer, and was cut off."""

INTERNAL: Final = "internal error; the log has it under the request id"
"""What a caller is told when something went wrong that nobody thought of."""

REQUEST_ID: Final = b"x-request-id"
TIMING: Final = b"server-timing"

_VALID_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class Journal:
    """Where requests are written down, whichever way they were answered."""

    def __init__(self, metrics: Metrics, tracing: Tracing, *, names_keys: bool) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._names_keys = names_keys

    def request(
        self,
        *,
        method: str,
        route: str,
        status: int,
        code: str | None,
        started: float,
        answer_bytes: int,
        request_id: str,
        key: str | None,
        level: int = logging.INFO,
    ) -> None:
        """A request is over: its status, the code of its error, and whose key it showed."""
        self._metrics.requests[route, str(status)] += 1
        if code:
            self._metrics.refusals[code] += 1
        event(
            "request",
            level=level,
            method=method,
            route=route,
            status=status,
            code=code,
            ms=ms_since(started),
            answer_bytes=answer_bytes,
            request_id=request_id,
            **({"key": key} if self._names_keys else {}),
        )

    def call(
        self,
        model: str,
        answer: Answer,
        stages: Mapping[str, float],
        headers: Mapping[str, str],
        counted: ModelStatistics | None,
    ) -> None:
        """A call with tensors was answered; its stages in seconds, `total` among them."""
        if counted is not None:
            counted.answered(len(answer.output), answer.stages, stages["total"])
        self._tracing.call(model, stages, headers)
        self._metrics.of_model(model).call(stages)


def stages_of(answer: Answer) -> dict[str, float]:
    """Return the stages of a call that is not encoded yet, in seconds."""
    stages = answer.stages
    return {
        "queue": stages.queue_s,
        "assembly": stages.assembly_s,
        "compute": stages.compute_s,
    }


def timing(stages: Mapping[str, float]) -> tuple[bytes, bytes]:
    """Return the header that tells the stages (https://www.w3.org/TR/server-timing)."""
    template = _timing_template(tuple(stages))
    return TIMING, template % tuple([seconds * 1e3 for seconds in stages.values()])


@lru_cache
def _timing_template(stages: tuple[str, ...]) -> bytes:
    return ", ".join(f"{stage};dur=%.3f" for stage in stages).encode()


def own_request_id(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the caller's own id, else the trace id of its `traceparent`, else None."""
    own = headers.get(REQUEST_ID)
    if own is not None and _VALID_ID.fullmatch(own):
        return own.decode()
    trace = _TRACEPARENT.fullmatch(headers.get(b"traceparent", b""))
    return trace[1].decode() if trace else None


def new_request_id() -> str:
    """Return an id of 32 digits: no secret, and so not worth asking the system for randomness."""
    return f"{random.getrandbits(128):032x}"


def ms_since(started: float) -> float:
    """Return the time since then on the monotonic clock, in ms."""
    return round((time.monotonic() - started) * 1e3, 3)
