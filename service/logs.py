"""Log records as one line each: JSON for machines, text for a person at a terminal."""

import logging
import sys
from typing import IO, Literal

import orjson

LOGGER = "headwise"
_LOGGER = logging.getLogger(LOGGER)


def configure(
    log_format: Literal["auto", "json", "text"], level: str, stream: IO[str] | None = None
) -> None:
    """
    Send every record of Headwise and uvicorn to `stream` (default: standard error).

    The fields of a record are what its caller passed as `extra={"fields": {...}}`.
    """
    stream = stream or sys.stderr
    as_text = log_format == "text" or (log_format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_TextFormatter() if as_text else _JsonFormatter())
    for name in (LOGGER, "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    # One access record a call is ours; uvicorn's own start and stop chatter is not needed.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def event(message: str, *, level: int = logging.INFO, **fields: object) -> None:
    """Log one record of Headwise."""
    if _LOGGER.isEnabledFor(level):
        _LOGGER.log(level, message, extra={"fields": fields})


class _JsonFormatter(logging.Formatter):
    """One JSON object a line; always `time`, `level`, `message`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


class _TextFormatter(logging.Formatter):
    """`HH:MM:SS message key=value …`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{k}={v}" for k, v in getattr(record, "fields", {}).items())
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.getMessage()} {fields}".rstrip()
        if record.levelno >= logging.WARNING:
            line = f"{line} [{record.levelname.lower()}]"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line
