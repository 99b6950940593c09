"""Log lines: JSON for machines, text for people."""

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.logs import configure, event, json_line

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
"""RFC 3339, UTC, milliseconds."""

Read = Callable[[], str]


@pytest.fixture(autouse=True)
def _restored_loggers() -> Iterator[None]:
    """Leave the process's loggers as they were."""
    loggers = [logging.getLogger(name) for name in ("headwise", "uvicorn", None)]
    kept = [(one, one.handlers, one.propagate, one.level) for one in loggers]
    yield
    for logger, handlers, propagate, level in kept:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[io.TextIOWrapper]:
    """Return a file to log to."""
    with (tmp_path / "log").open("w") as file:
        yield file


def configured(
    stream: io.TextIOWrapper,
    log_format: Literal["auto", "json", "text"],
    level: str = "info",
) -> Read:
    """Send the log there; return what reads all that was logged."""
    log = configure(log_format, level, stream)

    def read() -> str:
        log.writer.close(60)
        return Path(stream.name).read_text()

    return read


def test_logs_json_line_holds_message_and_fields(stream: io.TextIOWrapper) -> None:
    """One record is one JSON object."""
    read = configured(stream, "json")

    event("request", status=200, route="/x")

    [line] = read().splitlines()
    record = orjson.loads(line)
    assert {"level": "info", "message": "request", "status": 200, "route": "/x"}.items() <= (
        record.items()
    )


@pytest.mark.fault("E6")
@pytest.mark.parametrize("log_format", ["json", "text"])
def test_logs_time_is_utc_with_milliseconds(
    stream: io.TextIOWrapper, log_format: Literal["json", "text"]
) -> None:
    """The time of day is the same for every reader, in either form."""
    read = configured(stream, log_format)
    record = logging.getLogger("headwise").makeRecord("", logging.INFO, "", 0, "x", (), None)
    record.created = 1796095442.1239

    logging.getLogger("headwise").handle(record)
    event("now")

    first, second = read().splitlines()
    assert "2026-12-01T03:24:02.123Z" in first
    assert re.search(TIME, second)


def test_logs_auto_is_json_off_a_terminal(stream: io.TextIOWrapper) -> None:
    """A container's log is for machines."""
    read = configured(stream, "auto")

    event("x")

    assert orjson.loads(read())["message"] == "x"


def test_logs_text_line_is_readable_and_shows_severity(stream: io.TextIOWrapper) -> None:
    """A person sees what, with which values, and how bad."""
    read = configured(stream, "text")

    event("not ready", level=logging.ERROR, problem="p")

    assert read().strip().endswith("not ready problem=p [error]")


def test_logs_text_line_is_one_line_whatever_its_values(stream: io.TextIOWrapper) -> None:
    """No value begins a line of its own, and none commands the terminal."""
    read = configured(stream, "text")

    event("x", problem="a\nb\x1b[2Jc")

    assert read().count("\n") == 1
    assert r"a\nb\x1b[2Jc" in read()


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_logs_exception_comes_with_its_trace(
    stream: io.TextIOWrapper, log_format: Literal["json", "text"]
) -> None:
    """The operator sees where our own faults come from."""
    read = configured(stream, log_format)

    try:
        raise KeyError("inner")
    except KeyError:
        logging.getLogger("headwise").exception("failed")

    assert "KeyError: 'inner'" in read()


def test_logs_below_the_level_are_dropped(stream: io.TextIOWrapper) -> None:
    """The level is obeyed."""
    read = configured(stream, "json", "warning")

    event("quiet")

    assert not read()


def test_logs_of_other_packages_are_lines_of_the_same_form(stream: io.TextIOWrapper) -> None:
    """A warning of a library stands in its place among the others; its chatter is left out."""
    read = configured(stream, "json")

    event("before")
    logging.getLogger("asyncio").warning("slow")
    logging.getLogger("asyncio").info("chatter")
    logging.getLogger("uvicorn.error").error("broken")

    lines = [orjson.loads(line) for line in read().splitlines()]
    found = [(line["level"], line["message"]) for line in lines]
    assert found == [("info", "before"), ("warning", "slow"), ("error", "broken")]


@given(
    st.dictionaries(
        st.text(),
        st.one_of(st.text(st.characters()), st.integers(), st.booleans(), st.none(), st.binary()),
    )
)
def test_logs_any_values_make_one_line_of_json(fields: dict[str, object]) -> None:
    """Also a file name that is no UTF-8, and a number beyond 64 bits."""
    line = json_line(fields)

    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    expected = {k: str(v) if isinstance(v, bytes) else v for k, v in fields.items()}
    assert json.loads(line) == expected


def test_logs_lone_surrogate_stays_readable() -> None:
    """As Python has it of a file name that is no UTF-8."""
    assert json.loads(json_line({"problem": "a\udcff"})) == {"problem": "a\udcff"}
