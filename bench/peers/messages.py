"""
What is sent to peers, and what they answer: the protocol's messages and plain nested lists.

OIP is the Open Inference Protocol v2, see `loadtest.oip`.
"""

import io
from typing import Literal

import numpy as np
import numpy.typing as npt
import orjson

from bench.servers import HOST
from loadtest import oip
from loadtest.endpoint import request_bytes

Format = Literal["binary", "json"]
Floats = npt.NDArray[np.float32]

NAMES = ("output", "attention_weights")


def names(*, weights: bool) -> tuple[str, ...]:
    """Return the tensors that are asked for."""
    return NAMES if weights else NAMES[:1]


def raw_request(wire: Format, path: str, embeddings: Floats, *, weights: bool) -> bytes:
    """Return a request to a peer that leaves the bytes to `serving/codec.py`."""
    make = oip_binary_request if wire == "binary" else nested_json_request
    return make(path, embeddings, weights=weights)


def read_raw(wire: Format, body: bytes) -> dict[str, Floats]:
    """Return the tensors that `serving/codec.py` wrote."""
    return read_oip_binary(body) if wire == "binary" else read_nested_json(body)


def oip_request(wire: Format, path: str, embeddings: Floats, *, weights: bool) -> bytes:
    """Return a request to a peer that speaks the protocol in both forms."""
    make = oip_binary_request if wire == "binary" else oip_json_request
    return make(path, embeddings, weights=weights)


def read_oip(wire: Format, body: bytes) -> dict[str, Floats]:
    """Return the tensors of such a peer's answer."""
    return read_oip_binary(body) if wire == "binary" else read_oip_json(body)


def oip_binary_request(path: str, embeddings: Floats, *, weights: bool) -> bytes:
    """Return a request whose tensors, and those of its answer, follow their header as bytes."""
    outputs = [
        {"name": name, "parameters": {"binary_data": True}} for name in names(weights=weights)
    ]
    return _post(path, oip.encode({"embeddings": embeddings}, outputs=outputs))


def oip_json_request(path: str, embeddings: Floats, *, weights: bool) -> bytes:
    """Return a request in JSON, its numbers in one flat list."""
    outputs = [{"name": name} for name in names(weights=weights)]
    tensors = {"embeddings": embeddings}
    return _post(path, oip.encode_json(tensors, shortest=True, outputs=outputs))


def _post(path: str, body: oip.Body) -> bytes:
    return request_bytes(HOST, path, body.content, *body.headers.items())


def nested_json_request(path: str, embeddings: Floats, *, weights: bool) -> bytes:
    """Return a request in JSON, its numbers in nested lists."""
    body = orjson.dumps(
        {"embeddings": embeddings, "weights": weights}, option=orjson.OPT_SERIALIZE_NUMPY
    )
    return request_bytes(HOST, path, body, ("Content-Type", "application/json"))


def read_oip_binary(body: bytes) -> dict[str, Floats]:
    """Return the tensors of a binary answer; the header ends where its JSON does."""
    return oip.decode(body, oip.json_length(body))


def read_oip_json(body: bytes) -> dict[str, Floats]:
    """Return the tensors of an answer in the protocol's JSON."""
    return oip.decode(body)


def read_nested_json(body: bytes) -> dict[str, Floats]:
    """Return the tensors of an answer with nested lists."""
    answer = orjson.loads(body)
    return {name: np.array(answer[name], np.float32) for name in NAMES if name in answer}


def saved(tensor: Floats) -> bytes:
    """Return an array in numpy's own file format."""
    sink = io.BytesIO()
    np.save(sink, tensor, allow_pickle=False)
    return sink.getvalue()


def read_saved(body: bytes) -> dict[str, Floats]:
    """Return the tensors of an answer in numpy's own file format, one after the other."""
    source, tensors = io.BytesIO(body), {}
    for name in NAMES:
        if source.tell() < len(body):
            tensors[name] = np.load(source, allow_pickle=False)
    return tensors
