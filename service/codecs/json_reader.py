"""
Read JSON bodies whose weight is in arrays of numbers, exactly.

This reader goes through Python's own parser and lists.  It accepts `NaN` and `Infinity`,
and names the place of every mistake.  It is the slow one of two: see `simdjson_reader`,
which falls back to it, so that only this one ever words an error.
"""

import codecs
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from service.codecs.checks import kind_of, shown
from service.codecs.datatypes import FLOAT_MASK
from service.codecs.signatures import recognised
from service.errors import InvalidInput

MAX_RANK: Final = 5
"""One more than the deepest tensor of the contract, so that its message can say how deep it is."""

Node = Any
"""A JSON value in a reader's own form; only the reader it came from understands it."""


@dataclass(frozen=True)
class Nested:
    """
    A nested array: its leaves in order, and how many children each array of each level has.

    `[[1, 2], [3]]` has values [1, 2, 3] and counts ([2], [2, 1]).
    """

    values: npt.NDArray[Any]
    counts: tuple[list[int], ...]

    @property
    def rank(self) -> int:
        """How deep the leaves are."""
        return len(self.counts)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of a regular array; None = its parts differ in length."""
        if any(len(set(level)) > 1 for level in self.counts):
            return None
        return tuple(level[0] for level in self.counts if level)

    def place(self, index: int) -> str:
        """Return `[i][j]…`, the place of one leaf."""
        path: list[int] = []
        for level in reversed(self.counts):
            ends = np.cumsum(level)
            array = int(np.searchsorted(ends, index, side="right"))
            path.append(index - int(ends[array] - level[array]))
            index = array
        return "".join(f"[{i}]" for i in reversed(path))


class Reader(Protocol):
    """What a codec asks of a body."""

    def root(self) -> dict[str, Node]:
        """Return the members of the outermost object."""
        ...

    def objects(self, node: Node, where: str) -> list[dict[str, Node]]:
        """Return the members of each object of an array."""
        ...

    def floats(self, node: Node, where: str) -> Nested:
        """Return an array of numbers as FP32."""
        ...

    def bools(self, node: Node, where: str) -> Nested:
        """Return an array of `true` and `false`, or of 1 and 0."""
        ...

    def integers(self, node: Node, where: str, dtype: np.dtype[Any]) -> Nested:
        """Return an array of whole numbers that the type holds."""
        ...

    def plain(self, node: Node) -> Any:
        """Return any value as Python's own."""
        ...


class ExactReader:
    """Reads through Python's own parser and lists."""

    def __init__(self, body: bytes) -> None:
        try:
            text = body.removeprefix(codecs.BOM_UTF8).decode()
        except UnicodeDecodeError as error:
            found = recognised(body) or f"byte 0x{body[error.start]:02x} at {error.start}"
            raise InvalidInput(f"body: expected JSON in UTF-8, got {found}") from None
        if not text.strip():
            raise InvalidInput("body: expected a JSON object, got nothing")
        try:
            self._document = _DECODER.decode(text)
        except json.JSONDecodeError as error:
            found = recognised(body) or f"a mistake at character {error.pos}: {error.msg}"
            raise InvalidInput(f"body: expected JSON, got {found}") from None
        except RecursionError:
            raise InvalidInput(
                "body: expected less deeply nested JSON, got too many levels"
            ) from None
        except ValueError:  # Python's own limit on the digits of an integer
            raise InvalidInput(
                f"body: expected integers of at most {sys.get_int_max_str_digits()} digits,"
                " got a longer one"
            ) from None

    def root(self) -> dict[str, Node]:
        """See `Reader.root`."""
        if not isinstance(self._document, dict):
            raise InvalidInput(f"body: expected a JSON object, got {kind_of(self._document)}")
        return self._document

    def objects(self, node: Node, where: str) -> list[dict[str, Node]]:
        """See `Reader.objects`."""
        if not isinstance(node, list):
            raise InvalidInput(f"{where}: expected an array, got {kind_of(node)}")
        for i, item in enumerate(node):
            if not isinstance(item, dict):
                raise InvalidInput(f"{where}[{i}]: expected an object, got {kind_of(item)}")
        return node

    def floats(self, node: Node, where: str) -> Nested:
        """See `Reader.floats`."""
        return walk(node, where, _to_floats)

    def bools(self, node: Node, where: str) -> Nested:
        """See `Reader.bools`."""
        return walk(node, where, to_bools)

    def integers(self, node: Node, where: str, dtype: np.dtype[Any]) -> Nested:
        """See `Reader.integers`."""
        return walk(node, where, TO_INTEGERS[dtype.name])

    def plain(self, node: Node) -> Any:
        """See `Reader.plain`."""
        return node


