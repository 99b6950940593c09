"""Clients that others published, unchanged, against a real server: tritonclient and kserve's."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from ml_dtypes import bfloat16
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, shared_memory

from tests.support.calls import Case, Reply, check_close, expected, random_case
from tests.support.kserve_client import HOME, KserveClient
from tests.support.layers import CONFIGS, Layers
from tests.support.server import Server

MODELS = sorted([*CONFIGS, *(f"{name}-weights" for name in CONFIGS)])
SAME = 1e-6
"""What the same tensors may differ by when they come through another client."""


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    """Return tritonclient's client."""
    with triton.InferenceServerClient(urlsplit(server.url).netloc) as client:
        yield client


@pytest.fixture(scope="module")
def kserve(server: Server) -> Iterator[KserveClient]:
    """Return kserve's client."""
    if not HOME.exists():
        pytest.skip("kserve's client was not fetched: make .venv/kserve.stamp does it")
    with KserveClient(server.url) as client:
        yield client


def aio(server: Server, use: Callable[[Any], Awaitable[Any]]) -> Any:
    """Return what `use` makes of tritonclient's asynchronous client."""

    async def run() -> Any:
        async with triton_aio.InferenceServerClient(urlsplit(server.url).netloc) as client:
            return await use(client)

    return asyncio.run(run())


def aio_infer(server: Server, **call: Any) -> Any:
    """Return the result of one call of tritonclient's asynchronous client."""
    return aio(server, lambda client: client.infer(**call))


def case_of(name: str) -> Case:
    """Return one of the calls that every client sends, by what is special about it."""
    random = np.random.default_rng(7)
    plain = random_case(random, "mha", CONFIGS["mha"], [5, 5, 5])
    keys = tuple(random.random(5) < 0.6 for _ in range(3))
    pairs = tuple(random.random((3, 5, 5)) < 0.6 for _ in range(3))
    memory_lengths = [4, 4]
    return {
        "plain": plain,
        "weights": replace(plain, weights=True),
        "causal": replace(plain, causal=True, weights=True),
        "attend_mask": replace(plain, attend_mask=keys, weights=True),
        "pair_mask": replace(plain, pair_mask=pairs, weights=True),
        "head_mask": replace(plain, head_mask=np.array([1, 0, 0.5], np.float32)),
        "head_mask of each row": replace(
            plain, head_mask=random.random((3, 3)).astype(np.float32), weights=True
        ),
        "all masks": replace(
            plain, attend_mask=keys, pair_mask=pairs, head_mask=np.array([0, 1, 2], np.float32)
        ),
        "memory": random_case(random, "cross", CONFIGS["cross"], [3, 3], memory_lengths),
        "one token": random_case(random, "tiny", CONFIGS["tiny"], [1], weights=True),
    }[name]


CASES = [
    "plain",
    "weights",
    "causal",
    "attend_mask",
    "pair_mask",
    "head_mask",
    "head_mask of each row",
    "all masks",
    "memory",
    "one token",
]


def model_of(case: Case) -> str:
    """Return the protocol's model that answers a case."""
    return case.model + ("-weights" if case.weights else "")


def datatype_of(tensor: np.typing.NDArray[Any]) -> str:
    """Return the protocol's word for a dtype of ours."""
    return "BOOL" if tensor.dtype == np.bool_ else "FP32"


def inputs_of(case: Case, binary: Callable[[str], bool]) -> list[Any]:
    """Return a case as tritonclient's inputs."""
    inputs = []
    for name, tensor in case.stacked().items():
        given = triton.InferInput(name, list(tensor.shape), datatype_of(tensor))
        given.set_data_from_numpy(tensor, binary_data=binary(name))
        inputs.append(given)
    return inputs


def outputs_of(case: Case, binary: Callable[[str], bool]) -> list[Any]:
    """Return what a case asks for as tritonclient's outputs."""
    names = ["output", "attention_weights"] if case.weights else ["output"]
    return [triton.InferRequestedOutput(name, binary_data=binary(name)) for name in names]


def reply_of(result: Any) -> Reply:
    """Return tritonclient's result by its sequences."""
    weights = result.as_numpy("attention_weights")
    return Reply(tuple(result.as_numpy("output")), None if weights is None else tuple(weights))


