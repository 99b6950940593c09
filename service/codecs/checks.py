"""Checks that every reader of a body shares, and the words of their refusals."""

import difflib
from collections.abc import Iterable
from typing import Final

from service.errors import InvalidInput

_SHOWN: Final = 2**53
"""Numbers up to here are shown as they came."""


def check_known(
    found: Iterable[str], known: Iterable[str], where: str, suggested: Iterable[str] | None = None
) -> None:
    """
    Return when every key is known; `suggested` are those that a similar one may stand for.

    Raises:
        InvalidInput: names the first unknown key and the nearest known one.
    """
    found, known = tuple(found), tuple(known)
    if all(map(known.__contains__, found)):
        return
    unknown = next(key for key in found if key not in known)[:64]
    candidates = list(known if suggested is None else suggested)[:32]
    near = difflib.get_close_matches(unknown, candidates, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}? " if near else ""
    names = ", ".join(known[:32])
    raise InvalidInput(f"{where}: unknown key {unknown!r}; {hint}expected {names}")


def shown(value: object) -> str:
    """Show a small number as it came, and the type of all else: bodies are not repeated."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return kind_of(value)
    if value != value:
        return "NaN"
    return repr(value) if abs(value) < _SHOWN else "a larger number"


def kind_of(value: object) -> str:
    """Name a JSON value's type the way JSON does."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"
