"""Compressed bodies, in and out."""

import asyncio
import gzip
import threading
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from service.codecs.compression import MAX_MEMBERS, compress, decompress
from service.codecs.offload import Offload
from service.errors import Draining, InvalidInput, TooLarge
from tests.support.layers import Layers
from tests.support.server import Server

TEXT = b"each head attends to something else; " * 1000

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_decompress_gives_back_what_was_compressed(encoding: str) -> None:
    """Up to the limit itself."""
    packed = COMPRESSORS[encoding](TEXT)

    assert decompress(packed, encoding, len(TEXT)) == TEXT


def test_decompress_of_several_gzip_members_joins_them() -> None:
    """As RFC 1952 says of a file made of two."""
    packed = gzip.compress(TEXT) + gzip.compress(b"end")

    assert decompress(packed, "gzip", 10**6) == TEXT + b"end"


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_decompress_above_the_limit_stops_there(encoding: str) -> None:
    """A bomb of a thousandth of its size is not unpacked."""
    bomb = COMPRESSORS[encoding](bytes(2**27))

    with pytest.raises(TooLarge, match="at most 1000000 bytes decompressed, got more"):
        decompress(bomb, encoding, 10**6)


def test_decompress_of_many_members_counts_all_of_them() -> None:
    """The limit is for the body, not for each part of it."""
    with pytest.raises(TooLarge):
        decompress(gzip.compress(bytes(1000)) * 1001, "gzip", 10**6)


@pytest.mark.parametrize(
    ("encoding", "content", "message"),
    [
        ("gzip", b"not gzip at all", "expected gzip data, got other bytes"),
        ("deflate", gzip.compress(TEXT), "expected deflate data, got other bytes"),
        ("gzip", gzip.compress(TEXT)[:-9], "expected whole gzip data, got its beginning"),
        ("gzip", b"", "expected whole gzip data, got its beginning"),
        ("gzip", gzip.compress(TEXT) + b"more", "expected gzip data, got other bytes"),
        ("deflate", zlib.compress(TEXT)[:-5], "expected whole deflate data, got its beginning"),
        ("deflate", zlib.compress(TEXT) + b"x", "expected nothing after the deflate data"),
    ],
)
def test_decompress_of_damaged_data_says_how(encoding: str, content: bytes, message: str) -> None:
    """The caller learns whether it was the wrong format or not all of it."""
    with pytest.raises(InvalidInput, match=message):
        decompress(content, encoding, 10**6)


DECOMPRESSOR = zlib.decompressobj


class Counting:
    """zlib's decompressors, with what they are given, what they give and how often."""

    def __init__(self, on_step: Callable[[int], None] = lambda step: None) -> None:
        self.bytes_in = self.bytes_out = self.steps = 0
        self._on_step = on_step

    def decompressobj(self, wbits: int) -> "Counted":
        """Return a decompressor that counts here."""
        return Counted(DECOMPRESSOR(wbits), self)

    def decompress(self, reader: Any, content: memoryview, limit: int) -> bytes:
        """Count one step."""
        self.steps += 1
        self._on_step(self.steps)
        part = reader.decompress(content, limit)
        self.bytes_in += len(content)
        self.bytes_out += len(part)
        return bytes(part)


class Counted:
    """One of them."""

    def __init__(self, reader: Any, counting: Counting) -> None:
        self._reader = reader
        self._counting = counting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def decompress(self, content: memoryview, limit: int) -> bytes:
        """Take a step."""
        return self._counting.decompress(self._reader, content, limit)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Return what counts the work of `decompress`."""
    made = Counting()
    replace_zlib(monkeypatch, made)
    return made


def replace_zlib(monkeypatch: pytest.MonkeyPatch, counting: Counting) -> None:
    """Let `decompress` use those decompressors."""
    monkeypatch.setattr(zlib, "decompressobj", counting.decompressobj)


def noise(size: int) -> bytes:
    """Return bytes that do not compress."""
    return np.random.default_rng(size).bytes(size)


def member(payload: bytes, level: int, flushes: int) -> bytes:
    """Return a gzip member; each flush is a block of no content."""
    writer = zlib.compressobj(level, wbits=31)
    parts = [writer.compress(payload)]
    parts += [writer.flush(zlib.Z_FULL_FLUSH) for _ in range(flushes)]
    return b"".join([*parts, writer.flush()])


PAYLOADS = st.one_of(
    st.just(b""),
    st.binary(max_size=20),
    st.integers(0, 300_000).map(bytes),
    st.integers(0, 100_000).map(noise),
)
MEMBERS = st.builds(member, PAYLOADS, st.sampled_from([0, 1, 9]), st.integers(0, 20))
DAMAGE = st.one_of(
    st.just(lambda content: content),
    st.integers(1, 50).map(lambda size: lambda content: content[:-size]),
    st.binary(min_size=1, max_size=50).map(lambda more: lambda content: content + more),
)


@pytest.mark.fault("A1")
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(MEMBERS, st.integers(1, 3)), max_size=6).map(
        lambda runs: b"".join(content * count for content, count in runs)
    ),
    DAMAGE,
)
@example(gzip.compress(b"") * MAX_MEMBERS, lambda content: content)
@example(gzip.compress(b"") * (MAX_MEMBERS + 1), lambda content: content)
@example(gzip.compress(b"x") * (MAX_MEMBERS - 1) + gzip.compress(noise(10**6)), lambda c: c)
@example(member(bytes(3 * 2**20), 9, 0), lambda content: content)
@example(member(noise(3 * 2**20), 1, 0), lambda content: content)
@example(member(b"", 1, 0)[:10] + b"\0\0\0\xff\xff" * 100_000, lambda content: content)
@example(gzip.compress(TEXT) + bytes(10), lambda content: content)
def test_decompress_of_any_members_is_what_python_says_or_refused_in_linear_work(
    content: bytes, damage: Callable[[bytes], bytes]
) -> None:
    """Whatever the members, zlib is given each byte a few times at most, in few steps."""
    content = damage(content)
    counting = Counting()
    with pytest.MonkeyPatch.context() as patch:
        replace_zlib(patch, counting)
        try:
            found: bytes | None = decompress(content, "gzip", 2**26)
        except InvalidInput as error:
            found, reason = None, str(error)

    try:
        wanted: bytes | None = gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        wanted = None
    if found is None and wanted is not None:
        # What Python takes and we do not: nothing at all, zeros at the end, a great many members.
        assert not content or content.endswith(b"\0") or f"at most {MAX_MEMBERS}" in reason
    else:
        assert found == wanted
    assert counting.bytes_in <= 6 * len(content) + counting.bytes_out / 4
    assert counting.steps <= 2 + 2 * len(content) / 20 + counting.bytes_out / 2**18


@pytest.mark.fault("A1")
def test_decompress_ends_at_the_next_step_when_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long body does not keep its thread once its caller has left."""
    stop = threading.Event()
    counting = Counting(on_step=lambda step: stop.set() if step == 3 else None)
    replace_zlib(monkeypatch, counting)

    with pytest.raises(Draining):
        decompress(gzip.compress(bytes(2**26)), "gzip", 2**26, stop=stop)

    assert counting.steps == 3


