"""
The Open Inference Protocol v2 `infer` call: JSON, binary tensors, or both in one body.

A binary body is a JSON header of `Inference-Header-Content-Length` bytes and the
raw little-endian tensors after it, in the order of the header
(https://github.com/kserve/open-inference-protocol, binary tensor data extension).
A tensor may also lie, or be laid down, in shared memory: see `shared_memory`.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from service.calls import Answer, Call, Floats
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
from service.datatypes import BOOL, DTYPES, FP32, INTEGERS, NUMBERS, from_bytes, to_floats
from service.errors import InvalidInput, TooLarge
from service.json_reader import MAX_RANK, Nested, Node, Reader, kind_of, read
from service.options import MAX_TIMEOUT_S, check_known, checked, checked_heads
from service.pieces import Chunk, gathered, json_array, raw
from service.shapes import Options, Tensors
from service.shared_memory import Place, Slot, checked_size
from service.workers import JSON_PER_RAW_BYTE, Size

REGION: Final = "shared_memory_region"
HEADER_LENGTH: Final = "inference-header-content-length"
BINARY_MEDIA_TYPE: Final = "application/octet-stream"
_ALIGNMENT: Final = 64
_INPUTS: Final = {
    EMBEDDINGS: FP32,
    MEMORY: FP32,
    ATTEND_MASK: BOOL,
    PAIR_MASK: BOOL,
    HEAD_MASK: FP32,
}
_RESERVED: Final = "triton_"
"""What no parameter's name begins with: the protocol keeps it for its servers."""
_STATELESS: Final[dict[str, tuple[tuple[type, object], ...]]] = {
    "sequence_id": ((int, 0), (str, "")),
    "sequence_start": ((bool, False),),
    "sequence_end": ((bool, False),),
}
"""The parameters of calls that belong together, and with which values they say: it does not."""
_REMEMBERED_BYTES: Final = 2048
"""Longer JSON headers are read anew each time; callers repeat the short ones, call for call."""
_REMEMBERED: Final = 256
_ID: Final = 64
"""Characters of an id that is remembered with its answer's header."""
_DIGITS: Final = 10
"""Fewer digits than that number a head."""

Arrays = dict[str, npt.NDArray[Any]]
Places = Mapping[str, Place]
"""Where in shared memory tensors lie or belong, by their names."""


@dataclass(frozen=True)
class Borrowed:
    """An input that lies in shared memory."""

    slot: Slot
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Trailing:
    """An input that lies in the body, behind its JSON."""

    offset: int
    """From the end of the JSON."""
    byte_size: int
    datatype: str
    shape: tuple[int, ...]


@dataclass(eq=False, slots=True)
class InferRequest:
    """What a client asked for."""

    id: str
    arrays: Arrays
    """The inputs by name, but for those that lie elsewhere."""
    trailing: Mapping[str, Trailing]
    borrowed: Mapping[str, Borrowed]
    options: Options
    outputs: Mapping[str, bool]
    """The outputs by name, and whether each is binary in the body."""
    kept: Mapping[str, Slot]
    """The outputs that belong in shared memory, of which the body holds no values."""

    @property
    def tensors(self) -> Tensors:
        """The inputs, once none lies elsewhere."""
        return Tensors(**self.arrays)

    @property
    def slots(self) -> dict[str, Slot]:
        """Where in shared memory tensors lie or belong, by their names."""
        if not self.borrowed and not self.kept:
            return {}
        return {name: borrowed.slot for name, borrowed in self.borrowed.items()} | dict(self.kept)


def split_model_name(name: str) -> tuple[str, bool]:
    """Return the artifact behind a protocol model, and whether it declares the weights."""
    plain = name.removesuffix(WEIGHTS_SUFFIX)
    return plain, plain != name


