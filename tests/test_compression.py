"""Compressed bodies, in and out."""

import gzip
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from safetensors.numpy import load, save

from service.compression import accepted, compress, decompress
from service.errors import InvalidInput, TooLarge
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


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", None),
        ("br, zstd", None),
        ("gzip, deflate, br", "gzip"),
        ("gzip;q=0.5, deflate", "deflate"),
        ("gzip;q=0", None),
        ("GZIP ; q=1", "gzip"),
        ("gzip;q=high", None),
    ],
)
def test_accepted_is_the_best_liked_that_is_offered(header: str, expected: str | None) -> None:
    """The highest quality wins, the first of equals."""
    assert accepted(header) == expected


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_compress_is_read_by_the_standard_library(encoding: str) -> None:
    """Whatever pieces it came in."""
    packed = b"".join(compress(iter([TEXT, memoryview(b"end")]), encoding))

    unpack = gzip.decompress if encoding == "gzip" else zlib.decompress
    assert unpack(packed) == TEXT + b"end"


@pytest.mark.parametrize("encoding", COMPRESSORS)
@pytest.mark.parametrize("path", ["/v1/attention?model=tiny", "/v1/attention?model=tiny&weights=1"])
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
