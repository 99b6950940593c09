"""The protocol's infer call: what is accepted, what is refused, how it is answered."""

import contextlib
import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.codecs.oip_request import InferRequest, decode
from service.codecs.oip_response import sizes
from service.codecs.size import JSON_PER_RAW_BYTE, Size
from service.errors import InvalidInput
from service.inference.calls import Answer, Options, Stages
from tests.support.calls import check_close, expected, infer_body, random_case
from tests.support.layers import CONFIGS, Layers
from tests.support.server import Server

PATH = "/v2/models/tiny/infer"


def body(**changes: Any) -> dict[str, Any]:
    """Return a right JSON request for `tiny`, with changes."""
    tensor = {"name": "embeddings", "shape": [1, 2, 8], "datatype": "FP32", "data": [0.5] * 16}
    return {"inputs": [tensor], **changes}


def nested(depth: int) -> list[Any]:
    """Return arrays in arrays."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def tensor(**changes: Any) -> list[dict[str, Any]]:
    """Return the inputs of a right request, the one tensor changed; None drops a key."""
    [right] = body()["inputs"]
    changed = {**right, **changes}
    return [{key: value for key, value in changed.items() if value is not None}]


@pytest.mark.parametrize("data", [[0.5] * 16, [[[0.5] * 8] * 2], [[0.5] * 8] * 2])
def test_infer_data_may_be_flat_or_nested(server: Server, data: list[Any]) -> None:
    """Clients send either; only the shape of the tensor, or a flat list, is right."""
    response = server.post(PATH, json=body(inputs=tensor(data=data)))

    if data == [[0.5] * 8] * 2:
        assert response.status_code == 400
        assert (
            "embeddings: expected data of shape [1, 2, 8] or 16 flat values, got [2, 8]"
            in (response.json()["error"])
        )
    else:
        assert response.status_code == 200


def test_infer_json_answer_is_flat_with_string_version_and_no_parameters(server: Server) -> None:
    """perf_analyzer misreads nested data, and stops at parameters without a size."""
    answer = server.post(PATH, json=body(id="")).json()

    [output] = answer["outputs"]
    assert answer["model_version"] == "1"
    assert "id" not in answer
    assert sorted(output) == ["data", "datatype", "name", "shape"]
    assert len(output["data"]) == 16


def test_infer_outputs_choose_form_and_order(server: Server) -> None:
    """One output raw, one in JSON, in the order that was asked for."""
    outputs = [
        {"name": "attention_weights"},
        {"name": "output", "parameters": {"binary_data": True}},
    ]

    response = server.post("/v2/models/tiny-weights/infer", json=body(outputs=outputs))

    size = int(response.headers["inference-header-content-length"])
    answer = orjson.loads(response.content[:size])
    assert response.headers["content-type"] == "application/octet-stream"
    assert size % 64 == 0
    assert [output["name"] for output in answer["outputs"]] == ["attention_weights", "output"]
    assert "data" in answer["outputs"][0]
    assert answer["outputs"][1]["parameters"] == {"binary_data_size": 64}
    assert len(response.content) == size + 64


def test_infer_weights_model_asked_for_output_alone_gives_output_alone(server: Server) -> None:
    """What is not asked for is not sent."""
    response = server.post("/v2/models/tiny-weights/infer", json=body(outputs=[{"name": "output"}]))

    assert [output["name"] for output in response.json()["outputs"]] == ["output"]


@pytest.mark.parametrize("content_type", [None, "application/json", "text/plain", "x"])
def test_infer_reads_the_body_whatever_its_type_says(
    server: Server, content_type: str | None
) -> None:
    """A client may send no Content-Type at all, as tritonclient does."""
    headers = {} if content_type is None else {"Content-Type": content_type}

    response = server.post(PATH, content=orjson.dumps(body()), headers=headers)

    assert response.status_code == 200


def test_infer_header_length_of_a_pure_json_body_is_right(server: Server) -> None:
    """perf_analyzer always sends the header."""
    content = orjson.dumps(body())

    response = server.post(
        PATH, content=content, headers={"Inference-Header-Content-Length": str(len(content))}
    )

    assert response.status_code == 200


@pytest.mark.parametrize("spaces", range(8))
def test_infer_binary_at_any_offset_is_right(server: Server, layers: Layers, spaces: int) -> None:
    """The JSON header leaves the tensors unaligned."""
    case = random_case(np.random.default_rng(spaces), "tiny", CONFIGS["tiny"], [3, 3])
    content, size = infer_body(case, binary_in=lambda name: True, binary_out=True)
    content = content[:size] + b" " * spaces + content[size:]

    response = server.post(
        PATH, content=content, headers={"Inference-Header-Content-Length": str(size + spaces)}
    )

    size = int(response.headers["inference-header-content-length"])
    output = np.frombuffer(response.content[size:], "<f4").reshape(2, 3, 8)
    wanted = expected(case, layers.formula("tiny"))
    check_close(type(wanted)(tuple(output), None), wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": None}, "inputs: expected an array, got null"),
        ({"inputs": []}, "inputs: expected one named embeddings, got none"),
        ({"inputs": [1]}, "inputs[0]: expected an object, got a number"),
        ({"inputs": tensor(name=None)}, "inputs[0].name: expected a string, got null"),
        ({"inputs": tensor(name="x")}, "inputs[0]: unknown key 'x'"),
        ({"inputs": tensor(name="attention_mask")}, "send attend_mask [B, T]"),
        ({"inputs": tensor() * 2}, "inputs[1]: expected each input once, got embeddings twice"),
        ({"inputs": tensor(shape="-1")}, "inputs[0].shape: expected at most 5 axes"),
        ({"inputs": tensor(shape=[1, -2, 8])}, "inputs[0].shape: expected at most 5 axes"),
        ({"inputs": tensor(shape=[1, 2.0, 8])}, "inputs[0].shape: expected at most 5 axes"),
        ({"inputs": tensor(shape=[2**40, 2**40, 8])}, "inputs[0].shape: expected at most 5 axes"),
        ({"inputs": tensor(shape=[1] * 71 + [8])}, "inputs[0].shape: expected at most 5 axes"),
        (
            {"inputs": tensor(shape=[2**31 - 1] * 3 + [0])},
            "inputs[0].shape: expected at most 5 axes",
        ),
        ({"inputs": tensor(shape=nested(900))}, "inputs[0].shape: expected at most 5 axes"),
        ({"inputs": tensor(name=nested(900))}, "inputs[0].name: expected a string, got an array"),
        ({"id": nested(900)}, "id: expected a string, got an array"),
        ({"id": "\ud800"}, "id: expected Unicode characters, got a lone surrogate"),
        ({"parameters": {"timeout": 10**400}}, "parameters.timeout: expected whole microseconds"),
        ({"inputs": tensor(shape=[2**30, 2**30, 8])}, "embeddings: expected data of shape"),
        ({"inputs": tensor(shape=[2, 8])}, "embeddings: expected [B, S, 8], got [2, 8]"),
        (
            {"inputs": tensor(datatype="BYTES")},
            "inputs[0].datatype: embeddings: expected FP32 (also read: FP16, BF16, FP64, INT8,"
            " INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64), got 'BYTES'",
        ),
        ({"inputs": tensor(datatype="BOOL")}, "embeddings: expected FP32 (also read: FP16, BF16"),
        ({"inputs": tensor(datatype="fp32")}, "embeddings: expected FP32 (also read: FP16, BF16"),
        ({"inputs": tensor(datatype=1)}, "embeddings: expected FP32, got a number"),
        ({"inputs": tensor(data=None)}, "embeddings: expected one of data, parameters.binary"),
        ({"inputs": tensor(data=[0.5] * 15)}, "or 16 flat values, got 15 flat values"),
        ({"inputs": tensor(data=[[0.5] * 15, [0.5]])}, "flat values, got rows of unequal length"),
        ({"inputs": tensor(data=["a"] * 16)}, "embeddings[0]: expected a number, got a string"),
        ({"inputs": tensor(parameters=1)}, "inputs[0].parameters: expected an object"),
        ({"inputs": tensor(parameters={"binary_data_size": 64})}, "embeddings: expected one of"),
        ({"inputs": tensor(x=1)}, "inputs[0]: unknown key 'x'"),
        ({"outputs": [{"name": "x"}]}, "outputs[0]: expected output, got 'x'"),
        (
            {"outputs": [{"name": "attention_weights"}]},
            "outputs[0]: expected output, got 'attention_weights', an output of the model",
        ),
        (
            {"outputs": [{"name": "output"}] * 2},
            "outputs[1]: expected each output once",
        ),
        ({"outputs": [{"name": "output", "parameters": {"binary_data": 1}}]}, "binary_data: exp"),
        (
            {"outputs": [{"name": "output", "parameters": {"classification": 3}}]},
            "outputs[0].parameters.classification: expected none, got one: not offered",
        ),
        ({"outputs": 1}, "outputs: expected an array, got a number"),
        ({"id": 7}, "id: expected a string, got a number"),
        ({"parameters": []}, "parameters: expected an object, got an array"),
        ({"parameters": {"causal": 1}}, "causal: expected true or false, got 1"),
        ({"parameters": {"priority": "1"}}, "priority: expected 0 (default) or a whole number"),
        ({"parameters": {"timeout": 0.5}}, "parameters.timeout: expected whole microseconds"),
        ({"parameters": {"binary_data_output": 1}}, "parameters.binary_data_output: expected"),
        (
            {"parameters": {"sequence_id": 7}},
            "parameters.sequence_id: expected none, got 7",
        ),
        ({"parameters": {"sequence_id": "a"}}, "parameters.sequence_id: expected none"),
        ({"parameters": {"sequence_id": False}}, "parameters.sequence_id: expected none"),
        ({"parameters": {"sequence_id": []}}, "parameters.sequence_id: expected none"),
        ({"parameters": {"sequence_start": True}}, "parameters.sequence_start: expected none"),
        ({"parameters": {"sequence_end": 0}}, "parameters.sequence_end: expected none"),
        (
            {"parameters": {"triton_enable_empty_final_response": False}},
            "parameters: expected no name beginning with triton_, which is reserved, got",
        ),
        (
            {"parameters": {"heads": [0]}},
            "parameters.heads: expected none, got some: heads are chosen from the"
            " attention_weights of the model <name>-weights; this one has none",
        ),
        ({"x": 1}, "body: unknown key 'x'"),
    ],
)
def test_infer_json_mistake_is_named(server: Server, changes: dict[str, Any], message: str) -> None:
    """A caller's mistake is a 400 that says where, what was expected and what came."""
    response = server.post(PATH, content=json.dumps(body(**changes)).encode())

    assert response.status_code == 400, response.text
    assert message in response.json()["error"]
    assert response.json()["code"] == "invalid_input"


