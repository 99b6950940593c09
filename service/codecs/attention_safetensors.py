"""
`POST /v1/attention` in safetensors: raw tensors in, raw tensors out.

Sequences of different lengths lie one after the other: `embeddings` [sum of
lengths, E] beside `lengths` [B], whole numbers; so do `positions` [sum of lengths] and both
memories.  The answer is packed the same way, its weights as `attention_weights.0`,
`attention_weights.1` and so on.  Options may stand in the
metadata of the file, as texts: see `options.from_texts`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from service.codecs.chunks import Chunk, safetensors
from service.codecs.datatypes import (
    BOOL,
    FP32,
    INPUTS,
    INTEGERS,
    check_datatype,
    from_bytes,
)
from service.codecs.names import HEADS, check_names
from service.codecs.options import checked, combined, from_texts
from service.codecs.safetensors_reader import RawTensor, SafetensorsFile, read_file
from service.codecs.size import Size
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
from service.inference.calls import Answer, Bools, Floats, Options
from service.inference.tensors import Tensors
from service.inference.validation import Limits, check_size, pad, pad_last

MEDIA_TYPE: Final = "application/x-safetensors"
LENGTHS: Final = "lengths"
MEMORY_LENGTHS: Final = "memory_lengths"
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

_KEYS: Final = (*INPUTS, LENGTHS, MEMORY_LENGTHS)

_PADDING: Final = 64
"""
Sequences that lie one after the other are padded.  Packed calls count so many times their
bytes, so that those of more than 64 KiB are padded in a thread; less becomes 16 MiB at most.
"""

Read = dict[str, RawTensor]


def decode(
    body: bytes, query: Mapping[str, object], limits: Limits, timeout_s: float | None = None
) -> tuple[Tensors, Options]:
    """
    Return a body's tensors and options; those stand in the query, in its metadata, or in both.

    `timeout_s` is the time limit of a call that names none.

    Raises:
        InvalidInput: the body is not safetensors of the documented form, or contradicts the
            query.
        TooLarge: its header is longer, or has more tensors, than that of a call within the
            limits, which is found before it is parsed; or padding it would go above a limit.
    """
    file = load_file(body, limits)
    options = options_of(file, query, timeout_s)
    return tensors_of(file, limits), options


def load_file(body: bytes, limits: Limits) -> SafetensorsFile:
    """
    Return the tensors in a body as views of it, and its metadata; no name is checked yet.

    Raises:
        InvalidInput: the body is not safetensors, or a name stands there twice.
        TooLarge: see `decode`.
    """
    try:
        return read_file(body, len(_KEYS) + limits.max_rows)
    except InvalidInput:
        if body.lstrip()[:1] != b"{":
            raise
        raise InvalidInput(
            "body: expected safetensors, got JSON: send Content-Type: application/json with it"
        ) from None


def options_of(
    file: SafetensorsFile, query: Mapping[str, object], timeout_s: float | None
) -> Options:
    """
    Return the options of a call: see `decode`.

    Raises:
        InvalidInput: one is unknown or wrong, or query and metadata contradict each other.
    """
    own = ((key, text) for key, text in file.metadata.items() if key != _FORMAT)
    given = from_texts(own, "metadata")
    return checked(combined(query, given, "metadata and query"), timeout_s)


def size_of(file: SafetensorsFile) -> Size:
    """Return how much work `tensors_of` is."""
    content_bytes = sum(len(tensor.data) for tensor in file.tensors.values())
    return Size(raw_bytes=content_bytes * (_PADDING if LENGTHS in file.tensors else 1))


def tensors_of(file: SafetensorsFile, limits: Limits) -> Tensors:
    """
    Return the tensors of a call.

    Raises:
        InvalidInput: a name is unknown, or a tensor is not as documented.
        TooLarge: padding them would go above a limit.
    """
    tensors = file.tensors
    packed = LENGTHS in tensors
    names = set(tensors)
    known: tuple[str, ...] = _KEYS
    if packed:
        count = tensors[LENGTHS].count
        check_size(LENGTHS, count, 1, limits)
        names -= {f"{PAIR_MASK}.{i}" for i in range(count)}
        known += (f"{PAIR_MASK}.0",)
    else:
        of_packed = (name for name in tensors if name.startswith((MEMORY_LENGTHS, f"{PAIR_MASK}.")))
        if (name := next(of_packed, None)) is not None:
            raise InvalidInput(f"{LENGTHS}: expected beside {name[:64]}, got none")
    check_names((name for name in tensors if name in names), known, "body")
    if EMBEDDINGS not in tensors:
        raise InvalidInput(f"{EMBEDDINGS}: expected a tensor of that name, got {_listed(tensors)}")
    return _packed(tensors, limits) if packed else _dense(tensors)


def encode(name: str, version: int, answer: Answer) -> tuple[int, Iterator[Chunk]]:
    """
    Return the answer's length as safetensors, and the answer in pieces.

    It is packed when its sequences differ in length.  Its metadata has model and version, and
    names a subset of heads as the query does: `0,3`.
    """
    tensors: dict[str, Sequence[npt.NDArray[Any]]]
    if answer.lengths is None and answer.key_lengths is None:
        tensors = {OUTPUT: [answer.output]}
        if answer.attention_weights is not None:
            tensors[ATTENTION_WEIGHTS] = [answer.attention_weights]
        if answer.extra_weights is not None:
            tensors[EXTRA_WEIGHTS] = [answer.extra_weights]
    else:
        outputs = answer.outputs()
        tensors = {
            OUTPUT: outputs,
            LENGTHS: [np.array([len(output) for output in outputs], np.int64)],
        }
        for i, weights in enumerate(answer.weights()):
            tensors[f"{ATTENTION_WEIGHTS}.{i}"] = [weights]
        for i, weights in enumerate(answer.weights_of_extra_keys()):
            tensors[f"{EXTRA_WEIGHTS}.{i}"] = [weights]
    metadata = {"model": name, "version": str(version)}
    if answer.heads is not None:
        metadata[HEADS] = ",".join(map(str, answer.heads))
    return safetensors(tensors, metadata)


def _dense(tensors: Read) -> Tensors:
    return Tensors(**{name: _array(tensor, name) for name, tensor in tensors.items()})


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
    value_memory = None
    if VALUE_MEMORY in tensors:
        value_memory, _ = _unpack(tensors[VALUE_MEMORY], VALUE_MEMORY, key_lengths, limits)
    return Tensors(
        embeddings,
        memory,
        _one_a_token(tensors, ATTEND_MASK, key_lengths, limits),
        _packed_pair_mask(tensors, lengths, key_lengths, limits),
        _array(tensors[HEAD_MASK], HEAD_MASK) if HEAD_MASK in tensors else None,
        true_lengths,
        memory_lengths,
        value_memory,
        _one_a_token(tensors, POSITIONS, lengths, limits),
    )


def _one_a_token(
    tensors: Read, name: str, lengths: list[int], limits: Limits
) -> npt.NDArray[Any] | None:
    """Return a tensor [sum of lengths] as a padded block [B, longest]; None = there is none."""
    if name not in tensors:
        return None
    packed = _array(tensors[name], name)
    if packed.shape != (sum(lengths),):
        raise InvalidInput(
            f"{name}: expected [{sum(lengths)}], the sum of the lengths, got {list(packed.shape)}"
        )
    return pad_last(np.split(packed, np.cumsum(lengths)[:-1]), name, limits)


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
    masks: list[Bools] = [_array(tensors[name], name, BOOL) for name in names]
    for name, mask, length, keys in zip(names, masks, lengths, key_lengths, strict=True):
        if mask.ndim != 3 or mask.shape[1:] != (length, keys) or len(mask) != len(masks[0]):
            heads = "H or 1" if mask is masks[0] or masks[0].ndim != 3 else len(masks[0])
            raise InvalidInput(
                f"{name}: expected [{heads}, {length}, {keys}], got {list(mask.shape)}"
            )
    return pad_last(masks, PAIR_MASK, limits)


def _unpack(
    tensor: RawTensor, name: str, lengths: list[int], limits: Limits
) -> tuple[Floats, npt.NDArray[np.int64] | None]:
    floats: Floats = _array(tensor, name)
    if floats.ndim != 2 or len(floats) != sum(lengths):
        raise InvalidInput(
            f"{name}: expected [{sum(lengths)}, E], the sum of the lengths first,"
            f" got {list(floats.shape)}"
        )
    return pad(floats, lengths, name, limits)


def _lengths(tensor: RawTensor, name: str) -> list[int]:
    datatype = _datatype(tensor)
    if datatype not in INTEGERS or len(tensor.shape) != 1:
        raise InvalidInput(
            f"{name}: expected whole numbers [B], such as I64, got {tensor.dtype}"
            f" {list(tensor.shape)}"
        )
    numbers: list[int] = np.frombuffer(tensor.data, INTEGERS[datatype]).tolist()
    odd = next((i for i, length in enumerate(numbers) if length < 1), None)
    if odd is not None or not numbers:
        place = name if odd is None else f"{name}[{odd}]"
        found = "none" if odd is None else numbers[odd]
        raise InvalidInput(f"{place}: expected at least one length, each at least 1, got {found}")
    return numbers


def _array(tensor: RawTensor, name: str, wanted: str | None = None) -> npt.NDArray[Any]:
    """Return a tensor in the datatype that the layer gets of that name, or in `wanted`."""
    wanted, datatype = wanted or INPUTS[name], _datatype(tensor)
    check_datatype(datatype, wanted, name, _SPELLING)
    return from_bytes(tensor.data, 0, datatype, tensor.shape, name, wanted)


def _datatype(tensor: RawTensor) -> str:
    """Return the protocol's name of a datatype; the format's own where the protocol has none."""
    return _DATATYPES.get(tensor.dtype, tensor.dtype)


def _listed(tensors: Read) -> str:
    return ", ".join(repr(name[:64]) for name in list(tensors)[:8]) or "none"