def infer_target(path: str) -> tuple[str, str | None] | None:
    """Return the model, and the version if there is one, that a path of `infer` names."""
    if not (path.startswith("/v2/models/") and path.endswith("/infer")):
        return None
    match path.split("/")[3:]:
        case [name, "infer"]:
            return name, None
        case [name, "versions", version, "infer"]:
            return name, version
        case _:
            return None


def json_size(header_length: str | None, body_size: int) -> int:
    """
    Return how many bytes of a body are JSON; `header_length` is the header of that name.

    Raises:
        InvalidInput: the header is not a number that fits the body.
    """
    return body_size if header_length is None else _header_size(header_length, body_size)


def decode(
    body: bytes | memoryview, json_bytes: int, with_weights: bool, timeout_s: float | None = None
) -> InferRequest:
    """
    Return the request in a body whose first bytes are JSON and whose others are tensors.

    `with_weights` says whether the model declares `attention_weights`; `timeout_s`
    is the time limit from outside the body.

    Raises:
        InvalidInput: the body is not a request of the documented form.
    """
    asked = outline(body, json_bytes, with_weights, timeout_s)
    return replace(asked, arrays=arrays_of(asked, memoryview(body)[json_bytes:]), trailing={})


def outline(
    body: bytes | memoryview, json_bytes: int, with_weights: bool, timeout_s: float | None = None
) -> InferRequest:
    """
    Return the request as `decode` does, but without the tensors that lie behind its JSON.

    It may be the very object that an equal request had before.

    Raises:
        InvalidInput: the JSON is not of the documented form.
    """
    is_remembered = json_bytes < len(body) and json_bytes <= _REMEMBERED_BYTES
    read_json = _read_again if is_remembered else _read
    return read_json(bytes(body[:json_bytes]), with_weights, timeout_s)


def arrays_of(asked: InferRequest, binary: memoryview) -> Arrays:
    """
    Return the inputs that are not borrowed; `binary` is what lies behind the JSON.

    Raises:
        InvalidInput: the tensors are not exactly what lies there, or a value is wrong.
    """
    arrays = dict(asked.arrays)
    end = 0
    for name, place in asked.trailing.items():
        end = place.offset + place.byte_size
        if end > len(binary):
            raise InvalidInput(
                f"{name}: expected {place.byte_size} bytes of binary data,"
                f" got {max(0, len(binary) - place.offset)}"
            )
        arrays[name] = from_bytes(binary, place.offset, place.datatype, place.shape, name)
    if end != len(binary):
        raise InvalidInput(
            f"body: expected {end} bytes of binary tensors after the JSON header, got {len(binary)}"
        )
    return arrays


def borrow(request: InferRequest, places: Places, limit_bytes: int) -> InferRequest:
    """
    Return the request with copies of all the inputs that lie in shared memory.

    Raises:
        InvalidInput: a value is wrong, or its segment has become too short.
        TooLarge: they are more than the limit together; none is read then.
    """
    size = sum(borrowed.slot.byte_size for borrowed in request.borrowed.values())
    if size > limit_bytes:
        raise TooLarge(f"inputs: at most {limit_bytes} bytes in shared memory, got {size}")
    arrays = dict(request.arrays)
    for name, borrowed in request.borrowed.items():
        content = places[name].read()
        arrays[name] = from_bytes(content, 0, borrowed.datatype, borrowed.shape, name)
    return replace(request, arrays=arrays, borrowed={})


