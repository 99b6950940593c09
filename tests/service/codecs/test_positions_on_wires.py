"""Positions, causal defaults and the weights of extra keys mean the same on every wire."""

import asyncio
import dataclasses
import json
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from safetensors.numpy import load, save

from export.formula import Answer
from loadtest import oip
from tests.support.calls import TOLERANCE
from tests.support.layers import ALL, WIDE, Layers
from tests.support.server import Server

RANDOM = np.random.default_rng(16)
X = RANDOM.standard_normal((2, 3, 8)).astype(np.float32)
POSITIONS = np.array([[0, 5, 2], [7, 7, 1]])
SAFETENSORS = {"Content-Type": "application/x-safetensors"}

Wire = Callable[[Server, str, np.ndarray], np.ndarray]


def in_json(padding: int) -> Wire:
    """Return how JSON says it; with padding simdjson reads it."""

    def send(server: Server, model: str, positions: np.ndarray) -> np.ndarray:
        body = {"model": model, "embeddings": X.tolist(), "positions": positions.tolist()}
        content = json.dumps(body).encode() + b" " * padding
        return np.array(checked(server.post("/v1/attention", content=content)).json()["output"])

    return send


def in_safetensors(dtype: str) -> Wire:
    """Return how a safetensors body says it, in that datatype."""

    def send(server: Server, model: str, positions: np.ndarray) -> np.ndarray:
        content = save({"embeddings": X, "positions": positions.astype(dtype)})
        return load(checked(posted(server, content, model)).content)["output"]

    return send


def packed(server: Server, model: str, positions: np.ndarray) -> np.ndarray:
    """Send the sequences one after the other."""
    tensors = {"embeddings": X.reshape(6, 8), "positions": positions.reshape(6)}
    answer = checked(posted(server, save(tensors | {"lengths": np.array([3, 3])}), model))
    return load(answer.content)["output"]


def in_protocol(dtype: str, *, is_binary: bool) -> Wire:
    """Return how the protocol says it, raw or in JSON."""

    def send(server: Server, model: str, positions: np.ndarray) -> np.ndarray:
        tensors = {"embeddings": X, "positions": positions.astype(dtype)}
        body = oip.encode(tensors, is_binary=lambda name: is_binary)
        response = server.post(
            oip.infer_path(model),
            content=body.content,
            headers={oip.HEADER_LENGTH: str(body.header_length)},
        )
        size = int(response.headers.get(oip.HEADER_LENGTH, len(response.content)))
        return oip.decode(checked(response).content, size)["output"]

    return send


def in_shared_memory(server: Server, model: str, positions: np.ndarray) -> np.ndarray:
    """Send positions in a segment, as INT32."""
    segment = SharedMemory(create=True, size=64)
    try:
        assert segment.buf is not None
        segment.buf[:24] = positions.astype("<i4").tobytes()
        body = {"key": "/" + segment.name.lstrip("/"), "offset": 0, "byte_size": 64}
        checked(server.post("/v2/systemsharedmemory/region/p/register", json=body))
        entry: dict[str, Any] = {"name": "positions", "datatype": "INT32", "shape": [2, 3]}
        entry["parameters"] = oip.in_shared_memory("p", 0, 24)
        inputs = [oip.described("embeddings", X) | {"data": X.ravel().tolist()}, entry]
        answer = server.post(oip.infer_path(model), json={"inputs": inputs})
        return np.array(checked(answer).json()["outputs"][0]["data"]).reshape(X.shape)
    finally:
        server.post("/v2/systemsharedmemory/region/p/unregister")
        segment.close()
        segment.unlink()


WIRES = {
    "JSON": in_json(0),
    "JSON by simdjson": in_json(4000),
    "safetensors I64": in_safetensors("<i8"),
    "safetensors I32": in_safetensors("<i4"),
    "safetensors packed": packed,
    "protocol JSON INT64": in_protocol("<i8", is_binary=False),
    "protocol JSON INT32": in_protocol("<i4", is_binary=False),
    "protocol raw INT64": in_protocol("<i8", is_binary=True),
    "protocol raw INT32": in_protocol("<i4", is_binary=True),
    "shared memory": in_shared_memory,
}


def posted(server: Server, content: bytes, model: str, query: str = "") -> httpx.Response:
    """Return the answer to a safetensors body."""
    path = f"/v1/attention?model={model}&{query}"
    return server.post(path, content=content, headers=SAFETENSORS)


def checked(response: httpx.Response) -> httpx.Response:
    """Return an answer that is none of a refusal."""
    assert response.status_code == 200, response.text
    return response


def check(found: Any, wanted: Any) -> None:
    """Assert rule 2."""
    assert np.shape(found) == np.shape(wanted)
    assert np.abs(np.array(found) - wanted).max() <= TOLERANCE * max(1, np.abs(wanted).max())


