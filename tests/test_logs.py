"""Log lines: JSON for machines, text for people."""

import io
import logging

import orjson
import pytest

from service.logs import configure, event


@pytest.fixture(autouse=True)
def _restored_loggers() -> object:
    """Leave the process's loggers as they were."""
    names = ("headwise", "uvicorn")
    kept = {n: (logging.getLogger(n).handlers, logging.getLogger(n).propagate) for n in names}
    yield
    for name, (handlers, propagate) in kept.items():
        logging.getLogger(name).handlers = handlers
        logging.getLogger(name).propagate = propagate


def test_logs_json_line_holds_message_and_fields() -> None:
    """One record is one JSON object."""
    stream = io.StringIO()
    configure("json", "info", stream)

    event("request", status=200, route="/x")

    [line] = stream.getvalue().splitlines()
    record = orjson.loads(line)
    assert {"level": "info", "message": "request", "status": 200, "route": "/x"}.items() <= (
        record.items()
    )


def test_logs_auto_is_json_off_a_terminal() -> None:
    """A container's log is for machines."""
    stream = io.StringIO()
    configure("auto", "info", stream)

    event("x")

    assert orjson.loads(stream.getvalue())["message"] == "x"


def test_logs_text_line_is_readable_and_shows_severity() -> None:
    """A person sees what, with which values, and how bad."""
    stream = io.StringIO()
    configure("text", "info", stream)

    event("not ready", level=logging.ERROR, problem="p")

    assert stream.getvalue().strip().endswith("not ready problem=p [error]")


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_logs_exception_comes_with_its_trace(log_format: str) -> None:
    """The operator sees where our own faults come from."""
    stream = io.StringIO()
    configure(log_format, "info", stream)  # type: ignore[arg-type]

    try:
        raise KeyError("inner")
    except KeyError:
        logging.getLogger("headwise").exception("failed")

    assert "KeyError: 'inner'" in stream.getvalue()


def test_logs_below_the_level_are_dropped() -> None:
    """The level is obeyed."""
    stream = io.StringIO()
    configure("json", "warning", stream)

    event("quiet")

    assert not stream.getvalue()