def check_kept(request: InferRequest, call: Call, num_heads: int) -> None:
    """
    Return when the answer will have room in shared memory, as far as it belongs there.

    Raises:
        InvalidInput: a tensor will be larger than its slot.
    """
    rows, length, embed_dim = call.inputs.embeddings.shape
    heads = num_heads if call.heads is None else len(call.heads)
    shapes = {
        OUTPUT: (rows, length, embed_dim),
        ATTENTION_WEIGHTS: (rows, heads, length, call.inputs.key_length),
    }
    for name, slot in request.kept.items():
        size = math.prod(shapes[name]) * 4
        if slot.byte_size < size:
            raise InvalidInput(
                f"{name}: expected a shared_memory_byte_size of at least {size} for"
                f" {FP32} {list(shapes[name])}, got {slot.byte_size}"
            )


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
        return None, None, gathered(_header(_head(model, version, request.id), tensors, request))
    if len(binary) == len(tensors):
        shapes = tuple([(name, tensor.shape) for name, tensor in tensors.items()])
        header_of = _binary_header_again if len(request.id) <= _ID else _binary_header
        header = header_of(model, version, request.id, shapes)
    else:
        header = _aligned(b"".join(_header(_head(model, version, request.id), tensors, request)))
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


def _asked_for(request: InferRequest, answer: Answer) -> dict[str, Floats]:
    named = {OUTPUT: answer.output, ATTENTION_WEIGHTS: answer.attention_weights}
    return {name: tensor for name in request.outputs if (tensor := named[name]) is not None}


def _head(model: str, version: int, request_id: str) -> dict[str, Any]:
    head: dict[str, Any] = {"model_name": model, "model_version": str(version)}
    return head | {"id": request_id} if request_id else head


def _binary_header(
    model: str, version: int, request_id: str, shapes: tuple[tuple[str, tuple[int, ...]], ...]
) -> bytes:
    """Return the JSON of an answer whose tensors are all binary."""
    outputs = [_entry(name, shape, binary=True) for name, shape in shapes]
    return _aligned(orjson.dumps(_head(model, version, request_id) | {"outputs": outputs}))


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


def _read(header: bytes, with_weights: bool, timeout_s: float | None) -> InferRequest:
    """Return what the JSON says; tensors that lie elsewhere are not there yet."""

    def decode_header(reader: Reader) -> InferRequest:
        return _decode(reader, with_weights=with_weights, timeout_s=timeout_s)

    return read(header, decode_header)


_read_again = lru_cache(_REMEMBERED)(_read)
"""The same for a header that may have been read before; mistakes are not remembered."""


def _decode(reader: Reader, *, with_weights: bool, timeout_s: float | None) -> InferRequest:
    root = reader.root()
    # kserve's client repeats the model's name in the body; the path is what counts.
    check_known(root, ("id", "parameters", "inputs", "outputs", "model_name"), "body")
    request_id = reader.plain(root["id"]) if "id" in root else ""
    if not isinstance(request_id, str):
        raise InvalidInput(f"id: expected a string, got {kind_of(request_id)}")
    if any("\ud800" <= character <= "\udfff" for character in request_id):
        raise InvalidInput("id: expected Unicode characters, got a lone surrogate")
    parameters = _parameters(reader, root, "parameters")
    if "inputs" not in root:
        raise InvalidInput("inputs: expected an array of tensors, got none")
    arrays, trailing, borrowed = _inputs(reader, reader.objects(root["inputs"], "inputs"))
    outputs, kept = _outputs(reader, root, parameters, with_weights=with_weights)
    options = _options(parameters, timeout_s, outputs, with_weights=with_weights)
    if EMBEDDINGS not in {*arrays, *trailing, *borrowed}:
        raise InvalidInput(f"inputs: expected one named {EMBEDDINGS}, got none")
    return InferRequest(request_id, arrays, trailing, borrowed, options, outputs, kept)