FORMS: dict[str, tuple[Callable[[str], bool], Callable[[str], bool]]] = {
    "binary": (lambda name: True, lambda name: True),
    "json": (lambda name: False, lambda name: False),
    "mixed": (lambda name: "mask" not in name, lambda name: name == "output"),
    "mixed the other way": (lambda name: "mask" in name, lambda name: name != "output"),
}
"""Which inputs and which outputs are binary."""


def kserve_reply(kserve: KserveClient, case: Case, *, binary: bool) -> Reply:
    """Return what kserve's client makes of a case."""
    inputs = [
        {
            "name": name,
            "shape": list(tensor.shape),
            "datatype": datatype_of(tensor),
            "data": tensor.ravel().tolist(),
            "binary": binary,
        }
        for name, tensor in case.stacked().items()
    ]
    parameters = {"causal": case.causal, "binary_data_output": binary}
    answer = kserve.call(
        "infer", model=model_of(case), inputs=inputs, parameters=parameters, request_id="k-1"
    )
    assert "error" not in answer, answer
    assert answer["model"] == model_of(case)
    assert answer["id"] == "k-1"
    tensors = {
        name: np.array(output["data"], np.float32).reshape(output["shape"])
        for name, output in answer["outputs"].items()
    }
    weights = tensors.get("attention_weights")
    return Reply(tuple(tensors["output"]), None if weights is None else tuple(weights))


def check_same(found: Reply, first: Reply) -> None:
    """Assert that two ways of sending the same tensors gave the same numbers."""
    pairs = itertools.chain(
        zip(found.outputs, first.outputs, strict=True),
        zip(found.weights or (), first.weights or (), strict=True),
    )
    for have, want in pairs:
        assert np.abs(have - want).max() <= SAME * max(1.0, np.abs(want).max())


@pytest.mark.parametrize("name", CASES)
def test_tritonclient_gets_the_formula_in_every_form(
    server: Server, layers: Layers, client: triton.InferenceServerClient, name: str
) -> None:
    """Synchronous or not, binary or JSON or both: one answer, and it is the right one."""
    case = case_of(name)
    wanted = expected(case, layers.formula(case.model))
    replies = []
    for binary_in, binary_out in FORMS.values():
        call = {
            "model_name": model_of(case),
            "inputs": inputs_of(case, binary_in),
            "outputs": outputs_of(case, binary_out),
            "parameters": {"causal": case.causal},
        }
        replies.append(reply_of(client.infer(**call)))
        replies.append(reply_of(aio_infer(server, **call)))

    for reply in replies:
        check_close(reply, wanted)
        check_same(reply, replies[0])


@pytest.mark.parametrize("name", CASES)
def test_kserve_client_gets_the_formula_in_every_form(
    layers: Layers, client: triton.InferenceServerClient, kserve: KserveClient, name: str
) -> None:
    """Its own words in the body, the other client's answer, and that of the formula."""
    case = case_of(name)
    wanted = expected(case, layers.formula(case.model))
    parameters = {"causal": case.causal}
    first = reply_of(
        client.infer(model_of(case), inputs_of(case, FORMS["binary"][0]), parameters=parameters)
    )

    for binary in (True, False):
        reply = kserve_reply(kserve, case, binary=binary)

        check_close(reply, wanted)
        check_same(reply, first)


def test_tritonclient_sees_who_is_alive_and_ready(
    server: Server, client: triton.InferenceServerClient
) -> None:
    """Server, models and versions that are there are ready; others are not."""

    async def ask(client: Any) -> list[bool]:
        return [
            await client.is_server_live(),
            await client.is_server_ready(),
            *[await client.is_model_ready(name) for name in MODELS],
            await client.is_model_ready("tiny", "1"),
            await client.is_model_ready("tiny", "2"),
            await client.is_model_ready("nope"),
        ]

    expected_answers = [True] * (3 + len(MODELS)) + [False, False]
    assert aio(server, ask) == expected_answers
    assert client.is_server_live()
    assert client.is_server_ready()
    assert all(client.is_model_ready(name) for name in MODELS)
    assert client.is_model_ready("tiny-weights", "1")
    assert not client.is_model_ready("tiny", "2")
    assert not client.is_model_ready("nope-weights")


def test_kserve_client_sees_who_is_alive_and_ready(kserve: KserveClient) -> None:
    """It reads the bodies, not the status alone."""
    assert kserve.call("is_server_live") is True
    assert kserve.call("is_server_ready") is True
    assert kserve.call("is_model_ready", model_name="tiny") is True
    assert kserve.call("is_model_ready", model_name="tiny-weights") is True
    assert kserve.call("is_model_ready", model_name="nope") is False


