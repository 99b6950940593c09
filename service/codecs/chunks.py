"""Large answers in pieces, none of which holds the interpreter's lock for long."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

Chunk = bytes | memoryview

_NUMBERS: Final = 64 * 1024
"""Numbers written at a time; orjson takes about 3 ms for so many."""

_BYTES: Final = 1024 * 1024
"""Bytes handed to the connection at a time."""

_DTYPES: Final = {"float32": "F32", "int64": "I64"}


def json_array(array: npt.NDArray[Any]) -> Iterator[Chunk]:
    """Give an array as nested JSON; floats in their shortest form, non-finite ones as null."""
    if array.size <= _NUMBERS:
        yield _dumps(array)
        return
    each = array[0].size
    step = _NUMBERS // each
    yield b"["
    for start in range(0, len(array), max(1, step)):
        if start:
            yield b","
        if step:
            yield memoryview(_dumps(array[start : start + step]))[1:-1]
        else:
            yield from json_array(array[start])
    yield b"]"


def raw(array: npt.NDArray[Any]) -> Iterator[Chunk]:
    """Give an array's bytes, row-major and little-endian."""
    if array.nbytes <= _BYTES:
        yield array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        return
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    view = little.reshape(-1).view(np.uint8).data
    for start in range(0, len(view), _BYTES):
        yield view[start : start + _BYTES]


def safetensors(
    tensors: Mapping[str, Sequence[npt.NDArray[Any]]], metadata: Mapping[str, str]
) -> tuple[int, Iterator[Chunk]]:
    """
    Return the length of a safetensors file, and the file in pieces.

    Each tensor is given in parts, one or more, that follow each other on its first axis.

    An 8-byte header length, a JSON header, then the tensors
    (https://github.com/huggingface/safetensors#format); the library can write
    it only as one copy of everything.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, parts in tensors.items():
        start, end = end, end + sum(part.nbytes for part in parts)
        header[name] = {
            "dtype": _DTYPES[parts[0].dtype.name],
            "shape": [sum(map(len, parts)), *parts[0].shape[1:]],
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def pieces() -> Iterator[Chunk]:
        yield len(text).to_bytes(8, "little") + text
        for parts in tensors.values():
            for part in parts:
                yield from raw(part)

    return 8 + len(text) + end, pieces()


def gathered(pieces: Iterator[Chunk]) -> Iterator[bytes]:
    """Give the same bytes in fewer pieces of some size."""
    waiting: list[Chunk] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= _BYTES // 4:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def _dumps(array: npt.NDArray[Any]) -> bytes:
    return orjson.dumps(np.ascontiguousarray(array), option=orjson.OPT_SERIALIZE_NUMPY)