def binary(size: int = 64, *, shape: object = (1, 2, 8), datatype: str = "FP32") -> dict[str, Any]:
    """Return a request for one raw tensor."""
    entry = {
        "name": "embeddings",
        "shape": shape,
        "datatype": datatype,
        "parameters": {"binary_data_size": size},
    }
    return {"inputs": [entry]}


@pytest.mark.parametrize(
    ("size", "raw", "message"),
    [
        (128, 128, "binary_data_size: expected 64 bytes for FP32 [1, 2, 8], got 128"),
        (0, 0, "binary_data_size: expected 64 bytes for FP32 [1, 2, 8], got 0"),
        (64, 63, "embeddings: expected 64 bytes of binary data, got 63"),
        (64, 0, "embeddings: expected 64 bytes of binary data, got 0"),
        (64, 65, "body: expected 64 bytes of binary tensors after the JSON header, got 65"),
    ],
)
def test_infer_binary_of_the_wrong_size_is_named(
    server: Server, size: int, raw: int, message: str
) -> None:
    """Found and expected bytes are both told."""
    header = orjson.dumps(binary(size))

    response = server.post(
        PATH,
        content=header + b"\0" * raw,
        headers={"Inference-Header-Content-Length": str(len(header))},
    )

    assert response.status_code == 400
    assert message in response.json()["error"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("abc", "header Inference-Header-Content-Length: expected a number of bytes, got 'abc'"),
        ("-1", "expected a number of bytes, got '-1'"),
        ("0", "expected at least 1, got 0"),
        ("99999", "expected at most the body's"),
        ("9" * 5000, "expected at most the body's"),
        ("10", "body: expected JSON, got a mistake"),
    ],
)
def test_infer_header_length_mistake_is_named(server: Server, value: str, message: str) -> None:
    """Clients guess this header; the message says which guess was wrong."""
    response = server.post(
        PATH, content=orjson.dumps(body()), headers={"Inference-Header-Content-Length": value}
    )

    assert response.status_code == 400
    assert message in response.json()["error"]