def test_server_metadata_names_the_extensions_that_clients_look_for(
    server: Server, client: triton.InferenceServerClient
) -> None:
    """Strings in an array, and nothing that the server does not have."""
    metadata = client.get_server_metadata()

    extensions = set(metadata["extensions"])
    assert metadata["name"] == "headwise"
    assert isinstance(metadata["version"], str)
    assert {"binary_tensor_data", "statistics", "model_configuration"} <= extensions
    assert not extensions & {"sequence", "schedule_policy", "trace", "cuda_shared_memory"}
    assert aio(server, lambda client: client.get_server_metadata()) == metadata


@pytest.mark.parametrize("name", MODELS)
def test_model_metadata_is_the_layer(
    server: Server, client: triton.InferenceServerClient, name: str
) -> None:
    """Required inputs with their free axes; the weights only where the model is named so."""
    layer = CONFIGS[name.removesuffix("-weights")]
    embeddings = {"name": "embeddings", "datatype": "FP32", "shape": [-1, -1, layer.embed_dim]}
    memory = {"name": "memory", "datatype": "FP32", "shape": [-1, -1, layer.memory_dim]}
    output = embeddings | {"name": "output"}
    weights = {
        "name": "attention_weights",
        "datatype": "FP32",
        "shape": [-1, layer.num_heads, -1, -1],
    }

    metadata = client.get_model_metadata(name)

    assert metadata["name"] == name
    assert metadata["versions"] == ["1"]
    assert isinstance(metadata["platform"], str)
    assert metadata["inputs"] == ([embeddings, memory] if layer.is_cross else [embeddings])
    assert metadata["outputs"] == ([output, weights] if name.endswith("-weights") else [output])
    assert client.get_model_metadata(name, "1") == metadata
    assert aio(server, lambda client: client.get_model_metadata(name)) == metadata


@pytest.mark.parametrize("name", MODELS)
def test_model_config_agrees_with_the_metadata(
    server: Server, client: triton.InferenceServerClient, name: str
) -> None:
    """Same tensors without the batch axis, which is max_batch_size."""
    metadata = client.get_model_metadata(name)

    config = client.get_model_config(name)

    assert config["name"] == name
    assert config["max_batch_size"] > 0
    for side in ("input", "output"):
        assert config[side] == [
            config_entry
            | {"name": told["name"], "data_type": "TYPE_FP32", "dims": told["shape"][1:]}
            for config_entry, told in zip(config[side], metadata[side + "s"], strict=True)
        ]
    assert client.get_model_config(name, "1") == config
    assert aio(server, lambda client: client.get_model_config(name)) == config


def test_repository_index_lists_every_model_as_ready(
    server: Server, client: triton.InferenceServerClient
) -> None:
    """What a client may call is what it finds."""
    index = client.get_model_repository_index()

    assert sorted(entry["name"] for entry in index) == MODELS
    assert {(entry["version"], entry["state"]) for entry in index} == {("1", "READY")}
    assert aio(server, lambda client: client.get_model_repository_index()) == index


def statistics_of(client: triton.InferenceServerClient, model: str) -> dict[str, Any]:
    """Return the one entry of a model's statistics."""
    [entry] = client.get_inference_statistics(model)["model_stats"]
    assert (entry["name"], entry["version"]) == (model, "1")
    return dict(entry)


def test_statistics_count_calls_rows_and_failures(client: triton.InferenceServerClient) -> None:
    """Three calls of three sequences and a refused one are told as that."""
    case = case_of("weights")
    before = statistics_of(client, "mha-weights")
    for _ in range(3):
        client.infer("mha-weights", inputs_of(case, FORMS["binary"][0]))
    wrong = triton.InferInput("embeddings", [1, 1, 4], "FP32")
    wrong.set_data_from_numpy(np.zeros((1, 1, 4), np.float32))
    with pytest.raises(InferenceServerException, match="embeddings"):
        client.infer("mha-weights", [wrong])

    after = statistics_of(client, "mha-weights")

    def grown(*path: str) -> int:
        old, new = before, after
        for key in path:
            old, new = old[key], new[key]
        return int(str(new)) - int(str(old))

    assert grown("inference_count") == 9
    assert 1 <= grown("execution_count") <= 3
    for part in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        assert grown("inference_stats", part, "count") == 3
    assert grown("inference_stats", "fail", "count") == 1
    parts = ("queue", "compute_input", "compute_infer", "compute_output")
    spent = sum(grown("inference_stats", part, "ns") for part in parts)
    assert 0 < spent <= grown("inference_stats", "success", "ns")


