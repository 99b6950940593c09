"""
The Open Inference Protocol v2 `infer` call: JSON, binary tensors, or both in one body.

A binary body is a JSON header of `Inference-Header-Content-Length` bytes and the
raw little-endian tensors after it, in the order of the header
(https://github.com/kserve/open-inference-protocol, binary tensor data extension).
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from service.calls import Answer, Bools, Floats
from service.contract import (
    ATTEND_MASK,
    ATTENTION_WEIGHTS,
    EMBEDDINGS,
    HEAD_MASK,
    MEMORY,
    OUTPUT,
    PAIR_MASK,
    WEIGHTS_SUFFIX,
)
from service.errors import InvalidInput
from service.json_reader import MAX_RANK, Nested, Node, Reader, kind_of, read
from service.options import MAX_TIMEOUT_S, check_known, checked
from service.pieces import Chunk, gathered, json_array, raw
from service.shapes import Options, Tensors

HEADER_LENGTH: Final = "inference-header-content-length"
BINARY_MEDIA_TYPE: Final = "application/octet-stream"
_ALIGNMENT: Final = 64
_DATATYPES: Final[dict[str, np.dtype[Any]]] = {"FP32": np.dtype("<f4"), "BOOL": np.dtype(np.bool_)}
_INPUTS: Final = {
    EMBEDDINGS: "FP32",
    MEMORY: "FP32",
    ATTEND_MASK: "BOOL",
    PAIR_MASK: "BOOL",
    HEAD_MASK: "FP32",
}


@dataclass(frozen=True)
class InferRequest:
    """What a client asked for; `outputs` maps each wanted name to whether it is binary."""

    id: str
    tensors: Tensors
    options: Options
    outputs: Mapping[str, bool]


def split_model_name(name: str) -> tuple[str, bool]:
    """Return the artifact behind a protocol model, and whether it declares the weights."""
    plain = name.removesuffix(WEIGHTS_SUFFIX)
    return plain, plain != name


def json_size(header_length: str | None, body_size: int) -> int:
    """
    Return how many bytes of a body are JSON; `header_length` is the header of that name.

    Raises:
        InvalidInput: the header is not a number that fits the body.
    """
    return body_size if header_length is None else _header_size(header_length, body_size)


def decode(
    body: bytes, json_bytes: int, with_weights: bool, timeout_s: float | None = None
) -> InferRequest:
    """
    Return the request in a body whose first bytes are JSON and whose others are tensors.

    `with_weights` says whether the model declares `attention_weights`; `timeout_s`
    is the time limit from outside the body.

    Raises:
        InvalidInput: the body is not a request of the documented form.
    """
    binary = memoryview(body)[json_bytes:]

    def decode_header(reader: Reader) -> InferRequest:
        return _decode(reader, binary, with_weights=with_weights, timeout_s=timeout_s)

    return read(body[:json_bytes] if binary else body, decode_header)


def encode(
    model: str, version: int, request: InferRequest, answer: Answer
) -> tuple[int | None, int | None, Iterator[Chunk]]:
    """
    Return the length of the answer, that of its JSON header, and the answer in pieces.

    Without binary tensors the answer is all JSON and both lengths are None.
    The header is padded with spaces so that the tensors are aligned in memory.
    """
    named = {OUTPUT: answer.output, ATTENTION_WEIGHTS: answer.attention_weights}
    tensors = {name: tensor for name in request.outputs if (tensor := named[name]) is not None}
    head: dict[str, Any] = {"model_name": model, "model_version": str(version)}
    if request.id:
        head["id"] = request.id
    binary = [tensor for name, tensor in tensors.items() if request.outputs[name]]
    if not binary:
        return None, None, gathered(_header(head, tensors, request.outputs))
    if len(binary) == len(tensors):
        entries = [_entry(name, tensor, binary=True) for name, tensor in tensors.items()]
        text = orjson.dumps(head | {"outputs": entries})
    else:
        text = b"".join(_header(head, tensors, request.outputs))
    text += b" " * (-len(text) % _ALIGNMENT)
    pieces = itertools.chain([text], *(raw(tensor) for tensor in binary))
    return len(text) + sum(tensor.nbytes for tensor in binary), len(text), pieces


def _header(
    head: dict[str, Any], tensors: Mapping[str, Floats], binary: Mapping[str, bool]
) -> Iterator[bytes]:
    yield orjson.dumps(head)[:-1] + b',"outputs":['
    for i, (name, tensor) in enumerate(tensors.items()):
        entry = _entry(name, tensor, binary=binary[name])
        yield (b"," if i else b"") + orjson.dumps(entry)[:-1]
        if not binary[name]:
            yield b',"data":'
            yield from json_array(tensor.reshape(-1))
        yield b"}"
    yield b"]}"


def _entry(name: str, tensor: Floats, *, binary: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": tensor.shape}
    if binary:
        entry["parameters"] = {"binary_data_size": tensor.nbytes}
    return entry


def _header_size(text: str, body_size: int) -> int:
    if not text.isascii() or not text.isdigit():
        raise InvalidInput(
            f"header Inference-Header-Content-Length: expected a number, got {text[:64]!r}"
        )
    size = int(text[:20])
    if size == 0:
        raise InvalidInput(
            "header Inference-Header-Content-Length: expected a JSON header, got 0; a raw body"
            " cannot say which of two free axes is which"
        )
    if size > body_size:
        raise InvalidInput(
            "header Inference-Header-Content-Length: expected at most the body's"
            f" {body_size} bytes, got {size}"
        )
    return size


def _decode(
    reader: Reader, binary: memoryview, *, with_weights: bool, timeout_s: float | None
) -> InferRequest:
    root = reader.root()
    check_known(root, ("id", "parameters", "inputs", "outputs"), "body")
    request_id = reader.plain(root["id"]) if "id" in root else ""
    if not isinstance(request_id, str):
        raise InvalidInput(f"id: expected a string, got {kind_of(request_id)}")
    if any("\ud800" <= character <= "\udfff" for character in request_id):
        raise InvalidInput("id: expected Unicode characters, got a lone surrogate")
    parameters = _parameters(reader, root, "parameters")
    if "inputs" not in root:
        raise InvalidInput("inputs: expected an array of tensors, got none")
    arrays = _inputs(reader, reader.objects(root["inputs"], "inputs"), binary)
    outputs = _outputs(reader, root, parameters, with_weights=with_weights)
    options = _options(parameters, timeout_s, weights=ATTENTION_WEIGHTS in outputs)
    if EMBEDDINGS not in arrays:
        raise InvalidInput(f"inputs: expected one named {EMBEDDINGS}, got none")
    tensors = Tensors(**arrays)
    return InferRequest(request_id, tensors, options, outputs)


def _options(parameters: dict[str, Any], timeout_s: float | None, *, weights: bool) -> Options:
    raw: dict[str, object] = {"weights": weights, "timeout_s": timeout_s}
    if "timeout" in parameters:
        timeout = parameters["timeout"]
        whole = isinstance(timeout, int) and not isinstance(timeout, bool)
        if not whole or not 0 <= timeout <= MAX_TIMEOUT_S * 1e6:
            raise InvalidInput(
                f"parameters.timeout: expected whole microseconds up to {MAX_TIMEOUT_S * 1e6:.0f}"
            )
        raw["timeout_s"] = timeout / 1e6 if timeout else timeout_s
    raw |= {key: parameters[key] for key in ("causal", "priority") if key in parameters}
    return checked(raw)


def _parameters(reader: Reader, members: Mapping[str, Node], where: str) -> dict[str, Any]:
    """Return the `parameters` object; unknown ones are the protocol's to ignore."""
    parameters = reader.plain(members["parameters"]) if "parameters" in members else {}
    if not isinstance(parameters, dict):
        raise InvalidInput(f"{where}: expected an object, got {kind_of(parameters)}")
    return parameters


