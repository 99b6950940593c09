"""The wire formats: a call's tensors into a request, an answer's bytes into tensors."""

from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import orjson
from safetensors.numpy import load, save

from loadtest.errors import UsageWrong
from loadtest.target import DTYPES, Target
from loadtest.work import Tensors, Work

Arrays = dict[str, npt.NDArray[Any]]

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
_DATATYPES: Final = {"float16": "FP16", "float32": "FP32", "float64": "FP64", "bool": "BOOL"}
_OTHERS: Final = {
    "BOOL": "bool",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
}


@dataclass(frozen=True)
class Message:
    """The parts of one POST."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


def encode(target: Target, work: Work, tensors: Tensors) -> Message:
    """
    Return a call in the format of `work`; for shared memory, the binary one it stands for.

    Raises:
        UsageWrong: server or format cannot carry what the call asks for.
    """
    if target.api == "v2" and work.format == "safetensors":
        raise UsageWrong("--format: safetensors needs a Headwise server")
    if target.api == "v2" and work.weights != "off":
        raise UsageWrong("--weights: on and heads need a Headwise server")
    if target.api == "v2" and work.mask != "none":
        raise UsageWrong("--mask: masks need a Headwise server")
    if work.format == "safetensors":
        return _safetensors(target, work, tensors)
    if work.format == "json":
        return (_v1_json if target.api == "headwise" else _v2_json)(target, work, tensors)
    return v2_binary(target, work, tensors)


def decode(work: Work, api: str, body: bytes, header_length: int | None) -> Arrays:
    """
    Return the tensors of an answer's body.

    Raises:
        ValueError: it is none in this format.
    """
    if work.format == "safetensors":
        return dict(load(body))
    if work.format == "json" and api == "headwise":
        found = orjson.loads(body)
        names = ("output", "attention_weights")
        return {name: np.array(found[name], np.float32) for name in names if name in found}
    return decode_v2(body, header_length)


def decode_v2(body: bytes, header_length: int | None) -> Arrays:
    """
    Return the tensors of an answer of the protocol, as JSON or binary.

    Raises:
        ValueError: it is none.
    """
    end = len(body) if header_length is None else header_length
    found: Arrays = {}
    for entry in orjson.loads(body[:end])["outputs"]:
        dtype = dtype_of(entry["datatype"])
        size = entry.get("parameters", {}).get("binary_data_size")
        if size is None:
            values = np.array(entry["data"], dtype)
        else:
            values = np.frombuffer(body[end : end + size], dtype)
            end += size
        found[entry["name"]] = values.reshape(entry["shape"])
    return found


def v2_path(target: Target, work: Work) -> str:
    """Return where the protocol's calls of this work go."""
    name = target.model if work.weights == "off" else f"{target.model}-weights"
    return f"/v2/models/{quote(name, safe='')}/infer"


def v2_parameters(work: Work, tensors: Tensors) -> dict[str, object]:
    """Return what a call of the protocol says beside its tensors."""
    parameters: dict[str, object] = {}
    if tensors.causal:
        parameters["causal"] = True
    if work.heads is not None:
        parameters["heads"] = ",".join(map(str, work.heads))
    return parameters


def described(tensors: Tensors) -> list[tuple[dict[str, Any], npt.NDArray[Any]]]:
    """Return each input as the protocol declares it, beside its values."""
    given: Arrays = {**tensors.inputs, **tensors.masks}
    return [
        (
            {
                "name": name,
                "shape": list(values.shape),
                "datatype": _DATATYPES[values.dtype.name],
            },
            values,
        )
        for name, values in given.items()
    ]


def v2_binary(target: Target, work: Work, tensors: Tensors) -> Message:
    """Return a call of the protocol with binary tensors, both ways."""
    entries, parts = [], []
    for entry, values in described(tensors):
        part = np.ascontiguousarray(values).tobytes()
        entries.append({**entry, "parameters": {"binary_data_size": len(part)}})
        parts.append(part)
    parameters = {"binary_data_output": True, **v2_parameters(work, tensors)}
    head = orjson.dumps({"inputs": entries, "parameters": parameters})
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(head))}
    return Message(v2_path(target, work), head + b"".join(parts), headers)


def _v2_json(target: Target, work: Work, tensors: Tensors) -> Message:
    entries = [{**entry, "data": values.ravel().tolist()} for entry, values in described(tensors)]
    body = {"inputs": entries, "parameters": v2_parameters(work, tensors)}
    return Message(v2_path(target, work), orjson.dumps(body), {"Content-Type": "application/json"})


def _v1_json(target: Target, work: Work, tensors: Tensors) -> Message:
    body: dict[str, object] = {"model": target.model}
    given: Arrays = {**tensors.inputs, **tensors.masks}
    body |= {name: values.tolist() for name, values in given.items()}
    if tensors.causal:
        body["causal"] = True
    if work.weights != "off":
        body["weights"] = True if work.heads is None else {"heads": list(work.heads)}
    return Message("/v1/attention", orjson.dumps(body), {"Content-Type": "application/json"})


def _safetensors(target: Target, work: Work, tensors: Tensors) -> Message:
    if work.heads is not None:
        raise UsageWrong("--weights: heads by number cannot be asked for in safetensors")
    weights, causal = (str(flag).lower() for flag in (work.weights == "on", tensors.causal))
    query = f"model={quote(target.model)}&weights={weights}&causal={causal}"
    return Message(
        f"/v1/attention?{query}",
        save({**tensors.inputs, **tensors.masks}),
        {"Content-Type": "application/x-safetensors"},
    )


def dtype_of(datatype: str) -> np.dtype[Any]:
    """
    Return numpy's name of one of the protocol's number formats.

    Raises:
        ValueError: there is none.
    """
    name = DTYPES.get(datatype) or _OTHERS.get(datatype)
    if name is None:
        raise ValueError(f"expected numbers, got {datatype}")
    return np.dtype(name)
