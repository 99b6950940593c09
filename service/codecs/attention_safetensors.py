"""
`POST /v1/attention` in safetensors: raw tensors in, raw tensors out.

Sequences of different lengths lie one after the other: `embeddings` [sum of
lengths, E] beside `lengths` [B], whole numbers.  The answer is packed the same way, its
weights as `attention_weights.0`, `attention_weights.1` and so on.  Options may stand in the
metadata of the file, as texts: see `options.from_texts`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from service.codecs.chunks import Chunk, safetensors
from service.codecs.datatypes import BOOL, FP32, INPUTS, INTEGERS, check_datatype, from_bytes
from service.codecs.json_reader import ExactReader
from service.codecs.names import HEADS, check_names
from service.codecs.options import checked, combined, from_texts
from service.contract import (
    ATTEND_MASK,
    ATTENTION_WEIGHTS,
    EMBEDDINGS,
    HEAD_MASK,
    MEMORY,
    OUTPUT,
    PAIR_MASK,
)
from service.errors import InvalidInput
from service.inference.calls import Answer, Bools, Floats, Options
from service.inference.validation import Limits, Tensors, check_size, pad, pad_last

MEDIA_TYPE: Final = "application/x-safetensors"
LENGTHS: Final = "lengths"
MEMORY_LENGTHS: Final = "memory_lengths"
_LENGTH_BYTES: Final = 8
"""At the start of a file: how long its header is."""

_FORMAT: Final = "format"
"""What the safetensors library itself writes into the metadata."""

_SPELLING: Final = {
    FP32: "F32",
    "FP16": "F16",
    "BF16": "BF16",
    "FP64": "F64",
    **{name: name.replace("UINT", "U").replace("INT", "I") for name in INTEGERS},
    BOOL: "BOOL",
}
"""How the format spells the datatypes."""

_DATATYPES: Final = {spelling: name for name, spelling in _SPELLING.items()}

_KEYS: Final = (EMBEDDINGS, MEMORY, ATTEND_MASK, PAIR_MASK, HEAD_MASK, LENGTHS, MEMORY_LENGTHS)

Read = dict[str, "_Raw"]


def decode(
    body: bytes, query: Mapping[str, object], limits: Limits, timeout_s: float | None = None
) -> tuple[Tensors, Options]:
    """
    Return a body's tensors and options; those stand in the query, in its metadata, or in both.

    `timeout_s` is the time limit of a call that names none.

    Raises:
        InvalidInput: the body is not safetensors of the documented form, or contradicts the
            query.
        TooLarge: padding it would go above a limit.
    """
    try:
        entries = deserialize(body)  # type: ignore[no-untyped-call]
    except (SafetensorError, TypeError, ValueError) as error:
        is_json = body.lstrip()[:1] == b"{"
        found = "JSON: send Content-Type: application/json with it" if is_json else _reason(error)
        raise InvalidInput(f"body: expected safetensors, got {found}") from None
    given = from_texts(_metadata(body).items(), "metadata")
    options = checked(combined(query, given, "metadata and query"), timeout_s)
    tensors = {
        name: _Raw(_DATATYPES.get(e["dtype"], e["dtype"]), tuple(e["shape"]), e["data"])
        for name, e in entries
    }
    packed = LENGTHS in tensors
    known: tuple[str, ...] = _KEYS
    if packed:
        check_size(LENGTHS, tensors[LENGTHS].count, 1, limits)
        known += tuple(f"{PAIR_MASK}.{i}" for i in range(tensors[LENGTHS].count))
    else:
        of_packed = (name for name in tensors if name.startswith((MEMORY_LENGTHS, f"{PAIR_MASK}.")))
        if (name := next(of_packed, None)) is not None:
            raise InvalidInput(f"{LENGTHS}: expected beside {name[:64]}, got none")
    check_names(tensors, known, "body")
    if EMBEDDINGS not in tensors:
        raise InvalidInput(f"{EMBEDDINGS}: expected a tensor of that name, got {_listed(tensors)}")
    return (_packed(tensors, limits) if packed else _dense(tensors)), options


def encode(name: str, version: int, answer: Answer) -> tuple[int, Iterator[Chunk]]:
    """
    Return the answer's length as safetensors, and the answer in pieces.

    It is packed when its sequences differ in length.  Its metadata has model and version, and
    names a subset of heads as the query does: `0,3`.
    """
    tensors: dict[str, npt.NDArray[Any]]
    if answer.lengths is None and answer.key_lengths is None:
        tensors = {OUTPUT: answer.output}
        if answer.attention_weights is not None:
            tensors[ATTENTION_WEIGHTS] = answer.attention_weights
    else:
        outputs = answer.outputs()
        tensors = {
            OUTPUT: np.concatenate(outputs),
            LENGTHS: np.array([len(output) for output in outputs], np.int64),
        }
        for i, weights in enumerate(answer.weights()):
            tensors[f"{ATTENTION_WEIGHTS}.{i}"] = weights
    metadata = {"model": name, "version": str(version)}
    if answer.heads is not None:
        metadata[HEADS] = ",".join(map(str, answer.heads))
    return safetensors(tensors, metadata)


def _dense(tensors: Read) -> Tensors:
    return Tensors(
        _floats(tensors[EMBEDDINGS], EMBEDDINGS),
        _optional(tensors, MEMORY),
        _optional(tensors, ATTEND_MASK),
        _optional(tensors, PAIR_MASK),
        _optional(tensors, HEAD_MASK),
    )


def _packed(tensors: Read, limits: Limits) -> Tensors:
    lengths = _lengths(tensors[LENGTHS], LENGTHS)
    embeddings, true_lengths = _unpack(tensors[EMBEDDINGS], EMBEDDINGS, lengths, limits)
    key_lengths, memory, memory_lengths = lengths, None, None
    if MEMORY in tensors:
        if MEMORY_LENGTHS not in tensors:
            raise InvalidInput(
                f"{MEMORY_LENGTHS}: expected beside {LENGTHS} and {MEMORY}, got none"
            )
        key_lengths = _lengths(tensors[MEMORY_LENGTHS], MEMORY_LENGTHS)
        if len(key_lengths) != len(lengths):
            raise InvalidInput(
                f"{MEMORY_LENGTHS}: expected {len(lengths)} lengths, got {len(key_lengths)}"
            )
        memory, memory_lengths = _unpack(tensors[MEMORY], MEMORY, key_lengths, limits)
    attend_mask = _optional(tensors, ATTEND_MASK)
    if attend_mask is not None:
        if attend_mask.shape != (sum(key_lengths),):
            raise InvalidInput(
                f"{ATTEND_MASK}: expected [{sum(key_lengths)}], the sum of the lengths,"
                f" got {list(attend_mask.shape)}"
            )
        parts = np.split(attend_mask, np.cumsum(key_lengths)[:-1])
        attend_mask = pad_last(parts, ATTEND_MASK, limits)
    return Tensors(
        embeddings,
        memory,
        attend_mask,
        _packed_pair_mask(tensors, lengths, key_lengths, limits),
        _optional(tensors, HEAD_MASK),
        true_lengths,
        memory_lengths,
    )


def _packed_pair_mask(
    tensors: Read, lengths: list[int], key_lengths: list[int], limits: Limits
) -> Bools | None:
    """Return `pair_mask.0` [H or 1, S_0, T_0], `pair_mask.1` … as one padded mask."""
    if PAIR_MASK in tensors:
        raise InvalidInput(
            f"{PAIR_MASK}: expected {PAIR_MASK}.0, {PAIR_MASK}.1 … beside {LENGTHS}, one a"
            " sequence, got one for all"
        )
    names = [f"{PAIR_MASK}.{i}" for i in range(len(lengths))]
    given = [name for name in names if name in tensors]
    if not given:
        return None
    if given != names:
        missing = next(name for name in names if name not in tensors)
        raise InvalidInput(f"{missing}: expected one mask for each sequence, got none")
    masks = [_bools(tensors[name], name) for name in names]
    for name, mask, length, keys in zip(names, masks, lengths, key_lengths, strict=True):
        if mask.ndim != 3 or mask.shape[1:] != (length, keys) or len(mask) != len(masks[0]):
            heads = "H or 1" if mask is masks[0] or masks[0].ndim != 3 else len(masks[0])
            raise InvalidInput(
                f"{name}: expected [{heads}, {length}, {keys}], got {list(mask.shape)}"
            )
    return pad_last(masks, PAIR_MASK, limits)


def _unpack(
    tensor: "_Raw", name: str, lengths: list[int], limits: Limits
) -> tuple[Floats, npt.NDArray[np.int64] | None]:
    floats = _floats(tensor, name)
    if floats.ndim != 2 or len(floats) != sum(lengths):
        raise InvalidInput(
            f"{name}: expected [{sum(lengths)}, E], the sum of the lengths first,"
            f" got {list(floats.shape)}"
        )
    return pad(floats, lengths, name, limits)


def _lengths(tensor: "_Raw", name: str) -> list[int]:
    if tensor.datatype not in INTEGERS or len(tensor.shape) != 1:
        raise InvalidInput(f"{name}: expected whole numbers [B], such as I64, got {tensor}")
    numbers: list[int] = np.frombuffer(tensor.data, INTEGERS[tensor.datatype]).tolist()
    odd = next((i for i, length in enumerate(numbers) if length < 1), None)
    if odd is not None or not numbers:
        place = name if odd is None else f"{name}[{odd}]"
        found = "none" if odd is None else numbers[odd]
        raise InvalidInput(f"{place}: expected at least one length, each at least 1, got {found}")
    return numbers


def _optional(tensors: Read, name: str) -> npt.NDArray[Any] | None:
    if name not in tensors:
        return None
    return _bools(tensors[name], name) if INPUTS[name] == BOOL else _floats(tensors[name], name)


def _floats(tensor: "_Raw", name: str) -> Floats:
    check_datatype(tensor.datatype, FP32, name, _SPELLING)
    return from_bytes(tensor.data, 0, tensor.datatype, tensor.shape, name, FP32)


def _bools(tensor: "_Raw", name: str) -> Bools:
    check_datatype(tensor.datatype, BOOL, name, _SPELLING)
    return from_bytes(tensor.data, 0, tensor.datatype, tensor.shape, name, BOOL)


@dataclass(frozen=True)
class _Raw:
    """A tensor as it came."""

    datatype: str
    """The protocol's name; the format's own where the protocol has none."""
    shape: tuple[int, ...]
    data: bytearray

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{_SPELLING.get(self.datatype, self.datatype)} {list(self.shape)}"


def _metadata(body: bytes) -> dict[str, str]:
    """Return what the header of a right safetensors body says of all tensors together."""
    size = int.from_bytes(body[:_LENGTH_BYTES], "little")
    header = ExactReader(body[_LENGTH_BYTES : _LENGTH_BYTES + size]).root()
    metadata = header.get("__metadata__") or {}
    return {key: text for key, text in metadata.items() if key != _FORMAT}


def _listed(tensors: Read) -> str:
    return ", ".join(repr(name[:64]) for name in list(tensors)[:8]) or "none"


def _reason(error: Exception) -> str:
    text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return f"other bytes: {text}"
