"""Errors on the wire: every kind has a status, a stable code and a message."""

import asyncio

import orjson
import pytest
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request

from service import errors
from service.api.error_handlers import (
    answer_http_exception,
    answer_problem,
    answer_validation_error,
    to_response,
)
from service.errors import HeadwiseError, InvalidInput, NotNow, QueueFull, TooLarge
from service.transport.problems import STATUSES, status_of


def kinds() -> list[type[HeadwiseError]]:
    """Return every error class that a caller can meet: the others end the start."""
    every = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    ours = [kind for kind in every if issubclass(kind, HeadwiseError)]
    return [kind for kind in ours if not issubclass(kind, errors.StartRefused)]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_error_class_has_a_status_code_and_sentence(kind: type[HeadwiseError]) -> None:
    """None is forgotten, on the wire or in the tree at the top of the file."""
    assert kind in STATUSES
    assert kind.code
    assert (kind.__doc__ or "").count(".") == 1 or ";" in (kind.__doc__ or "")
    assert kind.__name__ in (errors.__doc__ or "")


def test_status_of_a_subclass_is_that_of_its_narrowest_known_class() -> None:
    """A new kind of wrong input is a 400 without being listed."""

    class VeryWrong(InvalidInput):
        """A kind nobody listed."""

    assert status_of(VeryWrong()) == 400


def test_to_response_carries_message_code_and_when_to_retry() -> None:
    """Program and person both learn what they need."""
    response = to_response(QueueFull("queue: 3 calls wait", retry_after_s=2))

    assert response.status_code == 429
    assert orjson.loads(bytes(response.body)) == {
        "error": "queue: 3 calls wait",
        "code": "queue_full",
    }
    assert response.headers["retry-after"] == "2"


def test_to_response_without_a_time_has_no_retry_header() -> None:
    """No number is made up."""
    assert "retry-after" not in to_response(NotNow("later")).headers


def test_to_response_of_half_read_bodies_closes_the_connection() -> None:
    """The rest of the body must not be taken for the next request."""
    assert to_response(TooLarge("x")).headers["connection"] == "close"


def test_to_response_never_breaks_on_its_own_message() -> None:
    """A lone surrogate from a caller's JSON has no UTF-8 form."""
    response = to_response(InvalidInput("key \ud800"))

    assert orjson.loads(bytes(response.body))["error"] == "key ?"


def test_validation_error_of_the_framework_names_the_field_and_repeats_no_body() -> None:
    """FastAPI's own answer echoes the whole input, and fails on NaN."""
    error = RequestValidationError(
        [{"loc": ("query", "x"), "msg": "wrong", "type": "t", "input": float("nan")}]
    )

    response = asyncio.run(answer_validation_error(Request({"type": "http"}), error))

    assert response.status_code == 400
    assert orjson.loads(bytes(response.body))["error"] == "query.x: wrong"


def test_handlers_pass_on_what_is_not_theirs() -> None:
    """A handler never hides another kind of error."""
    for handler in (answer_problem, answer_http_exception, answer_validation_error):
        with pytest.raises(KeyError):
            asyncio.run(handler(Request({"type": "http"}), KeyError()))
