"""
The log's level in the words of the protocol's logging extension.

Levels are nested here, debug in info in warning in error, so the extension's
switches are one threshold, and some of their combinations do not exist.
"""

import logging
from collections.abc import Mapping
from typing import Final

from service.codecs.checks import check_known, kind_of
from service.errors import InvalidInput

Value = bool | int | str

_SWITCHES: Final = {
    "log_info": logging.INFO,
    "log_warning": logging.WARNING,
    "log_error": logging.ERROR,
}
_FIXED: Final = {"log_file": "", "log_format": "default"}
_VERBOSE: Final = "log_verbose_level"
_STEP: Final = 10
"""From one of Python's levels to the next."""


def described(threshold: int) -> dict[str, Value]:
    """Return the extension's settings of a log that begins at this level of Python's."""
    return {
        "log_file": _FIXED["log_file"],
        **{name: threshold <= level for name, level in _SWITCHES.items()},
        _VERBOSE: int(threshold <= logging.DEBUG),
        "log_format": _FIXED["log_format"],
    }


def changed(threshold: int, requested: Mapping[str, object]) -> int:
    """
    Return the level nearest to `threshold` that does all that is requested.

    Raises:
        InvalidInput: an unknown key, a value of the wrong type, one that has no
            effect here, or switches that contradict each other.
    """
    check_known(requested, described(threshold), "logging")
    for name, only in _FIXED.items():
        if requested.get(name, only) != only:
            raise InvalidInput(f"{name}: expected {only!r}, got another; the operator sets it")
    least, most = logging.DEBUG, logging.ERROR
    for name, level in _SWITCHES.items():
        if name in requested and _flag(name, requested[name]):
            most = min(most, level)
        elif name in requested:
            least = max(least, level + _STEP)
    if _VERBOSE in requested:
        if _whole(_VERBOSE, requested[_VERBOSE]):
            most = logging.DEBUG
        else:
            least = max(least, logging.INFO)
    if least > logging.ERROR:
        raise InvalidInput("log_error: expected true, got false; errors are always logged")
    if least > most:
        raise InvalidInput(
            "logging: expected every level from the least severe one up, got one without the"
            " next; log_verbose_level contains log_info, which contains log_warning"
        )
    return min(max(threshold, least), most)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name}: expected true or false, got {kind_of(value)}")
    return value


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(f"{name}: expected a whole number, got {kind_of(value)}")
    if value < 0:
        raise InvalidInput(f"{name}: expected 0 or more, got {value}")
    return value