@pytest.mark.parametrize("model", ["learned", "stretched"])
@pytest.mark.parametrize("wire", WIRES)
def test_positions_mean_the_same_on_every_wire(
    wide_server: Server, layers: Layers, wire: str, model: str
) -> None:
    """The formula's answer, which is another one than without positions."""
    wanted = layers.formula(model)(X, positions=POSITIONS).output

    found = WIRES[wire](wide_server, model, POSITIONS)

    check(found, wanted)
    assert np.abs(layers.formula(model)(X).output - wanted).max() > 0.01


@pytest.mark.parametrize("wire", ["JSON", "safetensors packed", "protocol raw INT64"])
def test_positions_that_are_left_out_count_from_0(wide_server: Server, wire: str) -> None:
    """To the last bit."""
    counted = np.arange(3)[None].repeat(2, axis=0)
    without = wide_server.post("/v1/attention", json={"model": "learned", "embeddings": X.tolist()})

    found = WIRES[wire](wide_server, "learned", counted).astype(np.float32)

    np.testing.assert_array_equal(found, np.array(without.json()["output"], np.float32))


def test_positions_given_make_a_sequence_longer_than_the_table_right(
    wide_server: Server, layers: Layers
) -> None:
    """The table bounds positions, not tokens."""
    x, positions = np.full((12, 8), 0.5, np.float32), np.arange(12) % 9
    body = {"model": "learned", "embeddings": x.tolist()}

    refused = wide_server.post("/v1/attention", json=body)
    answer = wide_server.post("/v1/attention", json=body | {"positions": positions.tolist()})

    assert refused.status_code == 413
    wanted = layers.formula("learned")(x[None], positions=positions[None]).output[0]
    check(checked(answer).json()["output"], wanted)


@pytest.mark.parametrize("causal", [None, True, False])
def test_causal_that_is_null_or_not_said_is_the_default_of_the_layer(
    wide_server: Server, layers: Layers, causal: bool | None
) -> None:
    """In JSON, in the query and among the protocol's parameters; a call may say otherwise."""
    x = RANDOM.standard_normal((2, 4, 16)).astype(np.float32)
    wanted = layers.formula("rotary")(x, causal=causal).output
    body = {"model": "rotary", "embeddings": x.tolist()}
    query = "" if causal is None else f"causal={str(causal).lower()}"
    inputs = [oip.described("embeddings", x) | {"data": x.ravel().tolist()}]
    infer = {"inputs": inputs, "parameters": {"causal": causal}}

    by_json = wide_server.post("/v1/attention", json=body | {"causal": causal})
    by_query = posted(wide_server, save({"embeddings": x}), "rotary", query)
    by_protocol = wide_server.post(oip.infer_path("rotary"), json=infer)

    check(checked(by_json).json()["output"], wanted)
    check(load(checked(by_query).content)["output"], wanted)
    data = checked(by_protocol).json()["outputs"][0]["data"]
    check(np.reshape(data, x.shape), wanted)


@pytest.mark.parametrize("model", ["extra", "sinks"])
@pytest.mark.parametrize("heads", [None, [1], [1, 0]])
def test_extra_weights_come_with_the_weights_of_the_same_heads(
    wide_server: Server, layers: Layers, model: str, heads: list[int] | None
) -> None:
    """In every format; rows of both sum to 1."""
    answer = layers.formula(model)(X)
    kept = slice(None) if heads is None else heads
    count = len(WIDE[model].extra_keys)
    weights = True if heads is None else {"heads": heads}
    query = "weights=true" if heads is None else "heads=" + ",".join(map(str, heads))
    body = {"model": model, "embeddings": X.tolist(), "weights": weights}
    ragged = {"embeddings": X.reshape(6, 8)[:4], "lengths": np.array([3, 1])}
    inputs = [oip.described("embeddings", X) | {"data": X.ravel().tolist()}]
    parameters = {} if heads is None else {"heads": heads}

    by_json = checked(wide_server.post("/v1/attention", json=body)).json()
    single = checked(wide_server.post("/v1/attention", json=body | {"embeddings": X[0].tolist()}))
    dense = load(checked(posted(wide_server, save({"embeddings": X}), model, query)).content)
    lengths = load(checked(posted(wide_server, save(ragged), model, query)).content)
    infer = {"inputs": inputs, "parameters": parameters}
    by_protocol = checked(wide_server.post(oip.infer_path(model + "-weights"), json=infer)).json()

    wanted = answer.extra_weights[:, kept]
    check(by_json["extra_weights"], wanted)
    check(single.json()["extra_weights"], wanted[0])
    check(dense["extra_weights"], wanted)
    check(lengths["extra_weights.0"], wanted[0])
    assert lengths["extra_weights.1"].shape == (wanted.shape[1], 1, count)
    names = [output["name"] for output in by_protocol["outputs"]]
    assert names == ["output", "attention_weights", "extra_weights"]
    check(np.reshape(by_protocol["outputs"][2]["data"], wanted.shape), wanted)
    sums = dense["attention_weights"].sum(-1) + dense["extra_weights"].sum(-1)
    np.testing.assert_allclose(sums, 1, atol=1e-5)


