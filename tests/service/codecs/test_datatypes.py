"""Which values of the protocol's datatypes become FP32, and how."""

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.codecs.datatypes import DTYPES, INTEGERS, NUMBERS, from_bytes, to_floats
from service.errors import InvalidInput

CODES = {
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
}
"""How Python's own `struct` calls the datatypes that it knows."""


def as_fp32(value: float) -> float | None:
    """Return a number as FP32 by Python's own means; None = it does not fit, or is rounded."""
    try:
        [single] = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return None
    return None if isinstance(value, int) and single != value else float(single)


@pytest.mark.parametrize("datatype", CODES)
@given(data=st.data())
def test_from_bytes_gives_what_struct_reads(datatype: str, data: st.DataObject) -> None:
    """Any bytes at any offset are the FP32 numbers that they mean, or the first other is named."""
    item = struct.calcsize("<" + CODES[datatype])
    raw = data.draw(st.binary(min_size=6 * item, max_size=6 * item))
    spaces = data.draw(st.integers(0, 7))
    values = struct.unpack(f"<6{CODES[datatype]}", raw)
    wanted = [as_fp32(value) for value in values]

    def read() -> Any:
        return from_bytes(
            memoryview(b" " * spaces + raw), spaces, datatype, (2, 3), "memory", "FP32"
        )

    if None in wanted:
        row, column = divmod(wanted.index(None), 3)
        with pytest.raises(
            InvalidInput, match=rf"^memory: expected a .* got .* at \[{row}, {column}\]$"
        ):
            read()
        return
    found = read()
    assert found.flags.aligned
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array(wanted, np.float32).reshape(2, 3))


@given(st.binary(min_size=12, max_size=12))
def test_from_bytes_of_bf16_gives_the_upper_halves_of_fp32(raw: bytes) -> None:
    """As tritonclient writes it: the low two bytes are cut off."""
    halves = [raw[i : i + 2] for i in range(0, 12, 2)]
    wanted = struct.unpack("<6f", b"".join(b"\0\0" + half for half in halves))

    found = from_bytes(memoryview(raw), 0, "BF16", (6,), "embeddings", "FP32")

    np.testing.assert_array_equal(found, np.array(wanted, np.float32))


@pytest.mark.parametrize("datatype", ["INT32", "INT64", "UINT32", "UINT64"])
@given(data=st.data())
def test_to_floats_takes_whole_numbers_that_fp32_holds_and_no_others(
    datatype: str, data: st.DataObject
) -> None:
    """Near powers of two, where it is decided."""
    limits = np.iinfo(INTEGERS[datatype])
    power = data.draw(st.integers(20, limits.bits - 1))
    near = data.draw(st.integers(-130, 130)) * data.draw(st.sampled_from([1, 2, 2**8, 2**30]))
    sign = data.draw(st.sampled_from([1, -1])) if limits.min < 0 else 1
    value = min(max(sign * (2**power + near), int(limits.min)), int(limits.max))
    wanted = as_fp32(value)
    numbers = np.array([0, value], INTEGERS[datatype])

    if wanted is None:
        with pytest.raises(InvalidInput, match=r"FP32 holds exactly, got -?\d+ at \[1\]"):
            to_floats(numbers, "embeddings")
    else:
        assert to_floats(numbers, "embeddings").tolist() == [0, wanted]


@pytest.mark.parametrize(
    ("value", "is_held"),
    [
        (2**24, True),
        (2**24 + 1, False),
        (2**24 + 2, True),
        (-(2**63), True),
        (-(2**63) + 1, False),
        (2**63 - 1, False),
        (2**62 + 2**39, True),
        (2**62 + 2**38, False),
    ],
)
def test_to_floats_at_the_ends_of_int64(value: int, is_held: bool) -> None:
    """24 binary digits, wherever they stand."""
    assert (as_fp32(value) is not None) is is_held

    if is_held:
        assert to_floats(np.array([value]), "x").tolist() == [value]
    else:
        with pytest.raises(InvalidInput):
            to_floats(np.array([value]), "x")


@pytest.mark.parametrize("value", [3.5e38, -1e39, 1.7e308, 3.4028235677973366e38])
def test_to_floats_refuses_finite_doubles_outside_fp32(value: float) -> None:
    """They would come out infinite."""
    doubles = np.array([[0, np.inf, np.nan], [0, value, value]])

    with pytest.raises(InvalidInput, match=r"embeddings: expected a number within FP32.*\[1, 1\]"):
        to_floats(doubles, "embeddings")


def test_to_floats_rounds_doubles_and_keeps_what_is_not_finite() -> None:
    """As numpy rounds; NaN and infinity are for the layer to spread."""
    doubles = np.array([0.1, np.nan, np.inf, -np.inf, 1e-60, 3.4028235e38])

    np.testing.assert_array_equal(to_floats(doubles, "x"), doubles.astype(np.float32))


def test_from_bytes_leaves_aligned_fp32_where_it_is() -> None:
    """The usual call copies nothing."""
    numbers = np.arange(6, dtype=np.float32)

    found = from_bytes(numbers.view(np.uint8).data, 8, "FP32", (2, 2), "embeddings", "FP32")

    assert found.tolist() == [[2, 3], [4, 5]]
    assert np.shares_memory(found, numbers)


@pytest.mark.parametrize(("raw", "wanted"), [(b"\0\1\1\0", [[False, True], [True, False]])])
def test_from_bytes_reads_bool(raw: bytes, wanted: list[Any]) -> None:
    """A byte each."""
    found = from_bytes(memoryview(raw), 0, "BOOL", (2, 2), "attend_mask", "BOOL")

    assert found.dtype == np.bool_
    assert found.tolist() == wanted


@pytest.mark.parametrize("byte", [2, 255])
def test_from_bytes_refuses_a_bool_that_is_neither(byte: int) -> None:
    """A mask never means two things."""
    with pytest.raises(InvalidInput, match=rf"attend_mask: expected 0 or 1, got {byte} at \[2\]"):
        from_bytes(memoryview(bytes([0, 1, byte])), 0, "BOOL", (3,), "attend_mask", "BOOL")


def test_datatypes_have_the_sizes_of_the_protocol() -> None:
    """Its own table, without what is not read: BYTES."""
    sizes = {name: int(name.strip("UINTFPB")) // 8 for name in NUMBERS} | {"BOOL": 1}

    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == sizes


@pytest.mark.parametrize("datatype", ["INT32", "INT64"])
@pytest.mark.parametrize("spaces", [0, 1, 4])
def test_positions_are_read_as_int64_wherever_they_lie(datatype: str, spaces: int) -> None:
    """Aligned for the runtime, also behind a header of any length."""
    numbers = np.array([[0, 2**24 - 1, -1]], INTEGERS[datatype])
    content = b" " * spaces + numbers.tobytes()

    found = from_bytes(content, spaces, datatype, (1, 3), "positions", "INT64")

    assert found.dtype == np.int64
    assert found.flags.aligned
    np.testing.assert_array_equal(found, numbers)
