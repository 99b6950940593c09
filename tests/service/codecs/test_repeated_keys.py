"""A key that stands twice in an object: refused in every body, whichever reader reads it."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.codecs.json_reader import Reader
from service.codecs.simdjson_reader import read
from service.errors import InvalidInput
from tests.support.server import Server

INPUT = {"name": "embeddings", "shape": [1, 64, 8], "datatype": "FP32", "data": [0.5] * 512}
INFER: dict[str, Any] = {"inputs": [INPUT], "parameters": {"causal": True, "note": {"y": 1}}}
ATTENTION = {"model": "tiny", "embeddings": [[0.5] * 8] * 64, "weights": {"heads": [0]}}
LARGE = 4000
"""Spaces that make a body too long for the reader of small ones."""

keys = st.text(st.sampled_from('ab":\\é,{}[] '), max_size=3)
values = st.recursive(
    st.one_of(st.integers(0, 3), st.booleans(), st.none(), keys),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=8,
)


def written(value: Any, chosen: list[int]) -> str:
    """Write JSON; the object whose turn `chosen[0]` is has its first key once more."""
    if isinstance(value, list):
        return "[" + ",".join(written(item, chosen) for item in value) + "]"
    if not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    members = [(key, written(item, chosen)) for key, item in value.items()]
    if members:
        if chosen[0] == 0:
            members.append((members[0][0], "0"))
        chosen[0] -= 1
    return "{" + ",".join(f"{json.dumps(k, ensure_ascii=False)}:{v}" for k, v in members) + "}"


def plain(reader: Reader) -> Any:
    """Return every member of a body."""
    return {key: reader.plain(node) for key, node in reader.root().items()}


@pytest.mark.fault("B9")
@given(values, st.integers(-1, 4))
def test_read_refuses_a_key_that_stands_twice_at_any_depth(value: Any, place: int) -> None:
    """And nothing else: whatever the keys and texts hold, both readers give what is written."""
    document = {"x": value, "a:b": "c:d"}
    chosen = [place]
    body = written(document, chosen)
    is_repeated = place >= 0 > chosen[0]

    for spaces in (0, LARGE):
        content = body.encode() + b" " * spaces
        if is_repeated:
            with pytest.raises(InvalidInput, match="expected each key of an object once"):
                read(content, plain)
        else:
            assert read(content, plain) == document


@pytest.mark.fault("B9")
@pytest.mark.parametrize("padding", [0, LARGE, 400_000])
@pytest.mark.parametrize(
    ("path", "body", "once", "twice"),
    [
        ("/v2/models/tiny/infer", INFER, '"causal": true', '"causal": true, "causal": false'),
        ("/v2/models/tiny/infer", INFER, '"y": 1', '"y": 1, "y": 2'),
        ("/v2/models/tiny/infer", INFER, '"datatype": "FP32"', '"datatype": "", "datatype": ""'),
        ("/v2/models/tiny/infer", INFER, '"parameters":', '"parameters": {}, "parameters":'),
        ("/v1/attention", ATTENTION, '"model": "tiny"', '"model": "tiny", "model": "mha"'),
        ("/v1/attention", ATTENTION, '"heads": [0]', '"heads": [0], "heads": [1]'),
        ("/v2/repository/index", {"ready": True}, '"ready": true', '"ready": 1, "ready": true'),
    ],
)
def test_repeated_key_is_refused_at_every_endpoint_at_every_size(
    server: Server, path: str, body: dict[str, Any], once: str, twice: str, padding: int
) -> None:
    """On the event loop, in a thread, and below what is read by another reader."""
    text = json.dumps(body)
    assert text.count(once) == 1

    right = server.post(path, content=text.encode() + b" " * padding)
    wrong = server.post(path, content=text.replace(once, twice).encode() + b" " * padding)

    assert right.status_code == 200, right.text
    assert wrong.status_code == 400
    assert "expected each key of an object once" in wrong.json()["error"]


@pytest.mark.fault("B9")
@pytest.mark.parametrize("repeated", ["tensor", "metadata"])
def test_repeated_key_in_a_safetensors_header_is_refused(server: Server, repeated: str) -> None:
    """The library would take the last."""
    entry = '{"dtype": "F32", "shape": [1, 1, 8], "data_offsets": [0, 32]}'
    metadata = '{"causal": "true", "causal": "false"}' if repeated == "metadata" else "{}"
    header = f'{{"__metadata__": {metadata}, "embeddings": {entry}}}'
    if repeated == "tensor":
        header = header[:-1] + f', "embeddings": {entry}}}'
    raw = np.full(8, 0.5, "<f4").tobytes()

    response = server.post(
        "/v1/attention?model=tiny",
        content=len(header).to_bytes(8, "little") + header.encode() + raw,
        headers={"Content-Type": "application/x-safetensors"},
    )

    assert response.status_code == 400
    assert "expected each key of an object once" in response.json()["error"]