def test_infer_boolean_bytes_other_than_0_and_1_are_refused(server: Server) -> None:
    """A mask never means two things."""
    mask = {
        "name": "attend_mask",
        "shape": [1, 2],
        "datatype": "BOOL",
        "parameters": {"binary_data_size": 2},
    }
    header = orjson.dumps(body(inputs=[*tensor(), mask]))

    response = server.post(
        PATH,
        content=header + b"\1\2",
        headers={"Inference-Header-Content-Length": str(len(header))},
    )

    assert response.status_code == 400
    assert "attend_mask: expected 0 or 1, got" in response.json()["error"]


@pytest.mark.parametrize("causal", [False, True])
def test_infer_parameters_reach_the_layer(server: Server, causal: bool) -> None:
    """Known parameters count, unknown ones are the protocol's to ignore."""
    parameters = {"causal": causal, "timeout": 5_000_000, "priority": 1, "anything": "else"}

    answer = server.post(
        "/v2/models/tiny-weights/infer", json=body(parameters=parameters, id="abc")
    ).json()

    weights = np.array(answer["outputs"][1]["data"]).reshape(1, 2, 2, 2)
    assert answer["id"] == "abc"
    assert bool((weights[..., 0, 1] == 0).all()) is causal


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v2/models/tiny/versions/1/infer", 200),
        ("/v2/models/tiny-weights/versions/1/infer", 200),
        ("/v2/models/tiny/versions/2/infer", 404),
        ("/v2/models/tiny/versions/x/infer", 404),
        ("/v2/models/nope/infer", 404),
        ("/v2/models/nope-weights/infer", 404),
        ("/v2/models/tiny-weights-weights/infer", 404),
    ],
)
def test_infer_model_and_version_in_the_path(server: Server, path: str, status: int) -> None:
    """The version is an alias; an unknown one is 404."""
    response = server.post(path, json=body())

    assert response.status_code == status
    if status == 404:
        assert response.json()["code"] == "unknown_model"


