"""
What is sent to peers, and what they answer: the protocol's messages and plain nested lists.

OIP is the Open Inference Protocol v2; its binary form is the extension that Triton defined:
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

import io
import json
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson

from bench.servers import HOST
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
    entry = {
        "name": "embeddings",
        "shape": embeddings.shape,
        "datatype": "FP32",
        "parameters": {"binary_data_size": embeddings.nbytes},
    }
    header = orjson.dumps(
        {
            "inputs": [entry],
            "outputs": [
                {"name": name, "parameters": {"binary_data": True}}
                for name in names(weights=weights)
            ],
        }
    )
    return request_bytes(
        HOST,
        path,
        header + embeddings.tobytes(),
        ("Content-Type", "application/octet-stream"),
        ("Inference-Header-Content-Length", str(len(header))),
    )


def oip_json_request(path: str, embeddings: Floats, *, weights: bool) -> bytes:
    """Return a request in JSON, its numbers in one flat list."""
    entry = {
        "name": "embeddings",
        "shape": embeddings.shape,
        "datatype": "FP32",
        "data": embeddings.ravel(),
    }
    outputs = [{"name": name} for name in names(weights=weights)]
    body = orjson.dumps({"inputs": [entry], "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
    return request_bytes(HOST, path, body, ("Content-Type", "application/json"))


def nested_json_request(path: str, embeddings: Floats, *, weights: bool) -> bytes:
    """Return a request in JSON, its numbers in nested lists."""
    body = orjson.dumps(
        {"embeddings": embeddings, "weights": weights}, option=orjson.OPT_SERIALIZE_NUMPY
    )
    return request_bytes(HOST, path, body, ("Content-Type", "application/json"))


def read_oip_binary(body: bytes) -> dict[str, Floats]:
    """Return the tensors of a binary answer; the header ends where its JSON does."""
    text = body.decode("latin-1")  # one character a byte
    header, at = json.JSONDecoder().raw_decode(text)
    tensors = {}
    for entry in header["outputs"]:
        size = entry["parameters"]["binary_data_size"]
        block = np.frombuffer(body[at : at + size], np.float32)
        tensors[entry["name"]] = block.reshape(entry["shape"])
        at += size
    if at != len(body):
        raise ValueError(f"a binary answer: expected {at} bytes, got {len(body)}")
    return tensors


def read_oip_json(body: bytes) -> dict[str, Floats]:
    """Return the tensors of an answer in the protocol's JSON."""
    outputs: list[dict[str, Any]] = orjson.loads(body)["outputs"]
    return {
        entry["name"]: np.array(entry["data"], np.float32).reshape(entry["shape"])
        for entry in outputs
    }


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
