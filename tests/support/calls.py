"""One call in every format there is, and what the formula answers to it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from safetensors.numpy import load, save

from export.formula import Formula
from loadtest import oip
from service.layer_config import LayerConfig
from tests.support.server import Server

TOLERANCE = 1e-5
"""Rule 2 of the contract, for FP32."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """
    A call by its sequences.

    Shapes, for sequence i: embeddings [S_i, E], memory [T_i, M], value_memory [T_i, M_v],
    positions [S_i], attend_mask [T_i], pair_mask [H or 1, S_i, T_i]; head_mask [H] or [B, H] is
    one for all.
    """

    model: str
    embeddings: tuple[Array, ...]
    memory: tuple[Array, ...] | None = None
    attend_mask: tuple[Array, ...] | None = None
    pair_mask: tuple[Array, ...] | None = None
    head_mask: Array | None = None
    causal: bool | None = False
    """None = not said: the layer's default."""
    weights: bool = False
    value_memory: tuple[Array, ...] | None = None
    positions: tuple[Array, ...] | None = None

    @property
    def is_uniform(self) -> bool:
        """True when all sequences are of one length."""
        return len({len(x) for x in self.embeddings}) == 1 and (
            self.memory is None or len({len(x) for x in self.memory}) == 1
        )

    def options(self) -> dict[str, Any]:
        """Return the options as JSON."""
        options = {"model": self.model, "weights": self.weights}
        return options if self.causal is None else options | {"causal": self.causal}

    def tensors(self) -> dict[str, tuple[Array, ...]]:
        """Return the tensors that are given, by contract name and sequence."""
        named = {
            "embeddings": self.embeddings,
            "memory": self.memory,
            "value_memory": self.value_memory,
            "positions": self.positions,
            "attend_mask": self.attend_mask,
            "pair_mask": self.pair_mask,
        }
        return {name: parts for name, parts in named.items() if parts is not None}

    def stacked(self) -> dict[str, Array]:
        """Return the tensors of a uniform call, with a batch axis."""
        tensors = {name: np.stack(parts) for name, parts in self.tensors().items()}
        return tensors if self.head_mask is None else {**tensors, "head_mask": self.head_mask}


@dataclass(frozen=True)
class Reply:
    """An answer by its sequences: outputs [S_i, E], weights [H, S_i, T_i] and [H, S_i, n]."""

    outputs: tuple[Array, ...]
    weights: tuple[Array, ...] | None
    extra_weights: tuple[Array, ...] | None = None
    """None = not asked for, or the layer has no extra keys."""


def expected(case: Case, formula: Formula) -> Reply:
    """Return what the formula gives, one sequence at a time."""
    answers = []
    for i, x in enumerate(case.embeddings):
        head_mask = case.head_mask
        answers.append(
            formula(
                x[None],
                None if case.memory is None else case.memory[i][None],
                None if case.value_memory is None else case.value_memory[i][None],
                positions=None if case.positions is None else case.positions[i][None],
                attend_mask=None if case.attend_mask is None else case.attend_mask[i][None],
                pair_mask=None if case.pair_mask is None else case.pair_mask[i][None],
                causal=case.causal,
                head_mask=head_mask if head_mask is None or head_mask.ndim == 1 else head_mask[[i]],
            )
        )
    return Reply(
        tuple(answer.output[0] for answer in answers),
        tuple(answer.weights[0] for answer in answers) if case.weights else None,
        tuple(answer.extra_weights[0] for answer in answers)
        if case.weights and answers[0].extra_weights.shape[-1]
        else None,
    )


def check_close(found: Reply, wanted: Reply) -> None:
    """Assert rule 2: outputs relative to their own size, weights absolute."""
    assert (found.weights is None) == (wanted.weights is None)
    for have, want in zip(found.outputs, wanted.outputs, strict=True):
        assert have.shape == want.shape
        assert np.abs(have - want).max() <= TOLERANCE * max(1.0, np.abs(want).max())
    assert (found.extra_weights is None) == (wanted.extra_weights is None)
    for kind in ("weights", "extra_weights"):
        pairs = zip(getattr(found, kind) or (), getattr(wanted, kind) or (), strict=True)
        for have, want in pairs:
            assert have.shape == want.shape
            assert np.abs(have - want).max() <= TOLERANCE


def json_body(case: Case) -> dict[str, Any]:
    """Return the JSON of `/v1/attention`."""
    body = case.options()
    for name, parts in case.tensors().items():
        body[name] = [part.tolist() for part in parts]
    if case.head_mask is not None:
        body["head_mask"] = case.head_mask.tolist()
    return body


def send_json(server: Server, case: Case) -> Reply:
    """Send nested arrays."""
    response = server.post("/v1/attention", content=orjson.dumps(json_body(case)))
    assert response.status_code == 200, response.text
    return _from_json(response.json())


def send_single(server: Server, case: Case) -> Reply:
    """Send a call of one sequence one rank lower."""
    body = json_body(case)
    for name in case.tensors():
        [body[name]] = body[name]
    response = server.post("/v1/attention", json=body)
    assert response.status_code == 200, response.text
    document = response.json()
    for name in ("output", "attention_weights", "extra_weights"):
        if name in document:
            document[name] = [document[name]]
    return _from_json(document)


