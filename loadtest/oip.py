"""
Messages of the Open Inference Protocol v2, as any client writes and reads them.

The load tester, the benchmarks and the tests speak the protocol by this module alone.  It shares
no code with the service's codec, so that neither can hide a mistake of the other.  It needs numpy
and orjson.  The binary form is the extension that Triton defined:
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import orjson

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

HEADER_LENGTH: Final = "Inference-Header-Content-Length"

DTYPES: Final = {
    "BOOL": "bool",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
}
"""The protocol's names of number formats that numpy has, and numpy's."""
_DATATYPES: Final = {dtype: datatype for datatype, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Body:
    """A message's body: a JSON header of `header_length` bytes, then the raw tensors if any."""

    content: bytes
    header_length: int

    @property
    def headers(self) -> dict[str, str]:
        """What the request's head says of it; of JSON alone no length of a header is given."""
        if self.header_length == len(self.content):
            return {"Content-Type": "application/json"}
        return {
            "Content-Type": "application/octet-stream",
            HEADER_LENGTH: str(self.header_length),
        }


def infer_path(model: str) -> str:
    """Return where calls of a model go."""
    return f"/v2/models/{quote(model, safe='')}/infer"


def dtype_of(datatype: str) -> np.dtype[Any]:
    """
    Return numpy's name of one of the protocol's number formats.

    Raises:
        ValueError: there is none.
    """
    name = DTYPES.get(datatype)
    if name is None:
        raise ValueError(f"expected numbers, got {datatype}")
    return np.dtype(name)


def described(name: str, values: Array) -> dict[str, Any]:
    """Return a tensor as the protocol declares it, without its values."""
    return {"name": name, "shape": list(values.shape), "datatype": _DATATYPES[values.dtype.name]}


def in_shared_memory(region: str, offset: int, size: int) -> dict[str, object]:
    """Return the parameters of a tensor of `size` bytes that lies in a registered region."""
    return {
        "shared_memory_region": region,
        "shared_memory_offset": offset,
        "shared_memory_byte_size": size,
    }


def encode(
    tensors: Mapping[str, Array],
    *,
    is_binary: Callable[[str], bool] = lambda _: True,
    shortest: bool = False,
    **members: object,
) -> Body:
    """
    Return a call of these inputs, in order; `members` are what else its JSON says.

    Inputs for which `is_binary` is false have their numbers in the JSON, flat: with as many
    digits as Python's floats have or, `shortest`, as few as tell FP32 numbers apart.
    """
    entries, parts = [], []
    for name, values in tensors.items():
        entry = described(name, values)
        if is_binary(name):
            part = np.ascontiguousarray(values).tobytes()
            entry["parameters"] = {"binary_data_size": len(part)}
            parts.append(part)
        else:
            entry["data"] = values.ravel() if shortest else values.ravel().tolist()
        entries.append(entry)
    document = {"inputs": entries, **members}
    header = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return Body(b"".join([header, *parts]), len(header))


def encode_json(tensors: Mapping[str, Array], *, shortest: bool = False, **members: object) -> Body:
    """Return a call whose numbers are all in its JSON."""
    return encode(tensors, is_binary=lambda _: False, shortest=shortest, **members)


def json_length(content: bytes) -> int:
    """
    Return where the JSON ends that a body begins with, for answers whose head is not at hand.

    Raises:
        ValueError: it begins with none.
    """
    _, end = json.JSONDecoder().raw_decode(content.decode("latin-1"))  # one character a byte
    return end


def decode(
    content: bytes,
    header_length: int | None = None,
    kind: Literal["inputs", "outputs"] = "outputs",
) -> Arrays:
    """
    Return the tensors of a body, whichever of them are raw; without `header_length` none is.

    Raises:
        ValueError, KeyError, TypeError: it is none; a byte that belongs to no tensor counts.
    """
    end = len(content) if header_length is None else header_length
    found: Arrays = {}
    for entry in orjson.loads(content[:end])[kind]:
        dtype = dtype_of(entry["datatype"])
        size = entry.get("parameters", {}).get("binary_data_size")
        if size is None:
            values = np.array(entry["data"], dtype)
        else:
            values = np.frombuffer(content[end : end + size], dtype)
            end += size
        found[entry["name"]] = values.reshape(entry["shape"])
    if end != len(content):
        raise ValueError(f"a binary answer: expected {end} bytes, got {len(content)}")
    return found