ACCEPTED_AS_FLOATS = {
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
}
FORMS = ("flat", "nested", "binary")


def sent(array: np.ndarray[Any, Any], name: str, datatype: str, form: str) -> tuple[Any, bytes]:
    """Return a tensor's entry in the JSON, and what of it stands behind the JSON."""
    entry = {"name": name, "shape": array.shape, "datatype": datatype}
    if form == "binary":
        raw = array.astype(array.dtype.newbyteorder("<")).tobytes()
        return {**entry, "parameters": {"binary_data_size": len(raw)}}, raw
    return {**entry, "data": array.tolist() if form == "nested" else array.ravel().tolist()}, b""


def infer(
    server: Server, entries: list[tuple[Any, bytes]], model: str = "tiny", **members: Any
) -> Any:
    """Return the answer to a call of such tensors."""
    header = orjson.dumps({"inputs": [entry for entry, _ in entries], **members})
    return server.post(
        f"/v2/models/{model}/infer",
        content=header + b"".join(raw for _, raw in entries),
        headers={"Inference-Header-Content-Length": str(len(header))},
    )


def tensors_of(response: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of an answer, in JSON, raw or both."""
    assert response.status_code == 200, response.text
    size = int(response.headers.get("inference-header-content-length", len(response.content)))
    raw = response.content[size:]
    tensors = {}
    for output in orjson.loads(response.content[:size])["outputs"]:
        if "data" in output:
            flat = np.array(output["data"], np.float32)
        else:
            count = output["parameters"]["binary_data_size"]
            flat, raw = np.frombuffer(raw[:count], "<f4"), raw[count:]
        tensors[output["name"]] = flat.reshape(output["shape"])
    assert not raw
    return tensors


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("datatype", ACCEPTED_AS_FLOATS)
def test_infer_reads_every_number_type_as_fp32(
    server: Server, layers: Layers, datatype: str, form: str
) -> None:
    """What numpy makes of the same array is what the layer gets: embeddings and head mask."""
    random = np.random.default_rng(1)
    dtype = ACCEPTED_AS_FLOATS[datatype]
    numbers = random.standard_normal((1, 3, 8)) * 3
    array = (abs(numbers) if "U" in datatype else numbers).astype(dtype)
    mask = np.array([0, 2], dtype)

    response = infer(
        server, [sent(array, "embeddings", datatype, form), sent(mask, "head_mask", datatype, form)]
    )

    wanted = layers.formula("tiny")(array.astype(np.float32), head_mask=mask.astype(np.float32))
    np.testing.assert_allclose(tensors_of(response)["output"], wanted.output, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_infer_reads_memory_of_another_number_type(
    server: Server, layers: Layers, form: str
) -> None:
    """Beside embeddings of yet another."""
    random = np.random.default_rng(14)
    x = random.standard_normal((2, 3, 12)).astype(np.float16)
    memory = random.integers(-5, 5, (2, 4, 6), np.int32)

    response = infer(
        server,
        [sent(x, "embeddings", "FP16", form), sent(memory, "memory", "INT32", form)],
        "cross",
    )

    wanted = layers.formula("cross")(x.astype(np.float32), memory.astype(np.float32))
    np.testing.assert_allclose(tensors_of(response)["output"], wanted.output, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_infer_reads_bf16_in_json_as_numbers_and_raw_as_upper_halves(
    server: Server, form: str
) -> None:
    """As tritonclient carries it."""
    halves = np.random.default_rng(2).standard_normal((1, 2, 8)).astype(np.float32)
    halves = (halves.view(np.uint32) & 0xFFFF0000).view(np.float32)
    entry, raw = sent(halves, "embeddings", "BF16", form)
    if form == "binary":
        entry["parameters"]["binary_data_size"] = 32
        raw = b"".join(raw[i + 2 : i + 4] for i in range(0, 64, 4))

    found = tensors_of(infer(server, [(entry, raw)]))
    wanted = tensors_of(infer(server, [sent(halves, "embeddings", "FP32", "binary")]))

    np.testing.assert_array_equal(found["output"], wanted["output"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("datatype", "value", "words"),
    [
        ("FP64", 1e39, "expected a number within FP32 (up to 3.4e38), got"),
        ("INT32", 2**24 + 1, "expected a whole number that FP32 holds exactly, got"),
        ("INT64", 2**53 + 1, "expected a whole number that FP32 holds exactly, got"),
        ("UINT32", 2**32 - 1, "expected a whole number that FP32 holds exactly, got"),
        ("UINT64", 2**64 - 1, "expected a whole number that FP32 holds exactly, got"),
    ],
)
def test_infer_refuses_numbers_that_fp32_does_not_hold(
    server: Server, datatype: str, value: float, words: str, form: str
) -> None:
    """By tensor and first position, in every form."""
    array = np.zeros((1, 2, 8), ACCEPTED_AS_FLOATS[datatype])
    array[0, 1, 3] = array[0, 1, 5] = value

    response = infer(server, [sent(array, "embeddings", datatype, form)])

    message = response.json()["error"]
    assert (response.status_code, response.json()["code"]) == (400, "invalid_input")
    assert message.startswith("embeddings")
    assert words in message
    assert "[0, 1, 3]" in message or "[0][1][3]" in message or "embeddings[11]" in message


@pytest.mark.parametrize(
    ("datatype", "data", "words"),
    [
        ("INT8", 128, "embeddings[15]: expected a whole number of INT8, got 128"),
        ("UINT8", -1, "embeddings[15]: expected a whole number of UINT8, got -1"),
        ("INT32", 0.5, "embeddings[15]: expected a whole number of INT32, got 0.5"),
        ("INT32", 1.0, "embeddings[15]: expected a whole number of INT32, got 1.0"),
        ("INT64", 2**63, "embeddings[15]: expected a whole number of INT64, got a larger"),
        ("UINT64", 2**64, "embeddings[15]: expected a whole number of UINT64, got a larger"),
        (
            "UINT64",
            10**400,
            "embeddings[15]: expected a whole number of UINT64, got a larger number",
        ),
        ("INT16", True, "embeddings[15]: expected a whole number of INT16, got a boolean"),
        ("INT16", "1", "embeddings[15]: expected a whole number of INT16, got a string"),
        ("INT16", [1], "embeddings[0]: expected an array, got a number"),
        ("FP16", True, "embeddings[15]: expected a number, got a boolean"),
        ("FP16", None, "embeddings[15]: expected a number, got null"),
        ("FP32", True, "embeddings[15]: expected a number, got a boolean"),
        ("FP32", "1", "embeddings[15]: expected a number, got a string"),
        ("FP32", 3.5e38, "embeddings[15]: expected a number within FP32"),
        ("FP32", 10**39, "embeddings[15]: expected a number within FP32"),
        ("BF16", 1e39, "embeddings[15]: expected a number within FP32"),
    ],
)
@pytest.mark.parametrize("padding", [0, 4000])
def test_infer_json_value_of_another_kind_is_named(
    server: Server, datatype: str, data: Any, words: str, padding: int
) -> None:
    """By both readers: that of small bodies and that of large ones."""
    request = body(inputs=tensor(datatype=datatype, data=[0] * 15 + [data]))

    response = server.post(PATH, content=json.dumps(request).encode() + b" " * padding)

    assert response.status_code == 400, response.text
    assert words in response.json()["error"]


@pytest.mark.parametrize("literal", ["1e39", "-1e39", "1e400"])
def test_infer_json_number_outside_fp32_is_named(server: Server, literal: str) -> None:
    """As written, not as Python would write it."""
    content = json.dumps(body(inputs=tensor(data=[0.5] * 15 + ["#"]))).replace('"#"', literal)

    response = server.post(PATH, content=content.encode())

    assert response.status_code == 400
    assert response.json()["error"] == (
        "embeddings[15]: expected a number within FP32 (up to 3.4e38), got a larger one"
    )


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_infer_bare_nan_in_json_makes_only_its_own_sequence_null(
    server: Server, literal: str
) -> None:
    """perf_analyzer writes such; the answer is JSON that every parser reads."""
    content = json.dumps(body(inputs=tensor(shape=[2, 1, 8], data=[0.5] * 15 + ["#"])))

    response = server.post(PATH, content=content.replace('"#"', literal).encode())

    [output] = orjson.loads(response.content)["outputs"]
    assert output["data"][8:] == [None] * 8
    assert None not in output["data"][:8]


@pytest.mark.parametrize(
    "data",
    [
        [[[0.5] * 8, [0.5] * 7 + [[0.5]]]],
        [[[0.5] * 8, [0.5] * 7]],
        [[[0.5] * 8], [[0.5] * 8]],
        [[0.5] * 8, [0.5] * 8, []],
        [[[0.5] * 16]],
        [],
        0.5,
    ],
)
@pytest.mark.parametrize("padding", [0, 4000])
def test_infer_nested_data_of_another_shape_is_refused(
    server: Server, data: Any, padding: int
) -> None:
    """Every row's length counts, not only how many numbers there are."""
    content = orjson.dumps(body(inputs=tensor(data=data))) + b" " * padding

    response = server.post(PATH, content=content)

    assert response.status_code == 400
    assert response.json()["error"].startswith("embeddings")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("datatype", ["FP32", "FP16", "BYTES"])
@pytest.mark.parametrize(("name", "shape"), [("attend_mask", (1, 2)), ("pair_mask", (1, 1, 2, 2))])
def test_infer_mask_of_another_datatype_is_refused(
    server: Server, name: str, shape: tuple[int, ...], datatype: str, form: str
) -> None:
    """By name, with what is read; of a float mask it is said how it becomes one."""
    mask = sent(np.ones(shape, np.int64), name, datatype, form)

    response = infer(server, [sent(np.ones((1, 2, 8), "f4"), "embeddings", "FP32", form), mask])

    assert response.status_code == 400
    assert response.json()["error"].startswith(
        f"inputs[1].datatype: {name}: expected BOOL or whole numbers 0 and 1 (INT8, INT16, INT32,"
        f" INT64, UINT8, UINT16, UINT32, UINT64), got {datatype!r}"
    )
    assert ("mask == 0" in response.json()["error"]) is (datatype != "BYTES")


@pytest.mark.fault("E5")
@pytest.mark.parametrize("datatype", ["BOOL", "INT64", "INT32", "INT8", "UINT8", "UINT64"])
@pytest.mark.parametrize("form", FORMS)
def test_infer_masks_reach_the_layer(
    server: Server, layers: Layers, form: str, datatype: str
) -> None:
    """True or 1 = takes part, raw or in JSON: tokenizers give INT64."""
    x = np.random.default_rng(3).standard_normal((2, 3, 8)).astype(np.float32)
    attend = np.array([[True, True, False], [False, True, True]])
    pair = np.tri(3, dtype=np.bool_)[None, None]
    kind = bool if datatype == "BOOL" else np.dtype(datatype.lower())

    response = infer(
        server,
        [
            sent(x, "embeddings", "FP32", "binary"),
            sent(attend.astype(kind), "attend_mask", datatype, form),
            sent(pair.astype(kind), "pair_mask", datatype, form),
        ],
    )

    wanted = layers.formula("tiny")(x, attend_mask=attend, pair_mask=pair)
    np.testing.assert_allclose(tensors_of(response)["output"], wanted.output, atol=1e-5)


@pytest.mark.parametrize("value", [2, -1, 1.0, 10**400, "true", None, [True]])
def test_infer_json_mask_of_anything_but_booleans_0_and_1_is_refused(
    server: Server, value: Any
) -> None:
    """Any other value is no yes or no."""
    mask = {"name": "attend_mask", "shape": [1, 2], "datatype": "BOOL", "data": [True, value]}

    request = json.dumps(body(inputs=[*tensor(), mask]))
    response = server.post(PATH, content=request.encode())

    assert response.status_code == 400
    assert response.json()["error"].startswith("attend_mask[")


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP64", "INT8", "UINT64"])
def test_infer_binary_of_another_datatype_has_that_datatypes_size(
    server: Server, datatype: str
) -> None:
    """What is expected depends on what was declared."""
    size = 16 * {"FP16": 2, "BF16": 2, "FP64": 8, "INT8": 1, "UINT64": 8}[datatype]
    header = orjson.dumps(binary(size + 1, datatype=datatype))

    response = server.post(
        PATH,
        content=header + b"\0" * (size + 1),
        headers={"Inference-Header-Content-Length": str(len(header))},
    )

    assert response.status_code == 400
    assert response.json()["error"] == (
        f"embeddings: binary_data_size: expected {size} bytes for {datatype} [1, 2, 8],"
        f" got {size + 1}"
    )


@pytest.mark.parametrize("parameters", [{"sequence_id": 0}, {"sequence_id": ""}, {"headers": {}}])
def test_infer_parameters_that_ask_for_nothing_are_accepted(
    server: Server, parameters: dict[str, Any]
) -> None:
    """A client that always names them is served like any other."""
    flags = {"sequence_start": False, "sequence_end": False, "tritonish": 1}

    response = server.post(PATH, json=body(parameters=parameters | flags))

    assert response.status_code == 200, response.text


def test_infer_no_output_named_means_every_output(server: Server) -> None:
    """An empty list says as little as none."""
    path = "/v2/models/tiny-weights/infer"

    answers = [server.post(path, json=call).json() for call in (body(), body(outputs=[]))]

    assert answers[0] == answers[1]
    assert [output["name"] for output in answers[0]["outputs"]] == ["output", "attention_weights"]


@pytest.mark.parametrize("heads", [[0], [2], [2, 0], "1", "2,0", " 2 , 1,0"])
@pytest.mark.parametrize("is_binary", [False, True])
def test_infer_weights_are_those_of_the_chosen_heads_in_that_order(
    server: Server, layers: Layers, heads: list[int] | str, is_binary: bool
) -> None:
    """[B, len(heads), S, T], and the output stays that of all heads."""
    x = np.random.default_rng(4).standard_normal((2, 3, 24)).astype(np.float32)
    numbers = [int(head) for head in heads.split(",")] if isinstance(heads, str) else heads

    response = infer(
        server,
        [sent(x, "embeddings", "FP32", "binary")],
        "mha-weights",
        parameters={"heads": heads, "binary_data_output": is_binary},
    )

    found, wanted = tensors_of(response), layers.formula("mha")(x)
    np.testing.assert_allclose(found["attention_weights"], wanted.weights[:, numbers], atol=1e-5)
    np.testing.assert_allclose(found["output"], wanted.output, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ([3], "weights: expected heads from 0 to 2, got 3"),
        ("0,3", "weights: expected heads from 0 to 2, got 3"),
        ([-1], "weights: expected heads from 0 to 2, got -1"),
        ([10**30], "weights: expected heads from 0 to 2, got a larger"),
        ([1, 0, 1], "weights: expected each head once, got 1 again"),
        ("2,2", "weights: expected each head once, got 2 again"),
        ([], "parameters.heads: expected at least one head, got none"),
        ("", "parameters.heads: expected heads by number, from 0, such as 0,3, got ''"),
        ("0,", "parameters.heads: expected heads by number, from 0, such as 0,3, got '0,'"),
        ("-1", "parameters.heads: expected heads by number, from 0, such as 0,3, got '-1'"),
        ("²", "parameters.heads: expected heads by number, from 0, such as"),
        ("1" * 5000, "parameters.heads: expected heads by number, from 0, such as"),
        ([0.5], "parameters.heads[0]: expected heads by number, from 0, got 0.5"),
        ([True], "parameters.heads[0]: expected heads by number, from 0, got a boolean"),
        (["0"], "parameters.heads[0]: expected heads by number, from 0, got a string"),
        ([[0]], "parameters.heads[0]: expected heads by number, from 0, got an array"),
        (1, 'parameters.heads: expected "0,3" or [0, 3], got 1'),
        (None, 'parameters.heads: expected "0,3" or [0, 3], got null'),
        (True, 'parameters.heads: expected "0,3" or [0, 3], got a boolean'),
    ],
)
def test_infer_heads_that_do_not_exist_are_named(server: Server, heads: Any, words: str) -> None:
    """Counted from zero, each at most once."""
    request = body(inputs=tensor(shape=[1, 1, 24], data=[0.5] * 24), parameters={"heads": heads})

    response = server.post("/v2/models/mha-weights/infer", content=json.dumps(request).encode())

    assert response.status_code == 400
    assert words in response.json()["error"]


