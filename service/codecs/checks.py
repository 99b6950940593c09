"""Checks that every reader of a body shares, and the words of their refusals."""

import difflib
from collections.abc import Iterable

from service.errors import InvalidInput


def check_known(found: Iterable[str], known: Iterable[str], where: str) -> None:
    """
    Return when every key is known.

    Raises:
        InvalidInput: names the first unknown key and the nearest known one.
    """
    found, known = tuple(found), tuple(known)
    if all(map(known.__contains__, found)):
        return
    unknown = next(key for key in found if key not in known)
    if unknown == "attention_mask":
        # Elsewhere the padding mask, elsewhere again the ASGI path: never guess.
        raise InvalidInput(
            f"{where}: attention_mask: say attend_mask [B, T] (padding, true = takes part)"
            " or pair_mask [B or 1, H or 1, S, T] (true = this query may attend to this key)"
        )
    unknown = unknown[:64]
    near = difflib.get_close_matches(unknown, known[:32], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else f"; expected {', '.join(known)}"
    raise InvalidInput(f"{where}: unknown key {unknown!r}{hint}")


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
