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
from tests.support.calls import TOLERANCE
from tests.support.layers import CONFIGS, Layers
from tests.support.server import Server

ODD = [np.nan, np.inf, -np.inf]
many = settings(max_examples=150)


@pytest.fixture(scope="module")
def engines(layers: Layers) -> dict[str, OnnxEngine]:
    """Return the real engine of each layer."""
    return {
        name: OnnxEngine(read_graph(layers.artifact(name) / "layer.onnx"), config)
        for name, config in CONFIGS.items()
    }


@st.composite
def spoilt_calls(draw: st.DrawFn) -> tuple[str, Inputs]:
    """Draw a batch with a mask, some of whose tokens are not finite."""
    model = draw(st.sampled_from(sorted(CONFIGS)))
    layer = CONFIGS[model]
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
    memory = None if layer.memory_dim is None else tokens(keys, layer.memory_dim, share)
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
    )


@pytest.mark.fault("E13")
@many
@given(drawn=spoilt_calls(), weights=st.booleans())
def test_token_that_is_not_finite_spoils_only_queries_that_attend_to_it(
    drawn: tuple[str, Inputs], weights: bool, engines: dict[str, OnnxEngine], layers: Layers
) -> None:
    """And itself, where it attends to anything; all others are answered as if it were zero."""
    model, inputs = drawn
    mask = full_mask(inputs)
    assert mask is not None
    memory = inputs.embeddings if inputs.memory is None else inputs.memory
    odd_queries = np.asarray(~np.isfinite(inputs.embeddings).all(-1))
    odd_keys = np.asarray(~np.isfinite(memory).all(-1))
    rows, length = odd_queries.shape
    clean = layers.formula(model)(
        np.where(odd_queries[..., None], 0, inputs.embeddings),
        None if inputs.memory is None else np.where(odd_keys[..., None], 0, inputs.memory),
        pair_mask=mask,
    )

    found = engines[model].run(inputs, weights=weights)

    for row in range(rows):
        for query in range(length):
            attended = mask[min(row, len(mask) - 1), :, query]  # [H or 1, T]
            touched = attended & (odd_keys[row] | odd_queries[row, query])
            is_spoilt = touched.any(-1)  # [H or 1]
            output = found.output[row, query]
            if is_spoilt.any():
                assert np.isnan(output).all()
            else:
                wanted = clean.output[row, query]
                assert np.abs(output - wanted).max() <= TOLERANCE * max(1, np.abs(wanted).max())
            if found.attention_weights is None:
                continue
            for head in range(CONFIGS[model].num_heads):
                row_of_weights = found.attention_weights[row, head, query]
                if is_spoilt[min(head, len(is_spoilt) - 1)]:
                    assert np.isnan(row_of_weights).all()
                else:
                    wanted = clean.weights[row, head, query]
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
def test_future_token_that_is_not_finite_does_not_reach_the_past(engines: Any) -> None:
    """A causal query sees nothing after itself."""
    x = np.random.default_rng(3).standard_normal((1, 5, 8)).astype(np.float32)
    x[0, 3, 0] = np.nan

    found = engines["tiny"].run(Inputs(x, causal=True), weights=True)

    assert np.isfinite(found.output[0, :3]).all()
    assert np.isnan(found.output[0, 3:]).all()