def test_infer_large_mixed_answer_is_that_of_the_binary_one(server: Server) -> None:
    """The JSON that stands before the raw part is made in pieces, and still told by its length."""
    x = np.random.default_rng(5).standard_normal((1, 300, 8)).astype(np.float32)
    call = [sent(x, "embeddings", "FP32", "binary")]

    def outputs(*binary: str) -> list[dict[str, Any]]:
        names = ("attention_weights", "output")
        return [{"name": n, "parameters": {"binary_data": n in binary}} for n in names]

    mixed = infer(server, call, "tiny-weights", outputs=outputs("output"))
    raw = infer(server, call, "tiny-weights", outputs=outputs("output", "attention_weights"))

    assert int(mixed.headers["content-length"]) == len(mixed.content)
    assert int(mixed.headers["inference-header-content-length"]) % 64 == 0
    assert list(tensors_of(mixed)) == ["attention_weights", "output"]
    for name, tensor in tensors_of(raw).items():
        np.testing.assert_array_equal(tensors_of(mixed)[name], tensor)


def test_infer_only_mixed_answers_are_long_before_their_first_byte() -> None:
    """Their JSON is made where it holds up nobody; raw parts and pure JSON go out as made."""
    weights = np.zeros((1, 2, 300, 300), np.float32)
    answer = Answer(np.zeros((1, 300, 8), np.float32), weights, None, None, Stages(0, 0, 0))

    def first(**outputs: bool) -> Size:
        request = InferRequest("", {}, {}, {}, Options(), outputs, {})
        return sizes(request, answer)[0]

    assert first(output=True, attention_weights=False) == Size(
        json_bytes=JSON_PER_RAW_BYTE * weights.nbytes
    )
    assert first(output=True, attention_weights=True) == Size()
    assert first(output=False, attention_weights=False) == Size()


