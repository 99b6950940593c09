"""Callers of HTTP/1.0, which has no chunks."""

import gzip
import json

import numpy as np
import orjson
import pytest

from tests.service.api.test_fast_path import connect
from tests.support.layers import Layers
from tests.support.server import Server


def answer(server: Server, path: str, body: bytes, *lines: str) -> tuple[bytes, bytes]:
    """Return head and body of the answer to a POST of HTTP/1.0, as they came."""
    head = "\r\n".join([f"POST {path} HTTP/1.0", "Host: a", *lines, f"Content-Length: {len(body)}"])
    with connect(server) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        found = connection.makefile("rb").read()
    start, _, rest = found.partition(b"\r\n\r\n")
    return start.lower(), rest


def large_call() -> bytes:
    """Return a call whose answer with weights is sent in pieces."""
    call = {"model": "mha", "embeddings": np.ones((100, 24)), "weights": True}
    return orjson.dumps(call, option=orjson.OPT_SERIALIZE_NUMPY)


@pytest.mark.fault("B6")
def test_large_answer_to_http_1_0_has_a_length_and_no_chunks(server: Server) -> None:
    """RFC 9112, 6.1: chunk sizes would end up in the caller's JSON."""
    head, body = answer(server, "/v1/attention", large_call())

    assert b"transfer-encoding" not in head
    assert b"content-length: %d" % len(body) in head
    assert np.shape(json.loads(body)["attention_weights"])[-2:] == (100, 100)


@pytest.mark.fault("B6")
def test_compressed_answer_to_http_1_0_has_a_length_and_no_chunks(layers: Layers) -> None:
    """What it is compressed to is known before the head is sent."""
    with Server(layers.repository, compress_answers=True) as server:
        head, body = answer(server, "/v1/attention", large_call(), "Accept-Encoding: gzip")

    assert b"content-encoding: gzip" in head
    assert b"content-length: %d" % len(body) in head
    assert json.loads(gzip.decompress(body))["model"] == "mha"
