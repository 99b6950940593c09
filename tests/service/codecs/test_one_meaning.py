"""An input means the same in every format: datatypes, masks of 0 and 1, options, heads."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load, save

from loadtest import oip
from service.codecs import attention_safetensors
from service.codecs.datatypes import INPUTS, INTEGERS
from service.errors import InvalidInput, TooLarge
from service.inference.validation import Limits
from tests.support.layers import Layers
from tests.support.server import Server

HEADERS = {"Content-Type": "application/x-safetensors"}
DTYPES = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4"} | {
    "I64": "<i8",
    "U8": "u1",
    "U16": "<u2",
    "U32": "<u4",
    "U64": "<u8",
    "BOOL": "?",
}
X = np.random.default_rng(1).integers(0, 3, (2, 3, 8)).astype(np.float32)
"""Whole numbers, which every datatype holds."""
ATTEND = np.array([[1, 1, 0], [0, 1, 1]])
PAIR = np.tri(3, dtype=np.int64)[None, None]


def file_of(tensors: dict[str, tuple[str, np.ndarray]], **metadata: str) -> bytes:
    """Return a safetensors file of tensors in any datatype, BF16 included."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    parts, end = [], 0
    for name, (datatype, tensor) in tensors.items():
        if datatype == "BF16":
            raw = (tensor.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        else:
            raw = tensor.astype(DTYPES[datatype]).tobytes()
        start, end = end, end + len(raw)
        shape = list(tensor.shape)
        header[name] = {"dtype": datatype, "shape": shape, "data_offsets": [start, end]}
        parts.append(raw)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def sent(server: Server, content: bytes, query: str = "model=tiny") -> httpx.Response:
    """Return the answer to a safetensors body."""
    return server.post("/v1/attention?" + query, content=content, headers=HEADERS)


def output_of(response: httpx.Response) -> np.ndarray:
    """Return the output of a safetensors answer."""
    assert response.status_code == 200, response.text
    return load(response.content)["output"]


@pytest.mark.fault("E5", "E8d")
@pytest.mark.parametrize("datatype", [d for d in [*DTYPES, "BF16"] if d != "BOOL"])
def test_safetensors_numbers_of_any_datatype_are_read_as_fp32(
    server: Server, datatype: str
) -> None:
    """As the protocol reads them."""
    tensors = {"embeddings": (datatype, X), "head_mask": (datatype, np.array([2, 1]))}

    found = output_of(sent(server, file_of(tensors)))

    wanted = output_of(
        sent(server, save({"embeddings": X, "head_mask": np.array([2, 1], np.float32)}))
    )
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.fault("E5")
@pytest.mark.parametrize("datatype", ["BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"])
def test_safetensors_masks_of_0_and_1_are_read_in_any_datatype(
    server: Server, layers: Layers, datatype: str
) -> None:
    """1 = takes part, as in what tokenizers return."""
    tensors = {"embeddings": ("F32", X), "attend_mask": (datatype, ATTEND)}

    found = output_of(sent(server, file_of(tensors | {"pair_mask": (datatype, PAIR)})))

    wanted = layers.formula("tiny")(X, attend_mask=ATTEND > 0, pair_mask=PAIR > 0)
    np.testing.assert_allclose(found, wanted.output, atol=1e-5)


@pytest.mark.fault("E5")
@pytest.mark.parametrize("padding", [0, 4000])
def test_json_masks_of_0_and_1_are_read(server: Server, layers: Layers, padding: int) -> None:
    """By both readers."""
    body = {"model": "tiny", "embeddings": X.tolist(), "attend_mask": ATTEND.tolist()}
    content = json.dumps(body | {"pair_mask": PAIR.tolist()}).encode() + b" " * padding

    answer = server.post("/v1/attention", content=content)

    wanted = layers.formula("tiny")(X, attend_mask=ATTEND > 0, pair_mask=PAIR > 0)
    np.testing.assert_allclose(answer.json()["output"], wanted.output, atol=1e-5)


@pytest.mark.fault("E5")
@pytest.mark.parametrize("datatype", sorted(set(DTYPES) - {"F16", "F32", "F64", "BOOL"}))
def test_safetensors_lengths_are_any_whole_numbers(server: Server, datatype: str) -> None:
    """Whatever counts."""
    assert len(INTEGERS) == 8
    packed = {"embeddings": ("F32", X[0]), "lengths": (datatype, np.array([1, 2]))}

    answer = load(sent(server, file_of(packed)).content)

    assert answer["lengths"].tolist() == [1, 2]


def json_heads(server: Server, heads: list[int]) -> httpx.Response:
    """Ask in JSON."""
    body = {"model": "mha", "embeddings": [[0.5] * 24] * 2, "weights": {"heads": heads}}
    return server.post("/v1/attention", json=body, headers={"Accept": HEADERS["Content-Type"]})


def query_heads(key: str) -> Callable[[Server, list[int]], httpx.Response]:
    """Return how the query asks by that key."""

    def ask(server: Server, heads: list[int]) -> httpx.Response:
        text = ",".join(map(str, heads))
        content = save({"embeddings": np.full((1, 2, 24), 0.5, np.float32)})
        return sent(server, content, f"model=mha&{key}={text}")

    return ask


def metadata_heads(server: Server, heads: list[int]) -> httpx.Response:
    """Ask in the metadata of a safetensors body."""
    tensors = {"embeddings": np.full((1, 2, 24), 0.5, np.float32)}
    text = ",".join(map(str, heads))
    return sent(server, save(tensors, {"heads": text, "model": "mha", "format": "np"}), "")


@pytest.mark.fault("E5", "E12")
@pytest.mark.parametrize("heads", [[0, 2], [2, 0, 1], [1]])
@pytest.mark.parametrize("ask", [json_heads, query_heads("heads"), metadata_heads])
def test_heads_are_chosen_in_any_format_and_named_in_the_answer(
    server: Server, ask: Any, heads: list[int], tmp_path: Any
) -> None:
    """The same answer, byte for byte, with the heads in its metadata."""
    response = ask(server, heads)

    assert response.status_code == 200, response.text
    path = tmp_path / "answer"
    path.write_bytes(response.content)
    with safe_open(path, "np") as answer:
        assert answer.metadata()["heads"] == ",".join(map(str, heads))
        assert answer.get_tensor("attention_weights").shape == (1, len(heads), 2, 2)
    assert response.content == query_heads("heads")(server, heads).content


@pytest.mark.fault("E5")
def test_query_weights_take_heads_as_well(server: Server) -> None:
    """`weights=0,2` is `heads=0,2`."""
    by_weights = query_heads("weights")(server, [0, 2])

    assert by_weights.content == query_heads("heads")(server, [0, 2]).content


@pytest.mark.fault("E5")
def test_metadata_options_are_those_of_the_query(server: Server) -> None:
    """Not passed over: the same call, wherever its options stand; said twice alike is no fault."""
    options = {"model": "tiny", "weights": "true", "causal": "true", "priority": "1"}
    query = "&".join(f"{key}={value}" for key, value in options.items())

    by_metadata = sent(server, save({"embeddings": X}, options | {"format": "pt"}), "")

    assert by_metadata.status_code == 200, by_metadata.text
    assert "attention_weights" in load(by_metadata.content)
    assert by_metadata.content == sent(server, save({"embeddings": X}), query).content
    assert by_metadata.content == sent(server, save({"embeddings": X}, options), query).content


@pytest.mark.fault("E12")
def test_json_answer_names_a_subset_of_heads(server: Server) -> None:
    """In the order of their weights; without a subset there is nothing to name."""
    body: dict[str, Any] = {"model": "mha", "embeddings": [[0.5] * 24] * 2}

    def answer(weights: Any) -> Any:
        return server.post("/v1/attention", json=body | {"weights": weights}).json()

    assert answer({"heads": [2, 0]})["heads"] == [2, 0]
    assert "heads" not in answer(True)
    assert "heads" not in answer(False)


@pytest.mark.fault("E12")
@pytest.mark.parametrize("is_binary", [False, True])
def test_protocol_answer_names_a_subset_of_heads(server: Server, is_binary: bool) -> None:
    """As a parameter of the answer, where its weights are in it."""
    x = np.full((1, 2, 24), 0.5, np.float32)

    def answer(outputs: list[str] | None, **parameters: Any) -> Any:
        body = oip.encode({"embeddings": x}, is_binary=lambda name: is_binary)
        document = orjson.loads(body.content[: body.header_length])
        document["parameters"] = {"binary_data_output": is_binary} | parameters
        if outputs is not None:
            document["outputs"] = [{"name": name} for name in outputs]
        header = orjson.dumps(document)
        content = header + body.content[body.header_length :]
        response = server.post(
            oip.infer_path("mha-weights"),
            content=content,
            headers={oip.HEADER_LENGTH: str(len(header))},
        )
        assert response.status_code == 200, response.text
        size = int(response.headers.get(oip.HEADER_LENGTH, len(response.content)))
        return orjson.loads(response.content[:size])

    for _ in range(2):  # a header is remembered
        assert answer(None, heads="2,0")["parameters"] == {"heads": "2,0"}
        assert answer(None, heads=[1])["parameters"] == {"heads": "1"}
        assert "parameters" not in answer(None)
        assert "parameters" not in answer(["output"], heads=[1])


SIZES = {d: np.dtype(t).itemsize for d, t in DTYPES.items()} | {
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "C64": 8,
}
NAMES = [*INPUTS, "lengths", "memory_lengths", "pair_mask.0"]


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Draw a right safetensors file: any datatype, shape and bytes, under names of ours."""
    header: dict[str, Any] = {}
    content = b""
    others = st.lists(st.sampled_from(NAMES[1:]), unique=True, max_size=3)
    for name in ["embeddings", *draw(others)]:
        datatype = draw(st.sampled_from(sorted(SIZES)))
        shape = draw(st.lists(st.integers(0, 3), max_size=4))
        count = int(np.prod(shape, dtype=int)) * SIZES[datatype]
        few = st.lists(st.sampled_from([0, 1, 2, 127, 255]), min_size=count, max_size=count)
        start, content = len(content), content + bytes(draw(few))
        offsets = [start, len(content)]
        header[name] = {"dtype": datatype, "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content


@pytest.mark.fault("E5", "E8d")
@given(files())
def test_any_safetensors_file_is_read_as_fp32_and_bool_or_refused(content: bytes) -> None:
    """Nothing else comes out of it, and nothing else is raised."""
    limits = Limits(max_rows=4, max_length=8, max_tokens=32, max_answer_bytes=1000)
    try:
        tensors, _ = attention_safetensors.decode(content, {}, limits)
    except (InvalidInput, TooLarge):
        return
    for tensor in (tensors.embeddings, tensors.memory, tensors.head_mask):
        assert tensor is None or tensor.dtype == np.float32
    for mask in (tensors.attend_mask, tensors.pair_mask):
        assert mask is None or (mask.dtype == np.bool_ and mask.view(np.uint8).max(initial=0) < 2)
