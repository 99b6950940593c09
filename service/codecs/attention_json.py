"""
`POST /v1/attention` in JSON: nested arrays in, nested arrays out.

One sequence may come as [S][E] and is answered one rank lower, masks included;
sequences of one call may differ in length and come back with their own.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import orjson

from service.codecs.chunks import Chunk, json_array
from service.codecs.datatypes import INPUTS, INT64, INTEGERS
from service.codecs.json_bounds import JsonBounds, JsonCounts, bounds_of
from service.codecs.json_reader import Nested, Node, Reader
from service.codecs.names import HEADS, OPTIONS, check_names
from service.codecs.options import checked, combined
from service.codecs.simdjson_reader import read
from service.contract import (
    ATTEND_MASK,
    ATTENTION_WEIGHTS,
    EMBEDDINGS,
    EXTRA_WEIGHTS,
    HEAD_MASK,
    MEMORY,
    OUTPUT,
    PAIR_MASK,
    POSITIONS,
    VALUE_MEMORY,
)
from service.errors import InvalidInput
from service.inference.calls import Answer, Bools, Floats, Lengths, Options
from service.inference.tensors import Tensors, add_batch_axis
from service.inference.validation import Limits, pad, pad_last

MEDIA_TYPE: Final = "application/json"
_KEYS: Final = (*INPUTS, *OPTIONS)


def decode(
    body: bytes,
    query: Mapping[str, object],
    limits: Limits,
    timeout_s: float | None = None,
    bounds: JsonBounds | None = None,
    counts: JsonCounts | None = None,
) -> tuple[Tensors, Options, bool]:
    """
    Return a body's tensors and options, and whether it is one sequence [S][E].

    `query` holds options from outside the body; `timeout_s` is the time limit of a call
    that names none.  `bounds` are by default those of the limits; `counts` are the body's,
    if they are known.

    Raises:
        InvalidInput: the body is not JSON of the documented form, or contradicts the query.
        TooLarge: it consists of more than a call within the limits, which is found
            before it is parsed; or padding it would go above a limit.
    """
    bounds = bounds or bounds_of(limits)
    return read(body, lambda reader: _decode(reader, query, limits, timeout_s), bounds, counts)


def encode(name: str, version: int, answer: Answer, *, single: bool) -> Iterator[Chunk]:
    """
    Give the answer as JSON in pieces; floats in their shortest form, non-finite ones as null.

    A subset of heads is named before their weights.
    """
    head: dict[str, Any] = {"model": name, "version": version}
    if answer.heads is not None:
        head[HEADS] = answer.heads
    yield orjson.dumps(head)[:-1]
    named = {
        OUTPUT: answer.outputs(),
        ATTENTION_WEIGHTS: answer.weights(),
        EXTRA_WEIGHTS: answer.weights_of_extra_keys(),
    }
    for key, tensors in named.items():
        if not tensors:
            continue
        yield b',"%s":' % key.encode()
        yield b"" if single else b"["
        for i, tensor in enumerate(tensors):
            if i:
                yield b","
            yield from json_array(tensor)
        yield b"" if single else b"]"
    yield b"}"


def _decode(
    reader: Reader, query: Mapping[str, object], limits: Limits, timeout_s: float | None
) -> tuple[Tensors, Options, bool]:
    # Clients with typed models send null for what they leave out.
    root = {key: node for key, node in reader.root().items() if node is not None}
    check_names(root, _KEYS, "body")
    given: dict[str, object] = {key: reader.plain(root[key]) for key in OPTIONS if key in root}
    options = checked(combined(query, given, "body and query"), timeout_s)
    if EMBEDDINGS not in root:
        raise InvalidInput(f"{EMBEDDINGS}: expected [B][S][E] or [S][E], got none")
    embeddings = reader.floats(root[EMBEDDINGS], EMBEDDINGS)
    single = embeddings.rank == 2
    if not single and embeddings.rank != 3:
        raise InvalidInput(
            f"{EMBEDDINGS}: expected [B][S][E] or [S][E], got {_axes(embeddings.rank)}"
        )
    lengths, block, true_lengths = _sequences(embeddings, EMBEDDINGS, limits, single=single)
    key_lengths, memory, memory_lengths = lengths, None, None
    if MEMORY in root:
        nested = reader.floats(root[MEMORY], MEMORY)
        _check_axes(nested, MEMORY, "[B]", "[T][M]", single=single)
        key_lengths, memory, memory_lengths = _sequences(nested, MEMORY, limits, single=single)
        _check_count(MEMORY, len(key_lengths), len(lengths))
    value_memory = _value_memory(reader, root, key_lengths, limits, single=single)
    tensors = Tensors(
        block,
        memory,
        _attend_mask(reader, root, key_lengths, limits, single=single),
        _pair_mask(reader, root, lengths, key_lengths, limits, single=single),
        _head_mask(reader, root),
        true_lengths,
        memory_lengths,
        value_memory,
        _positions(reader, root, lengths, limits, single=single),
    )
    return (add_batch_axis(tensors) if single else tensors), options, single


def _sequences(
    nested: Nested, name: str, limits: Limits, *, single: bool
) -> tuple[list[int], Floats, np.ndarray[Any, Any] | None]:
    """Return the length of each sequence, the padded block, and the lengths if they differ."""
    lengths, widths = nested.counts[-2], nested.counts[-1]
    short = next((i for i, length in enumerate(lengths) if length < 1), None)
    if short is not None or not lengths:
        place = "" if single or short is None else f"[{short}]"
        raise InvalidInput(f"{name}{place}: expected at least one token, got none")
    odd = next((i for i, width in enumerate(widths) if width != widths[0]), None)
    if odd is not None:
        place = Nested(nested.values, nested.counts[:-1]).place(odd)
        raise InvalidInput(
            f"{name}{place}: expected {widths[0]} numbers as in the first token, got {widths[odd]}"
        )
    packed = nested.values.reshape(len(widths), widths[0])
    if single:
        return lengths, packed, None
    block, true_lengths = pad(packed, lengths, name, limits)
    return lengths, block, true_lengths


def _value_memory(
    reader: Reader,
    root: dict[str, Node],
    key_lengths: list[int],
    limits: Limits,
    *,
    single: bool,
) -> Floats | None:
    if VALUE_MEMORY not in root:
        return None
    nested = reader.floats(root[VALUE_MEMORY], VALUE_MEMORY)
    _check_axes(nested, VALUE_MEMORY, "[B]", "[T][M_v]", single=single)
    lengths, block, _ = _sequences(nested, VALUE_MEMORY, limits, single=single)
    _check_lengths(VALUE_MEMORY, lengths, key_lengths, "tokens, one a key", single=single)
    return block


def _positions(
    reader: Reader, root: dict[str, Node], lengths: list[int], limits: Limits, *, single: bool
) -> Lengths | None:
    if POSITIONS not in root:
        return None
    nested = reader.integers(root[POSITIONS], POSITIONS, INTEGERS[INT64])
    _check_axes(nested, POSITIONS, "[B]", "[S]", single=single)
    _check_lengths(POSITIONS, nested.counts[-1], lengths, "numbers, one a token", single=single)
    if single:
        return nested.values
    parts = np.split(nested.values, np.cumsum(lengths)[:-1])
    return pad_last(parts, POSITIONS, limits)


def _attend_mask(
    reader: Reader,
    root: dict[str, Node],
    key_lengths: list[int],
    limits: Limits,
    *,
    single: bool,
) -> Bools | None:
    if ATTEND_MASK not in root:
        return None
    nested = reader.bools(root[ATTEND_MASK], ATTEND_MASK)
    _check_axes(nested, ATTEND_MASK, "[B]", "[T]", single=single)
    counts = nested.counts[-1]
    _check_lengths(ATTEND_MASK, counts, key_lengths, "values, one a key", single=single)
    if single:
        return nested.values
    parts = np.split(nested.values, np.cumsum(key_lengths)[:-1])
    return pad_last(parts, ATTEND_MASK, limits)


def _pair_mask(
    reader: Reader,
    root: dict[str, Node],
    lengths: list[int],
    key_lengths: list[int],
    limits: Limits,
    *,
    single: bool,
) -> Bools | None:
    if PAIR_MASK not in root:
        return None
    nested = reader.bools(root[PAIR_MASK], PAIR_MASK)
    _check_axes(nested, PAIR_MASK, "[B or 1]", "[H or 1][S][T]", single=single)
    if nested.shape is not None:
        # All equal; whether they fit is checked with the other shapes.
        mask = nested.values.reshape(nested.shape)
        if len(set(lengths)) == 1 and len(set(key_lengths)) == 1:
            return mask
    if single:
        raise InvalidInput(
            f"{PAIR_MASK}: expected [H or 1][{lengths[0]}][{key_lengths[0]}], got rows of"
            " unequal length"
        )
    parts = _pair_masks_by_sequence(nested, lengths, key_lengths)
    return pad_last(parts, PAIR_MASK, limits)


def _pair_masks_by_sequence(
    nested: Nested, lengths: list[int], key_lengths: list[int]
) -> list[Bools]:
    """Split a mask over sequences of different lengths; each has its own [H or 1][S_i][T_i]."""
    _check_count(PAIR_MASK, nested.counts[0][0], len(lengths))
    heads = iter(nested.counts[1])
    query_counts, key_counts = iter(nested.counts[2]), iter(nested.counts[3])
    parts, start = [], 0
    for i, (length, keys) in enumerate(zip(lengths, key_lengths, strict=True)):
        count = next(heads)
        rows = [next(query_counts) for _ in range(count)]
        widths = [next(key_counts) for _ in range(sum(rows))]
        if set(rows) != {length} or set(widths) != {keys}:
            found = f"[{count}][{_sizes(rows)}][{_sizes(widths)}]"
            raise InvalidInput(
                f"{PAIR_MASK}[{i}]: expected [H or 1][{length}][{keys}], got {found}"
            )
        size = count * length * keys
        parts.append(nested.values[start : start + size].reshape(count, length, keys))
        start += size
    if len({part.shape[0] for part in parts}) > 1:
        raise InvalidInput(
            f"{PAIR_MASK}: expected the same number of heads for every sequence, got"
            f" {' and '.join(map(str, sorted({part.shape[0] for part in parts})))}"
        )
    return parts


def _sizes(counts: list[int]) -> str:
    """Show how long arrays are: all alike, or from the shortest to the longest."""
    least, most = min(counts, default=0), max(counts, default=0)
    return f"{least}" if least == most else f"{least} to {most}"


def _head_mask(reader: Reader, root: dict[str, Node]) -> Floats | None:
    if HEAD_MASK not in root:
        return None
    nested = reader.floats(root[HEAD_MASK], HEAD_MASK)
    if nested.rank > 2 or nested.shape is None:
        found = "rows of unequal length" if nested.shape is None else _axes(nested.rank)
        raise InvalidInput(f"{HEAD_MASK}: expected [H] or [B][H], got {found}")
    return nested.values.reshape(nested.shape)


def _check_axes(nested: Nested, name: str, batch: str, axes: str, *, single: bool) -> None:
    """Refuse another number of axes than `axes`, before which many sequences have `batch`."""
    expected, beside = (axes, "[S][E]") if single else (batch + axes, "[B][S][E]")
    if nested.rank != expected.count("["):
        raise InvalidInput(
            f"{name}: expected {expected} beside {EMBEDDINGS} {beside}, got {_axes(nested.rank)}"
        )


def _axes(rank: int) -> str:
    """Show how deep arrays are nested."""
    return "[]" * rank + (" (one level of arrays)" if rank == 1 else f" ({rank} levels of arrays)")


def _check_lengths(
    name: str, found: list[int], expected: list[int], what: str, *, single: bool
) -> None:
    """Refuse sequences of other lengths; `what` says of what each has as many as expected."""
    _check_count(name, len(found), len(expected))
    for i, (have, want) in enumerate(zip(found, expected, strict=True)):
        if have != want:
            place = "" if single else f"[{i}]"
            raise InvalidInput(f"{name}{place}: expected {want} {what}, got {have}")


def _check_count(name: str, found: int, expected: int) -> None:
    if found != expected:
        raise InvalidInput(f"{name}: expected {expected} sequences as in embeddings, got {found}")
