"""
One line for each request that is over.

It is formatted here and not by `logging`, whose record and formatter would take several
times as long; order and level are those of every other line of the log (see `logs`).
"""

import logging
import time
from typing import Final

from service.logs import LOGGER, Log, json_line, now, one_line
from service.telemetry.request_record import RequestRecord

_LOGGER = logging.getLogger(LOGGER)
_LEVELS: Final = {logging.DEBUG: "debug", logging.INFO: "info"}


class AccessLog:
    """
    Writes the line of each request, as JSON or as text, as the rest of the log.

    With `names_keys` a line has the name of the key that the caller showed.
    """

    def __init__(self, log: Log, *, names_keys: bool) -> None:
        self._write = log.writer.write
        self._format = _text if log.is_text else _json
        self._names_keys = names_keys

    def write(self, record: RequestRecord, level: int = logging.INFO) -> None:
        """Log a request that is over, if the log's level is this one or below."""
        if _LOGGER.isEnabledFor(level):
            self._write(self._format(record, _LEVELS[level], names_key=self._names_keys))


def _json(record: RequestRecord, level: str, *, names_key: bool) -> bytes:
    """Return one JSON object; what a request does not have, such as a model, is null."""
    line = {
        "time": now(),
        "level": level,
        "message": "request",
        "method": record.method,
        "route": record.route,
        "model": record.model,
        "version": record.version,
        "rows": record.rows,
        "tokens": record.tokens,
        "status": record.status,
        "code": record.code,
        "ms": _ms_since(record.started),
        "request_bytes": record.request_bytes,
        "answer_bytes": record.answer_bytes,
        "request_id": record.request_id,
    }
    if names_key:
        line["key"] = record.key
    return json_line(line)


def _text(record: RequestRecord, level: str, *, names_key: bool) -> bytes:
    """Return the same in columns, the longest last; what a request does not have is a dash."""
    model = "-" if record.model is None else f"{record.model}/{record.version}"
    columns = [
        f"{now()} request {_dash(record.method):<4} {record.status}",
        f"{_ms_since(record.started):>9.3f} ms",
        f"{model:<12}",
        f"{_dash(record.rows):>4} rows {_dash(record.tokens):>6} tokens",
        f"{record.request_bytes:>8} B in {record.answer_bytes:>9} B out ",
        f"{record.request_id:<32}",
        *([f"{_dash(record.key):<12}"] if names_key else []),
        record.route,
        *([record.code] if record.code else []),
        *([f"[{level}]"] if level == "debug" else []),
    ]
    return one_line(" ".join(columns)).encode() + b"\n"


def _dash(value: object) -> str:
    return "-" if value is None else str(value)


def _ms_since(started: float) -> float:
    """Return the time since then on the monotonic clock, in whole microseconds, as ms."""
    return int((time.monotonic() - started) * 1e6) / 1e3