def _outputs(
    reader: Reader, root: dict[str, Node], parameters: dict[str, Any], *, with_weights: bool
) -> dict[str, bool]:
    declared = (OUTPUT, ATTENTION_WEIGHTS) if with_weights else (OUTPUT,)
    by_default = _flag(parameters, "binary_data_output", "parameters", default=False)
    entries = reader.objects(root["outputs"], "outputs") if "outputs" in root else []
    if not entries:
        return dict.fromkeys(declared, by_default)
    outputs: dict[str, bool] = {}
    for i, entry in enumerate(entries):
        where = f"outputs[{i}]"
        check_known(entry, ("name", "parameters"), where)
        name = _name(reader, entry, where)
        if name == ATTENTION_WEIGHTS and not with_weights:
            raise InvalidInput(f"{where}: {name} is an output of the model <name>{WEIGHTS_SUFFIX}")
        if name not in declared:
            raise InvalidInput(f"{where}: expected {' or '.join(declared)}, got {name[:64]!r}")
        if name in outputs:
            raise InvalidInput(f"{where}: {name} is asked for twice")
        own = _parameters(reader, entry, f"{where}.parameters")
        outputs[name] = _flag(own, "binary_data", f"{where}.parameters", default=by_default)
    return outputs


def _inputs(
    reader: Reader, entries: list[dict[str, Node]], binary: memoryview
) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {}
    offset = 0
    for i, entry in enumerate(entries):
        where = f"inputs[{i}]"
        check_known(entry, ("name", "shape", "datatype", "parameters", "data"), where)
        name = _name(reader, entry, where)
        check_known([name], _INPUTS, where)
        if name in arrays:
            raise InvalidInput(f"{where}: {name} is given twice")
        shape = _shape(reader, entry, where)
        _check_datatype(reader, entry, name, where)
        parameters = _parameters(reader, entry, f"{where}.parameters")
        size = parameters.get("binary_data_size")
        if (size is None) == ("data" not in entry):
            raise InvalidInput(f"{name}: expected either data or parameters.binary_data_size")
        if size is None:
            arrays[name] = _from_json(reader, entry["data"], name, shape)
        else:
            arrays[name] = _from_binary(binary, offset, size, name, shape)
            offset += size
    if offset != len(binary):
        raise InvalidInput(
            f"body: expected {offset} bytes of binary tensors after the JSON header,"
            f" got {len(binary)}"
        )
    return arrays


