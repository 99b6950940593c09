"""
Read safetensors without copying: each tensor is a view of the body.

The format is an 8-byte header length, a JSON header, then the tensors without holes
(https://github.com/huggingface/safetensors#format).  The library reads it only by copying
every tensor with the interpreter's lock held (18 to 36 ms for 60 MB), and takes one of two
tensors of the same name in silence.
"""

import math
from dataclasses import dataclass
from typing import Final

from service.codecs.checks import kind_of
from service.codecs.json_reader import ExactReader
from service.errors import InvalidInput, TooLarge

ITEM_BYTES: Final = {
    **dict.fromkeys(("BOOL", "I8", "U8"), 1),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64"), 8),
}
"""The datatypes that are known, and how many bytes a number of each takes."""

_METADATA: Final = "__metadata__"
_MAX_RANK: Final = 8
_LENGTH_BYTES: Final = 8
"""Of the header's length, with which a file begins."""
_ENTRY_BYTES: Final = 256
"""What the header may hold for each tensor; an entry takes about half of it."""
_FREE_BYTES: Final = 8 * 1024
"""What it may hold beside: metadata, and spaces."""
_FREE_OBJECTS: Final = 64
"""Braces that it may hold beside those of its tensors: its own, and what metadata spells out."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor in a body: little-endian and row-major."""

    dtype: str
    """As the header has it; its size is only known to be right for one of `ITEM_BYTES`."""
    shape: tuple[int, ...]
    start: int
    data: memoryview

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """What a body holds."""

    tensors: dict[str, RawTensor]
    metadata: dict[str, str]


def read_file(body: bytes, most: int) -> SafetensorsFile:
    """
    Return the tensors in a body, at most so many, and its metadata.

    The length of the header and the number of its objects are looked at before it is parsed.

    Raises:
        InvalidInput: the body is not safetensors, or a name stands there twice.
        TooLarge: the header is too long for so many tensors, or has more.
    """
    header = body[_LENGTH_BYTES : _LENGTH_BYTES + _header_bytes(body, most)]
    if (found := header.count(b"{")) > most + _FREE_OBJECTS:
        raise TooLarge(f"body: at most {most} tensors in safetensors, got {found - 1}")
    try:
        entries = ExactReader(header).root()
    except InvalidInput as error:
        raise _mistake(f"a header in JSON; {str(error).removeprefix('body: ')}") from None
    metadata = entries.pop(_METADATA, None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _mistake(f"{_METADATA}: an object of strings, got another")
    if len(entries) > most:
        raise TooLarge(f"body: at most {most} tensors in safetensors, got {len(entries)}")
    content = memoryview(body)[_LENGTH_BYTES + len(header) :]
    tensors = {name: _tensor(name[:64], entry, content) for name, entry in entries.items()}
    end = 0
    for name, tensor in sorted(
        tensors.items(), key=lambda item: (item[1].start, len(item[1].data))
    ):
        if tensor.start != end:
            raise _mistake(f"{name[:64]}: data from byte {end} on, got {tensor.start}")
        end += len(tensor.data)
    if end != len(content):
        raise _mistake(f"{end} bytes of tensors, got {len(content)}")
    return SafetensorsFile(tensors, metadata)


def _header_bytes(body: bytes, most: int) -> int:
    """Return the length of the header, as the first bytes say; see `read_file`."""
    size = int.from_bytes(body[:_LENGTH_BYTES], "little")
    rest = len(body) - _LENGTH_BYTES
    if rest < 0 or size > rest:
        raise _mistake(f"a header of {size} bytes, got {max(0, rest)}")
    most_bytes = _FREE_BYTES + _ENTRY_BYTES * most
    if size > most_bytes:
        raise TooLarge(
            f"body: at most {most_bytes} bytes of safetensors header for {most} tensors, got {size}"
        )
    return size


def _tensor(name: str, entry: object, content: memoryview) -> RawTensor:
    """Return what the header says of a tensor, when the content may hold it."""
    if not isinstance(entry, dict):
        raise _mistake(f"{name}: an object, got {kind_of(entry)}")
    dtype, shape = entry.get("dtype"), _sizes(entry.get("shape"))
    if not isinstance(dtype, str):
        raise _mistake(f"{name}: a dtype, got {kind_of(dtype)}")
    # No array has more bytes than an address can name, not even if one size is 0.
    is_possible = shape is not None and math.prod(max(1, size) for size in shape) < 2**60
    if shape is None or not is_possible or len(shape) > _MAX_RANK:
        raise _mistake(f"{name}: a shape of at most {_MAX_RANK} sizes, got another")
    offsets = _sizes(entry.get("data_offsets"))
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _mistake(f"{name}: data_offsets of two numbers, the lower first, got others")
    start, end = offsets
    size = math.prod(shape) * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else end - start
    if end - start != size or end > len(content):
        raise _mistake(
            f"{name}: data_offsets of {size} bytes for {dtype} {list(shape)} within the"
            f" {len(content)} that follow the header, got {start} and {end}"
        )
    return RawTensor(dtype[:64], shape, start, content[start:end])


def _sizes(value: object) -> tuple[int, ...] | None:
    """Return an array of whole numbers from 0; None = it is something else."""
    if not isinstance(value, list):
        return None
    are_sizes = all(type(size) is int and 0 <= size < 2**63 for size in value)
    return tuple(value) if are_sizes else None


def _mistake(expected: str) -> InvalidInput:
    return InvalidInput(f"body: expected safetensors: {expected}")
