"""safetensors bodies: bounded before they are parsed, read without copies, as the library reads."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from service.codecs import attention_safetensors, safetensors_reader
from service.codecs.json_reader import ExactReader
from service.codecs.safetensors_reader import ITEM_BYTES, read_file
from service.errors import HeadwiseError, InvalidInput, TooLarge
from service.inference.validation import Limits
from tests.support.server import Server

LIMITS = Limits(max_rows=4, max_length=16, max_tokens=64, max_answer_bytes=2**20)
MOST = 64
HEADERS = {"Content-Type": "application/x-safetensors"}


def file_of(header: bytes | dict[str, Any], content: bytes = b"") -> bytes:
    """Return a file with this header, whatever is in it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content


def entry(start: int = 0, end: int = 4, dtype: str = "F32", *shape: int) -> dict[str, Any]:
    """Return what a header says of a tensor; by default of one number."""
    return {"dtype": dtype, "shape": list(shape or (1,)), "data_offsets": [start, end]}


def empty_tensors(count: int) -> bytes:
    """Return a file of that many tensors without numbers."""
    empty = entry(0, 0, "F32", 0)
    return file_of({f"t{i}": empty for i in range(count)})


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the bytes of every header that is parsed."""
    seen: list[int] = []
    exact = ExactReader

    def reader(header: bytes) -> Any:
        seen.append(len(header))
        return exact(header)

    monkeypatch.setattr(safetensors_reader, "ExactReader", reader)
    return seen


@pytest.mark.fault("A2")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (empty_tensors(64_000), "body: at most 11520 bytes of safetensors header for 13 tensors"),
        (file_of(b"{" * 11_521), "body: at most 11520 bytes of safetensors header"),
        (file_of(b" " * 11_521), "body: at most 11520 bytes of safetensors header"),
        (file_of({"__metadata__": {"a": "x" * 12_000}}), "body: at most 11520 bytes of safetens"),
        (empty_tensors(100), "body: at most 13 tensors in safetensors, got 100"),
        (file_of(b"{" * 100), "body: at most 13 tensors in safetensors, got 99"),
    ],
)
def test_header_is_refused_by_its_length_and_tensors_before_it_is_parsed(
    body: bytes, message: str, parsed: list[int]
) -> None:
    """No byte of a bomb reaches the parser, whatever the header is made of."""
    with pytest.raises(TooLarge) as caught:
        attention_safetensors.decode(body, {}, LIMITS)

    assert message in str(caught.value)
    assert parsed == []


@pytest.mark.fault("A2")
@pytest.mark.parametrize("max_rows", [1, 256, 10_000])
def test_header_of_any_call_within_the_limits_is_read(max_rows: int) -> None:
    """A mask for each sequence, the longest names and numbers: still within the bounds."""
    rows = np.ones(max_rows, np.int64)
    tensors: dict[str, np.ndarray] = {
        "embeddings": np.zeros((max_rows, 8), np.float32),
        "attend_mask": np.ones(max_rows, bool),
        "head_mask": np.ones((max_rows, 2), np.float32),
        "lengths": rows,
        **{f"pair_mask.{i}": np.ones((2, 1, 1), bool) for i in range(max_rows)},
    }
    body = save(tensors, {"format": "pt", "model": "a" * 63})

    read, _ = attention_safetensors.decode(body, {}, Limits(max_rows, 4096, 131_072, 2**29))

    assert read.pair_mask is not None
    assert read.pair_mask.shape == (max_rows, 2, 1, 1)


pieces = st.sampled_from(
    [b"{", b"}", b"[", b"]", b'"a":', b'"b":', b",", b"0", b'"', b"\\", b" ", b'"shape":', b"\xff"]
)


@pytest.mark.fault("A2")
@given(
    unit=st.lists(pieces, min_size=1, max_size=8).map(b"".join),
    times=st.integers(1, 4_000),
    content=st.binary(max_size=16),
    most=st.integers(1, 40),
)
def test_bytes_and_objects_parsed_are_bounded_by_the_tensors_allowed(
    unit: bytes, times: int, content: bytes, most: int
) -> None:
    """Property: what is parsed of any body is within 8 KiB and 256 bytes for each tensor."""
    seen: list[bytes] = []
    exact = ExactReader

    class Counting(exact):  # type: ignore[misc, valid-type]
        def __init__(self, header: bytes) -> None:
            seen.append(header)
            super().__init__(header)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_reader, "ExactReader", Counting)
        try:
            found = len(read_file(file_of(unit * times, content), most).tensors)
        except HeadwiseError:
            found = 0

    assert found <= most
    assert all(len(header) <= 8192 + 256 * most for header in seen)
    assert all(header.count(b"{") <= most + 64 for header in seen)


names = st.sampled_from(["embeddings", "lengths", "a", "b", "", "ä", "__metadata__"])
sizes = st.lists(st.sampled_from([0, 1, 2, 3]), max_size=3)
entries = st.builds(
    lambda dtype, shape, offsets: {"dtype": dtype, "shape": shape, "data_offsets": offsets},
    st.sampled_from([*ITEM_BYTES, "Q9"]),
    sizes | st.just([-1]) | st.just([2**62, 4]),
    st.lists(st.integers(0, 24), min_size=1, max_size=3),
)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Return files that are nearly right: tensors one after the other, and one change."""
    header: dict[str, Any] = {}
    end = 0
    for name in draw(st.lists(names.filter(lambda n: not n.startswith("_")), unique=True)):
        dtype, shape = draw(st.sampled_from(sorted(ITEM_BYTES))), draw(sizes)
        start, end = end, end + int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    changed = draw(st.dictionaries(names, entries | st.just({}) | st.none(), max_size=1))
    text = json.dumps(header | changed).encode() + b" " * draw(st.integers(0, 9))
    return file_of(text, bytes(max(0, end + draw(st.sampled_from([0, 0, 0, 1, -1])))))