def send_safetensors(server: Server, case: Case) -> Reply:
    """Send a uniform call as dense tensors."""
    return _from_dense(_post_safetensors(server, case, case.stacked()))


def send_packed(server: Server, case: Case) -> Reply:
    """Send sequences one after the other, with their lengths."""
    tensors: dict[str, Array] = {}
    for name, parts in case.tensors().items():
        if name == "pair_mask":
            tensors |= {f"pair_mask.{i}": part for i, part in enumerate(parts)}
        else:
            tensors[name] = np.concatenate(parts)
    tensors["lengths"] = np.array([len(x) for x in case.embeddings])
    if case.memory is not None:
        tensors["memory_lengths"] = np.array([len(x) for x in case.memory])
    if case.head_mask is not None:
        tensors["head_mask"] = case.head_mask
    content = _post_safetensors(server, case, tensors)
    rows = len(case.embeddings)
    if "lengths" not in content:
        return _from_dense(content)
    outputs = np.split(content["output"], np.cumsum(content["lengths"])[:-1])

    def named(kind: str) -> tuple[Array, ...] | None:
        found = tuple(content[n] for i in range(rows) if (n := f"{kind}.{i}") in content)
        return found or None

    return Reply(tuple(outputs), named("attention_weights"), named("extra_weights"))


def send_oip_json(server: Server, case: Case) -> Reply:
    """Send a uniform call in the protocol's JSON."""
    return _infer(server, case, binary_in=lambda name: False, binary_out=False)


def send_oip_binary(server: Server, case: Case) -> Reply:
    """Send a uniform call with every tensor raw, answered raw."""
    return _infer(server, case, binary_in=lambda name: True, binary_out=True)


def send_oip_mixed(server: Server, case: Case) -> Reply:
    """Send masks in JSON beside raw embeddings."""
    return _infer(server, case, binary_in=lambda name: "mask" not in name, binary_out=True)


def infer_body(
    case: Case, *, binary_in: Callable[[str], bool], binary_out: bool
) -> tuple[bytes, int]:
    """Return a protocol body and the length of its JSON header."""
    parameters = {"binary_data_output": binary_out, "unknown": "kept"}
    if case.causal is not None:
        parameters["causal"] = case.causal
    body = oip.encode(case.stacked(), is_binary=binary_in, id="7", parameters=parameters)
    return body.content, body.header_length


def _infer(
    server: Server, case: Case, *, binary_in: Callable[[str], bool], binary_out: bool
) -> Reply:
    content, size = infer_body(case, binary_in=binary_in, binary_out=binary_out)
    model = case.model + ("-weights" if case.weights else "")
    response = server.post(
        oip.infer_path(model), content=content, headers={oip.HEADER_LENGTH: str(size)}
    )
    assert response.status_code == 200, response.text
    size = int(response.headers.get(oip.HEADER_LENGTH, len(response.content)))
    document = orjson.loads(response.content[:size])
    assert document["id"] == "7"
    assert document["model_name"] == model
    assert all(("data" in output) != binary_out for output in document["outputs"])
    return _from_dense(oip.decode(response.content, size))


def _post_safetensors(
    server: Server, case: Case, tensors: dict[str, Array]
) -> dict[str, npt.NDArray[Any]]:
    options = {key: str(value).lower() for key, value in case.options().items()}
    response = server.post(
        "/v1/attention",
        content=save({name: np.ascontiguousarray(t) for name, t in tensors.items()}),
        params=options,
        headers={"Content-Type": "application/x-safetensors"},
    )
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-safetensors"
    return load(response.content)


def _from_dense(tensors: dict[str, npt.NDArray[Any]]) -> Reply:
    """Return an answer of sequences of one length."""
    kinds = (tensors.get(name) for name in ("attention_weights", "extra_weights"))
    return Reply(tuple(tensors["output"]), *(None if t is None else tuple(t) for t in kinds))


def _from_json(document: dict[str, Any]) -> Reply:
    kinds = (document.get(name) for name in ("attention_weights", "extra_weights"))
    return Reply(
        tuple(np.array(output, np.float64) for output in document["output"]),
        *(None if t is None else tuple(np.array(w, np.float64) for w in t) for t in kinds),
    )


def random_case(
    random: np.random.Generator,
    model: str,
    layer: LayerConfig,
    lengths: list[int],
    memory_lengths: list[int] | None = None,
    **options: Any,
) -> Case:
    """Return a call of standard normal embeddings without masks."""
    case = Case(
        model,
        tuple(random.standard_normal((n, layer.embed_dim)).astype(np.float32) for n in lengths),
        **options,
    )
    if layer.memory_dim is None:
        return case

    def tokens(width: int) -> tuple[Array, ...]:
        sizes = memory_lengths or lengths
        return tuple(random.standard_normal((n, width)).astype(np.float32) for n in sizes)

    case = replace(case, memory=tokens(layer.memory_dim))
    if layer.value_memory_dim is None:
        return case
    return replace(case, value_memory=tokens(layer.value_memory_dim))
