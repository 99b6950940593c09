"""
The datatypes of raw tensors: which ones are read as FP32, as a mask or as positions.

They have the protocol's names; safetensors spells them in its own way.  Raw tensors are
little-endian and row-major.  Every format reads them here, so that a tensor means the same in all.
"""

import math
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from service.contract import (
    ATTEND_MASK,
    EMBEDDINGS,
    HEAD_MASK,
    MEMORY,
    PAIR_MASK,
    POSITIONS,
    VALUE_MEMORY,
)
from service.errors import InvalidInput
from service.inference.calls import Bools, Floats

BOOL: Final = "BOOL"
FP32: Final = "FP32"
INT64: Final = "INT64"
INTEGERS: Final[dict[str, np.dtype[Any]]] = {
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    INT64: np.dtype("<i8"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
}
FLOATS: Final[dict[str, np.dtype[Any]]] = {
    FP32: np.dtype("<f4"),
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # the upper half of an FP32; numpy has no such type
    "FP64": np.dtype("<f8"),
}
NUMBERS: Final = FLOATS | INTEGERS
"""What may be sent where FP32 is expected, and how its bytes are read."""

DTYPES: Final[dict[str, np.dtype[Any]]] = NUMBERS | {BOOL: np.dtype("u1")}

MASKS: Final[dict[str, np.dtype[Any]]] = {BOOL: DTYPES[BOOL]} | INTEGERS
"""What may be sent where BOOL is expected: the integers only as 0 and 1."""

_WHOLE: Final = {INT64: INTEGERS[INT64], "INT32": INTEGERS["INT32"]}
"""What may be sent where INT64 is expected."""

_READ: Final = {FP32: NUMBERS, BOOL: MASKS, INT64: _WHOLE}

INPUTS: Final = {
    EMBEDDINGS: FP32,
    MEMORY: FP32,
    VALUE_MEMORY: FP32,
    POSITIONS: INT64,
    ATTEND_MASK: BOOL,
    PAIR_MASK: BOOL,
    HEAD_MASK: FP32,
}
"""The tensors of a call, and the datatype that the layer gets of each."""

Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

FLOAT_MASK: Final = (
    "of a float mask that is added to the scores (0 and -inf) send the booleans mask == 0"
)
"""What to do with the additive masks of PyTorch and Hugging Face."""

_FP32_BITS: Final = np.uint64(24)
"""How many binary digits an FP32 number has."""


def check_datatype(
    datatype: str, wanted: str, where: str, spelling: Mapping[str, str] | None = None
) -> None:
    """
    Return when tensors of that datatype are read where `wanted` (see `INPUTS`) is expected.

    `spelling` gives the names of a format that has its own; None = the protocol's.

    Raises:
        InvalidInput: names the tensor, its datatype and all that are read.
    """
    read = _READ[wanted]
    if datatype in read:
        return
    names = dict(spelling or {})
    others = ", ".join(names.get(name, name) for name in read if name != wanted)
    expected = f"{names.get(wanted, wanted)} (also read: {others})"
    if wanted == BOOL:
        expected = f"{names.get(BOOL, BOOL)} or whole numbers 0 and 1 ({others})"
    hint = f"; {FLOAT_MASK}" if wanted == BOOL and datatype in FLOATS else ""
    raise InvalidInput(f"{where}: expected {expected}, got {names.get(datatype, datatype)!r}{hint}")


def from_bytes(
    content: Buffer, offset: int, datatype: str, shape: tuple[int, ...], name: str, wanted: str
) -> npt.NDArray[Any]:
    """
    Return a tensor of the wanted datatype, FP32, BOOL or INT64, aligned for the runtime.

    FP32 or INT64 that is aligned already stays where it is; `name` is that of the tensor, for
    the messages.
    The datatype has been checked: see `check_datatype`.

    Raises:
        InvalidInput: FP32 does not hold a value, or one of a mask is neither 0 nor 1.
    """
    tensor = np.frombuffer(content, DTYPES[datatype], math.prod(shape), offset).reshape(shape)
    if wanted == BOOL:
        return to_bools(tensor, name)
    if datatype == wanted:
        return tensor if tensor.flags.aligned else tensor.copy()
    if wanted == INT64:
        return tensor.astype(np.int64)
    if datatype == "BF16":
        return (tensor.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return to_floats(tensor, name)


def to_bools(numbers: npt.NDArray[Any], name: str) -> Bools:
    """
    Return a mask of whole numbers as booleans.

    Raises:
        InvalidInput: the first value that is neither 0 nor 1, and its place.
    """
    if numbers.max(initial=0) > 1 or numbers.min(initial=0) < 0:
        odd = (numbers != 0) & (numbers != 1)
        _refuse(odd, name, "0 or 1", numbers)
    return numbers.view(np.bool_) if numbers.dtype.itemsize == 1 else numbers.astype(np.bool_)


def to_floats(numbers: npt.NDArray[Any], name: str) -> Floats:
    """
    Return FP16, FP64 or whole numbers as FP32.

    Raises:
        InvalidInput: a finite number is outside FP32, or a whole one would be rounded.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        floats = numbers.astype(np.float32)
    if numbers.dtype == np.float64:
        beyond = np.isinf(floats) & np.isfinite(numbers)
        if beyond.any():
            _refuse(beyond, name, "a number within FP32 (up to 3.4e38)", numbers)
    elif numbers.dtype.kind in "iu" and numbers.dtype.itemsize > 2:
        rounded = _needs_more_digits(numbers)
        if rounded.any():
            _refuse(rounded, name, "a whole number that FP32 holds exactly", numbers)
    return floats


def _needs_more_digits(numbers: npt.NDArray[Any]) -> Bools:
    """Say of each whole number whether it has more binary digits between its ones than FP32."""
    if numbers.dtype.kind == "i":
        # The least of all has no counterpart above zero; read as unsigned it is right again.
        sizes = np.abs(numbers.astype(np.int64)).view(np.uint64)
    else:
        sizes = numbers.astype(np.uint64)
    with np.errstate(over="ignore"):  # of a tensor without axes numpy would say so
        lowest_one = sizes & (~sizes + np.uint64(1))
    return (sizes >> _FP32_BITS) >= np.maximum(lowest_one, np.uint64(1))


def _refuse(odd: Bools, name: str, expected: str, numbers: npt.NDArray[Any]) -> NoReturn:
    first = int(odd.argmax())
    place = [int(index) for index in np.unravel_index(first, odd.shape)]
    raise InvalidInput(f"{name}: expected {expected}, got {numbers.reshape(-1)[first]} at {place}")