def test_statistics_of_all_models_name_them_all(
    server: Server, client: triton.InferenceServerClient
) -> None:
    """One entry for each model, called or not."""
    everything = client.get_inference_statistics()["model_stats"]

    assert sorted(entry["name"] for entry in everything) == MODELS
    told = aio(server, lambda client: client.get_inference_statistics())["model_stats"]
    assert [entry["name"] for entry in told] == [entry["name"] for entry in everything]


@pytest.mark.parametrize(
    ("dtype", "binary"),
    [
        *itertools.product([np.float16, np.float64, np.int8, np.int64], [True, False]),
        (bfloat16, True),  # the client itself sends it as bytes only
    ],
)
def test_other_datatypes_are_read_as_the_numbers_they_hold(
    layers: Layers, client: triton.InferenceServerClient, dtype: type, binary: bool
) -> None:
    """What a client has at hand needs no conversion on its side."""
    drawn = np.random.default_rng(1).uniform(-3, 3, (2, 3, 8))
    numbers: np.typing.NDArray[Any] = drawn.astype(dtype)
    given = triton.InferInput("embeddings", [2, 3, 8], np_to_triton_dtype(numbers.dtype))
    given.set_data_from_numpy(numbers, binary_data=binary)

    result = client.infer("tiny", [given])

    case = Case("tiny", tuple(numbers.astype(np.float32)))
    check_close(reply_of(result), expected(case, layers.formula("tiny")))


def test_chosen_heads_come_alone(layers: Layers, client: triton.InferenceServerClient) -> None:
    """A parameter of this client is a string, a number or a boolean: the heads are a string."""
    case = case_of("weights")

    result = client.infer(
        "mha-weights", inputs_of(case, FORMS["binary"][0]), parameters={"heads": "2,0"}
    )

    wanted = expected(case, layers.formula("mha"))
    assert wanted.weights is not None
    chosen = Reply(wanted.outputs, tuple(weights[[2, 0]] for weights in wanted.weights))
    check_close(reply_of(result), chosen)


def test_requested_outputs_come_alone_and_in_order(client: triton.InferenceServerClient) -> None:
    """What is not asked for is not sent."""
    inputs = inputs_of(case_of("one token"), FORMS["binary"][0])

    alone = client.infer("tiny-weights", inputs, outputs=[triton.InferRequestedOutput("output")])
    turned = client.infer(
        "tiny-weights",
        inputs,
        outputs=[
            triton.InferRequestedOutput("attention_weights", binary_data=False),
            triton.InferRequestedOutput("output"),
        ],
    )

    def names(result: Any) -> list[str]:
        return [output["name"] for output in result.get_response()["outputs"]]

    assert names(alone) == ["output"]
    assert alone.as_numpy("attention_weights") is None
    assert names(turned) == ["attention_weights", "output"]
    assert turned.as_numpy("attention_weights").tolist() == [[[[1.0]], [[1.0]]]]


def test_all_outputs_come_when_none_is_named(client: triton.InferenceServerClient) -> None:
    """The model's declared outputs, binary, as the client then asks for."""
    result = client.infer("tiny-weights", inputs_of(case_of("one token"), FORMS["json"][0]))

    outputs = result.get_response()["outputs"]
    assert [output["name"] for output in outputs] == ["output", "attention_weights"]
    assert [output["parameters"]["binary_data_size"] for output in outputs] == [32, 8]


def test_request_id_and_version_come_back(
    server: Server, client: triton.InferenceServerClient
) -> None:
    """The id is echoed when there was one; the version is a string."""
    inputs = inputs_of(case_of("one token"), FORMS["binary"][0])

    named = client.infer("tiny", inputs, request_id="a7", model_version="1").get_response()
    nameless = client.infer("tiny", inputs).get_response()
    other = aio(server, lambda client: client.infer("tiny", inputs, request_id="b8"))

    assert (named["id"], named["model_name"], named["model_version"]) == ("a7", "tiny", "1")
    assert "id" not in nameless
    assert other.get_response()["id"] == "b8"


