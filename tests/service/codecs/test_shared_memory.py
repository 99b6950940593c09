"""Tensors in system shared memory: where they may lie, and what happens when they do not."""

import contextlib
import gc
import gzip
import json
import os
import resource
import signal
import threading
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory as Segment
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from httpx import Response

from service.codecs.shared_memory import DIRECTORY, MAX_REGIONS, SharedMemory, Slot
from service.errors import Disabled, InvalidInput, NotFound
from tests.support.layers import Layers
from tests.support.server import Server

ALL = "/v2/systemsharedmemory"
Floats = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def shared(layers: Layers) -> Iterator[Server]:
    """Return a server that takes tensors from shared memory."""
    with Server(layers.repository, shared_memory="true", max_body_bytes=2**20) as running:
        yield running


@pytest.fixture(autouse=True)
def _forget(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave no region to the next test."""
    yield
    if "shared" in request.fixturenames:
        running: Server = request.getfixturevalue("shared")
        assert running.post(f"{ALL}/unregister").status_code == 200


@pytest.fixture
def segment() -> Iterator[Segment]:
    """Return a new segment of 4096 bytes."""
    with new_segment(4096) as made:
        yield made


@contextlib.contextmanager
def new_segment(size: int) -> Iterator[Segment]:
    """Make a segment for a while."""
    made = Segment(create=True, size=size)
    try:
        yield made
    finally:
        made.close()
        made.unlink()


def key_of(segment: Segment) -> str:
    """Return what shm_open(3) calls the segment."""
    return "/" + segment.name.lstrip("/")


def file_of(segment: Segment) -> Path:
    """Return where the segment is among the files."""
    return DIRECTORY / segment.name


def get(segment: Segment, offset: int, size: int) -> bytes:
    """Return what lies there."""
    assert segment.buf is not None
    return bytes(segment.buf[offset : offset + size])


def put(segment: Segment, array: Floats, offset: int = 0) -> int:
    """Lay a tensor down, and return how many bytes it takes."""
    assert segment.buf is not None
    segment.buf[offset : offset + array.nbytes] = array.tobytes()
    return array.nbytes


def register(server: Server, name: str, segment: Segment, **changes: Any) -> Any:
    """Register a whole segment."""
    body = {"key": key_of(segment), "offset": 0, "byte_size": segment.size, **changes}
    return server.post(f"{ALL}/region/{name}/register", content=orjson.dumps(body))


def at(region: Any, byte_size: Any, offset: Any = None) -> dict[str, Any]:
    """Return the parameters that say where in shared memory a tensor is."""
    parameters = {"shared_memory_region": region, "shared_memory_byte_size": byte_size}
    return parameters if offset is None else parameters | {"shared_memory_offset": offset}


def entry(array: Floats, datatype: str = "FP32", **parameters: Any) -> dict[str, Any]:
    """Return the embeddings' entry."""
    return {
        "name": "embeddings",
        "shape": array.shape,
        "datatype": datatype,
        "parameters": parameters,
    }


def infer(
    server: Server,
    tensor: dict[str, Any],
    outputs: list[dict[str, Any]] | None = None,
    model: str = "tiny",
    **members: Any,
) -> Any:
    """Return the response to a call with one input."""
    body = {"inputs": [tensor], **({} if outputs is None else {"outputs": outputs}), **members}
    return server.post(f"/v2/models/{model}/infer", content=json.dumps(body).encode())


def check_problem(response: Any, status: int, code: str, words: str) -> None:
    """Assert the one form of all errors."""
    assert response.status_code == status, response.text
    assert sorted(response.json()) == ["code", "error"]
    assert response.json()["code"] == code
    assert words in response.json()["error"]


@pytest.fixture
def x() -> Floats:
    """Return embeddings [2, 3, 8] for `tiny`."""
    return np.random.default_rng(8).standard_normal((2, 3, 8)).astype(np.float32)


@pytest.mark.parametrize("offset", [0, 1, 128])
def test_infer_reads_and_writes_shared_memory(
    shared: Server, layers: Layers, segment: Segment, x: Floats, offset: int
) -> None:
    """At any offset; the answer's entry then has a name, a datatype and a shape alone."""
    size = put(segment, x, offset)
    register(shared, "r", segment)
    outputs = [
        {"name": "output", "parameters": at("r", size, 1024)},
        {"name": "attention_weights", "parameters": at("r", 1024, 2048) | {"binary_data": False}},
    ]

    response = infer(shared, entry(x, **at("r", size, offset)), outputs, "tiny-weights", id="7")

    wanted = layers.formula("tiny")(x)
    assert response.json() == {
        "model_name": "tiny-weights",
        "model_version": "1",
        "id": "7",
        "outputs": [
            {"name": "output", "datatype": "FP32", "shape": [2, 3, 8]},
            {"name": "attention_weights", "datatype": "FP32", "shape": [2, 2, 3, 3]},
        ],
    }
    assert "inference-header-content-length" not in response.headers
    assert response.headers["content-type"] == "application/json"
    output = np.frombuffer(get(segment, 1024, size), "<f4").reshape(2, 3, 8)
    weights = np.frombuffer(get(segment, 2048, 144), "<f4").reshape(2, 2, 3, 3)
    np.testing.assert_allclose(output, wanted.output, atol=1e-5)
    np.testing.assert_allclose(weights, wanted.weights, atol=1e-5)


def test_infer_registered_part_begins_at_its_own_offset(
    shared: Server, layers: Layers, segment: Segment, x: Floats
) -> None:
    """A slot counts from where the region begins."""
    size = put(segment, x, 100 + 28)
    register(shared, "r", segment, offset=100, byte_size=3000)
    outputs = [{"name": "output", "parameters": at("r", size, 2000)}]

    response = infer(shared, entry(x, **at("r", size, 28)), outputs)

    assert response.status_code == 200, response.text
    output = np.frombuffer(get(segment, 2100, size), "<f4").reshape(2, 3, 8)
    np.testing.assert_allclose(output, layers.formula("tiny")(x).output, atol=1e-5)


def test_infer_mixes_shared_memory_json_and_raw_tensors(
    shared: Server, layers: Layers, segment: Segment, x: Floats
) -> None:
    """Each tensor where the client wants it."""
    register(shared, "r", segment)
    put(segment, np.array([[1, 0, 1], [1, 1, 1]], np.bool_))
    mask = {
        "name": "attend_mask",
        "shape": [2, 3],
        "datatype": "BOOL",
        "parameters": at("r", 6),
    }
    heads = {"name": "head_mask", "shape": [2], "datatype": "FP32", "data": [1, 0.5]}
    outputs = [
        {"name": "attention_weights", "parameters": at("r", 144, 64)},
        {"name": "output", "parameters": {"binary_data": True}},
    ]
    inputs = [mask, entry(x, binary_data_size=x.nbytes), heads]
    header = orjson.dumps({"inputs": inputs, "outputs": outputs})

    response = shared.post(
        "/v2/models/tiny-weights/infer",
        content=header + x.tobytes(),
        headers={"Inference-Header-Content-Length": str(len(header))},
    )

    wanted = layers.formula("tiny")(
        x,
        attend_mask=np.array([[True, False, True], [True, True, True]]),
        head_mask=np.array([1, 0.5]),
    )
    size = int(response.headers["inference-header-content-length"])
    answer = orjson.loads(response.content[:size])
    assert sorted(answer["outputs"][0]) == ["datatype", "name", "shape"]
    assert answer["outputs"][1]["parameters"] == {"binary_data_size": x.nbytes}
    output = np.frombuffer(response.content[size:], "<f4").reshape(x.shape)
    weights = np.frombuffer(get(segment, 64, 144), "<f4").reshape(2, 2, 3, 3)
    np.testing.assert_allclose(output, wanted.output, atol=1e-5)
    np.testing.assert_allclose(weights, wanted.weights, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint64"])
def test_infer_converts_what_lies_in_shared_memory(
    shared: Server, layers: Layers, segment: Segment, x: Floats, dtype: str
) -> None:
    """Every datatype of the body may lie there."""
    array = abs(x * 3).astype(dtype)
    datatype = np.dtype(dtype).name.upper().replace("FLOAT", "FP")
    register(shared, "r", segment)

    response = infer(shared, entry(array, datatype, **at("r", put(segment, array))))

    output = np.reshape(response.json()["outputs"][0]["data"], x.shape)
    wanted = layers.formula("tiny")(array.astype(np.float32)).output
    np.testing.assert_allclose(output, wanted, atol=1e-5)


def test_infer_refuses_values_in_shared_memory_like_any_other(
    shared: Server, segment: Segment
) -> None:
    """By tensor and position."""
    array = np.zeros((1, 2, 8))
    array[0, 1, 2] = 1e39
    register(shared, "r", segment)

    response = infer(shared, entry(array, "FP64", **at("r", put(segment, array))))

    check_problem(response, 400, "invalid_input", "embeddings: expected a number within FP32")
    assert "[0, 1, 2]" in response.json()["error"]


def test_infer_large_tensors_go_through_shared_memory(shared: Server) -> None:
    """Read and written by a thread of the server's; the same as in the body."""
    x = np.random.default_rng(9).standard_normal((3, 500, 8)).astype(np.float32)
    with new_segment(2**24) as segment:
        register(shared, "r", segment)
        put(segment, x)
        weights = 3 * 2 * 500 * 500 * 4
        outputs = [
            {"name": "output", "parameters": at("r", x.nbytes, x.nbytes)},
            {"name": "attention_weights", "parameters": at("r", weights, 2 * x.nbytes)},
        ]
        tensor = entry(x, **at("r", x.nbytes))

        response = infer(shared, tensor, outputs, "tiny-weights")
        raw = infer(shared, tensor, None, "tiny-weights", parameters={"binary_data_output": True})

        assert response.json()["outputs"][1]["shape"] == [3, 2, 500, 500]
        size = int(raw.headers["inference-header-content-length"])
        assert get(segment, x.nbytes, x.nbytes + weights) == raw.content[size:]


@pytest.mark.parametrize(
    ("parameters", "status", "words"),
    [
        (at("r", 192, 3905), 400, "within its 4096 bytes, got 3905 and 192"),
        (at("r", 192, 4096), 400, "within its 4096 bytes, got 4096 and 192"),
        (at("r", 192, 2**61), 400, "within its 4096 bytes"),
        (at("r", 192, 2**64), 400, "shared_memory_offset: expected a whole number of bytes from 0"),
        (at("r", 192, -1), 400, "shared_memory_offset: expected a whole number of bytes from 0"),
        (at("r", 192, 0.0), 400, "shared_memory_offset: expected a whole number of bytes from 0"),
        (at("r", 192, "0"), 400, "shared_memory_offset: expected a whole number of bytes from 0"),
        (at("r", None), 400, "shared_memory_byte_size: expected a whole number of bytes from 1"),
        (at("r", True), 400, "shared_memory_byte_size: expected a whole number of bytes from 1"),
        (at("r", 0), 400, "shared_memory_byte_size: expected a whole number of bytes from 1"),
        (at(7, 192), 400, "shared_memory_region: expected a string, got a number"),
        (at(None, 192), 400, "shared_memory_region: expected a string, got null"),
        (at("s", 192), 404, "shared memory region 's': no region of that name is registered"),
        (at("", 192), 404, "shared memory region '': no region of that name is registered"),
    ],
)
@pytest.mark.parametrize("is_input", [True, False])
def test_infer_slot_that_is_not_there_is_named(
    shared: Server,
    segment: Segment,
    x: Floats,
    parameters: dict[str, Any],
    status: int,
    words: str,
    is_input: bool,
) -> None:
    """For inputs and outputs alike, before anything is computed."""
    register(shared, "r", segment)
    if is_input:
        response = infer(shared, entry(x, **parameters))
    else:
        tensor = {**entry(x), "data": x.ravel().tolist()}
        response = infer(shared, tensor, [{"name": "output", "parameters": parameters}])

    code = {400: "invalid_input", 404: "not_found"}[status]
    check_problem(response, status, code, words)


@pytest.mark.parametrize("size", [191, 193, 96])
def test_infer_input_of_another_size_than_its_shape_is_refused(
    shared: Server, segment: Segment, x: Floats, size: int
) -> None:
    """Exactly the tensor's bytes."""
    register(shared, "r", segment)

    response = infer(shared, entry(x, **at("r", size)))

    words = f"shared_memory_byte_size: expected 192 bytes for FP32 [2, 3, 8], got {size}"
    check_problem(response, 400, "invalid_input", words)


@pytest.mark.parametrize(
    ("name", "size", "parameters", "words"),
    [
        ("output", 191, {}, "output: expected a shared_memory_byte_size of at least 192 for FP32"),
        ("attention_weights", 143, {}, "attention_weights: expected a shared_memory_byte_size of"),
        ("attention_weights", 71, {"heads": [1]}, "of at least 72 for FP32 [2, 1, 3, 3], got 71"),
    ],
)
def test_infer_output_larger_than_its_slot_is_refused(
    shared: Server,
    segment: Segment,
    x: Floats,
    name: str,
    size: int,
    parameters: dict[str, Any],
    words: str,
) -> None:
    """What a slot must hold is told; one byte more is enough."""
    register(shared, "r", segment)
    put(segment, x)
    tensor = entry(x, **at("r", x.nbytes))

    def response(byte_size: int) -> Any:
        outputs = [{"name": name, "parameters": at("r", byte_size, 1024)}]
        return infer(shared, tensor, outputs, "tiny-weights", parameters=parameters)

    check_problem(response(size), 400, "invalid_input", words)
    assert response(size + 1).status_code == 200


@pytest.mark.fault("E12")
def test_infer_names_the_heads_whose_weights_are_in_shared_memory(
    shared: Server, segment: Segment, x: Floats
) -> None:
    """Beside the outputs: clients take parameters at one for those of a binary tensor."""
    register(shared, "r", segment)
    put(segment, x)
    outputs = [{"name": "attention_weights", "parameters": at("r", 72, 1024)}]
    parameters = {"heads": [1]}

    tensor = entry(x, **at("r", x.nbytes))
    answer = infer(shared, tensor, outputs, "tiny-weights", parameters=parameters).json()

    assert answer["parameters"] == {"heads": "1"}
    assert sorted(answer["outputs"][0]) == ["datatype", "name", "shape"]


def test_infer_input_given_twice_over_is_refused(
    shared: Server, segment: Segment, x: Floats
) -> None:
    """In the body or in shared memory, not both."""
    register(shared, "r", segment)

    for more in ({"data": x.tolist()}, {}):
        tensor = entry(x, **at("r", x.nbytes)) | more
        if not more:
            tensor["parameters"]["binary_data_size"] = x.nbytes
        check_problem(infer(shared, tensor), 400, "invalid_input", "embeddings: expected one of")


def test_infer_inputs_in_shared_memory_are_limited_like_a_body(shared: Server) -> None:
    """A small request must not make the server take any amount of memory."""
    x = np.zeros((1, 2**20 // 32 + 1, 8), np.float32)
    with new_segment(x.nbytes) as segment:
        register(shared, "r", segment)

        response = infer(shared, entry(x, **at("r", x.nbytes)))

    words = "inputs: at most 1048576 bytes in shared memory, got 1048608"
    check_problem(response, 413, "too_large", words)


@pytest.mark.parametrize("length", [0, 100])
def test_infer_from_a_segment_that_was_shortened_is_refused(
    shared: Server, segment: Segment, x: Floats, length: int
) -> None:
    """A mapping would end the process by SIGBUS."""
    put(segment, x)
    register(shared, "r", segment)
    os.truncate(file_of(segment), length)

    response = infer(shared, entry(x, **at("r", x.nbytes)))

    words = "shared memory region 'r': expected 192 bytes in it, but its segment has become shorter"
    check_problem(response, 400, "invalid_input", words)
    assert shared.get("/v2/health/live").status_code == 200


def test_infer_into_a_segment_that_was_shortened_is_refused(
    shared: Server, segment: Segment, x: Floats
) -> None:
    """And does not lengthen it again."""
    register(shared, "r", segment)
    os.truncate(file_of(segment), 100)
    tensor = {**entry(x), "data": x.ravel().tolist()}

    response = infer(shared, tensor, [{"name": "output", "parameters": at("r", 192)}])

    check_problem(response, 400, "invalid_input", "its segment has become shorter")
    assert os.stat(file_of(segment)).st_size == 100


def test_infer_survives_a_segment_that_changes_all_the_time(shared: Server, x: Floats) -> None:
    """Every call is answered or refused, whatever the client does to its segment meanwhile."""
    done = threading.Event()
    with new_segment(2**20) as segment:
        path = file_of(segment)
        register(shared, "r", segment)

        def shake() -> None:
            while not done.is_set():
                os.truncate(path, 0)
                os.truncate(path, 2**20)

        shaker = threading.Thread(target=shake)
        shaker.start()
        try:
            outputs = [{"name": "output", "parameters": at("r", 192, 2**20 - 192)}]
            tensor = entry(x, **at("r", x.nbytes, 2**19))
            statuses = {infer(shared, tensor, outputs).status_code for _ in range(200)}
        finally:
            done.set()
            shaker.join()

    assert statuses <= {200, 400}
    assert shared.process.poll() is None


def test_infer_of_a_region_that_is_gone_is_404(shared: Server, segment: Segment, x: Floats) -> None:
    """Unregistering is at once for calls that come after it."""
    register(shared, "r", segment)
    put(segment, x)
    tensor = entry(x, **at("r", x.nbytes))
    assert infer(shared, tensor).status_code == 200

    assert shared.post(f"{ALL}/region/r/unregister").status_code == 200

    check_problem(infer(shared, tensor), 404, "not_found", "'r'")


def test_infer_of_an_unlinked_segment_still_works(
    shared: Server, layers: Layers, x: Floats
) -> None:
    """Once registered, the region is what counts, as for a mapping."""
    with new_segment(4096) as segment:
        register(shared, "r", segment)
        put(segment, x)

    response = infer(shared, entry(x, **at("r", x.nbytes)))

    output = np.reshape(response.json()["outputs"][0]["data"], x.shape)
    np.testing.assert_allclose(output, layers.formula("tiny")(x).output, atol=1e-5)


def test_infer_with_much_json_beside_shared_memory_is_read(
    layers: Layers, segment: Segment
) -> None:
    """Such a body is read in another process, which has no regions."""
    random = np.random.default_rng(10)
    x = random.standard_normal((1, 300, 8)).astype(np.float32)
    pair = np.tri(300, dtype=np.bool_)[None, None].repeat(2, 1)
    mask = {"name": "pair_mask", "shape": pair.shape, "datatype": "BOOL", "data": pair.tolist()}
    heads = {
        "name": "head_mask",
        "shape": [2],
        "datatype": "FP32",
        "parameters": at("r", put(segment, np.array([0.5, 2], np.float32))),
    }
    inputs = [{**entry(x), "data": x.tolist()}, mask, heads]
    content = orjson.dumps({"inputs": inputs}) + b" " * 2**22

    with Server(layers.repository, shared_memory="true") as running:
        register(running, "r", segment)
        response = running.post("/v2/models/tiny/infer", content=content)

    wanted = layers.formula("tiny")(x, pair_mask=pair, head_mask=np.array([0.5, 2]))
    output = np.reshape(response.json()["outputs"][0]["data"], x.shape)
    np.testing.assert_allclose(output, wanted.output, atol=1e-5)


def test_register_status_and_unregister(shared: Server, segment: Segment) -> None:
    """The protocol's own round; control bodies come under any content type."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    body = orjson.dumps({"key": key_of(segment), "offset": 16, "byte_size": 100})
    described = {"name": "a", "key": key_of(segment), "offset": 16, "byte_size": 100}

    registered = shared.post(f"{ALL}/region/a/register", content=body, headers=form)
    register(shared, "b c", segment)

    assert (registered.status_code, registered.content) == (200, b"")
    assert shared.get(f"{ALL}/region/a/status").json() == [described]
    everything = shared.get(f"{ALL}/status").json()
    assert everything == [
        described,
        {"name": "b c", "key": key_of(segment), "offset": 0, "byte_size": segment.size},
    ]
    for _ in range(2):  # the second time it is unknown
        gone = shared.post(f"{ALL}/region/a/unregister", headers=form)
        assert (gone.status_code, gone.content) == (200, b"")
    assert [region["name"] for region in shared.get(f"{ALL}/status").json()] == ["b c"]
    check_problem(shared.get(f"{ALL}/region/a/status"), 404, "not_found", "region 'a'")
    assert shared.post(f"{ALL}/unregister").status_code == 200
    assert shared.get(f"{ALL}/status").json() == []


def test_register_offset_is_zero_when_left_out(shared: Server, segment: Segment) -> None:
    """As the protocol says."""
    body = orjson.dumps({"key": key_of(segment), "byte_size": 10})

    assert shared.post(f"{ALL}/region/r/register", content=body).status_code == 200
    assert shared.get(f"{ALL}/region/r/status").json()[0]["offset"] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": "psm_x"}, "key: expected / and a name of letters, digits, dots, underscores"),
        ({"key": "/"}, "key: expected / and a name"),
        ({"key": "/."}, "key: expected / and a name"),
        ({"key": "/.."}, "key: expected / and a name"),
        ({"key": "/../../etc/passwd"}, "key: expected / and a name"),
        ({"key": "//psm_x"}, "key: expected / and a name"),
        ({"key": "/a\0b"}, "key: expected / and a name"),
        ({"key": "/a\n"}, "key: expected / and a name"),
        ({"key": "/é"}, "key: expected / and a name"),
        ({"key": "/" + "a" * 255}, "key: expected / and a name"),
        ({"key": None}, "key: expected / and a name"),
        ({"key": 7}, "key: expected / and a name"),
        ({"key": "/headwise-x"}, "key: names from /headwise, /sem., /triton_python_backend on are"),
        ({"key": "/sem.x"}, "key: names from /headwise, /sem., /triton_python_backend on are"),
        ({"key": "/nobody-made-this"}, "key: expected that of a shared memory segment; none has"),
        ({"offset": 1}, "within the segment's 4096 bytes, got 1 and 4096"),
        ({"offset": 4097, "byte_size": 1}, "within the segment's 4096 bytes, got 4097 and 1"),
        ({"byte_size": 4097}, "within the segment's 4096 bytes, got 0 and 4097"),
        ({"byte_size": 2**61, "offset": 2**61}, "within the segment's 4096 bytes"),
        ({"byte_size": 2**64}, "byte_size: expected a whole number of bytes from 1"),
        ({"byte_size": 0}, "byte_size: expected a whole number of bytes from 1"),
        ({"byte_size": -1}, "byte_size: expected a whole number of bytes from 1"),
        ({"byte_size": 10.0}, "byte_size: expected a whole number of bytes from 1"),
        ({"byte_size": "10"}, "byte_size: expected a whole number of bytes from 1"),
        ({"byte_size": None}, "byte_size: expected a whole number of bytes from 1"),
        ({"byte_size": True}, "byte_size: expected a whole number of bytes from 1"),
        ({"offset": -1}, "offset: expected a whole number of bytes from 0"),
        ({"offset": None}, "offset: expected a whole number of bytes from 0"),
        ({"size": 1}, "body: unknown key 'size'; did you mean byte_size?"),
    ],
)
def test_register_mistake_is_named(
    shared: Server, segment: Segment, changes: dict[str, Any], words: str
) -> None:
    """No key leads out of where segments are, and no size out of the segment."""
    body = {"key": key_of(segment), "offset": 0, "byte_size": 4096, **changes}

    response = shared.post(f"{ALL}/region/r/register", content=json.dumps(body).encode())

    check_problem(response, 400, "invalid_input", words)
    assert shared.get(f"{ALL}/status").json() == []


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"", 400, "body: expected a JSON object, got nothing"),
        (b"[]", 400, "body: expected a JSON object, got an array"),
        (b"{", 400, "body: expected JSON, got a mistake"),
        (b"\xff", 400, "body: expected JSON in UTF-8"),
        (b"[" * 50_000, 400, "body: expected less deeply nested JSON"),
        (b" " * 70_000, 413, "body: at most 65536 bytes"),
    ],
)
def test_register_body_mistake_is_named(
    shared: Server, content: bytes, status: int, words: str
) -> None:
    """Whatever is sent."""
    response = shared.post(f"{ALL}/region/r/register", content=content)

    check_problem(response, status, {400: "invalid_input", 413: "too_large"}[status], words)


def test_register_body_may_be_compressed(shared: Server) -> None:
    """What is wrong in it is told as if it had come plain; an unknown encoding is named."""

    def answer(encoding: str) -> Response:
        headers = {"Content-Encoding": encoding}
        return shared.post(
            f"{ALL}/region/r/register", content=gzip.compress(b"[]"), headers=headers
        )

    check_problem(answer("gzip"), 400, "invalid_input", "expected a JSON object, got an array")
    check_problem(answer("br"), 415, "unsupported_media_type", "header Content-Encoding")


def test_register_name_twice_is_refused(shared: Server, segment: Segment) -> None:
    """Even for the same segment, as Triton does."""
    assert register(shared, "r", segment).status_code == 200

    response = register(shared, "r", segment)

    check_problem(response, 400, "invalid_input", "shared memory region 'r': already in manager")


def test_register_more_regions_than_there_may_be_is_refused(
    shared: Server, segment: Segment
) -> None:
    """Each keeps a file open."""
    for i in range(MAX_REGIONS):
        assert register(shared, str(i), segment).status_code == 200

    response = register(shared, "more", segment)

    check_problem(response, 400, "invalid_input", f"at most {MAX_REGIONS} regions may be")
    shared.post(f"{ALL}/region/0/unregister")
    assert register(shared, "more", segment).status_code == 200


def test_register_name_too_long_is_refused(shared: Server, segment: Segment) -> None:
    """And not repeated whole."""
    response = register(shared, "r" * 300, segment)

    check_problem(response, 400, "invalid_input", "expected a name of at most 256 characters")
    assert len(response.json()["error"]) < 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/status"),
        ("GET", "/unregister"),
        ("GET", "/region/r/register"),
        ("GET", "/region/r/unregister"),
    ],
)
def test_wrong_verb_is_405(shared: Server, method: str, path: str) -> None:
    """In the one form of all errors."""
    response = shared.client.request(method, f"{shared.url}{ALL}{path}")

    check_problem(response, 405, "method_not_allowed", "method: expected")


def test_switched_off_nothing_is_registered_and_nothing_said_against_unregistering(
    server: Server, segment: Segment, x: Floats
) -> None:
    """perf_analyzer unregisters everything before it begins, whatever it was asked to do."""
    words = "system shared memory: switched off"

    check_problem(register(server, "r", segment), 403, "disabled", words)
    for path in ("/status", "/region/r/status"):
        assert server.get(ALL + path).json() == []
    for path in ("/unregister", "/region/r/unregister"):
        assert server.post(ALL + path).status_code == 200
    check_problem(infer(server, entry(x, **at("r", x.nbytes))), 403, "disabled", words)
    tensor = {**entry(x), "data": x.ravel().tolist()}
    outputs = [{"name": "output", "parameters": at("r", 192)}]
    check_problem(infer(server, tensor, outputs), 403, "disabled", words)


def test_tritonclient_round_trip_through_shared_memory(shared: Server, layers: Layers) -> None:
    """The unmodified client, with its own helper for segments."""
    http = pytest.importorskip("tritonclient.http")
    memory = pytest.importorskip("tritonclient.utils.shared_memory")
    x = np.random.default_rng(11).standard_normal((1, 4, 24)).astype(np.float32)
    key = f"/tests-{os.getpid()}"
    handle = memory.create_shared_memory_region("all", key, 4096)
    try:
        with http.InferenceServerClient(shared.url.removeprefix("http://")) as client:
            memory.set_shared_memory_region(handle, [x])
            client.register_system_shared_memory("all", key, 4096)
            tensor = http.InferInput("embeddings", x.shape, "FP32")
            tensor.set_shared_memory("all", x.nbytes)
            output = http.InferRequestedOutput("output")
            output.set_shared_memory("all", x.nbytes, offset=2048)

            result = client.infer("mha", [tensor], outputs=[output])

            assert result.get_output("output")["shape"] == [1, 4, 24]
            assert client.get_system_shared_memory_status("all")[0]["key"] == key
            client.unregister_system_shared_memory("all")
            assert client.get_system_shared_memory_status() == []
        found = memory.get_contents_as_numpy(handle, np.float32, [1, 4, 24], 2048)
        np.testing.assert_allclose(found, layers.formula("mha")(x).output, atol=1e-5)
        del found
    finally:
        gc.collect()
        memory.destroy_shared_memory_region(handle)


def segment_file(directory: Path, size: int = 100) -> Path:
    """Make what stands for a segment."""
    path = directory / "s"
    path.write_bytes(bytes(size))
    return path


def open_files() -> set[str]:
    """Return what files this process has open."""
    files = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            files.add(str(link.readlink()))
    return files


def test_region_in_use_stays_open_when_it_is_unregistered(tmp_path: Path) -> None:
    """A call that has found its places ends well; after the last one the file is closed."""
    path = segment_file(tmp_path)
    memory = SharedMemory(is_offered=True, directory=tmp_path)
    memory.register("r", "/s", 10, 90)
    place = memory.place(Slot("r", 5, 4))

    memory.unregister()
    place.write(memoryview(b"four"))

    assert place.read().tobytes() == b"four"
    assert path.read_bytes()[15:19] == b"four"
    assert str(path) in open_files()
    del place
    assert str(path) not in open_files()


def test_unregistering_closes_what_nobody_uses(tmp_path: Path) -> None:
    """Registering again and again keeps no file open."""
    path = segment_file(tmp_path)
    memory = SharedMemory(is_offered=True, directory=tmp_path)
    for _ in range(3):
        memory.register("r", "/s", 0, 100)
        assert str(path) in open_files()
        memory.unregister("r")
        assert str(path) not in open_files()


def test_register_that_is_refused_keeps_no_file_open(tmp_path: Path) -> None:
    """Also when the file was opened to learn that it is too short."""
    path = segment_file(tmp_path)
    memory = SharedMemory(is_offered=True, directory=tmp_path)

    with pytest.raises(InvalidInput, match="within the segment's 100 bytes"):
        memory.register("r", "/s", 0, 101)

    assert str(path) not in open_files()
    assert memory.status() == []


def test_register_follows_no_link_and_opens_nothing_but_files(tmp_path: Path) -> None:
    """Whoever may write there must not lead the server elsewhere, or hold it up."""
    outside = tmp_path / "outside"
    outside.write_bytes(bytes(100))
    directory = tmp_path / "shm"
    directory.mkdir()
    (directory / "link").symlink_to(outside)
    (directory / "directory").mkdir()
    os.mkfifo(directory / "pipe")
    memory = SharedMemory(is_offered=True, directory=directory)

    for name in ("link", "directory", "pipe"):
        with pytest.raises(InvalidInput, match=r"^key: ") as refusal:
            memory.register("r", "/" + name, 0, 1)
        assert str(tmp_path) not in str(refusal.value)


def test_write_to_a_full_machine_is_refused_by_name(tmp_path: Path) -> None:
    """A limit on file sizes stands for memory that has run out."""
    segment_file(tmp_path)
    memory = SharedMemory(is_offered=True, directory=tmp_path)
    memory.register("r", "/s", 0, 100)
    place = memory.place(Slot("r", 60, 30))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    try:
        with pytest.raises(InvalidInput, match="shared memory region 'r': cannot be written"):
            place.write(memoryview(bytes(30)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_not_offered_there_is_no_place(tmp_path: Path) -> None:
    """Whatever is asked."""
    segment_file(tmp_path)
    memory = SharedMemory(is_offered=False, directory=tmp_path)

    with pytest.raises(Disabled):
        memory.register("r", "/s", 0, 1)
    with pytest.raises(Disabled):
        memory.place(Slot("r", 0, 1))
    assert memory.status("r") == []


def test_offered_a_place_outside_is_refused_and_an_unknown_one_not_found(tmp_path: Path) -> None:
    """The last byte may be used, the one after it not."""
    segment_file(tmp_path)
    memory = SharedMemory(is_offered=True, directory=tmp_path)
    memory.register("r", "/s", 90, 10)

    assert memory.place(Slot("r", 9, 1)).read().tolist() == [0]
    with pytest.raises(InvalidInput, match="within its 10 bytes, got 9 and 2"):
        memory.place(Slot("r", 9, 2))
    with pytest.raises(NotFound):
        memory.place(Slot("x", 0, 1))


@pytest.mark.fault("E8d")
def test_register_segment_of_another_user_names_both(segment: Segment) -> None:
    """Whose it is, who the server is, and the cure."""
    file_of(segment).chmod(0)
    memory = SharedMemory(is_offered=True)
    is_root = os.geteuid() == 0
    if is_root:  # who may open everything
        os.seteuid(65534)
    try:
        with pytest.raises(InvalidInput) as refused:
            memory.register("r", key_of(segment), 0, 64)
    finally:
        if is_root:
            os.seteuid(0)

    owner, server = file_of(segment).stat().st_uid, 65534 if is_root else os.geteuid()
    assert str(refused.value) == (
        "key: that segment cannot be opened for reading and writing: Permission denied; it"
        f" belongs to uid {owner}, mode 0000, and the server runs as uid {server}:"
        " run both as the same user"
    )
