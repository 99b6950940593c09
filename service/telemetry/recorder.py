"""What is kept of every request: its counters, its access-log line, its span."""

import logging
import random
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from service.inference.calls import Answer
from service.logs import LOGGER
from service.telemetry.access_log import AccessLog
from service.telemetry.metrics import Metrics
from service.telemetry.request_record import RequestRecord
from service.telemetry.statistics import ModelStatistics
from service.telemetry.tracing import Tracing

CLIENT_LEFT: Final = 499
"""The status that is counted and logged when the caller left before the answer."""

CLIENT_STALLED: Final = "client_stalled"
"""The code beside it when the caller did not read its answer, and was cut off."""

REQUEST_ID: Final = b"x-request-id"
TIMING: Final = b"server-timing"

_VALID_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class Recorder:
    """Where requests are written down, whichever way they were answered."""

    def __init__(self, metrics: Metrics, tracing: Tracing, access_log: AccessLog) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._access_log = access_log

    def request(self, record: RequestRecord, *, level: int = logging.INFO) -> None:
        """
        A request is over: it is counted, and has its line in the log.

        One that failed on our side, answered 500 or broken off, has an error line before.
        """
        self._metrics.requests[record.route, str(record.status)] += 1
        if record.code:
            self._metrics.refusals[record.code] += 1
        if record.failure is not None or record.status == 500:
            self.failure(record)
        self._access_log.write(record, level)

    def failure(self, record: RequestRecord) -> None:
        """Log what went wrong on our side, with the first cause and where it was raised."""
        cause: BaseException | None = record.failure
        while cause is not None and cause.__cause__ is not None:
            cause = cause.__cause__
        fields = {
            "request_id": record.request_id,
            "route": record.route,
            "model": record.model,
            "version": record.version,
            "cause": "unknown" if cause is None else f"{type(cause).__name__}: {cause}",
        }
        logging.getLogger(LOGGER).error(
            "a request failed", exc_info=record.failure, extra={"fields": fields}
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