def test_decompress_above_the_limit_makes_one_step_more_at_most(counting: Counting) -> None:
    """What is refused costs no more than what is accepted."""
    with pytest.raises(TooLarge):
        decompress(gzip.compress(bytes(2**26)), "gzip", 2**20)

    assert counting.bytes_out <= 2**20 + 2**18


def test_workers_that_are_closed_stop_what_can_be_stopped() -> None:
    """The end of the server is one more reason for nobody to wait."""
    began, stopped = threading.Event(), threading.Event()

    def hold(stop: threading.Event) -> None:
        began.set()
        assert stop.wait(60)
        stopped.set()

    async def scenario() -> None:
        offload = Offload(decode_timeout_s=60)
        task = asyncio.create_task(offload.interruptible(hold))
        await asyncio.to_thread(began.wait, 60)
        offload.close()
        await task

    asyncio.run(scenario())

    assert stopped.is_set()


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_compress_is_read_by_the_standard_library(encoding: str) -> None:
    """Whatever pieces it came in."""
    packed = b"".join(compress(iter([TEXT, memoryview(b"end")]), encoding))

    unpack = gzip.decompress if encoding == "gzip" else zlib.decompress
    assert unpack(packed) == TEXT + b"end"


@pytest.mark.parametrize("encoding", COMPRESSORS)
@pytest.mark.parametrize(
    "path", ["/v1/attention?model=tiny", "/v1/attention?model=tiny&causal=true"]
)
def test_compressed_request_is_answered_like_any_other(
    server: Server, path: str, encoding: str
) -> None:
    """The answer is the same to the bit, and is not compressed unasked."""
    content = save({"embeddings": np.ones((2, 3, 8), np.float32)})
    headers = {"Content-Type": "application/x-safetensors"}
    plain = server.post(path, content=content, headers=headers)

    packed = COMPRESSORS[encoding](content)
    response = server.post(path, content=packed, headers=headers | {"Content-Encoding": encoding})

    assert response.status_code == 200
    assert "content-encoding" not in response.headers
    assert response.content == plain.content


def test_bomb_is_refused_and_the_next_call_is_served(server: Server) -> None:
    """130 kB that would be 128 MB."""
    bomb = gzip.compress(bytes(2**27))

    response = server.post("/v1/attention", content=bomb, headers={"Content-Encoding": "gzip"})

    assert response.status_code == 413
    assert response.json()["code"] == "too_large"
    assert server.get("/v2/health/ready").status_code == 200


@pytest.mark.fault("A1")
@pytest.mark.parametrize("path", ["/v2/repository/index", "/v1/attention"])
def test_body_of_very_many_members_is_refused(server: Server, path: str) -> None:
    """A mebibyte that holds nothing at all is 52 000 decompressors' work."""
    content = gzip.compress(b"") * 52_000

    response = server.post(path, content=content, headers={"Content-Encoding": "gzip"})

    assert response.status_code == 400
    assert f"expected at most {MAX_MEMBERS} gzip members" in response.json()["error"]


def test_answers_are_compressed_where_asked_for_and_switched_on(layers: Layers) -> None:
    """Small and large ones; never an error, and never for who did not ask."""
    with Server(layers.repository, compress_answers=True) as server:
        for rows in (1, 200):
            content = save({"embeddings": np.ones((rows, 100, 24), np.float32)})
            headers = {"Content-Type": "application/x-safetensors", "Accept-Encoding": "identity"}
            plain = server.post("/v1/attention?model=mha", content=content, headers=headers)
            for encoding in COMPRESSORS:
                asked = headers | {"Accept-Encoding": f"br, {encoding}"}
                packed = server.post("/v1/attention?model=mha", content=content, headers=asked)
                assert "content-encoding" not in plain.headers
                assert packed.headers["content-encoding"] == encoding
                assert (load(packed.content)["output"] == load(plain.content)["output"]).all()
        wrong = server.post("/v1/attention", json={}, headers={"Accept-Encoding": "gzip"})
        listing = server.get("/v1/models")
    assert wrong.status_code == 400
    assert "content-encoding" not in wrong.headers
    assert "content-encoding" not in listing.headers
