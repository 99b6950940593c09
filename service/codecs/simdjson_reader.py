"""
Read JSON bodies through simdjson, which copies numbers straight into a buffer.

Copying flattens whatever is nested, so this reader gives up on anything irregular, and the
body is read again by the exact reader.  A small body goes to the exact reader at once,
which reads it in less time.
"""

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np
import simdjson

from service.codecs.json_bounds import (
    UNCOUNTED_BYTES,
    JsonBounds,
    JsonCounts,
    check,
    counts_of,
)
from service.codecs.json_reader import (
    MAX_RANK,
    TO_INTEGERS,
    ExactReader,
    Nested,
    Node,
    Reader,
    to_bools,
    to_float32,
    walk,
)
from service.errors import InvalidInput

_MAX_MEMBERS: Final = 32
"""More than any object of ours has; larger ones are left to the exact reader."""

_COUNTED: Final = 2**24 - 1
"""
More elements of an array than so many simdjson does not count, and `as_list` (pysimdjson
7.0.2) writes them behind the list that it made for so many: the process ends, at best.
"""

_SMALL_BYTES: Final = 2048
"""Up to here Python's own parser takes a third of the time that going through simdjson takes."""

_KEPT_BYTES: Final = 16 * 2**20
"""Bodies up to here are parsed in memory that is kept; new memory takes as long as parsing."""

_kept = threading.local()

_HOLD_MORE: Final = {list, dict, str}
"""The types of values whose text may hold brackets and colons."""

_T = TypeVar("_T")


def read(
    body: bytes,
    decode: Callable[[Reader], _T],
    bounds: JsonBounds | None = None,
    counts: JsonCounts | None = None,
) -> _T:
    """
    Return what `decode` makes of the body, which is counted before it is parsed.

    `counts` are its own, where they are known.  Without `bounds` it may have any number of
    arrays and values.

    Raises:
        InvalidInput: the body is not JSON, or `decode` found a mistake in it.
        TooLarge: it is above the bounds.
    """
    if len(body) <= _SMALL_BYTES:
        return decode(ExactReader(body))
    if len(body) <= UNCOUNTED_BYTES:
        arrays, commas = body.count(b"["), 0
    else:
        counts = counts or counts_of(body)
        check(body, bounds, counts)
        arrays, commas = counts.arrays, counts.commas
    try:
        fast = SimdjsonReader(body, may_be_long=commas >= _COUNTED)
        result = decode(fast)
    except (Irregular, InvalidInput):
        return decode(ExactReader(body))
    # What `decode` saw is counted.  One more bracket is an array among numbers, one more colon
    # a key that stood twice in an object, or a text that was not read.
    if fast.arrays != arrays or _has_more_colons(body, fast.colons):
        return decode(ExactReader(body))
    return result


def _has_more_colons(body: bytes, count: int) -> bool:
    """Say whether a body holds more colons; looking for the few there are beats counting all."""
    place = -1
    for _ in range(count + 1):
        place = body.find(b":", place + 1)
        if place < 0:
            return False
    return True


class Irregular(Exception):
    """The body may hold what simdjson would flatten; only the exact reader can tell."""


class SimdjsonReader:
    """
    Reads through simdjson; counts the arrays it has looked into, and the colons it has seen.

    `may_be_long` says that one may have more elements than simdjson counts.
    """

    def __init__(self, body: bytes, *, may_be_long: bool = False) -> None:
        self.arrays = 0
        self.colons = 0
        self._may_be_long = may_be_long
        try:
            self._document = _parse(body)
        except (ValueError, RuntimeError) as error:
            raise Irregular from error

    def root(self) -> dict[str, Node]:
        """See `Reader.root`."""
        return self._members(self._document)

    def objects(self, node: Node, where: str) -> list[dict[str, Node]]:
        """See `Reader.objects`."""
        if not isinstance(node, simdjson.Array):
            raise Irregular
        self.arrays += 1
        return [self._members(item) for item in node]

    def floats(self, node: Node, where: str) -> Nested:
        """See `Reader.floats`."""
        if not isinstance(node, simdjson.Array):
            raise Irregular
        counts: list[list[int]] = []
        arrays: list[Any] = [node]
        while True:
            counts.append([len(array) for array in arrays])
            self.arrays += len(arrays)
            first = next((array for array in arrays if len(array)), None)
            if first is None or len(counts) > MAX_RANK:
                raise Irregular
            if not isinstance(first[0], simdjson.Array):
                break
            arrays = [item for array in arrays for item in array]
            if not all(isinstance(array, simdjson.Array) for array in arrays):
                raise Irregular
        try:
            doubles = np.frombuffer(node.as_buffer(of_type="d"), np.float64)
        except (TypeError, ValueError) as error:
            raise Irregular from error
        values = to_float32(doubles)
        if values.size != sum(counts[-1]) or not np.isfinite(values).all():
            raise Irregular
        return Nested(values, tuple(counts))

    def bools(self, node: Node, where: str) -> Nested:
        """See `Reader.bools`."""
        return walk(self.plain(node), where, to_bools)

    def integers(self, node: Node, where: str, dtype: np.dtype[Any]) -> Nested:
        """See `Reader.integers`."""
        return walk(self.plain(node), where, TO_INTEGERS[dtype.name])

    def plain(self, node: Node) -> Any:
        """See `Reader.plain`."""
        if self._may_be_long and isinstance(node, simdjson.Array | simdjson.Object):
            self._check_countable(node)
        try:
            if isinstance(node, simdjson.Array):
                node = node.as_list()
            elif isinstance(node, simdjson.Object):
                node = node.as_dict()
            self._count(node)
        except RecursionError as error:
            raise Irregular from error
        return node

    def _check_countable(self, node: Node) -> None:
        """Return when simdjson makes Python's own of an array or object without harm."""
        is_short = isinstance(node, simdjson.Array) and len(node) <= _MAX_MEMBERS
        if not is_short or any(isinstance(item, simdjson.Array | simdjson.Object) for item in node):
            raise Irregular

    def _count(self, value: object) -> None:
        """Count what the text of a value holds: simdjson keeps the last of equal keys only."""
        match value:
            case str():
                self.colons += value.count(":")
            case list():
                self.arrays += 1
                if not _HOLD_MORE.isdisjoint(map(type, value)):
                    for item in value:
                        self._count(item)
            case dict():
                self.colons += len(value)
                for key, item in value.items():
                    self._count(key)
                    self._count(item)

    def _members(self, node: Node) -> dict[str, Node]:
        if not isinstance(node, simdjson.Object):
            raise Irregular
        keys = list(node.keys()) if len(node) <= _MAX_MEMBERS else []
        # simdjson looks a key up by going through all before it.
        if not keys or len(set(keys)) != len(keys):
            raise Irregular
        self.colons += len(keys) + sum(key.count(":") for key in keys)
        try:
            return {key: node[key] for key in keys}  # `items()` would make Python's own of all
        except KeyError as error:  # simdjson does not find a key that holds U+0000
            raise Irregular from error


def _parse(body: bytes) -> Any:
    """Return simdjson's document; the memory of this thread's last one is used again."""
    if len(body) > _KEPT_BYTES:
        return simdjson.Parser().parse(body)
    if not hasattr(_kept, "parser"):
        _kept.parser = simdjson.Parser()
    try:
        return _kept.parser.parse(body)
    except RuntimeError:  # something still looks at the last document
        _kept.parser = simdjson.Parser()
        return _kept.parser.parse(body)