def test_infer_header_that_came_before_is_read_for_each_call_by_itself() -> None:
    """The same JSON stands before other numbers, and is no excuse for too few of them."""
    entry = {
        "name": "embeddings",
        "shape": [1, 1, 8],
        "datatype": "FP32",
        "parameters": {"binary_data_size": 32},
    }
    header = orjson.dumps({"inputs": [entry], "id": "twice"})
    first, second = (np.full((1, 1, 8), value, np.float32) for value in (1, 2))

    for numbers in (first, second, first):
        request = decode(header + numbers.tobytes(), len(header), ("output",))
        np.testing.assert_array_equal(request.tensors.embeddings, numbers)
    for size in (28, 36):
        with pytest.raises(InvalidInput, match=f"got {size}"):
            decode(header + bytes(size), len(header), ("output",))


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


def compressed(server: Server, x: np.ndarray[Any, Any], encoding: str, **headers: str) -> Any:
    """Send a raw tensor in a compressed body, answered raw."""
    entry, raw = sent(x, "embeddings", "FP32", "binary")
    header = orjson.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}})
    length = {"Inference-Header-Content-Length": str(len(header)), "Content-Encoding": encoding}
    content = COMPRESSORS[encoding](header + raw)
    return server.post(PATH, content=content, headers=length | headers)


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_infer_reads_a_compressed_body(server: Server, layers: Layers, encoding: str) -> None:
    """The header's length is that of the JSON before it was compressed; the answer is plain."""
    x = np.random.default_rng(12).standard_normal((2, 3, 8)).astype(np.float32)

    response = compressed(server, x, encoding)

    assert "content-encoding" not in response.headers
    wanted = layers.formula("tiny")(x).output
    np.testing.assert_allclose(tensors_of(response)["output"], wanted, atol=1e-5)


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_infer_of_a_body_that_grows_without_end_is_413(server: Server, encoding: str) -> None:
    """A bomb of a thousandth of its size is not unpacked."""
    bomb = COMPRESSORS[encoding](b" " * 2**27)

    response = server.post(PATH, content=bomb, headers={"Content-Encoding": encoding})

    assert (response.status_code, response.json()["code"]) == (413, "too_large")
    assert server.post(PATH, json=body()).status_code == 200


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_infer_answers_compressed_where_that_is_switched_on_and_asked_for(
    layers: Layers, server: Server, encoding: str
) -> None:
    """The header's length is that of the JSON once it is unpacked; errors are never compressed."""
    x = np.random.default_rng(13).standard_normal((2, 3, 8)).astype(np.float32)
    asked = {"Accept-Encoding": encoding}

    with Server(layers.repository, compress_answers=True) as willing:
        response = compressed(willing, x, encoding, **asked)
        wrong = willing.post(PATH, json=body(x=1), headers=asked)

    assert response.headers["content-encoding"] == encoding
    np.testing.assert_array_equal(
        tensors_of(response)["output"], tensors_of(compressed(server, x, encoding))["output"]
    )
    assert wrong.status_code == 400
    assert "content-encoding" not in wrong.headers


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda values: (
        st.lists(values, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(["a", "b"]), values, max_size=3)
    ),
    max_leaves=8,
)
parameters_of_all_kinds = json_values | st.dictionaries(
    st.sampled_from(
        [
            "binary_data_size",
            "binary_data",
            "binary_data_output",
            "shared_memory_region",
            "shared_memory_offset",
            "shared_memory_byte_size",
            "classification",
            "causal",
            "timeout",
            "priority",
            "heads",
            "sequence_id",
            "triton_x",
        ]
    ),
    json_values | st.just(64) | st.text("0,3", max_size=4),
    max_size=5,
)
entries_of_all_kinds = json_values | st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(
            ["embeddings", "attend_mask", "positions", "output", "extra_weights"]
        )
        | json_values,
        "shape": st.just([1, 2, 8]) | json_values,
        "datatype": st.sampled_from([*ACCEPTED_AS_FLOATS, "BF16", "BOOL", "BYTES"]) | json_values,
        "data": st.just([0.5] * 16) | json_values,
        "parameters": parameters_of_all_kinds,
    },
)
requests_of_all_kinds = st.fixed_dictionaries(
    {"inputs": st.lists(entries_of_all_kinds, max_size=3) | json_values},
    optional={
        "id": json_values,
        "parameters": parameters_of_all_kinds,
        "outputs": st.lists(entries_of_all_kinds, max_size=3) | json_values,
    },
)


