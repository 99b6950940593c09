"""
The options of a call, wherever they stand.

In a JSON body they are typed; in a query string and in the metadata of a safetensors body
they are texts, of the same names and meanings.  What is said in two places must be the same;
only the header's time limit is a default that the others override.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Final

from service.codecs.checks import check_known, kind_of, shown
from service.codecs.names import HEADS, OPTIONS, check_names
from service.contract import MAX_VERSION, is_valid_version
from service.errors import InvalidInput
from service.inference.calls import Options

TEXT_NAMES: Final = (*OPTIONS, HEADS)
"""Those in a query and in metadata, where `heads=0,3` is also written `weights=0,3`."""

TIMEOUT_HEADER: Final = "x-request-timeout-s"
MAX_TIMEOUT_S: Final = 3600.0
MAX_PRIORITY: Final = 2**31 - 1
_VERSION: Final = f"expected a whole number from 1 to {MAX_VERSION}"

_TIMEOUT_FIELD: Final = "header X-Request-Timeout-S"

_DIGITS: Final = 10
"""Fewer digits than that number a head."""


def from_texts(pairs: Iterable[tuple[str, str]], where: str) -> dict[str, object]:
    """
    Return options that came as texts, typed as in JSON; `where` names the place: `query`.

    Raises:
        InvalidInput: an unknown or repeated key, a value of the wrong type, or heads beside
            weights that are not asked for.
    """
    pairs = list(pairs)
    check_names((key for key, _ in pairs), TEXT_NAMES, where)
    options: dict[str, object] = {}
    for key, text in pairs:
        if key in options:
            raise InvalidInput(f"{where}: {key}: expected once, got it twice")
        place = f"{where}: {key}"
        match key:
            case "model":
                options[key] = text
            case "version":
                if not is_valid_version(text):
                    raise InvalidInput(f"{place}: {_VERSION}, got {text[:64]!r}")
                options[key] = int(text)
            case "causal":
                options[key] = _boolean(place, text)
            case "weights":
                options[key] = _text_weights(place, text)
            case "heads":
                options[key] = {HEADS: list(heads_of_text(place, text))}
            case _:
                options[key] = _number(place, text)
    heads = options.pop(HEADS, None)
    if heads is not None and options.get("weights", True) not in (True, heads):
        raise InvalidInput(
            f"{where}: heads: expected weights=true or the same heads beside it, got others"
        )
    return options if heads is None else options | {"weights": heads}


def header_timeout(headers: Mapping[str, str]) -> float | None:
    """
    Return the time limit that a request's header gives, which any other one overrides.

    Raises:
        InvalidInput: not a number, or out of bounds.
    """
    if TIMEOUT_HEADER not in headers:
        return None
    return _timeout(_number(_TIMEOUT_FIELD, headers[TIMEOUT_HEADER]), _TIMEOUT_FIELD)


def combined(
    outer: Mapping[str, object], inner: Mapping[str, object], places: str
) -> dict[str, object]:
    """
    Return the options of two places; the header's time limit gives way: see `header_timeout`.

    Raises:
        InvalidInput: they contradict each other; `places` names both.
    """
    for key, value in inner.items():
        if outer.get(key, value) != value:
            found = " and ".join(json.dumps(one)[:64] for one in (value, outer[key]))
            raise InvalidInput(f"{key}: expected the same in {places}, got {found}")
    return {**outer, **inner}


def checked(raw: Mapping[str, object], timeout_s: float | None = None) -> Options:
    """
    Return the options of a mapping that holds no other keys; `timeout_s` = where it has none.

    Raises:
        InvalidInput: a value of the wrong type or out of bounds.
    """
    model = raw.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidInput(f"model: expected a string, got {kind_of(model)}")
    own_timeout_s = raw.get("timeout_s")
    weights, heads = _weights(raw.get("weights", False))
    return Options(
        model=model,
        version=_version(raw.get("version")),
        weights=weights,
        heads=heads,
        causal=_flag("causal", causal) if (causal := raw.get("causal")) is not None else None,
        timeout_s=timeout_s if own_timeout_s is None else _timeout(own_timeout_s, "timeout_s"),
        priority=_priority(raw.get("priority", 0)),
    )


def _version(value: object) -> str | None:
    """Return a version as the protocol names it."""
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= MAX_VERSION:
        got = str(value) if type(value) is int and abs(value) < 10**12 else kind_of(value)
        raise InvalidInput(f"version: {_VERSION}, got {got}")
    return str(value)


def checked_heads(value: object, where: str) -> tuple[int, ...]:
    """
    Return the heads of an array of numbers; whether the layer has them is checked later.

    Raises:
        InvalidInput: not an array of whole numbers, or none of them.
    """
    if not isinstance(value, list):
        raise InvalidInput(f"{where}: expected an array of heads, got {kind_of(value)}")
    if not value:
        raise InvalidInput(f"{where}: expected at least one head, got none")
    for i, head in enumerate(value):
        if type(head) is not int:
            raise InvalidInput(f"{where}[{i}]: expected heads by number, from 0, got {shown(head)}")
    return tuple(value)


def heads_of_text(
    where: str, text: str, expected: str = "heads by number, from 0, such as 0,3"
) -> tuple[int, ...]:
    """
    Return the heads of `0,3`; `expected` is for the message.

    Raises:
        InvalidInput: not whole numbers with commas between them.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < _DIGITS for part in parts):
        raise InvalidInput(f"{where}: expected {expected}, got {text[:64]!r}")
    return tuple(map(int, parts))


def _weights(value: object) -> tuple[bool, tuple[int, ...] | None]:
    """Return whether weights are asked for, and of which heads; None = of all."""
    if isinstance(value, bool):
        return value, None
    if not isinstance(value, dict):
        raise InvalidInput(
            f'weights: expected true, false or {{"heads": [0, 3]}}, got {kind_of(value)}'
        )
    check_known(value, (HEADS,), "weights")
    heads = value.get(HEADS)
    return True, None if heads is None else checked_heads(heads, "weights.heads")


def _text_weights(where: str, text: str) -> object:
    """Return the weights of a text as JSON has them: true, false or an object with heads."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text in ("0", "1"):
        raise InvalidInput(
            f"{where}: expected true, false or heads, got {text!r}, which may mean either;"
            f" say {where.split(': ')[-1]}=true, or heads={text} for one head"
        )
    return {HEADS: list(heads_of_text(where, text, "true, false or heads such as 0,3"))}


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise InvalidInput(f"{name}: expected true or false, got {shown(value)}")


def _timeout(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"{where}: expected a number of seconds, got {kind_of(value)}")
    if not 0 < value <= MAX_TIMEOUT_S:  # also false for NaN
        raise InvalidInput(
            f"{where}: expected seconds above 0 and at most {MAX_TIMEOUT_S:g}, got {shown(value)}"
        )
    return float(value)


def _priority(value: object) -> int:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or not 0 <= value <= MAX_PRIORITY:  # type: ignore[operator]
        raise InvalidInput(
            "priority: expected 0 (default) or a whole number from 1 (highest) to"
            f" {MAX_PRIORITY}, got {shown(value)}"
        )
    return int(value)  # type: ignore[call-overload, no-any-return]


def _boolean(where: str, text: str) -> bool:
    if text.lower() in ("true", "1"):
        return True
    if text.lower() in ("false", "0"):
        return False
    raise InvalidInput(f"{where}: expected true or false, got {text[:64]!r}")


def _number(where: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InvalidInput(f"{where}: expected a number, got {text[:64]!r}") from None
    if not math.isfinite(value):
        raise InvalidInput(f"{where}: expected a finite number, got {text[:64]!r}")
    return value
