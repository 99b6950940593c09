"""Choosing whose attention weights are in an answer: in every format, whole and in parts."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest
from safetensors.numpy import load

from tests.support.calls import TOLERANCE, Case, expected, json_body, random_case
from tests.support.layers import CONFIGS, Layers
from tests.support.server import Server

ONE: dict[str, Any] = {"model": "mha", "embeddings": [[0.5] * 24] * 2}


@pytest.fixture(scope="module")
def narrow(layers: Layers) -> Iterator[Server]:
    """Return a server that runs every call in parts, and whose answers are small."""
    with Server(layers.repository, max_batch_tokens=4, max_answer_bytes=2000) as running:
        yield running


def check_heads(found: list[Any], case: Case, layers: Layers, heads: list[int]) -> None:
    """Assert that each sequence's weights are those of these heads."""
    wanted = expected(case, layers.formula(case.model)).weights
    assert wanted is not None
    for have, want in zip(found, wanted, strict=True):
        assert np.shape(have) == want[heads].shape
        assert np.abs(np.array(have) - want[heads]).max() <= TOLERANCE


@pytest.mark.parametrize("heads", [[0], [1], [2, 0], [0, 1, 2]])
@pytest.mark.parametrize("lengths", [[3, 3], [1, 4, 2]])
@pytest.mark.parametrize("accept", ["application/json", "application/x-safetensors"])
def test_attention_weights_are_those_of_the_chosen_heads(
    server: Server, layers: Layers, heads: list[int], lengths: list[int], accept: str
) -> None:
    """In the order of the request, each sequence with its own length."""
    case = random_case(np.random.default_rng(6), "mha", CONFIGS["mha"], lengths, weights=True)
    body = json_body(case) | {"weights": {"heads": heads}}

    response = server.post("/v1/attention", content=orjson.dumps(body), headers={"Accept": accept})

    assert response.status_code == 200, response.text
    if accept == "application/json":
        weights = response.json()["attention_weights"]
    else:
        tensors = load(response.content)
        named = [f"attention_weights.{i}" for i in range(len(lengths))]
        weights = (
            list(tensors["attention_weights"])
            if "attention_weights" in tensors
            else [tensors[name] for name in named]
        )
    check_heads(weights, case, layers, heads)


@pytest.mark.parametrize("lengths", [[4, 4, 4], [1, 4, 2]])
def test_attention_in_parts_has_the_weights_of_the_chosen_heads(
    narrow: Server, layers: Layers, lengths: list[int]
) -> None:
    """However many runs a call takes."""
    case = random_case(np.random.default_rng(7), "mha", CONFIGS["mha"], lengths, weights=True)
    body = json_body(case) | {"weights": {"heads": [2, 1]}}

    answer = narrow.post("/v1/attention", content=orjson.dumps(body)).json()

    check_heads(answer["attention_weights"], case, layers, [2, 1])


def test_attention_limit_counts_only_the_chosen_heads(narrow: Server) -> None:
    """3 x 5 queries of 24 numbers take 1440 bytes, the weights of each head 300; 2000 may be."""
    body = {"model": "mha", "embeddings": [[[0.5] * 24] * 5] * 3}

    def status(weights: Any) -> int:
        return narrow.post("/v1/attention", json=body | {"weights": weights}).status_code

    assert status({"heads": [2]}) == 200
    assert status({"heads": [0, 2]}) == 413
    assert status(True) == 413


def test_limit_counts_all_heads_of_one_sequence(narrow: Server) -> None:
    """It is run with all of them, so that choosing one must not let in what all may not."""
    body = {"model": "mha", "embeddings": [[0.5] * 24] * 12, "weights": {"heads": [2]}}

    assert narrow.post("/v1/attention", json=body).status_code == 413


def test_attention_one_sequence_has_chosen_heads_one_rank_lower(server: Server) -> None:
    """[len(heads)][S][T]."""
    answer = server.post("/v1/attention", json=ONE | {"weights": {"heads": [1]}}).json()

    assert np.shape(answer["attention_weights"]) == (1, 2, 2)


@pytest.mark.parametrize("weights", [{}, {"heads": None}, True])
def test_attention_weights_of_no_heads_in_particular_are_of_all(
    server: Server, weights: Any
) -> None:
    """Clients with typed models send null, or nothing, for what they leave out."""
    answer = server.post("/v1/attention", json=ONE | {"weights": weights}).json()

    assert np.shape(answer["attention_weights"]) == (3, 2, 2)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"head": [0]}, "weights: unknown key 'head'; did you mean heads?"),
        ({"heads": [0], "x": 1}, "weights: unknown key 'x'; expected heads"),
        ({"heads": []}, "weights.heads: expected at least one head, got none"),
        ({"heads": "0,1"}, "weights.heads: expected an array of heads, got a string"),
        ({"heads": 1}, "weights.heads: expected an array of heads, got a number"),
        ({"heads": [0.0]}, "weights.heads[0]: expected heads by number, from 0, got 0.0"),
        ({"heads": [None]}, "weights.heads[0]: expected heads by number, from 0, got null"),
        ({"heads": [3]}, "weights: expected heads from 0 to 2, got 3"),
        ({"heads": [-1]}, "weights: expected heads from 0 to 2, got -1"),
        ({"heads": [1, 1]}, "weights: expected each head once, got 1 again"),
        ({"heads": [0] * 100_000}, "weights: expected each head once, got 0 again"),
        ([0], 'weights: expected true, false or {"heads": [0, 3]}, got an array'),
    ],
)
def test_attention_heads_that_do_not_exist_are_named(
    server: Server, weights: Any, words: str
) -> None:
    """Counted from zero, each at most once."""
    response = server.post("/v1/attention", content=json.dumps(ONE | {"weights": weights}).encode())

    assert response.status_code == 400
    assert response.json()["code"] == "invalid_input"
    assert words in response.json()["error"]
