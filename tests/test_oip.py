"""The protocol's infer call: what is accepted, what is refused, how it is answered."""

import json
from typing import Any

import numpy as np
import orjson
import pytest

from tests.calls import check_close, expected, infer_body, random_case
from tests.layers import CONFIGS, Layers
from tests.server import Server

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
        ({"inputs": tensor(name="attention_mask")}, "say attend_mask [B, T]"),
        ({"inputs": tensor() * 2}, "inputs[1]: embeddings is given twice"),
        ({"inputs": tensor(shape="-1")}, "inputs[0].shape: expected an array of whole numbers"),
        ({"inputs": tensor(shape=[1, -2, 8])}, "inputs[0].shape: expected an array of whole"),
        ({"inputs": tensor(shape=[1, 2.0, 8])}, "inputs[0].shape: expected an array of whole"),
        ({"inputs": tensor(shape=[2**40, 2**40, 8])}, "inputs[0].shape: expected an array"),
        ({"inputs": tensor(shape=[1] * 71 + [8])}, "inputs[0].shape: expected an array of whole"),
        ({"inputs": tensor(shape=[2**31 - 1] * 3 + [0])}, "inputs[0].shape: expected an array"),
        ({"inputs": tensor(shape=nested(900))}, "inputs[0].shape: expected an array of whole"),
        ({"inputs": tensor(name=nested(900))}, "inputs[0].name: expected a string, got an array"),
        ({"id": nested(900)}, "id: expected a string, got an array"),
        ({"id": "\ud800"}, "id: expected Unicode characters, got a lone surrogate"),
        ({"parameters": {"timeout": 10**400}}, "parameters.timeout: expected whole microseconds"),
        ({"inputs": tensor(shape=[2**30, 2**30, 8])}, "embeddings: expected data of shape"),
        ({"inputs": tensor(shape=[2, 8])}, "embeddings: expected [B, S, 8], got [2, 8]"),
        ({"inputs": tensor(datatype="INT64")}, "embeddings: expected FP32, got 'INT64'"),
        ({"inputs": tensor(datatype=1)}, "embeddings: expected FP32, got a number"),
        ({"inputs": tensor(data=None)}, "embeddings: expected either data or parameters.binary"),
        ({"inputs": tensor(data=[0.5] * 15)}, "or 16 flat values, got 15 flat values"),
        ({"inputs": tensor(data=[[0.5] * 15, [0.5]])}, "flat values, got rows of unequal length"),
        ({"inputs": tensor(data=["a"] * 16)}, "embeddings[0]: expected a number, got a string"),
        ({"inputs": tensor(parameters=1)}, "inputs[0].parameters: expected an object"),
        ({"inputs": tensor(parameters={"binary_data_size": 64})}, "embeddings: expected either"),
        ({"inputs": tensor(x=1)}, "inputs[0]: unknown key 'x'"),
        ({"outputs": [{"name": "x"}]}, "outputs[0]: expected output, got 'x'"),
        ({"outputs": [{"name": "attention_weights"}]}, "is an output of the model <name>-weights"),
        ({"outputs": [{"name": "output"}] * 2}, "outputs[1]: output is asked for twice"),
        ({"outputs": [{"name": "output", "parameters": {"binary_data": 1}}]}, "binary_data: exp"),
        ({"outputs": 1}, "outputs: expected an array, got a number"),
        ({"id": 7}, "id: expected a string, got a number"),
        ({"parameters": []}, "parameters: expected an object, got an array"),
        ({"parameters": {"causal": 1}}, "causal: expected true or false, got a number"),
        ({"parameters": {"priority": "1"}}, "priority: expected 0 (default) or a whole number"),
        ({"parameters": {"timeout": 0.5}}, "parameters.timeout: expected whole microseconds"),
        ({"parameters": {"binary_data_output": 1}}, "parameters.binary_data_output: expected"),
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
        ("abc", "header Inference-Header-Content-Length: expected a number, got 'abc'"),
        ("-1", "expected a number, got '-1'"),
        ("0", "expected a JSON header, got 0"),
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
    assert "attend_mask: expected bytes 0 and 1, got another" in response.json()["error"]


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
