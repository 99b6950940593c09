"""The two JSON readers: the same answers, and every mistake named."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.codecs.checks import kind_of
from service.codecs.json_reader import MAX_RANK, ExactReader, Nested, Reader
from service.codecs.simdjson_reader import Irregular, SimdjsonReader, read
from service.errors import InvalidInput


def floats_of(reader: Reader) -> Nested:
    """Decode `{"x": …}` as numbers."""
    return reader.floats(reader.root()["x"], "x")


def bools_of(reader: Reader) -> Nested:
    """Decode `{"x": …}` as booleans."""
    return reader.bools(reader.root()["x"], "x")


def body_of(value: object) -> bytes:
    """Write `{"x": value}`."""
    return json.dumps({"x": value}).encode()


rows = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=4)
nested = st.one_of(
    rows,
    st.lists(rows, min_size=1, max_size=4),
    st.lists(st.lists(rows, min_size=1, max_size=3), min_size=1, max_size=3),
)


@given(value=nested)
def test_readers_agree_on_regular_and_ragged_numbers(value: Any) -> None:
    """Fast is nothing but fast."""
    body = body_of(value)

    fast, exact = floats_of(SimdjsonReader(body)), floats_of(ExactReader(body))

    assert fast.counts == exact.counts
    np.testing.assert_array_equal(fast.values, exact.values)


@pytest.mark.parametrize(
    ("text", "values", "counts"),
    [
        ("[[1, 2], [3]]", [1, 2, 3], ([2], [2, 1])),
        ("[]", [], ([0],)),
        ("[[], []]", [], ([2], [0, 0])),
        ("[1e-50, -0.0]", [0, -0.0], ([2],)),
        ("[123456789012345678901234567890]", [1.2345679e29], ([1],)),
        ("[NaN, Infinity, -Infinity]", [math.nan, math.inf, -math.inf], ([3],)),
    ],
)
def test_read_floats_gives_leaves_and_counts(
    text: str, values: list[float], counts: tuple[list[int], ...]
) -> None:
    """Whatever the nesting, nothing is lost and nothing is flattened."""
    found = read(b'{"x": %s}' % text.encode(), floats_of)

    np.testing.assert_array_equal(found.values, np.array(values, np.float32))
    assert found.counts == counts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1", "x: expected an array, got a number"),
        ('"a"', "x: expected an array, got a string"),
        ("{}", "x: expected an array, got an object"),
        ("null", "x: expected an array, got null"),
        ("[[1, true]]", "x[0][1]: expected a number, got a boolean"),
        ('[[1], ["2"]]', "x[1][0]: expected a number, got a string"),
        ("[[1], [null]]", "x[1][0]: expected a number, got null"),
        ("[[1], 2]", "x[1]: expected an array, got a number"),
        ("[[1, 2], [3, [4]]]", "x[0][0]: expected an array, got a number"),
        # simdjson flattens these to the right number of values.
        ("[[[], [1, 2]], [3, 4]]", "x[1][0]: expected an array, got a number"),
        ("[[1, 2], [[3], [4]]]", "x[0][0]: expected an array, got a number"),
        ("[1, 1e39]", "x[1]: expected a number within FP32 (up to 3.4e38), got a larger one"),
        ("[[0], [-1e400]]", "x[1][0]: expected a number within FP32"),
        ("[1%s]" % ("0" * 400), "x[0]: expected a number within FP32"),
        ("[[[[[[1]]]]]]", f"x: expected at most {MAX_RANK - 1} levels of arrays"),
    ],
)
def test_read_floats_mistake_is_named_with_its_place(text: str, message: str) -> None:
    """The caller learns where, what was expected and what came."""
    with pytest.raises(InvalidInput) as caught:
        read(b'{"x": %s}' % text.encode(), floats_of)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "x[1]: expected true, false, 1 or 0, got 2"),
        ("[1, -1]", "x[1]: expected true, false, 1 or 0, got -1"),
        ("[[true, 0], [1.0]]", "x[1][0]: expected true, false, 1 or 0, got 1.0; of a float mask"),
        ("[[true], [null]]", "x[1][0]: expected true, false, 1 or 0, got null"),
        ("[[true], false]", "x[1]: expected an array, got a boolean"),
        ("[[true], 3]", "x[1]: expected true, false, 1 or 0, got a number"),
    ],
)
def test_read_bools_takes_booleans_0_and_1_only(text: str, message: str) -> None:
    """A mask never means two things."""
    with pytest.raises(InvalidInput) as caught:
        read(b'{"x": %s}' % text.encode(), bools_of)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body: expected a JSON object, got nothing"),
        (b"  ", "body: expected a JSON object, got nothing"),
        (b"[1]", "body: expected a JSON object, got an array"),
        (b'{"x": [1],}', "body: expected JSON, got a mistake at character"),
        (b'{"x": [1]} x', "body: expected JSON, got a mistake at character 11: Extra data"),
        (b'{"x": "\xff"}', "body: expected JSON in UTF-8, got byte 0xff at 7"),
        (b'{"x": [1], "x": [2]}', "body: expected each key of an object once, got 'x' twice"),
        (b'{"x": ' + b"[" * 100_000, "body: expected less deeply nested JSON"),
        (
            b'{"x": [1' + b"0" * 5000 + b"]}",
            "body: expected integers of at most 4300 d",
        ),
    ],
)
def test_read_what_is_no_json_object_says_so(body: bytes, message: str) -> None:
    """Broken bodies are told apart."""
    with pytest.raises(InvalidInput) as caught:
        read(body, floats_of)

    assert message in str(caught.value)


def test_read_skips_a_byte_order_mark() -> None:
    """Some editors write one."""
    assert read(b'\xef\xbb\xbf{"x": [NaN]}', floats_of).counts == ([1],)


def test_fast_reader_is_really_used_for_plain_bodies() -> None:
    """A regular body never reaches the slow reader."""
    body = body_of([[1.0, 2.0]])
    reader = SimdjsonReader(body)

    floats_of(reader)

    assert reader.arrays == body.count(b"[")


@pytest.mark.parametrize("text", ["[]", "[[1], 2]", "[[[[[[1]]]]]]", "[true]", "1"])
def test_fast_reader_vouches_for_nothing_irregular(text: str) -> None:
    """Anything odd is left to the exact reader."""
    with pytest.raises(Irregular):
        floats_of(SimdjsonReader(b'{"x": %s}' % text.encode()))


def test_read_objects_of_an_array() -> None:
    """Both readers give members of objects."""
    body = b'{"x": [{"a": 1}, {"b": [2]}]}'

    def names(reader: Reader) -> list[list[str]]:
        return [list(members) for members in reader.objects(reader.root()["x"], "x")]

    assert names(SimdjsonReader(body)) == names(ExactReader(body)) == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1", "x: expected an array, got a number"),
        ("[1]", "x[0]: expected an object, got a number"),
    ],
)
def test_read_objects_mistake_is_named(text: str, message: str) -> None:
    """As for numbers."""
    with pytest.raises(InvalidInput) as caught:
        read(b'{"x": %s}' % text.encode(), lambda r: r.objects(r.root()["x"], "x"))

    assert str(caught.value) == message


def test_read_plain_objects_count_their_arrays() -> None:
    """What is read as plain values is vouched for, too."""
    body = b'{"x": {"a": [[1], {"b": []}], "c": "["}}'

    assert read(body, lambda r: r.plain(r.root()["x"])) == {"a": [[1], {"b": []}], "c": "["}


def test_fast_reader_leaves_objects_of_many_members_alone() -> None:
    """Looking up each of many keys would take the square of their number."""
    body = json.dumps({f"k{i}": 1 for i in range(33)}).encode()

    with pytest.raises(Irregular):
        SimdjsonReader(body).root()
    assert len(read(body, lambda r: r.root())) == 33


def test_nested_place_counts_through_ragged_levels() -> None:
    """The place of a leaf is found from the counts alone."""
    found = read(b'{"x": [[[1], [2, 3]], [], [[4]]]}', floats_of)

    assert [found.place(i) for i in range(4)] == [
        "[0][0][0]",
        "[0][1][0]",
        "[0][1][1]",
        "[2][0][0]",
    ]


def test_kind_of_names_json_types() -> None:
    """Messages speak JSON, not Python."""
    values: list[object] = [None, True, 1, 1.5, "a", [], {}]

    assert [kind_of(v) for v in values] == [
        "null",
        "a boolean",
        "a number",
        "a number",
        "a string",
        "an array",
        "an object",
    ]


@pytest.mark.parametrize("padding", [0, 3000])
def test_key_that_holds_a_zero_is_read_like_any_other(padding: int) -> None:
    """In a small body as in one for simdjson, which lists such a key but does not find it."""
    body = b'{"a\\u0000": [1]}' + b" " * padding

    assert read(body, lambda reader: list(reader.root())) == ["a\0"]
