"""Names from PyTorch, Hugging Face, Keras, Triton and OpenAI-like APIs, on every wire."""

import string
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from service.codecs.names import SENTENCES, check_names
from service.errors import InvalidInput
from tests.support.server import Server

HEADERS = {"Content-Type": "application/x-safetensors"}
X = {"embeddings": np.full((1, 2, 8), 0.5, np.float32)}
INPUT = {"name": "embeddings", "shape": [1, 2, 8], "datatype": "FP32", "data": [0.5] * 16}
MASKS = ("attend_mask", "pair_mask", "head_mask")

Wire = Callable[[Server, str], httpx.Response]


def in_json(server: Server, name: str) -> httpx.Response:
    """Send the name as a key of `/v1/attention`."""
    return server.post("/v1/attention", json={"model": "tiny", "embeddings": [[0.5] * 8], name: 1})


def in_safetensors(server: Server, name: str) -> httpx.Response:
    """Send it as a tensor."""
    content = save(X | {name: np.ones((1, 2), bool)})
    return server.post("/v1/attention?model=tiny", content=content, headers=HEADERS)


def in_metadata(server: Server, name: str) -> httpx.Response:
    """Send it in the metadata of a safetensors body."""
    content = save(X, {name: "1"})
    return server.post("/v1/attention?model=tiny", content=content, headers=HEADERS)


def in_query(server: Server, name: str) -> httpx.Response:
    """Send it in the query."""
    body = {"model": "tiny", "embeddings": [[0.5] * 8]}
    return server.post("/v1/attention", params={name: "1"}, json=body)


def in_inputs(server: Server, name: str) -> httpx.Response:
    """Send it as an input of the protocol."""
    mask = {"name": name, "shape": [1, 2], "datatype": "BOOL", "data": [True, False]}
    return server.post("/v2/models/tiny/infer", json={"inputs": [INPUT, mask]})


def in_parameters(server: Server, name: str) -> httpx.Response:
    """Send it as a parameter of the protocol."""
    body = {"inputs": [INPUT], "parameters": {name: True}}
    return server.post("/v2/models/tiny/infer", json=body)


def in_infer_query(server: Server, name: str) -> httpx.Response:
    """Send it in the query of the protocol's call."""
    return server.post("/v2/models/tiny/infer", params={name: "1"}, json={"inputs": [INPUT]})


WIRES: list[Wire] = [
    *(in_json, in_safetensors, in_metadata, in_query),
    *(in_inputs, in_parameters, in_infer_query),
]

READ: dict[Wire, set[str]] = {
    in_safetensors: {"lengths"},
    in_metadata: {"heads", "format"},
    in_query: {"heads"},
    in_parameters: {"heads", "timeout"},
}
"""The names of the table that are ours, or the protocol's, on some wires."""

INVERTED = "invert it (~mask)"

MEANINGS: list[tuple[str, tuple[str, ...]]] = [
    *((n, ("attend_mask [B, T]", INVERTED)) for n in ("key_padding_mask", "keyPaddingMask")),
    *((n, ("attend_mask [B, T]", INVERTED)) for n in ("src_key_padding_mask",)),
    ("padding_mask", ("attend_mask [B, T]", "true for padding", "inverted (~mask)")),
    *((n, ("nothing is added", "positions", "bias == 0")) for n in ("attn_bias", "position_bias")),
    ("memory_key_padding_mask", ("attend_mask [B, T]", INVERTED)),
    *((n, ("pair_mask [B or 1, H or 1, S, T]", INVERTED)) for n in ("attn_mask", "src_mask")),
    ("memory_mask", ("pair_mask", INVERTED, "mask == 0")),
    ("attention_mask", ("attend_mask [B, T]", "pair_mask", "1 = takes part")),
    ("encoder_attention_mask", ("attend_mask [B, T]", "nothing is inverted")),
    ("mask", ("attend_mask [B, T]", "pair_mask", "PyTorch's booleans mean the opposite")),
    ("layer_head_mask", ("head_mask [H] or [B, H]", "0 switches it off")),
    ("is_causal", ("causal true", "t <= s")),
    ("use_causal_mask", ("causal true",)),
    *((n, ("weights true", "<name>-weights")) for n in ("need_weights", "output_attentions")),
    ("average_attn_weights", ("weights true", "not averaged")),
]
"""Names of masks and options, and what their sentences must say."""

TENSORS: list[tuple[str, tuple[str, ...]]] = [
    *((n, ("embeddings [B, S, E]",)) for n in ("query", "hidden_states", "inputs_embeds")),
    *((n, ("memory [B, T, M]",)) for n in ("key", "value", "encoder_hidden_states")),
    *((n, ("text and tokens are not read", "embeddings [B, S, E]")) for n in ("input_ids",)),
    ("token_type_ids", ("add them to embeddings",)),
    *((n, ("positions [B, S]", "from 0")) for n in ("position_ids", "positionIds", "input_pos")),
    *((n, ("extra_weights",)) for n in ("extra_weights", "bias_k", "sinks")),
    *((n, ("part of the layer", "/v1/models/{name}")) for n in ("sliding_window", "window")),
    *((n, ("part of the layer", "positions [B, S]")) for n in ("alibi", "relative_attention_bias")),
    *((n, ("in safetensors", "in /v2 pad them")) for n in ("sequence_length", "valid_lens")),
    ("past_key_values", ("the whole sequence",)),
]
"""Names of what else enters a layer or a model."""

