"""What is kept of every request: its counters, its access-log line, its span."""

import logging
from collections.abc import Mapping

from service.inference.calls import Answer
from service.logs import LOGGER
from service.telemetry.access_log import AccessLog
from service.telemetry.metrics import Metrics
from service.telemetry.request_record import RequestRecord
from service.telemetry.statistics import ModelStatistics
from service.telemetry.tracing import Tracing


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
            self._metrics.refusals[record.code, record.model or ""] += 1
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
        statistics: ModelStatistics | None,
    ) -> None:
        """A call with tensors was answered; its stages in seconds, `total` among them."""
        if statistics is not None:
            statistics.answered(len(answer.output), answer.stages, stages["total"])
        self._tracing.call(model, stages, headers)
        self._metrics.of_model(model).call(stages)

    def close(self) -> None:
        """Send the spans that have not been sent."""
        self._tracing.close()
