"""
`POST /v1/attention` in safetensors: raw tensors in, raw tensors out.

Sequences of different lengths lie one after the other: `embeddings` [sum of
lengths, E] beside `lengths` INT64 [B].  The answer is packed the same way, its
weights as `attention_weights.0`, `attention_weights.1` and so on.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from service.codecs.checks import check_known
from service.codecs.chunks import Chunk, safetensors
from service.codecs.offload import Size
from service.codecs.options import checked
from service.codecs.safetensors_reader import RawTensor, read_file
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
_KEYS: Final = (EMBEDDINGS, MEMORY, ATTEND_MASK, PAIR_MASK, HEAD_MASK, LENGTHS, MEMORY_LENGTHS)

_PADDING: Final = 64
"""
Sequences that lie one after the other are padded.  Packed calls count so many times their
bytes, so that those of more than 64 KiB are padded in a thread; less becomes 16 MiB at most.
"""

_DTYPES: Final = {
    "BOOL": np.dtype("?"),
    "F16": np.dtype("<f2"),
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (4, 8)},
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
}

Read = dict[str, npt.NDArray[Any]]


def decode(body: bytes, options: Mapping[str, object], limits: Limits) -> tuple[Tensors, Options]:
    """
    Return a body's tensors; the options stand outside it.

    Raises:
        InvalidInput: the body is not safetensors of the documented form.
        TooLarge: its header is longer, or has more tensors, than that of a call within the
            limits, which is found before it is parsed; or padding it would go above a limit.
    """
    return tensors_of(load_tensors(body, limits), limits), checked(options)


def load_tensors(body: bytes, limits: Limits) -> Read:
    """
    Return the tensors in a body, by name, as views of it; the names are not checked yet.

    Raises:
        InvalidInput: the body is not safetensors, or a name stands there twice.
        TooLarge: see `decode`.
    """
    file = read_file(body, len(_KEYS) + limits.max_rows)
    return {name: _array(name, tensor) for name, tensor in file.tensors.items()}


def size_of(tensors: Read) -> Size:
    """Return how much work `tensors_of` is."""
    content_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return Size(raw_bytes=content_bytes * (_PADDING if LENGTHS in tensors else 1))


def tensors_of(tensors: Read, limits: Limits) -> Tensors:
    """
    Return the tensors of a call.

    Raises:
        InvalidInput: a name is unknown, or a tensor is not as documented.
        TooLarge: padding them would go above a limit.
    """
    packed = LENGTHS in tensors
    names = set(tensors)
    known: tuple[str, ...] = _KEYS
    if packed:
        count = tensors[LENGTHS].size
        check_size(LENGTHS, count, 1, limits)
        names -= {f"{PAIR_MASK}.{i}" for i in range(count)}
        known += (f"{PAIR_MASK}.0",)
    check_known((name for name in tensors if name in names), known, "body")
    if EMBEDDINGS not in tensors:
        raise InvalidInput(f"{EMBEDDINGS}: expected a tensor of that name, got none")
    if MEMORY_LENGTHS in tensors and not packed:
        raise InvalidInput(f"{MEMORY_LENGTHS}: expected {LENGTHS} beside it, got none")
    return _packed(tensors, limits) if packed else _dense(tensors)


def encode(name: str, version: int, answer: Answer) -> tuple[int, Iterator[Chunk]]:
    """
    Return the answer's length as safetensors, and the answer in pieces.

    It is packed when its sequences differ in length.
    """
    tensors: dict[str, Sequence[npt.NDArray[Any]]]
    if answer.lengths is None and answer.key_lengths is None:
        tensors = {OUTPUT: [answer.output]}
        if answer.attention_weights is not None:
            tensors[ATTENTION_WEIGHTS] = [answer.attention_weights]
    else:
        outputs = answer.outputs()
        tensors = {
            OUTPUT: outputs,
            LENGTHS: [np.array([len(output) for output in outputs], np.int64)],
        }
        for i, weights in enumerate(answer.weights()):
            tensors[f"{ATTENTION_WEIGHTS}.{i}"] = [weights]
    return safetensors(tensors, {"model": name, "version": str(version)})


def _dense(tensors: Read) -> Tensors:
    return Tensors(
        _floats(tensors[EMBEDDINGS], EMBEDDINGS),
        _optional_floats(tensors, MEMORY),
        _optional_bools(tensors, ATTEND_MASK),
        _optional_bools(tensors, PAIR_MASK),
        _optional_floats(tensors, HEAD_MASK),
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
    attend_mask = _optional_bools(tensors, ATTEND_MASK)
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
        _optional_floats(tensors, HEAD_MASK),
        true_lengths,
        memory_lengths,
    )


def _packed_pair_mask(
    tensors: Read, lengths: list[int], key_lengths: list[int], limits: Limits
) -> Bools | None:
    """Return `pair_mask.0` [H or 1, S_0, T_0], `pair_mask.1` … as one padded mask."""
    if PAIR_MASK in tensors:
        raise InvalidInput(f"{PAIR_MASK}: expected {PAIR_MASK}.0, {PAIR_MASK}.1 … beside {LENGTHS}")
    names = [f"{PAIR_MASK}.{i}" for i in range(len(lengths))]
    given = [name for name in names if name in tensors]
    if not given:
        return None
    if given != names:
        missing = next(name for name in names if name not in tensors)
        raise InvalidInput(f"{missing}: expected one mask a sequence, got none")
    masks = [_bools(tensors[name], name) for name in names]
    for name, mask, length, keys in zip(names, masks, lengths, key_lengths, strict=True):
        if mask.ndim != 3 or mask.shape[1:] != (length, keys) or len(mask) != len(masks[0]):
            raise InvalidInput(
                f"{name}: expected [H or 1, {length}, {keys}], got {list(mask.shape)}"
            )
    return pad_last(masks, PAIR_MASK, limits)


def _unpack(
    tensor: npt.NDArray[Any], name: str, lengths: list[int], limits: Limits
) -> tuple[Floats, npt.NDArray[np.int64] | None]:
    floats = _floats(tensor, name)
    if floats.ndim != 2 or len(floats) != sum(lengths):
        raise InvalidInput(
            f"{name}: expected [{sum(lengths)}, E], the sum of the lengths first,"
            f" got {list(floats.shape)}"
        )
    return pad(floats, lengths, name, limits)


def _lengths(tensor: npt.NDArray[Any], name: str) -> list[int]:
    if tensor.dtype != np.int64 or tensor.ndim != 1:
        raise InvalidInput(f"{name}: expected INT64 [B], got {_described(tensor)}")
    if tensor.size < 1 or int(tensor.min()) < 1:
        raise InvalidInput(f"{name}: expected at least one length, each at least 1")
    return [int(length) for length in tensor]


def _optional_floats(tensors: Read, name: str) -> Floats | None:
    return _floats(tensors[name], name) if name in tensors else None


def _optional_bools(tensors: Read, name: str) -> Bools | None:
    return _bools(tensors[name], name) if name in tensors else None


def _floats(tensor: npt.NDArray[Any], name: str) -> Floats:
    if tensor.dtype != np.float32:
        raise InvalidInput(f"{name}: expected F32, got {_described(tensor)}")
    return tensor


def _bools(tensor: npt.NDArray[Any], name: str) -> Bools:
    if tensor.dtype != np.bool_:
        raise InvalidInput(f"{name}: expected BOOL, got {_described(tensor)}")
    if tensor.view(np.uint8).max(initial=0) > 1:
        raise InvalidInput(f"{name}: expected bytes 0 and 1, got another")
    return tensor


def _described(tensor: npt.NDArray[Any]) -> str:
    return f"{tensor.dtype.name} {list(tensor.shape)}"


def _array(name: str, tensor: RawTensor) -> npt.NDArray[Any]:
    if tensor.dtype not in _DTYPES:
        raise InvalidInput(f"{name[:64]}: dtype {tensor.dtype} is not read")
    flat = np.frombuffer(tensor.data, _DTYPES[tensor.dtype])
    array = flat.reshape(tensor.shape)
    return array if array.flags.aligned else array.copy()
