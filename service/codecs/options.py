"""The options of a call, wherever they stand: in a JSON body, a query string or a header."""

import math
from collections.abc import Iterable, Mapping
from typing import Final

from service.codecs.checks import check_known, kind_of
from service.contract import MAX_VERSION, is_valid_version
from service.errors import InvalidInput
from service.inference.calls import Options

NAMES: Final = ("model", "version", "weights", "causal", "timeout_s", "priority")
TIMEOUT_HEADER: Final = "x-request-timeout-s"
MAX_TIMEOUT_S: Final = 3600.0
MAX_PRIORITY: Final = 2**31 - 1
_VERSION: Final = f"expected a whole number from 1 to {MAX_VERSION}"


def from_query(pairs: Iterable[tuple[str, str]], headers: Mapping[str, str]) -> dict[str, object]:
    """
    Return the options of a query string and of the time-limit header, typed.

    Raises:
        InvalidInput: an unknown or repeated key, or a value of the wrong type.
    """
    pairs = list(pairs)
    check_known((key for key, _ in pairs), NAMES, "query")
    options: dict[str, object] = {}
    if TIMEOUT_HEADER in headers:
        options["timeout_s"] = _number("header X-Request-Timeout-S", headers[TIMEOUT_HEADER])
    seen = set()
    for key, text in pairs:
        if key in seen:
            raise InvalidInput(f"query: {key} stands there twice")
        seen.add(key)
        match key:
            case "model":
                options[key] = text
            case "version":
                if not is_valid_version(text):
                    raise InvalidInput(f"query: version: {_VERSION}, got {text[:64]!r}")
                options[key] = int(text)
            case "weights" | "causal":
                options[key] = _boolean(f"query: {key}", text)
            case _:
                options[key] = _number(f"query: {key}", text)
    return options


def checked(raw: Mapping[str, object]) -> Options:
    """
    Return the options of a mapping that holds no other keys.

    Raises:
        InvalidInput: a value of the wrong type or out of bounds.
    """
    model = raw.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidInput(f"model: expected a string, got {kind_of(model)}")
    timeout_s = raw.get("timeout_s")
    weights, heads = _weights(raw.get("weights", False))
    return Options(
        model=model,
        version=_version(raw.get("version")),
        weights=weights,
        heads=heads,
        causal=_flag("causal", raw.get("causal", False)),
        timeout_s=None if timeout_s is None else _timeout(timeout_s),
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
    for head in value:
        if type(head) is not int:
            raise InvalidInput(f"{where}: expected heads by number, from 0, got {kind_of(head)}")
    return tuple(value)


def _weights(value: object) -> tuple[bool, tuple[int, ...] | None]:
    """Return whether weights are asked for, and of which heads; None = of all."""
    if isinstance(value, bool):
        return value, None
    if not isinstance(value, dict):
        raise InvalidInput(
            f'weights: expected true, false or {{"heads": [0, 3]}}, got {kind_of(value)}'
        )
    check_known(value, ("heads",), "weights")
    heads = value.get("heads")
    return True, None if heads is None else checked_heads(heads, "weights.heads")


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise InvalidInput(f"{name}: expected true or false, got {kind_of(value)}")


def _timeout(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"timeout_s: expected a number of seconds, got {kind_of(value)}")
    if not 0 < value <= MAX_TIMEOUT_S:  # also false for NaN
        told = f"{value:g}" if abs(value) < 2**53 else "a number without measure"
        raise InvalidInput(f"timeout_s: expected above 0 and at most {MAX_TIMEOUT_S:g}, got {told}")
    return float(value)


def _priority(value: object) -> int:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole:
        raise InvalidInput("priority: expected 0 (default) or a whole number from 1 (highest)")
    if not 0 <= value <= MAX_PRIORITY:  # type: ignore[operator]
        raise InvalidInput(f"priority: expected 0 to {MAX_PRIORITY}")
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
