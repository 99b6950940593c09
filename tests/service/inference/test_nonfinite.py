"""NaN and infinity in tokens: they reach whoever attends to them, and nobody else."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.inference.artifact import read_graph
from service.inference.calls import Inputs
from service.inference.engine import OnnxEngine, full_mask
from service.inference.nonfinite import spoilt
from tests.support.calls import TOLERANCE
from tests.support.layers import ALL, Layers
from tests.support.server import Server

ODD = [np.nan, np.inf, -np.inf]
many = settings(max_examples=150)


@pytest.fixture(scope="module")
def engines(layers: Layers) -> dict[str, OnnxEngine]:
    """Return the real engine of each layer."""
    return {
        name: OnnxEngine(read_graph(layers.artifact(name) / "layer.onnx"), config)
        for name, config in ALL.items()
    }


@st.composite
def spoilt_calls(draw: st.DrawFn) -> tuple[str, Inputs]:
    """Draw a batch with a mask, some of whose tokens are not finite."""
    model = draw(st.sampled_from(sorted(ALL)))
    layer = ALL[model]
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    keys = draw(st.integers(1, 6)) if layer.is_cross else length

    def tokens(count: int, width: int, share: float) -> np.ndarray:
        x = random.standard_normal((rows, count, width)).astype(np.float32)
        odd = random.random((rows, count)) < share
        x[odd, random.integers(0, width)] = random.choice(ODD)
        return x

    share = draw(st.sampled_from([0.2, 0.5]))
    embeddings = tokens(length, layer.embed_dim, share)
    memory, value_memory = (
        None if width is None else tokens(keys, width, share)
        for width in (layer.memory_dim, layer.value_memory_dim)
    )
    heads = draw(st.sampled_from([1, layer.num_heads]))
    kind = draw(st.sampled_from(["attend", "pair", "both", "causal"]))
    is_causal = kind == "causal" and not layer.is_cross
    attend = random.random((rows, keys)) < 0.6
    pair = random.random((draw(st.sampled_from([1, rows])), heads, length, keys)) < 0.6
    return model, Inputs(
        embeddings,
        memory,
        attend if kind in ("attend", "both") or (kind == "causal" and not is_causal) else None,
        pair if kind in ("pair", "both") else None,
        causal=is_causal,
        value_memory=value_memory,
    )


def odd_tokens(tensor: np.ndarray) -> np.ndarray:
    """Say of each token whether it has a number that is not finite."""
    return np.asarray(~np.isfinite(tensor).all(-1))


def zeroed(tensor: np.ndarray) -> np.ndarray:
    """Return the tensor with zeros in place of such tokens."""
    return np.where(odd_tokens(tensor)[..., None], 0, tensor)


@pytest.mark.fault("E13")
@many
@given(drawn=spoilt_calls(), weights=st.booleans())
def test_token_that_is_not_finite_spoils_only_queries_that_attend_to_it(
    drawn: tuple[str, Inputs], weights: bool, engines: dict[str, OnnxEngine], layers: Layers
) -> None:
    """And itself, where it attends to anything; all others are answered as if it were zero."""
    model, inputs = drawn
    layer = ALL[model]
    mask = full_mask(inputs, layer.window)
    assert mask is not None
    embeddings, memory, value_memory = inputs.embeddings, inputs.memory, inputs.value_memory
    odd_queries = odd_tokens(embeddings)
    odd_memories = [odd_tokens(x) for x in (memory, value_memory) if x is not None]
    odd_keys = np.logical_or.reduce(odd_memories or [odd_queries])
    rows, length = odd_queries.shape
    clean = layers.formula(model)(
        zeroed(embeddings),
        None if memory is None else zeroed(memory),
        None if value_memory is None else zeroed(value_memory),
        pair_mask=mask,
        causal=False,
    )

    found = engines[model].run(inputs, weights=weights)

    for row in range(rows):
        for query in range(length):
            attended = mask[min(row, len(mask) - 1), :, query]  # [H or 1, T]
            touched = attended & (odd_keys[row] | odd_queries[row, query])
            is_spoilt = touched.any(-1)  # [H or 1]
            if layer.extra_keys:
                is_spoilt = is_spoilt | odd_queries[row, query]
            output = found.output[row, query]
            if is_spoilt.any():
                assert np.isnan(output).all()
            else:
                wanted = clean.output[row, query]
                assert np.abs(output - wanted).max() <= TOLERANCE * max(1, np.abs(wanted).max())
            if found.attention_weights is None:
                continue
            kinds = [(found.attention_weights, clean.weights)]
            if found.extra_weights is not None:
                kinds.append((found.extra_weights, clean.extra_weights))
            for have, want in kinds:
                for head in range(layer.num_heads):
                    row_of_weights = have[row, head, query]
                    if is_spoilt[min(head, len(is_spoilt) - 1)]:
                        assert np.isnan(row_of_weights).all()
                    else:
                        wanted = want[row, head, query]
                        assert np.abs(row_of_weights - wanted).max() <= TOLERANCE


@pytest.mark.fault("E13")
@pytest.mark.parametrize("odd", ODD)
def test_padding_of_any_content_is_not_seen_by_the_tokens_before_it(
    server: Server, odd: float
) -> None:
    """The usual case: what a caller left behind in the padding of a batch."""
    x = np.random.default_rng(2).standard_normal((2, 4, 8)).astype(np.float32)
    x[0, 2:] = odd
    text: Any = np.where(np.isfinite(x), x, 0).tolist()
    body = {"model": "tiny", "embeddings": text, "attend_mask": [[1, 1, 0, 0], [1, 1, 1, 1]]}
    right = server.post("/v1/attention", json=body).json()["output"]
    body["embeddings"] = x.astype(object).tolist()

    content = json.dumps(body).encode()  # with bare NaN and Infinity
    found = server.post("/v1/attention", content=content).json()["output"]

    assert found[0][:2] == right[0][:2]
    assert found[1] == right[1]
    assert found[0][2:] == [[None] * 8] * 2


@pytest.mark.fault("E13")
def test_query_that_is_not_finite_is_spoilt_by_attending_to_an_extra_key() -> None:
    """Also where the mask hides every key of its sequence; a value spoils who attends to it."""
    x = np.ones((1, 3, 2), np.float32)
    x[0, 1, 0] = np.inf
    values = np.ones((1, 2, 5), np.float32)
    values[0, 1, 4] = np.nan
    nothing = np.zeros((1, 1, 3, 3), bool)
    memory = np.ones((1, 2, 4), np.float32)
    second = np.array([[[[True, False], [True, False], [False, True]]]])

    plain, extra = (spoilt(Inputs(x), nothing, extra_keys=flag) for flag in (False, True))
    cross = spoilt(Inputs(x[:, [0, 0, 0]], memory, value_memory=values), second)

    assert plain is not None
    assert extra is not None
    assert cross is not None
    assert plain.queries.tolist() == [[[False, False, False]]]
    assert extra.queries.tolist() == [[[False, True, False]]]
    assert cross.queries.tolist() == [[[False, False, True]]]
    assert cross.inputs.value_memory is not None
    assert cross.inputs.value_memory[0].tolist() == [[1.0] * 5, [0.0] * 5]


@pytest.mark.fault("E13")
def test_future_token_that_is_not_finite_does_not_reach_the_past(engines: Any) -> None:
    """A causal query sees nothing after itself."""
    x = np.random.default_rng(3).standard_normal((1, 5, 8)).astype(np.float32)
    x[0, 3, 0] = np.nan

    found = engines["tiny"].run(Inputs(x, causal=True), weights=True)

    assert np.isfinite(found.output[0, :3]).all()
    assert np.isnan(found.output[0, 3:]).all()
