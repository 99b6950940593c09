"""The wire formats: a call's tensors into a request, an answer's bytes into tensors."""

from dataclasses import dataclass, field
from urllib.parse import quote

import numpy as np
import orjson
from safetensors.numpy import load, save

from loadtest import oip
from loadtest.errors import UsageWrong
from loadtest.oip import Arrays
from loadtest.target import Target
from loadtest.work import Tensors, Work


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
        if "outputs" not in found:  # as calls of one's own of the protocol have it
            names = ("output", "attention_weights", "extra_weights")
            return {name: np.array(found[name], np.float32) for name in names if name in found}
    return oip.decode(body, header_length)


def v2_path(target: Target, work: Work) -> str:
    """Return where the protocol's calls of this work go."""
    name = target.model if work.weights == "off" else f"{target.model}-weights"
    return oip.infer_path(name)


def v2_parameters(work: Work, tensors: Tensors) -> dict[str, object]:
    """Return what a call of the protocol says beside its tensors."""
    parameters: dict[str, object] = {}
    if tensors.causal:
        parameters["causal"] = True
    if work.heads is not None:
        parameters["heads"] = ",".join(map(str, work.heads))
    return parameters


def v2_inputs(tensors: Tensors) -> Arrays:
    """Return everything that a call of the protocol carries, by name."""
    return {**tensors.inputs, **tensors.masks}


def v2_binary(target: Target, work: Work, tensors: Tensors) -> Message:
    """Return a call of the protocol with binary tensors, both ways."""
    parameters = {"binary_data_output": True, **v2_parameters(work, tensors)}
    body = oip.encode(v2_inputs(tensors), parameters=parameters)
    return Message(v2_path(target, work), body.content, body.headers)


def _v2_json(target: Target, work: Work, tensors: Tensors) -> Message:
    body = oip.encode_json(v2_inputs(tensors), parameters=v2_parameters(work, tensors))
    return Message(v2_path(target, work), body.content, body.headers)


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
    query = f"model={quote(target.model)}&weights={str(work.weights == 'on').lower()}"
    if tensors.causal:
        query += "&causal=true"
    given = {**tensors.inputs, **tensors.masks}
    return Message(
        f"/v1/attention?{query}",
        # The library writes an array's memory as it lies, whatever its order.
        save({name: np.ascontiguousarray(values) for name, values in given.items()}),
        {"Content-Type": "application/x-safetensors"},
    )