def _options(
    parameters: dict[str, Any],
    timeout_s: float | None,
    outputs: Mapping[str, bool],
    *,
    with_weights: bool,
) -> Options:
    _check_reserved(parameters)
    raw: dict[str, object] = {"weights": ATTENTION_WEIGHTS in outputs, "timeout_s": timeout_s}
    if "timeout" in parameters:
        timeout = parameters["timeout"]
        whole = isinstance(timeout, int) and not isinstance(timeout, bool)
        if not whole or not 0 <= timeout <= MAX_TIMEOUT_S * 1e6:
            raise InvalidInput(
                f"parameters.timeout: expected whole microseconds up to {MAX_TIMEOUT_S * 1e6:.0f}"
            )
        raw["timeout_s"] = timeout / 1e6 if timeout else timeout_s
    raw |= {key: parameters[key] for key in ("causal", "priority") if key in parameters}
    options = checked(raw)
    if "heads" not in parameters:
        return options
    if not with_weights:
        raise InvalidInput(
            f"parameters.heads: heads are chosen from the {ATTENTION_WEIGHTS} of the model"
            f" <name>{WEIGHTS_SUFFIX}; this one has none"
        )
    return replace(options, heads=_heads(parameters["heads"]))


def _check_reserved(parameters: dict[str, Any]) -> None:
    """
    Return when no parameter asks for what only a server with sequences of calls has.

    Raises:
        InvalidInput: one does, or has a name that the protocol reserves.
    """
    for key, value in parameters.items():
        if key.startswith(_RESERVED):
            raise InvalidInput(
                f"parameters.{key[:64]}: names beginning with {_RESERVED} are reserved"
            )
        if key in _STATELESS and (type(value), value) not in _STATELESS[key]:
            raise InvalidInput(f"parameters.{key}: expected none; calls are independent here")


def _heads(value: object) -> tuple[int, ...]:
    """Return the heads of `[0, 3]`, or of `"0,3"` from clients whose parameters are no arrays."""
    where = "parameters.heads"
    if not isinstance(value, str):
        if not isinstance(value, list):
            raise InvalidInput(f'{where}: expected "0,3" or [0, 3], got {kind_of(value)}')
        return checked_heads(value, where)
    texts = [text.strip() for text in value.split(",")]
    if not all(text.isascii() and text.isdigit() and len(text) < _DIGITS for text in texts):
        raise InvalidInput(f'{where}: expected numbers like "0,3", got {value[:64]!r}')
    return tuple(map(int, texts))


def _parameters(reader: Reader, members: Mapping[str, Node], where: str) -> dict[str, Any]:
    """Return the `parameters` object; unknown ones are the protocol's to ignore."""
    parameters = reader.plain(members["parameters"]) if "parameters" in members else {}
    if not isinstance(parameters, dict):
        raise InvalidInput(f"{where}: expected an object, got {kind_of(parameters)}")
    return parameters


def _outputs(
    reader: Reader, root: dict[str, Node], parameters: dict[str, Any], *, with_weights: bool
) -> tuple[dict[str, bool], dict[str, Slot]]:
    """Return whether each output is binary, and the slots of those for shared memory."""
    declared = (OUTPUT, ATTENTION_WEIGHTS) if with_weights else (OUTPUT,)
    by_default = _flag(parameters, "binary_data_output", "parameters", default=False)
    entries = reader.objects(root["outputs"], "outputs") if "outputs" in root else []
    if not entries:
        return dict.fromkeys(declared, by_default), {}
    outputs: dict[str, bool] = {}
    kept: dict[str, Slot] = {}
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
        if "classification" in own:
            raise InvalidInput(f"{where}.parameters.classification: not offered; expected none")
        outputs[name] = _flag(own, "binary_data", f"{where}.parameters", default=by_default)
        if REGION in own:
            outputs[name], kept[name] = False, _slot(own, f"{where}.parameters")
    return outputs, kept