@given(body=files())
def test_reader_takes_what_the_library_takes_and_refuses_what_it_refuses(body: bytes) -> None:
    """Property: same names, datatypes, shapes and bytes, or an error from both."""
    try:
        theirs = {
            name: (one["dtype"], tuple(one["shape"]), bytes(one["data"]))
            for name, one in deserialize(body)  # type: ignore[no-untyped-call]
        }
    except SafetensorError:
        with pytest.raises(InvalidInput):
            read_file(body, MOST)
        return

    ours = read_file(body, MOST).tensors

    assert {n: (t.dtype, t.shape, bytes(t.data)) for n, t in ours.items()} == theirs


def test_metadata_is_returned() -> None:
    """Its values are text."""
    body = save({"a": np.zeros(1, np.float32)}, {"format": "pt"})

    assert read_file(body, MOST).metadata == {"format": "pt"}


@pytest.mark.fault("A2", "B9")
def test_repeated_name_is_refused() -> None:
    """Which of two tensors of the same name counts is nobody's guess."""
    one = json.dumps(entry()).encode()

    with pytest.raises(InvalidInput) as caught:
        read_file(file_of(b'{"a":%s,"a":%s}' % (one, one), bytes(4)), MOST)

    assert "twice" in str(caught.value)


@pytest.mark.fault("A2")
@pytest.mark.parametrize("shape", [[2**62, 2**62], [0, 2**62, 2**62], [1] * 9, [2**63], [1e9]])
def test_huge_shape_is_refused(shape: list[Any]) -> None:
    """A shape costs nothing, and never becomes an error of another kind."""
    one = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}

    with pytest.raises(InvalidInput):
        attention_safetensors.decode(file_of({"embeddings": one}), {}, LIMITS)


@pytest.mark.fault("A2")
def test_tensors_are_views_of_the_body_unless_they_are_not_aligned() -> None:
    """Reading takes no memory for numbers that may stay where they are."""
    block = np.arange(8, dtype=np.float32).reshape(1, 1, 8)
    body = save({"embeddings": block})
    header = body[8 : 8 + body[0]].rstrip()
    odd = file_of(header + b" " * (1 - len(header) % 4 + 4), block.tobytes())

    for content, is_view in ((body, True), (odd, False)):
        tensors, _ = attention_safetensors.decode(content, {}, LIMITS)

        assert np.shares_memory(tensors.embeddings, np.frombuffer(content, np.uint8)) is is_view
        assert tensors.embeddings.flags.aligned
        np.testing.assert_array_equal(tensors.embeddings, block)


@pytest.mark.fault("A2")
def test_server_refuses_a_header_bomb(server: Server) -> None:
    """The 64 000 tensors of 3.7 MB that once took 1.2 s of the event loop."""
    response = server.post(
        "/v1/attention?model=tiny", content=empty_tensors(64_000), headers=HEADERS
    )

    assert response.status_code == 413, response.text
    assert response.json()["code"] == "too_large"
    assert "bytes of safetensors header for 265 tensors" in response.json()["error"]
