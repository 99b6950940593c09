"""What a JSON body consists of is counted before it is parsed, whichever decoder reads it."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.codecs import attention_json, json_bounds, oip_request, simdjson_reader
from service.codecs.json_bounds import bounds_of, check, counts_of, weighed
from service.codecs.json_reader import ExactReader
from service.errors import HeadwiseError, InvalidInput, TooLarge
from service.inference.validation import Limits
from tests.support.server import Server

FEW = 1024
SMALL = 16 * 1024
LIMITS = Limits(max_rows=4, max_length=64, max_tokens=256, max_answer_bytes=2**24)
WIDTH = 8
WIDE = Limits(max_rows=256, max_length=4096, max_tokens=131_072, max_answer_bytes=2**29)
MOST_ARRAYS = 256 + 4 * 4 + FEW
MOST_PAIR_ARRAYS = MOST_ARRAYS + 16 * 256 + 64 * 1024
MOST_VALUE_ARRAYS = MOST_ARRAYS + 256 + 4
MOST_VALUES = 256 * (WIDTH + 1) + 4 * WIDTH + FEW

OFFERED = ("output", "attention_weights")

Decode = Callable[[bytes], object]


def decode_attention(body: bytes) -> object:
    """Decode a body of `/v1/attention`."""
    return attention_json.decode(body, {}, LIMITS, bounds=bounds_of(LIMITS, WIDTH))


def decode_infer(body: bytes) -> object:
    """Decode an infer body that is JSON alone."""
    return oip_request.decode(body, len(body), OFFERED, None, bounds_of(LIMITS, WIDTH))


def decode_infer_header(body: bytes) -> object:
    """Decode an infer body whose JSON is followed by four bytes of a tensor."""
    return oip_request.decode(body + bytes(4), len(body), OFFERED, None, bounds_of(LIMITS, WIDTH))


DECODERS = (decode_attention, decode_infer, decode_infer_header)


class Parsed:
    """Counts what the exact reader has made, by kind, and the bytes that simdjson was given."""

    def __init__(self) -> None:
        self.arrays = self.objects = self.members = self.values = self.exact_bytes = 0
        self.simdjson_bytes = 0

    def count(self, document: object) -> None:
        """Add everything in a document."""
        waiting = [document]
        while waiting:
            node = waiting.pop()
            match node:
                case list():
                    self.arrays += 1
                    waiting.extend(node)
                case dict():
                    self.objects += 1
                    self.members += len(node)
                    waiting.extend(node.values())
                case _:
                    self.values += 1


@pytest.fixture
def parsed() -> Iterator[Parsed]:
    """Return the counts of everything that either parser is given in the test."""
    with counting() as counts:
        yield counts


class counting:  # noqa: N801
    """Replace both parsers, for the length of a block, by ones that count."""

    def __enter__(self) -> Parsed:
        counts = Parsed()
        self._patch = pytest.MonkeyPatch()
        parse = simdjson_reader._parse

        class Counting(ExactReader):
            def __init__(self, body: bytes) -> None:
                counts.exact_bytes += len(body)
                super().__init__(body)
                counts.count(self._document)

        def counted_parse(body: bytes) -> Any:
            counts.simdjson_bytes += len(body)
            return parse(body)

        self._patch.setattr(simdjson_reader, "ExactReader", Counting)
        self._patch.setattr(simdjson_reader, "_parse", counted_parse)
        return counts

    def __exit__(self, *error: object) -> None:
        self._patch.undo()


@pytest.mark.fault("A3")
@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (b'{"embeddings":[' + b"[]," * 1_333_000 + b"[]]}", TooLarge, "at most 1296 arrays"),
        (b'{"embeddings":[' + b"[0]," * 10_000 + b"[0]]}", TooLarge, "at most 1296 arrays"),
        (b'{"pair_mask":[' + b"[]," * 1_333_000 + b"[]]}", TooLarge, "got 1333002 arrays"),
        (b'{"inputs":[' + b"{}," * 1_333_000 + b"{}]}", InvalidInput, "at most 1024 objects"),
        (b"{" + b'"a":{},' * 5_000 + b'"b":0}', InvalidInput, "at most 1024 objects"),
        (b"{" + b'"a":0,' * 400_000 + b'"b":0}', InvalidInput, "at most 1024 members"),
        (b'{"embeddings":[[' + b"0," * 100_000 + b"0]]}", TooLarge, "and 3360 values"),
        (b'{"id":"' + b"[" * 100_000 + b'"}', TooLarge, "at most 1296 arrays"),
        (b"[" * 100_000, TooLarge, "at most 1296 arrays"),
        (b'{"a":' * 100_000, InvalidInput, "at most 1024 objects"),
        (b"," * 100_000, TooLarge, "got 0 arrays and 100001 values"),
    ],
)
def test_bomb_is_refused_before_it_is_parsed(
    decode: Decode, body: bytes, error: type[HeadwiseError], message: str, parsed: Parsed
) -> None:
    """Neither parser is given a byte of it."""
    with pytest.raises(error) as caught:
        decode(body)

    assert message in str(caught.value)
    assert parsed.simdjson_bytes == parsed.exact_bytes == 0


units = st.lists(
    st.sampled_from(
        [
            *(b"[", b"]", b"{", b"}", b"[]", b"{}", b",", b'"a":', b'"', b"0", b"1e9", b"NaN"),
            *(b"true", b"\\n", b" ", b'"pair_mask":', b'"inputs":', b'"\\ud800"', b"\xc3\xa9"),
        ]
    ),
    min_size=1,
    max_size=6,
).map(b"".join)


@pytest.mark.fault("A3")
@settings(max_examples=200)
@given(
    before=st.sampled_from([b"", b"{", b'{"embeddings":[', b'{"inputs":[{"data":[', b"["]),
    unit=units,
    times=st.integers(1, 30_000),
    after=st.sampled_from([b"", b"}", b"0]}", b"[]]}", b"0]}]}", b"]"]),
    decode=st.sampled_from(DECODERS),
)
def test_what_is_parsed_of_any_body_is_bounded_by_the_limits(
    before: bytes, unit: bytes, times: int, after: bytes, decode: Decode
) -> None:
    """Property: whatever a parser is given has no more parts than a call within the limits."""
    body = before + unit * times + after
    with (
        counting() as parsed,
        contextlib.suppress(HeadwiseError),
    ):  # of any kind: what was spent on it counts
        decode(body)

    most_arrays = MOST_PAIR_ARRAYS if b"pair_mask" in body else MOST_ARRAYS
    # A body of 16 KiB is parsed uncounted, as small as it is.
    assert parsed.arrays <= max(most_arrays, SMALL)
    assert parsed.objects <= max(FEW, SMALL)
    assert parsed.members <= max(FEW, SMALL)
    assert parsed.simdjson_bytes <= len(body)
    assert parsed.exact_bytes <= len(body)
    if b"pair_mask" not in body:
        assert parsed.values <= max(MOST_VALUES, SMALL)


@pytest.mark.fault("A3")
@pytest.mark.parametrize("heads", [1, 2, 16])
@pytest.mark.parametrize(
    ("rows", "length", "keys"), [(4, 4, 4), (1, 16, 16), (4, 1, 7), (2, 8, 8), (3, 5, 5)]
)
def test_any_call_within_the_limits_is_within_the_bounds(
    rows: int, length: int, keys: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every tensor there is, at the very limits, and with nothing added to spare."""
    monkeypatch.setattr(json_bounds, "_FEW", 8)
    monkeypatch.setattr(json_bounds, "_PAIR_ARRAYS", 0)
    width = 16
    limits = Limits(rows, max(length, keys), rows * (length + keys), 2**24)
    bounds = bounds_of.__wrapped__(limits, width)
    tensors = {
        "embeddings": np.zeros((rows, length, width)),
        "memory": np.zeros((rows, keys, width)),
        "attend_mask": np.ones((rows, keys), bool),
        "head_mask": np.ones((rows, heads)),
    }

    # A layer with positions has no memory, and what stands for a key in both memories has the
    # width of `LayerConfig.token_width`.
    memories = {"memory": (rows, keys, width - 6), "value_memory": (rows, keys, 6)}
    kinds: list[dict[str, Any]] = [{}, {"pair_mask": np.ones((rows, heads, length, keys), bool)}]
    kinds.append({name: np.zeros(shape) for name, shape in memories.items()})
    if length == keys:
        positions = np.full((rows, length), 2**24 - 1)
        kinds.append({"memory": np.zeros(0), "positions": positions})
    for more in kinds:
        body = json.dumps({name: t.tolist() for name, t in (tensors | more).items()}).encode()

        check(body, bounds, counts_of(body))


