"""
What a JSON body consists of, counted before it is parsed.

A parser makes an object of every array and every value, up to a hundred bytes for two or
three of the body, so that the size of a body says little of what reading it takes.
Counting commas and brackets is linear, takes 0.1 ns a byte and leaves the interpreter's lock.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from service.codecs.size import Size
from service.contract import PAIR_MASK, VALUE_MEMORY
from service.errors import InvalidInput, TooLarge
from service.inference.validation import Limits

UNCOUNTED_BYTES: Final = 16 * 1024
"""
Up to here a body is small, whatever it consists of: each of its bytes an array, it would
take 5 ms.
"""

_COMMA_BYTES: Final = 10
_ARRAY_BYTES: Final = 100
"""
A value counts as at least so many bytes, which an FP32 number takes at its shortest, so that
bodies of ordinary numbers count as what they are; and an array, which is more work, as more.
"""

_FEW: Final = 1024
"""Of objects, members, and of arrays that hold no sequence or token: shapes, parameters."""

_PAIR_ARRAYS_PER_TOKEN: Final = 16
_PAIR_ARRAYS: Final = 64 * 1024
"""
A pair mask has an array for each head of each query.  The number of heads is not known
here; 16 are enough wherever so many arrays, each of T values, would fit a body of 64 MiB.
"""

_CHUNK: Final = 256 * 1024
"""Bytes that are compared at a time; they stay in the processor's cache."""


@dataclass(frozen=True)
class JsonCounts:
    """How many arrays a body has at most, and how many commas."""

    json_bytes: int
    arrays: int
    commas: int

    @property
    def size(self) -> Size:
        """How much work it is to read."""
        weight = _COMMA_BYTES * self.commas + _ARRAY_BYTES * self.arrays
        return Size(json_bytes=max(self.json_bytes, weight))


@dataclass(frozen=True)
class JsonBounds:
    """What a body may consist of, and why."""

    arrays: int
    """With neither a pair mask nor a value memory."""
    pair_arrays: int
    """With a pair mask."""
    value_arrays: int
    """With a value memory."""
    values: int | None
    """Without a pair mask, which may have more than a body can hold; None = not known."""
    reason: str
    """The limits behind these numbers, for the messages."""


CONTROL: Final = JsonBounds(64 * 1024, 64 * 1024, 64 * 1024, 64 * 1024, "a request without tensors")
"""For the bodies of endpoints that take no tensors."""


@lru_cache(64)
def bounds_of(limits: Limits, width: int | None = None) -> JsonBounds:
    """
    Return what the body of a call within the limits consists of at most.

    `width` is that of the widest token: no number is refused where it is not known.
    """
    # An array for each sequence of embeddings, memory or positions, and both smaller masks, and
    # for each token of embeddings and memory; the tokens are within max_tokens together.
    arrays = limits.max_tokens + 4 * limits.max_rows + _FEW
    pair_arrays = arrays + _PAIR_ARRAYS_PER_TOKEN * limits.max_tokens + _PAIR_ARRAYS
    # A value memory has as many tokens as the memory beside it.
    value_arrays = arrays + limits.max_tokens + limits.max_rows
    reason = f"{limits.max_rows} sequences and {limits.max_tokens} tokens"
    if width is None:
        return JsonBounds(arrays, pair_arrays, value_arrays, None, reason)
    # Each query has its numbers and its position, each key its numbers and its value of the
    # attend mask, and both count as tokens; the values of a head mask are fewer, for each
    # sequence, than the numbers of a token.
    values = limits.max_tokens * (width + 1) + limits.max_rows * width + _FEW
    return JsonBounds(arrays, pair_arrays, value_arrays, values, f"{reason} of {width} numbers")


def counts_of(content: bytes) -> JsonCounts:
    """Return the counts of a body; brackets and commas in strings count like any other."""
    array, comma = b"[,"
    characters = np.frombuffer(content, np.uint8)
    arrays = commas = 0
    for start in range(0, len(characters), _CHUNK):
        chunk = characters[start : start + _CHUNK]
        arrays += int(np.count_nonzero(chunk == array))
        commas += int(np.count_nonzero(chunk == comma))
    return JsonCounts(len(characters), arrays, commas)


def weighed(content: bytes, bounds: JsonBounds | None) -> tuple[Size, JsonCounts | None]:
    """
    Return how much work a body is to read, and its counts unless it is small.

    Raises:
        InvalidInput, TooLarge: see `check`.
    """
    if len(content) <= UNCOUNTED_BYTES:
        return Size(json_bytes=len(content)), None
    counts = counts_of(content)
    check(content, bounds, counts)
    return counts.size, counts


def check(content: bytes, bounds: JsonBounds | None, counts: JsonCounts) -> None:
    """
    Return when a body may be parsed.

    Raises:
        InvalidInput: it has more objects or members than any that is documented.
        TooLarge: it has more arrays or values than a call within the limits.
    """
    for character, name in ((b"{", "objects"), (b":", "members")):
        if _has_more(content, character, _FEW):
            raise InvalidInput(f"body: expected at most {_FEW} {name}, got more")
    if bounds is None:
        return
    values = counts.commas + 1
    are_few = bounds.values is None or values <= bounds.values
    if are_few and counts.arrays <= bounds.arrays:
        return
    if are_few and counts.arrays <= bounds.value_arrays and VALUE_MEMORY.encode() in content:
        return
    if counts.arrays <= bounds.pair_arrays and PAIR_MASK.encode() in content:
        return
    most = f"{bounds.arrays} arrays"
    if bounds.values is not None:
        most += f" and {bounds.values} values"
    reason = bounds.reason
    if bounds.pair_arrays > bounds.arrays:
        reason += f" ({bounds.pair_arrays} arrays with a {PAIR_MASK}"
        reason += f", {bounds.value_arrays} with a {VALUE_MEMORY})"
    raise TooLarge(
        f"body: at most {most} for {reason}, got {counts.arrays} arrays and {values} values"
    )


def _has_more(content: bytes, character: bytes, most: int) -> bool:
    """Say whether a character that is rare in right bodies occurs more often than that."""
    place = content.find(character)
    for _ in range(most):
        if place < 0:
            return False
        place = content.find(character, place + 1)
    return place >= 0