def test_priority_timeout_and_unknown_parameters_are_accepted(
    layers: Layers, client: triton.InferenceServerClient
) -> None:
    """What concerns the queue does not concern the answer."""
    case = case_of("plain")

    result = client.infer(
        "mha",
        inputs_of(case, FORMS["binary"][0]),
        priority=1,
        timeout=30_000_000,
        parameters={"anything": "else", "causal": False, "number": 3},
    )

    check_close(reply_of(result), expected(case, layers.formula("mha")))


def test_calls_at_once_get_their_own_answers(server: Server, layers: Layers) -> None:
    """Whoever shares a batch, in whatever order: every caller gets its own numbers."""
    random = np.random.default_rng(3)
    cases = [random_case(random, "tiny", CONFIGS["tiny"], [1 + i % 4]) for i in range(24)]

    async def ask(client: Any) -> list[Any]:
        calls = (client.infer("tiny", inputs_of(case, FORMS["binary"][0])) for case in cases)
        return await asyncio.gather(*calls)

    with triton.InferenceServerClient(urlsplit(server.url).netloc, concurrency=8) as client:
        pending = [
            client.async_infer("tiny", inputs_of(case, FORMS["binary"][0])) for case in cases
        ]
        results = [waiting.get_result() for waiting in pending]

    for case, one, other in zip(cases, results, aio(server, ask), strict=True):
        wanted = expected(case, layers.formula("tiny"))
        check_close(reply_of(one), wanted)
        check_close(reply_of(other), wanted)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
@pytest.mark.parametrize("form", ["binary", "json", "mixed"])
def test_compressed_requests_are_read(
    server: Server,
    layers: Layers,
    client: triton.InferenceServerClient,
    algorithm: str,
    form: str,
) -> None:
    """The header's length counts in what was compressed."""
    case = case_of("attend_mask")
    binary_in, binary_out = FORMS[form]
    call = {
        "model_name": "mha-weights",
        "inputs": inputs_of(case, binary_in),
        "outputs": outputs_of(case, binary_out),
        "request_compression_algorithm": algorithm,
    }

    replies = [client.infer(**call), aio_infer(server, **call)]

    for reply in replies:
        check_close(reply_of(reply), expected(case, layers.formula("mha")))


@pytest.fixture(scope="module")
def compressing(layers: Layers) -> Iterator[Server]:
    """Return a server that compresses answers for those who ask."""
    with Server(layers.repository, compress_answers=True) as running:
        yield running


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
@pytest.mark.parametrize("form", ["binary", "json"])
def test_compressed_answers_are_read(
    compressing: Server,
    layers: Layers,
    capsys: pytest.CaptureFixture[str],
    algorithm: str,
    form: str,
) -> None:
    """What the client asked for is what the server sent, and the client can read it."""
    case = case_of("attend_mask")
    binary_in, binary_out = FORMS[form]
    call = {
        "model_name": "mha-weights",
        "inputs": inputs_of(case, binary_in),
        "outputs": outputs_of(case, binary_out),
        "response_compression_algorithm": algorithm,
    }
    address = urlsplit(compressing.url).netloc
    with triton.InferenceServerClient(address, verbose=True) as client:
        reply = client.infer(**call)
    other = aio_infer(compressing, **call)

    said = capsys.readouterr().out.lower()
    assert f"'content-encoding': '{algorithm}'" in said
    for result in (reply, other):
        check_close(reply_of(result), expected(case, layers.formula("mha")))


def test_what_is_no_tensor_is_never_compressed(compressing: Server) -> None:
    """The asynchronous client accepts compression always, and reads it in answers alone."""

    async def ask(client: Any) -> tuple[Any, str]:
        with pytest.raises(InferenceServerException) as caught:
            await client.infer("nope", inputs_of(case_of("one token"), FORMS["binary"][0]))
        return await client.get_model_metadata("tiny"), str(caught.value.message())

    metadata, message = aio(compressing, ask)

    assert metadata["name"] == "tiny"
    assert "nope" in message


def test_answers_stay_as_they_are_unless_the_server_is_told(
    server: Server, layers: Layers, capsys: pytest.CaptureFixture[str]
) -> None:
    """A client that would take compressed answers gets plain ones, and reads them."""
    case = case_of("plain")
    address = urlsplit(server.url).netloc
    with triton.InferenceServerClient(address, verbose=True) as client:
        result = client.infer(
            "mha",
            inputs_of(case, FORMS["binary"][0]),
            response_compression_algorithm="gzip",
        )

    assert "content-encoding" not in capsys.readouterr().out.lower()
    check_close(reply_of(result), expected(case, layers.formula("mha")))


