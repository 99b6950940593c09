"""
The protocol's datatypes, and which of their values FP32 holds.

Raw tensors are little-endian and row-major.
"""

import math
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from service.errors import InvalidInput
from service.inference.calls import Bools, Floats

BOOL: Final = "BOOL"
FP32: Final = "FP32"
INTEGERS: Final[dict[str, np.dtype[Any]]] = {
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
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

_FP32_BITS: Final = np.uint64(24)
"""How many binary digits an FP32 number has."""


def from_bytes(
    content: memoryview | npt.NDArray[np.uint8],
    offset: int,
    datatype: str,
    shape: tuple[int, ...],
    name: str,
) -> Floats | Bools:
    """
    Return a tensor as FP32, or as bool where BOOL came, aligned for the runtime.

    FP32 that is aligned already stays where it is; `name` is the tensor's, for the messages.

    Raises:
        InvalidInput: FP32 does not hold a value, or a BOOL is neither 0 nor 1.
    """
    dtype = DTYPES[datatype]
    tensor = np.frombuffer(content, dtype, math.prod(shape), offset).reshape(shape)
    if datatype == FP32:
        return tensor if tensor.flags.aligned else tensor.copy()
    if datatype == BOOL:
        if tensor.max(initial=0) > 1:
            raise InvalidInput(f"{name}: expected bytes 0 and 1, got another")
        return tensor.view(np.bool_)
    if datatype == "BF16":
        return (tensor.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return to_floats(tensor, name)


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
            _refuse(beyond, name, "a number within FP32 (up to 3.4e38), got a larger one")
    elif numbers.dtype.kind in "iu" and numbers.dtype.itemsize > 2:
        rounded = _needs_more_digits(numbers)
        if rounded.any():
            _refuse(rounded, name, "a whole number that FP32 holds exactly, got another")
    return floats


def _needs_more_digits(numbers: npt.NDArray[Any]) -> Bools:
    """Say of each whole number whether it has more binary digits between its ones than FP32."""
    if numbers.dtype.kind == "i":
        # The least of all has no counterpart above zero; read as unsigned it is right again.
        sizes = np.abs(numbers.astype(np.int64)).view(np.uint64)
    else:
        sizes = numbers.astype(np.uint64)
    lowest_one = sizes & (~sizes + np.uint64(1))
    return (sizes >> _FP32_BITS) >= np.maximum(lowest_one, np.uint64(1))


def _refuse(odd: Bools, name: str, expected: str) -> NoReturn:
    place = [int(index) for index in np.unravel_index(int(odd.argmax()), odd.shape)]
    raise InvalidInput(f"{name}: expected {expected} at {place}")
