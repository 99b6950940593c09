"""
Log records as one line each: JSON for machines, text for a person at a terminal.

Every line of the process goes through one writer (see `log_writer`): those of `logging`,
here, and those of the access log.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Literal

import orjson

from service.log_writer import LogWriter

LOGGER = "headwise"
_LOGGER = logging.getLogger(LOGGER)


@dataclass(frozen=True)
class Log:
    """Where all lines go, and in which of the two forms."""

    writer: LogWriter
    is_text: bool


def configure(
    log_format: Literal["auto", "json", "text"], level: str, stream: IO[str] | None = None
) -> Log:
    """
    Send every record of `logging` to the file of `stream` (default: standard error).

    Headwise's own are those of `level` or above; of all others, warnings and errors.
    The fields of a record are what its caller passed as `extra={"fields": {...}}`.
    A standard error that is closed loses them.
    """
    descriptor = _descriptor(stream or sys.stderr)
    is_text = log_format == "text" or (log_format == "auto" and os.isatty(descriptor))
    formatter = _TextFormatter() if is_text else _JsonFormatter()

    def notice(lines: int) -> bytes:
        extra = {"fields": {"lines": lines}}
        record = _LOGGER.makeRecord(
            LOGGER, logging.WARNING, "", 0, "log lines lost", (), None, extra=extra
        )
        return _text_line(formatter.format(record))

    writer = LogWriter(descriptor, notice=notice)
    handler = _Handler(writer)
    handler.setFormatter(formatter)
    threshold = logging.getLevelNamesMapping()[level.upper()]
    for name in (LOGGER, "uvicorn", None):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        # One access line a call is ours; what others say of start and stop is not needed.
        logger.setLevel(threshold if name == LOGGER else max(threshold, logging.WARNING))
    return Log(writer, is_text)


def event(message: str, *, level: int = logging.INFO, **fields: object) -> None:
    """Log one record of Headwise."""
    if _LOGGER.isEnabledFor(level):
        _LOGGER.log(level, message, extra={"fields": fields})


def now() -> str:
    """Return the time of day as every line has it: RFC 3339, UTC, milliseconds."""
    return _rfc3339(time.time_ns() // 1_000_000)


def json_line(fields: Mapping[str, object]) -> bytes:
    """Return one line that holds one JSON object, whatever the values."""
    try:
        # Adding copies: what orjson returns lies in a block of 1 KiB, three times the line.
        return orjson.dumps(fields, default=str) + b"\n"
    except TypeError:
        # A lone surrogate, as in a file name that is not UTF-8, or a number beyond 64 bits.
        return json.dumps(fields, default=str).encode() + b"\n"


# Many requests end in one millisecond, and all of the others in one second.
@lru_cache(maxsize=16)
def _rfc3339(milliseconds: int) -> str:
    return f"{_second(milliseconds // 1000)}.{milliseconds % 1000:03d}Z"


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def one_line(text: str) -> str:
    """Return the text, escaped where a terminal would not show it as it is."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _text_line(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _descriptor(stream: IO[str] | None) -> int:
    """Return the stream's file; where the process was started without one, /dev/null."""
    return os.open(os.devnull, os.O_WRONLY) if stream is None else stream.fileno()


class _Handler(logging.Handler):
    """Hands each record to the writer, to be written at once."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.write(_text_line(self.format(record)), at_once=True)
        except Exception:
            self.handleError(record)


class _JsonFormatter(logging.Formatter):
    """One JSON object a line; always `time`, `level`, `message`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _rfc3339(int(record.created * 1000)),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json_line(line).decode().rstrip("\n")


class _TextFormatter(logging.Formatter):
    """`TIME message key=value …`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{k}={v}" for k, v in getattr(record, "fields", {}).items())
        time_of_day = _rfc3339(int(record.created * 1000))
        line = one_line(f"{time_of_day} {record.getMessage()} {fields}".rstrip())
        if record.levelno >= logging.WARNING:
            line = f"{line} [{record.levelname.lower()}]"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line