def test_errors_carry_our_message_and_status(
    server: Server, client: triton.InferenceServerClient
) -> None:
    """A client tells its user what we said, with the status that we meant."""
    wrong = triton.InferInput("embeddings", [1, 2, 5], "FP32")
    wrong.set_data_from_numpy(np.zeros((1, 2, 5), np.float32))
    right = inputs_of(case_of("one token"), FORMS["binary"][0])
    unknown = [triton.InferRequestedOutput("nope")]
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("400", "embeddings: expected [B, S, 8], got [1, 2, 5]", {"inputs": [wrong]}),
        ("400", "expected output, got 'nope'", {"inputs": right, "outputs": unknown}),
        (
            "400",
            "attention_weights",
            {"inputs": right, "outputs": outputs_of(case_of("one token"), FORMS["binary"][1])},
        ),
        ("404", "'nope'", {"inputs": right, "model_name": "nope"}),
        ("404", "tiny", {"inputs": right, "model_version": "3"}),
        ("504", "limit of 1e-06 s passed", {"inputs": right, "timeout": 1}),
    ]
    for status, message, call in calls:
        call = {"model_name": "tiny"} | call
        with pytest.raises(InferenceServerException) as caught:
            client.infer(**call)
        with pytest.raises(InferenceServerException) as other:
            aio_infer(server, **call)
        for error in (caught.value, other.value):
            assert error.status() == status
            assert message in error.message()


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.get_model_metadata("nope"),
        lambda client: client.get_model_metadata("tiny", "9"),
        lambda client: client.get_model_config("nope"),
        lambda client: client.get_inference_statistics("nope-weights"),
    ],
)
def test_errors_of_what_is_asked_beside_calls_are_readable(
    client: triton.InferenceServerClient, ask: Callable[[Any], Any]
) -> None:
    """An unknown model is 404 with our sentence at every endpoint."""
    with pytest.raises(InferenceServerException) as caught:
        ask(client)

    assert caught.value.status() == "404"
    assert "decoding" not in caught.value.message()


def test_kserve_client_tells_our_message(kserve: KserveClient) -> None:
    """Status and sentence reach its user too."""
    tensor = {"name": "embeddings", "shape": [1, 1, 5], "datatype": "FP32", "data": [0.0] * 5}

    answer = kserve.call(
        "infer",
        model="tiny",
        inputs=[tensor | {"binary": True}],
        parameters={},
        request_id="k-2",
    )

    assert answer["status"] == 400
    assert "embeddings: expected [B, S, 8], got [1, 1, 5]" in answer["error"]


def test_system_shared_memory_carries_tensors_both_ways(layers: Layers) -> None:
    """Embeddings and output stay in memory that the client made; the numbers are the same."""
    case = case_of("plain")
    [embeddings] = case.stacked().values()
    size = embeddings.nbytes
    with Server(layers.repository, shared_memory=True) as server:
        client = triton.InferenceServerClient(urlsplit(server.url).netloc)
        key = "/clients-of-headwise"
        region = shared_memory.create_shared_memory_region("calls", key, 2 * size)
        try:
            shared_memory.set_shared_memory_region(region, [embeddings])
            client.register_system_shared_memory("calls", "/clients-of-headwise", 2 * size)
            given = triton.InferInput("embeddings", list(embeddings.shape), "FP32")
            given.set_shared_memory("calls", size)
            wanted = triton.InferRequestedOutput("output")
            wanted.set_shared_memory("calls", size, offset=size)

            registered = client.get_system_shared_memory_status()
            result = client.infer("mha", [given], outputs=[wanted])

            output = shared_memory.get_contents_as_numpy(
                region, np.float32, embeddings.shape, offset=size
            )
            found = Reply(tuple(output.copy()), None)
            del output
            client.unregister_system_shared_memory()
            left = client.get_system_shared_memory_status()
        finally:
            shared_memory.destroy_shared_memory_region(region)
            client.close()

    assert [entry["name"] for entry in registered] == ["calls"]
    assert "data" not in result.get_response()["outputs"][0]
    assert left == []
    check_close(found, expected(case, layers.formula("mha")))
