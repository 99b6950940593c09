"""The answer to the protocol's infer call: JSON, binary tensors, or both in one body."""

import itertools
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
import orjson

from service.codecs.chunks import Chunk, gathered, json_array, raw
from service.codecs.datatypes import DTYPES, FP32
from service.codecs.names import HEADS
from service.codecs.oip_inputs import Places
from service.codecs.oip_request import InferRequest
from service.codecs.size import JSON_PER_RAW_BYTE, Size
from service.contract import ATTENTION_WEIGHTS, EXTRA_WEIGHTS, OUTPUT
from service.errors import InvalidInput
from service.inference.calls import Answer, Call, Floats
from service.layer_config import LayerConfig

_ALIGNMENT: Final = 64

_REMEMBERED: Final = 256

_ID: Final = 64
"""Characters of an id that is remembered with its answer's header."""


def encode(
    model: str, version: int, request: InferRequest, answer: Answer, places: Places
) -> tuple[int | None, int | None, Iterator[Chunk]]:
    """
    Return the length of the answer, that of its JSON header, and the answer in pieces.

    Without binary tensors the answer is all JSON and both lengths are None.
    The header is padded with spaces so that the tensors are aligned in memory.
    What belongs in shared memory is there when this returns.

    Raises:
        InvalidInput: a tensor has no room in shared memory any more.
    """
    tensors = _asked_for(request, answer)
    for name in request.kept:
        little = np.ascontiguousarray(tensors[name], "<f4")
        places[name].write(little.reshape(-1).view(np.uint8).data)
    binary = [tensor for name, tensor in tensors.items() if request.outputs[name]]
    if not binary:
        head = _head(model, version, request.id, answer.heads)
        return None, None, gathered(_header(head, tensors, request))
    if len(binary) == len(tensors):
        shapes = tuple([(name, tensor.shape) for name, tensor in tensors.items()])
        header_of = _binary_header_again if len(request.id) <= _ID else _binary_header
        header = header_of(model, version, request.id, answer.heads, shapes)
    else:
        head = _head(model, version, request.id, answer.heads)
        header = _aligned(b"".join(_header(head, tensors, request)))
    size = len(header)
    pieces = itertools.chain([header], *[raw(tensor) for tensor in binary])
    return size + sum([tensor.nbytes for tensor in binary]), size, pieces


def sizes(request: InferRequest, answer: Answer) -> tuple[Size, Size]:
    """Return how much work `encode` is before it returns, and how much its pieces are."""
    raw_bytes = json_bytes = kept_bytes = 0
    for name, tensor in _asked_for(request, answer).items():
        if name in request.kept:
            kept_bytes += tensor.nbytes
        elif request.outputs[name]:
            raw_bytes += tensor.nbytes
        else:
            json_bytes += JSON_PER_RAW_BYTE * tensor.nbytes
    # The JSON that stands before raw tensors is made at once: its length is told first.
    first = Size(json_bytes if raw_bytes else 0, kept_bytes)
    return first, Size(0, raw_bytes) if raw_bytes else Size(json_bytes)


def check_kept(request: InferRequest, call: Call, layer: LayerConfig) -> None:
    """
    Return when the answer will have room in shared memory, as far as it belongs there.

    Raises:
        InvalidInput: a tensor will be larger than its slot.
    """
    rows, length, embed_dim = call.inputs.embeddings.shape
    heads = layer.num_heads if call.heads is None else len(call.heads)
    shapes = {
        OUTPUT: (rows, length, embed_dim),
        ATTENTION_WEIGHTS: (rows, heads, length, call.inputs.key_length),
        EXTRA_WEIGHTS: (rows, heads, length, len(layer.extra_keys)),
    }
    for name, slot in request.kept.items():
        size = math.prod(shapes[name]) * 4
        if slot.byte_size < size:
            raise InvalidInput(
                f"{name}: expected a shared_memory_byte_size of at least {size} for"
                f" {FP32} {list(shapes[name])}, got {slot.byte_size}"
            )


def _asked_for(request: InferRequest, answer: Answer) -> dict[str, Floats]:
    named = {
        OUTPUT: answer.output,
        ATTENTION_WEIGHTS: answer.attention_weights,
        EXTRA_WEIGHTS: answer.extra_weights,
    }
    return {name: tensor for name in request.outputs if (tensor := named[name]) is not None}


def _head(
    model: str, version: int, request_id: str, heads: tuple[int, ...] | None
) -> dict[str, Any]:
    """
    Return what an answer says before its tensors; it names a subset of heads: `0,3`.

    It does so beside the outputs, because a client that finds parameters at one in shared
    memory looks for its bytes (perf_analyzer).
    """
    head: dict[str, Any] = {"model_name": model, "model_version": str(version)}
    if request_id:
        head["id"] = request_id
    if heads is not None:
        head["parameters"] = {HEADS: ",".join(map(str, heads))}
    return head


def _binary_header(
    model: str,
    version: int,
    request_id: str,
    heads: tuple[int, ...] | None,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
) -> bytes:
    """Return the JSON of an answer whose tensors are all binary."""
    outputs = [_entry(name, shape, binary=True) for name, shape in shapes]
    return _aligned(orjson.dumps(_head(model, version, request_id, heads) | {"outputs": outputs}))


_binary_header_again = lru_cache(_REMEMBERED)(_binary_header)
"""The same for one that may have been made before."""


def _aligned(header: bytes) -> bytes:
    return header + b" " * (-len(header) % _ALIGNMENT)


def _header(
    head: dict[str, Any], tensors: Mapping[str, Floats], request: InferRequest
) -> Iterator[Chunk]:
    yield orjson.dumps(head)[:-1] + b',"outputs":['
    for i, (name, tensor) in enumerate(tensors.items()):
        entry = _entry(name, tensor.shape, binary=request.outputs[name])
        yield (b"," if i else b"") + orjson.dumps(entry)[:-1]
        if not request.outputs[name] and name not in request.kept:
            yield b',"data":'
            yield from json_array(tensor.reshape(-1))
        yield b"}"
    yield b"]}"


def _entry(name: str, shape: tuple[int, ...], *, binary: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "datatype": FP32, "shape": shape}
    if binary:
        entry["parameters"] = {"binary_data_size": math.prod(shape) * DTYPES[FP32].itemsize}
    return entry
