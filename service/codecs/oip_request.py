"""
The Open Inference Protocol v2 `infer` request: JSON, binary tensors, or both in one body.

A binary body is a JSON header of `Inference-Header-Content-Length` bytes and the
raw little-endian tensors after it, in the order of the header
(https://github.com/kserve/open-inference-protocol, binary tensor data extension).
A tensor may also lie in shared memory: see `shared_memory`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from service.codecs.checks import kind_of, shown
from service.codecs.datatypes import INPUTS, from_bytes
from service.codecs.json_bounds import JsonBounds, JsonCounts, weighed
from service.codecs.json_reader import Reader
from service.codecs.names import HEADS, check_names, check_parameters
from service.codecs.oip_inputs import (
    Arrays,
    Borrowed,
    Places,
    Trailing,
    inputs_of,
    parameters_of,
)
from service.codecs.oip_outputs import WEIGHTS, Offered, outputs_of
from service.codecs.options import MAX_TIMEOUT_S, checked, checked_heads, heads_of_text
from service.codecs.shared_memory import Slot
from service.codecs.simdjson_reader import read
from service.codecs.size import Size
from service.contract import (
    ATTENTION_WEIGHTS,
    EMBEDDINGS,
    WEIGHTS_SUFFIX,
)
from service.errors import InvalidInput, TooLarge
from service.inference.calls import Options
from service.inference.tensors import Tensors

_REMEMBERED: Final = 256

_MAX_ID: Final = 64 * 1024
"""It is repeated in the answer, whose head is written in one step."""
_SURROGATE: Final = re.compile("[\ud800-\udfff]")

HEADER_LENGTH: Final = "inference-header-content-length"

BINARY_MEDIA_TYPE: Final = "application/octet-stream"

_RESERVED: Final = "triton_"
"""What no parameter's name begins with: the protocol keeps it for its servers."""

_STATELESS: Final[dict[str, tuple[tuple[type, object], ...]]] = {
    "sequence_id": ((int, 0), (str, "")),
    "sequence_start": ((bool, False),),
    "sequence_end": ((bool, False),),
}
"""The parameters of calls that belong together, and with which values they say: it does not."""

_PARAMETERS: Final = (
    "causal",
    "priority",
    "timeout",
    HEADS,
    "binary_data_output",
    *_STATELESS,
)
"""The parameters of a request that are read; the protocol has unknown ones passed over."""

_OF_TENSORS: Final = ("binary_data",)
"""The protocol's parameters of one tensor that have names of the table; here they mean nothing."""

_REMEMBERED_BYTES: Final = 2048
"""Longer JSON headers are read anew each time; callers repeat the short ones, call for call."""

_CONVERTED: Final = (b"FP16", b"BF16", b"FP64", b"INT")
_PER_CONVERTED_BYTE: Final = 4
_CONVERTED_BYTES: Final = 2**20
"""
Tensors of these datatypes are more work than others, 2 to 3 ns a byte; that counts from so
many bytes of all tensors on.
"""


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


def work_of(
    body: bytes | memoryview, json_bytes: int, bounds: JsonBounds
) -> tuple[Size, JsonCounts | None]:
    """
    Return how much work `decode` is, and the counts of the JSON unless that is small.

    Raises:
        InvalidInput, TooLarge: the JSON is above the bounds.
    """
    header = bytes(body[:json_bytes])
    size, counts = weighed(header, bounds)
    raw_bytes = len(body) - json_bytes
    if raw_bytes > _CONVERTED_BYTES and any(name in header for name in _CONVERTED):
        raw_bytes *= _PER_CONVERTED_BYTE
    return replace(size, raw_bytes=raw_bytes), counts


def decode(
    body: bytes | memoryview,
    json_bytes: int,
    offered: Offered,
    timeout_s: float | None = None,
    bounds: JsonBounds | None = None,
    counts: JsonCounts | None = None,
) -> InferRequest:
    """
    Return the request in a body whose first bytes are JSON and whose others are tensors.

    `offered` are the outputs of the model: see `offered_outputs`; `timeout_s` is the time
    limit from outside the body; `bounds` and `counts` are those of the JSON.

    Raises:
        InvalidInput: the body is not a request of the documented form.
        TooLarge: its JSON is above the bounds, which is found before it is parsed.
    """
    asked = outline(body, json_bytes, offered, timeout_s, bounds, counts)
    return replace(asked, arrays=arrays_of(asked, memoryview(body)[json_bytes:]), trailing={})


def outline(
    body: bytes | memoryview,
    json_bytes: int,
    offered: Offered,
    timeout_s: float | None = None,
    bounds: JsonBounds | None = None,
    counts: JsonCounts | None = None,
) -> InferRequest:
    """
    Return the request as `decode` does, but without the tensors that lie behind its JSON.

    It may be the very object that an equal request had before.

    Raises:
        InvalidInput: the JSON is not of the documented form.
        TooLarge: it is above the bounds, which is found before it is parsed.
    """
    header = bytes(body[:json_bytes])
    if json_bytes < len(body) and json_bytes <= _REMEMBERED_BYTES:
        return _read_again(header, offered, timeout_s)
    return _read(header, offered, timeout_s, bounds, counts)


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
        arrays[name] = from_bytes(
            binary, place.offset, place.datatype, place.shape, name, INPUTS[name]
        )
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
        content, datatype = places[name].read(), borrowed.datatype
        arrays[name] = from_bytes(content, 0, datatype, borrowed.shape, name, INPUTS[name])
    return replace(request, arrays=arrays, borrowed={})