def _inputs(
    reader: Reader, entries: list[dict[str, Node]]
) -> tuple[Arrays, dict[str, Trailing], dict[str, Borrowed]]:
    """Return the tensors that the JSON holds, and where the others lie: behind it, or shared."""
    arrays: Arrays = {}
    trailing: dict[str, Trailing] = {}
    borrowed: dict[str, Borrowed] = {}
    offset = 0
    for i, entry in enumerate(entries):
        where = f"inputs[{i}]"
        check_known(entry, ("name", "shape", "datatype", "parameters", "data"), where)
        name = _name(reader, entry, where)
        check_known([name], _INPUTS, where)
        if name in {*arrays, *trailing, *borrowed}:
            raise InvalidInput(f"{where}: {name} is given twice")
        shape = _shape(reader, entry, where)
        datatype = _datatype(reader, entry, name, where)
        parameters = _parameters(reader, entry, f"{where}.parameters")
        size = parameters.get("binary_data_size")
        if ("data" in entry) + (size is not None) + (REGION in parameters) != 1:
            raise InvalidInput(
                f"{name}: expected one of data, parameters.binary_data_size and parameters.{REGION}"
            )
        if size is not None:
            byte_size = _check_size(size, "binary_data_size", name, datatype, shape)
            trailing[name] = Trailing(offset, byte_size, datatype, shape)
            offset += byte_size
        elif REGION in parameters:
            slot = _slot(parameters, f"{where}.parameters")
            _check_size(slot.byte_size, "shared_memory_byte_size", name, datatype, shape)
            borrowed[name] = Borrowed(slot, datatype, shape)
        else:
            arrays[name] = _from_json(reader, entry["data"], name, datatype, shape)
    return arrays, trailing, borrowed


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


def _datatype(reader: Reader, entry: Mapping[str, Node], name: str, where: str) -> str:
    datatype = reader.plain(entry["datatype"]) if "datatype" in entry else None
    wanted = _INPUTS[name]
    if datatype == wanted:
        return wanted
    if isinstance(datatype, str) and datatype in NUMBERS and wanted == FP32:
        return datatype
    found = repr(datatype[:64]) if isinstance(datatype, str) else kind_of(datatype)
    others = f" or another of {', '.join(NUMBERS)}" if wanted == FP32 else ""
    raise InvalidInput(f"{where}.datatype: {name}: expected {wanted}{others}, got {found}")


def _slot(parameters: dict[str, Any], where: str) -> Slot:
    region = parameters[REGION]
    if not isinstance(region, str):
        raise InvalidInput(f"{where}.{REGION}: expected a string, got {kind_of(region)}")
    offset = parameters.get("shared_memory_offset", 0)
    byte_size = parameters.get("shared_memory_byte_size")
    return Slot(
        region,
        checked_size(f"{where}.shared_memory_offset", offset, least=0),
        checked_size(f"{where}.shared_memory_byte_size", byte_size, least=1),
    )


def _from_json(
    reader: Reader, node: Node, name: str, datatype: str, shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    if datatype == BOOL:
        nested = reader.bools(node, name)
    elif datatype in INTEGERS:
        nested = reader.integers(node, name, INTEGERS[datatype])
    else:
        nested = reader.floats(node, name)
    expected = math.prod(shape)
    flat = nested.rank == 1 and nested.values.size == expected
    if not flat and nested.shape != shape:
        raise InvalidInput(
            f"{name}: expected data of shape {list(shape)} or {expected} flat values,"
            f" got {_found_shape(nested)}"
        )
    array = nested.values.reshape(shape)
    return to_floats(array, name) if datatype in INTEGERS else array


def _found_shape(nested: Nested) -> str:
    if nested.shape is None:
        return "rows of unequal length"
    return f"{nested.values.size} flat values" if nested.rank == 1 else str(list(nested.shape))


def _check_size(
    size: object, parameter: str, name: str, datatype: str, shape: tuple[int, ...]
) -> int:
    """Return how many bytes the tensor takes, when that is what the parameter says."""
    expected = math.prod(shape) * DTYPES[datatype].itemsize
    if type(size) is not int or size != expected:
        found = size if type(size) is int else kind_of(size)
        raise InvalidInput(
            f"{name}: {parameter}: expected {expected} bytes for {datatype} {list(shape)},"
            f" got {found}"
        )
    return expected


def _flag(parameters: Mapping[str, Any], name: str, where: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidInput(f"{where}.{name}: expected true or false, got {kind_of(value)}")
    return value