def test_extra_weights_are_answered_alone_to_who_names_them_alone(
    wide_server: Server, layers: Layers
) -> None:
    """Undeclared, so that a tool that asks for all that is declared does not meet them."""
    inputs = [oip.described("embeddings", X) | {"data": X.ravel().tolist()}]
    body = {"inputs": inputs, "outputs": [{"name": "extra_weights"}]}

    answer = wide_server.post(oip.infer_path("extra-weights"), json=body)

    [output] = checked(answer).json()["outputs"]
    assert (output["name"], output["shape"]) == ("extra_weights", [2, 2, 3, 2])
    check(np.reshape(output["data"], (2, 2, 3, 2)), layers.formula("extra")(X).extra_weights)


def test_extra_weights_go_to_shared_memory(wide_server: Server, layers: Layers) -> None:
    """Where there is room for them; a slot that is too small is refused."""
    segment = SharedMemory(create=True, size=128)
    inputs = [oip.described("embeddings", X) | {"data": X.ravel().tolist()}]
    path = oip.infer_path("extra-weights")

    def body(size: int) -> dict[str, Any]:
        slot = oip.in_shared_memory("e", 0, size)
        return {"inputs": inputs, "outputs": [{"name": "extra_weights", "parameters": slot}]}

    try:
        region = {"key": "/" + segment.name.lstrip("/"), "offset": 0, "byte_size": 128}
        checked(wide_server.post("/v2/systemsharedmemory/region/e/register", json=region))
        checked(wide_server.post(path, json=body(96)))
        assert segment.buf is not None
        found = np.frombuffer(bytes(segment.buf[:96]), "<f4").reshape(2, 2, 3, 2)
        refused = wide_server.post(path, json=body(95))
    finally:
        wide_server.post("/v2/systemsharedmemory/region/e/unregister")
        segment.close()
        segment.unlink()

    check(found, layers.formula("extra")(X).extra_weights)
    assert "at least 96 for FP32 [2, 2, 3, 2], got 95" in refused.json()["error"]


@pytest.mark.parametrize("model", ["rotary", "stretched", "buckets", "learned"])
def test_calls_with_and_without_positions_at_once_are_each_answered_as_if_alone(
    wide_server: Server, layers: Layers, model: str
) -> None:
    """What waits together is run together, whatever its positions and lengths."""
    formula, width = layers.formula(model), ALL[model].embed_dim
    last = ALL[model].max_positions or 50
    calls = []
    for i in range(24):
        x = RANDOM.standard_normal((1, 1 + i % 6, width)).astype(np.float32)
        positions = RANDOM.integers(0, last, x.shape[:2]) if i % 3 else None
        calls.append((x, positions, [None, True, False][i % 4 % 3]))

    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=wide_server.url, timeout=60) as client:
            bodies = []
            for x, positions, causal in calls:
                body = {"model": model, "embeddings": x.tolist(), "causal": causal}
                bodies.append(
                    body | ({} if positions is None else {"positions": positions.tolist()})
                )
            posts = [client.post("/v1/attention", content=orjson.dumps(body)) for body in bodies]
            return list(await asyncio.gather(*posts))

    for (x, positions, causal), answer in zip(calls, asyncio.run(ask_all()), strict=True):
        wanted: Answer = formula(x, positions=positions, causal=causal)
        check(checked(answer).json()["output"], wanted.output)


@pytest.mark.parametrize("model", sorted(WIDE))
def test_model_shows_every_option_of_its_layer_and_what_a_call_may_hold(
    wide_server: Server, model: str
) -> None:
    """Nobody has to guess which inputs a layer has."""
    layer = WIDE[model]

    shown = wide_server.get(f"/v1/models/{model}").json()

    assert shown["layer"] == json.loads(json.dumps(dataclasses.asdict(layer)))
    assert ("positions" in shown["inputs"]) is layer.takes_positions
    assert ("value_memory" in shown["inputs"]) is (layer.value_memory_dim is not None)
    assert ("extra_weights" in shown["outputs"]) is bool(layer.extra_keys)
    if not layer.is_cross:
        assert shown["inputs"]["causal"].endswith(f"default: {str(layer.causal).lower()}")
    if layer.max_positions is not None:
        assert "from 0 to 8" in shown["inputs"]["positions"]


def test_protocol_declares_what_is_required_and_nothing_of_the_rest(wide_server: Server) -> None:
    """perf_analyzer sends every input and asks for every output that is declared."""

    def declared(model: str) -> tuple[list[str], list[str]]:
        document = wide_server.get(f"/v2/models/{model}").json()
        config = wide_server.get(f"/v2/models/{model}/config").json()
        inputs, outputs = (
            [tensor["name"] for tensor in document[kind]] for kind in ("inputs", "outputs")
        )
        assert [tensor["name"] for tensor in config["input"]] == inputs
        assert [tensor["name"] for tensor in config["output"]] == outputs
        return inputs, outputs

    assert declared("learned") == (["embeddings"], ["output"])
    assert declared("extra-weights") == (["embeddings"], ["output", "attention_weights"])
    assert declared("values") == (["embeddings", "memory", "value_memory"], ["output"])