def _header_size(text: str, body_size: int) -> int:
    if not text.isascii() or not text.isdigit():
        raise InvalidInput(
            f"header Inference-Header-Content-Length: expected a number of bytes, got {text[:64]!r}"
        )
    size = int(text[:20])
    if size == 0:
        raise InvalidInput(
            "header Inference-Header-Content-Length: expected at least 1, got 0: tensors without"
            " JSON before them cannot say which of two free axes is which"
        )
    if size > body_size:
        raise InvalidInput(
            "header Inference-Header-Content-Length: expected at most the body's"
            f" {body_size} bytes, got {size}"
        )
    return size


def _read(
    header: bytes,
    offered: Offered,
    timeout_s: float | None,
    bounds: JsonBounds | None = None,
    counts: JsonCounts | None = None,
) -> InferRequest:
    """Return what the JSON says; tensors that lie elsewhere are not there yet."""

    def decode_header(reader: Reader) -> InferRequest:
        return _decode(reader, offered, timeout_s)

    return read(header, decode_header, bounds, counts)


_read_again = lru_cache(_REMEMBERED)(_read)
"""The same for a header that may have been read before; mistakes are not remembered."""


def _decode(reader: Reader, offered: Offered, timeout_s: float | None) -> InferRequest:
    root = reader.root()
    # kserve's client repeats the model's name in the body; the path is what counts.
    check_names(root, ("id", "parameters", "inputs", "outputs", "model_name"), "body")
    request_id = reader.plain(root["id"]) if "id" in root else ""
    if not isinstance(request_id, str):
        raise InvalidInput(f"id: expected a string, got {kind_of(request_id)}")
    if len(request_id) > _MAX_ID:
        raise InvalidInput(f"id: expected at most {_MAX_ID} characters, got {len(request_id)}")
    if _SURROGATE.search(request_id):
        raise InvalidInput("id: expected Unicode characters, got a lone surrogate")
    parameters = parameters_of(reader, root, "parameters")
    if "inputs" not in root:
        raise InvalidInput("inputs: expected an array of tensors, got none")
    arrays, trailing, borrowed = inputs_of(reader, reader.objects(root["inputs"], "inputs"))
    outputs, kept = outputs_of(reader, root, parameters, offered)
    options = _options(parameters, timeout_s, outputs, offered)
    if EMBEDDINGS not in {*arrays, *trailing, *borrowed}:
        raise InvalidInput(f"inputs: expected one named {EMBEDDINGS}, got none")
    return InferRequest(request_id, arrays, trailing, borrowed, options, outputs, kept)


def _options(
    parameters: dict[str, Any],
    timeout_s: float | None,
    outputs: Mapping[str, bool],
    offered: Offered,
) -> Options:
    _check_reserved(parameters)
    raw: dict[str, object] = {"weights": not outputs.keys().isdisjoint(WEIGHTS)}
    if "timeout" in parameters:
        timeout = parameters["timeout"]
        whole = isinstance(timeout, int) and not isinstance(timeout, bool)
        if not whole or not 0 <= timeout <= MAX_TIMEOUT_S * 1e6:
            raise InvalidInput(
                f"parameters.timeout: expected whole microseconds up to {MAX_TIMEOUT_S * 1e6:.0f},"
                f" got {shown(timeout)}"
            )
        raw["timeout_s"] = timeout / 1e6 if timeout else None
    raw |= {key: parameters[key] for key in ("causal", "priority") if key in parameters}
    options = checked(raw, timeout_s)
    if HEADS not in parameters:
        return options
    if ATTENTION_WEIGHTS not in offered:
        raise InvalidInput(
            f"parameters.heads: expected none, got some: heads are chosen from the"
            f" {ATTENTION_WEIGHTS} of the model <name>{WEIGHTS_SUFFIX}; this one has none"
        )
    return replace(options, heads=_heads(parameters[HEADS]))


def _check_reserved(parameters: dict[str, Any]) -> None:
    """
    Return when no parameter asks for what is not done here, or is done under another name.

    Raises:
        InvalidInput: one does, or has a name that the protocol reserves.
    """
    check_parameters(parameters, (*_PARAMETERS, *_OF_TENSORS), "parameters")
    for key, value in parameters.items():
        if key.startswith(_RESERVED):
            raise InvalidInput(
                f"parameters: expected no name beginning with {_RESERVED}, which is reserved,"
                f" got {key[:64]!r}"
            )
        if key in _STATELESS and (type(value), value) not in _STATELESS[key]:
            raise InvalidInput(
                f"parameters.{key}: expected none, got {shown(value)}; calls are independent here"
            )


def _heads(value: object) -> tuple[int, ...]:
    """Return the heads of `[0, 3]`, or of `"0,3"` from clients whose parameters are no arrays."""
    where = "parameters.heads"
    if isinstance(value, str):
        return heads_of_text(where, value)
    if not isinstance(value, list):
        raise InvalidInput(f'{where}: expected "0,3" or [0, 3], got {shown(value)}')
    return checked_heads(value, where)