def _name(reader: Reader, entry: Mapping[str, Node], where: str) -> str:
    name = reader.plain(entry["name"]) if "name" in entry else None
    if not isinstance(name, str):
        raise InvalidInput(f"{where}.name: expected a string, got {kind_of(name)}")
    return name


def _shape(reader: Reader, entry: Mapping[str, Node], where: str) -> tuple[int, ...]:
    shape = reader.plain(entry["shape"]) if "shape" in entry else None
    sizes = shape if isinstance(shape, list) and len(shape) <= MAX_RANK else [None]
    if not all(type(size) is int and 1 <= size < 2**31 for size in sizes):
        raise InvalidInput(
            f"{where}.shape: expected an array of whole numbers from 1, at most {MAX_RANK}"
        )
    return tuple(sizes)


def _check_datatype(reader: Reader, entry: Mapping[str, Node], name: str, where: str) -> None:
    datatype = reader.plain(entry["datatype"]) if "datatype" in entry else None
    if datatype != _INPUTS[name]:
        found = repr(datatype[:64]) if isinstance(datatype, str) else kind_of(datatype)
        raise InvalidInput(f"{where}.datatype: {name}: expected {_INPUTS[name]}, got {found}")


def _from_json(reader: Reader, node: Node, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    nested = reader.floats(node, name) if _INPUTS[name] == "FP32" else reader.bools(node, name)
    expected = math.prod(shape)
    flat = nested.rank == 1 and nested.values.size == expected
    if not flat and nested.shape != shape:
        raise InvalidInput(
            f"{name}: expected data of shape {list(shape)} or {expected} flat values,"
            f" got {_found_shape(nested)}"
        )
    return nested.values.reshape(shape)


def _found_shape(nested: Nested) -> str:
    if nested.shape is None:
        return "rows of unequal length"
    return f"{nested.values.size} flat values" if nested.rank == 1 else str(list(nested.shape))


def _from_binary(
    binary: memoryview, offset: int, size: object, name: str, shape: tuple[int, ...]
) -> Floats | Bools:
    dtype = _DATATYPES[_INPUTS[name]]
    expected = math.prod(shape) * dtype.itemsize
    if isinstance(size, bool) or not isinstance(size, int) or size != expected:
        found = size if type(size) is int else kind_of(size)
        raise InvalidInput(
            f"{name}: binary_data_size: expected {expected} bytes for {_INPUTS[name]}"
            f" {list(shape)}, got {found}"
        )
    if offset + size > len(binary):
        raise InvalidInput(
            f"{name}: expected {size} bytes of binary data, got {max(0, len(binary) - offset)}"
        )
    if dtype == np.bool_ and np.frombuffer(binary, np.uint8, size, offset).max(initial=0) > 1:
        raise InvalidInput(f"{name}: expected bytes 0 and 1, got another")
    tensor = np.frombuffer(binary, dtype, expected // dtype.itemsize, offset).reshape(shape)
    # The header leaves the tensors at any offset; the runtime wants them aligned.
    return tensor if tensor.flags.aligned else tensor.copy()


def _flag(parameters: Mapping[str, Any], name: str, where: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidInput(f"{where}.{name}: expected true or false, got {kind_of(value)}")
    return value