def walk(
    node: object, where: str, to_array: Callable[[list[Any]], npt.NDArray[Any] | None]
) -> Nested:
    """
    Return nested lists as one array; `to_array` gives None for values it does not take.

    Raises:
        InvalidInput: not an array, too deep, leaves at unequal depths or of the
            wrong type, or a number outside FP32.
    """
    counts: list[list[int]] = []
    leaves: list[Any] = []
    level: list[Any] = [node]
    while True:
        _check_arrays(level, where, counts, to_array)
        counts.append([len(array) for array in level])
        children = [item for array in level for item in array]
        if not any(isinstance(child, list) for child in children):
            leaves = children
            break
        if len(counts) == MAX_RANK:
            raise InvalidInput(
                f"{where}: expected at most {MAX_RANK - 1} levels of arrays, got more"
            )
        level = children
    values = to_array(leaves)
    if values is None:
        _refuse_leaf(Nested(np.empty(0), tuple(counts)), leaves, where, to_array)
    nested = Nested(values, tuple(counts))
    if values.dtype == np.float64:
        nested = Nested(to_float32(values), nested.counts)
        beyond = np.isinf(nested.values) & np.isfinite(values)
        if beyond.any():
            _refuse_beyond(where + nested.place(int(beyond.argmax())))
    return nested


class _Overflow(float):
    """A literal that is finite as written and infinite as a float: 1e400."""


def _number(literal: str) -> float:
    value = float(literal)
    return value if math.isfinite(value) else _Overflow(value)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InvalidInput(f"body: expected each key of an object once, got {twice[:64]!r} twice")
    return members


_DECODER: Final = json.JSONDecoder(parse_float=_number, object_pairs_hook=_once)


def _check_arrays(
    level: list[Any],
    where: str,
    counts: list[list[int]],
    to_array: Callable[[list[Any]], npt.NDArray[Any] | None],
) -> None:
    odd = next((i for i, item in enumerate(level) if not isinstance(item, list)), None)
    if odd is not None:
        place = Nested(np.empty(0), tuple(counts)).place(odd) if counts else ""
        wanted = (
            "an array" if to_array([level[odd]]) is not None or not counts else _WANTED[to_array]
        )
        raise InvalidInput(f"{where}{place}: expected {wanted}, got {kind_of(level[odd])}")


def _refuse_leaf(
    nested: Nested,
    leaves: list[Any],
    where: str,
    to_array: Callable[[list[Any]], npt.NDArray[Any] | None],
) -> NoReturn:
    odd = next(i for i, leaf in enumerate(leaves) if to_array([leaf]) is None)
    place = where + nested.place(odd)
    if isinstance(leaves[odd], _Overflow) or (type(leaves[odd]) is int and to_array is _to_floats):
        _refuse_beyond(place)
    hint = f"; {FLOAT_MASK}" if to_array is to_bools and type(leaves[odd]) is float else ""
    raise InvalidInput(f"{place}: expected {_WANTED[to_array]}, got {shown(leaves[odd])}{hint}")


def _refuse_beyond(place: str) -> NoReturn:
    raise InvalidInput(f"{place}: expected a number within FP32 (up to 3.4e38), got a larger one")


def _to_floats(leaves: list[Any]) -> npt.NDArray[np.float64] | None:
    # `type`, not `isinstance`: a bool is an int to Python, and an overflow a float.
    if not {type(leaf) for leaf in leaves} <= {int, float}:
        return None
    try:
        return np.array(leaves, np.float64)
    except OverflowError:  # an integer beyond any float
        return None


def to_bools(leaves: list[Any]) -> npt.NDArray[np.bool_] | None:
    """Return leaves that are all booleans, or 0 and 1, as an array; None = one is not."""
    kinds = set(map(type, leaves))
    is_mask = kinds <= {bool} or (kinds <= {bool, int} and set(leaves) <= {0, 1})
    return np.array(leaves, np.bool_) if is_mask else None


def _to_integers(dtype: np.dtype[Any]) -> Callable[[list[Any]], npt.NDArray[Any] | None]:
    def to_array(leaves: list[Any]) -> npt.NDArray[Any] | None:
        if not {type(leaf) for leaf in leaves} <= {int}:
            return None
        try:
            return np.array(leaves, dtype)
        except OverflowError:
            return None

    return to_array


def to_float32(doubles: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Return the nearest FP32 numbers; what is too large becomes infinity."""
    with np.errstate(over="ignore"):
        return doubles.astype(np.float32)


TO_INTEGERS: Final = {
    f"{sign}int{bits}": _to_integers(np.dtype(f"{sign}int{bits}"))
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}

_WANTED: Final[dict[Any, str]] = {
    _to_floats: "a number",
    to_bools: "true, false, 1 or 0",
    **{take: f"a whole number of {name.upper()}" for name, take in TO_INTEGERS.items()},
}