@pytest.mark.fault("A3")
def test_second_memory_is_counted_only_where_there_is_one() -> None:
    """Its tokens are as many as those of the memory beside it, and no reason for more arrays."""
    bounds = bounds_of(LIMITS, WIDTH)
    arrays = b"[" * (MOST_VALUE_ARRAYS - 1)

    check(b'{"value_memory":[' + arrays, bounds, counts_of(b"[" + arrays))
    for body in (b'{"memory":[' + arrays, b'{"value_memory":[[' + arrays):
        with pytest.raises(TooLarge, match=f"at most {MOST_ARRAYS} arrays"):
            check(body, bounds, counts_of(body))


@pytest.mark.fault("A3")
@given(
    data=st.binary(max_size=400_000) | st.text(alphabet="[],:{}0", max_size=4000).map(str.encode)
)
def test_counts_are_those_of_the_bytes(data: bytes) -> None:
    """Property: in chunks as in one piece."""
    counts = counts_of(data)

    assert (counts.arrays, counts.commas) == (data.count(b"["), data.count(b","))


@pytest.mark.fault("A3")
@given(
    item=st.sampled_from([b"0,", b"[],", b"[0],", b"true,", b"0.5,", b"0.12345678,", b'"",']),
    size=st.integers(1, 4 * 2**20),
)
def test_work_that_a_body_is_counted_as_grows_with_its_parts(item: bytes, size: int) -> None:
    """Property: what is read at once or in a thread has a bounded number of parts."""
    body = item * (size // len(item))

    read, _ = weighed(body, None)

    parts = body.count(b",") + body.count(b"[")
    assert read.json_bytes >= len(body)
    if item == b"0.12345678,":
        assert read.json_bytes <= len(body) + 10
    if read.is_small:
        assert parts <= 320 * 1024 // 10
    elif read.json_bytes <= 4 * 2**20:
        assert parts <= 4 * 2**20 // 10


@pytest.mark.fault("A3")
@pytest.mark.parametrize(
    ("header", "raw_bytes", "is_small"),
    [
        (b'{"datatype":"FP32"}', 4 * 2**20, True),
        (b'{"datatype":"FP32"}', 4 * 2**20 + 1, False),
        (b'{"datatype":"FP16"}', 2**20, True),
        (b'{"datatype":"FP16"}', 2 * 2**20, False),
        (b'{"datatype":"UINT64"}', 2 * 2**20, False),
        (b"[" + b"0.5," * 30_000 + b"]", 0, True),
        (b"[" + b"0,0,0.5," * 15_000 + b"]", 0, False),
    ],
)
def test_infer_body_is_read_at_once_only_when_it_is_little_work(
    header: bytes, raw_bytes: int, is_small: bool
) -> None:
    """By what it consists of, not by its length: other datatypes are converted."""
    body = header + bytes(raw_bytes)

    for content in (body, memoryview(body)):
        size, _ = oip_request.work_of(content, len(header), bounds_of(WIDE))

        assert size.is_small is is_small


def test_bounds_are_told_with_the_limits_behind_them() -> None:
    """The caller learns what would be taken."""
    body = b"[" * 5_000

    with pytest.raises(TooLarge) as caught:
        check(body, bounds_of(LIMITS, WIDTH), counts_of(body))

    assert str(caught.value) == (
        f"body: at most {MOST_ARRAYS} arrays and {MOST_VALUES} values for 4 sequences and 256"
        f" tokens of 8 numbers ({MOST_PAIR_ARRAYS} arrays with a pair_mask, {MOST_VALUE_ARRAYS}"
        " with a value_memory), got 5000 arrays and 1 values"
    )


@pytest.mark.fault("A3")
@pytest.mark.parametrize(
    ("path", "content", "status", "message"),
    [
        (
            "/v1/attention",
            b'{"model":"tiny","embeddings":[' + b"[]," * 1_333_000 + b"[]]}",
            413,
            "body: at most 133120 arrays and",
        ),
        (
            "/v1/attention",
            b'{"model":"tiny",' + b",".join(b'"a%d":0' % i for i in range(400_000)) + b"}",
            400,
            "body: expected at most 1024 members, got more",
        ),
        (
            "/v2/models/tiny/infer",
            b'{"inputs":[{"name":"embeddings","shape":[1,1,8],"datatype":"FP32","data":['
            + b"0," * 2_000_000
            + b"0]}]}",
            413,
            "tokens of 8 numbers",
        ),
        (
            "/v2/models/tiny/infer",
            b'{"inputs":[' + b"{}," * 100_000 + b"{}]}",
            400,
            "body: expected at most 1024 objects, got more",
        ),
        (
            "/v2/repository/index",
            b'{"ready":[' + b"0," * 400_000 + b"0]}",
            413,
            "body: at most 65536 arrays and 65536 values for a request without tensors, got",
        ),
        (
            "/v2/repository/index",
            b"{" + b'"a":0,' * 100_000 + b'"b":0}',
            400,
            "body: expected at most 1024 members, got more",
        ),
        (
            "/v2/models/tiny/infer",
            b'{"id":"' + b"x" * 70_000 + b'","inputs":[]}',
            400,
            "id: expected at most 65536 characters, got 70000",
        ),
    ],
)
def test_server_refuses_a_bomb_by_name(
    server: Server, path: str, content: bytes, status: int, message: str
) -> None:
    """Every endpoint that reads JSON counts it first."""
    response = server.post(path, content=content)

    assert response.status_code == status, response.text
    assert message in response.json()["error"]


@pytest.mark.fault("A3")
def test_infer_header_before_binary_tensors_is_counted(server: Server) -> None:
    """`Inference-Header-Content-Length` makes no difference."""
    header = b'{"inputs":[' + b"[]," * 200_000 + b"[]]}"

    response = server.post(
        "/v2/models/tiny/infer",
        content=header + bytes(32),
        headers={"Inference-Header-Content-Length": str(len(header))},
    )

    assert response.status_code == 413
    assert "body: at most" in response.json()["error"]


@pytest.mark.fault("A3")
def test_array_longer_than_simdjson_counts_is_left_to_the_exact_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 2**24 elements and more simdjson would make a list for fewer, and write behind it."""
    monkeypatch.setattr(simdjson_reader, "_COUNTED", 20_000)
    integers = b'{"name":"embeddings","shape":[1,5000,8],"datatype":"INT32","data":[%s]}'
    body = b'{"inputs":[' + integers % (b"1," * 39_999 + b"1") + b"]}"
    floats = b'{"embeddings":[' + b"[1,1,1,1,1,1,1,1]," * 4_999 + b"[1,1,1,1,1,1,1,1]]}"

    with counting() as parsed:
        request = oip_request.decode(body, len(body), ("output",))
        assert parsed.exact_bytes == len(body)
        attention_json.decode(floats, {}, WIDE)

    assert request.arrays["embeddings"].sum() == 40_000
    assert parsed.exact_bytes == len(body)  # numbers are copied into a buffer, which grows


@pytest.mark.fault("A3")
def test_array_of_two_to_the_24th_elements_is_read_to_its_end() -> None:
    """The real number, with the real parser: one more element than simdjson counts."""
    count = 2**24
    body = b'{"x":[' + b"0," * (count - 1) + b"7]}"

    found = simdjson_reader.read(body, lambda reader: reader.plain(reader.root()["x"]))

    assert len(found) == count
    assert found[-1] == 7