offers = st.sampled_from(
    [("output",), ("output", "attention_weights"), ("output", "attention_weights", "extra_weights")]
)


def check_decodes_or_refuses(content: bytes, json_bytes: int, offered: tuple[str, ...]) -> None:
    """Assert that a body is read, or refused as a caller's mistake."""
    with contextlib.suppress(InvalidInput):
        request = decode(content, json_bytes, offered)
        for tensor in request.arrays.values():
            assert tensor.dtype in (np.float32, np.bool_, np.int64)


@given(st.binary(max_size=200), st.integers(1, 200), offers)
def test_decode_of_any_bytes_is_a_request_or_a_refusal(
    content: bytes, json_bytes: int, offered: tuple[str, ...]
) -> None:
    """Whatever is sent, it is never our fault."""
    check_decodes_or_refuses(content, min(json_bytes, len(content)), offered)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(requests_of_all_kinds, st.binary(max_size=80), offers, st.sampled_from([0, 3000]))
def test_decode_of_any_json_is_a_request_or_a_refusal(
    request: dict[str, Any], raw: bytes, offered: tuple[str, ...], padding: int
) -> None:
    """Also where it is nearly right; by both readers."""
    header = json.dumps(request).encode() + b" " * padding

    check_decodes_or_refuses(header + raw, len(header), offered)