OTHERS = [
    *((n, "text and tokens are not read") for n in ("text", "input", "prompt", "messages")),
    *((n, "nothing is generated") for n in ("n", "temperature", "max_tokens", "stream")),
    *((n, "/v2/models/{name}/infer") for n in ("inputs", "outputs", "parameters")),
    ("model_name", "say model"),
    ("model_version", "/v2/models/{name}/versions/{version}/infer"),
    ("timeout", "timeout_s, in seconds"),
    ("id", "X-Request-ID"),
]
"""Names of other APIs' requests."""


@pytest.mark.fault("E1")
@pytest.mark.parametrize(
    ("wire", "name", "words"),
    [(wire, *row) for row in MEANINGS + TENSORS for wire in WIRES],
)
def test_name_from_pytorch_or_hugging_face_is_answered_with_ours_and_its_meaning(
    server: Server, name: str, words: tuple[str, ...], wire: Wire
) -> None:
    """The same sentence on every wire: which of ours, of which shape, and whether inverted."""
    response = wire(server, name)

    assert response.status_code == 400, response.text
    message = response.json()["error"]
    assert name in message
    assert all(word in message for word in words), message
    assert (INVERTED in message) is (INVERTED in words)
    assert "did you mean" not in message


@pytest.mark.fault("E1")
@pytest.mark.parametrize(
    ("name", "words", "wire"),
    [
        (*row, wire)
        for row in OTHERS
        for wire in WIRES
        if (wire, row[0]) != (in_parameters, "timeout")
    ],
)
def test_name_from_another_api_is_answered_with_what_is_read_here(
    server: Server, name: str, words: str, wire: Wire
) -> None:
    """Whoever sends text or the protocol's body to the wrong place learns the right one."""
    response = wire(server, name)

    assert response.status_code == 400, response.text
    assert words in response.json()["error"]


@pytest.mark.fault("E1")
@pytest.mark.parametrize("wire", WIRES)
def test_every_name_of_the_table_is_refused_on_every_wire_that_does_not_read_it(
    server: Server, wire: Wire
) -> None:
    """With its sentence; none is passed over, where callers would believe that it counts."""
    for name in sorted(SENTENCES.keys() - READ.get(wire, set())):
        response = wire(server, name)

        assert response.status_code == 400, f"{name}: {response.text}"
        assert f"unknown key {name!r}: {SENTENCES[name]}" in response.json()["error"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("sequence_id", 0), ("sequence_start", False), ("sequence_end", False)),
        *(("binary_data_output", False), ("binary_data", True), ("classification", 1)),
        *(("priority", 1), ("timeout", 10**7)),
    ],
)
def test_parameter_of_the_protocol_is_none_of_the_table(
    server: Server, name: str, value: object
) -> None:
    """Clients of the protocol send them, also where they say what is so without them."""
    body = {"inputs": [INPUT], "parameters": {name: value}}

    assert server.post("/v2/models/tiny/infer", json=body).status_code == 200


@pytest.mark.parametrize("name", ["headers", "content_type", "trace", "priority_class", "tenant"])
def test_parameter_that_means_nothing_to_attention_is_passed_over(
    server: Server, name: str
) -> None:
    """As the protocol has it."""
    assert in_parameters(server, name).status_code == 200
    assert in_infer_query(server, name).status_code == 200


PIECES = st.sampled_from(
    ["key", "attn", "attend", "attention", "pair", "head", "padding", "mask", "masks", "src", "_"]
)


@pytest.mark.fault("E1")
@given(
    st.one_of(
        st.lists(PIECES, min_size=1, max_size=5).map("".join),
        st.sampled_from(MASKS).flatmap(
            lambda name: st.tuples(
                st.integers(0, len(name)), st.sampled_from(string.ascii_lowercase + "_")
            ).map(lambda change: name[: change[0]] + change[1] + name[change[0] + 1 :])
        ),
    )
)
def test_no_name_is_answered_with_a_mask_because_it_looks_similar(name: str) -> None:
    """A wrong mask computes without a word: every mask's sentence says what true means."""
    known = ("embeddings", "memory", *MASKS, "weights", "causal")
    if name in known:
        return

    with pytest.raises(InvalidInput) as caught:
        check_names([name], known, "body")

    message = str(caught.value)
    assert not any(f"did you mean {mask}" in message for mask in MASKS)
    if "mask" in name and "send" not in message:
        assert "true = this key takes part" in message


def test_every_sentence_is_for_names_that_are_not_ours() -> None:
    """Else the table would refuse what is read."""
    ours: Any = {"embeddings", "memory", "attendmask", "pairmask", "headmask"}

    assert not ours & set(SENTENCES)
    assert not {"weights", "causal", "timeouts", "priority", "version"} & set(SENTENCES)
