"""Layers of every option, at random and tiny, and calls to them."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from export.formula import Answer, Formula
from export.layer_spec import LayerSpec
from service.inference.calls import Inputs
from service.layer_config import (
    PROJECTIONS,
    ExtraKey,
    LayerConfig,
    Norm,
    PositionBias,
    Rotary,
)
from tests.support.specs import random_spec

MAX_POSITION = 30
"""The largest that a call gives: far ones make logits of ALiBi too large for FP32's 1e-5."""


@st.composite
def specs(draw: st.DrawFn) -> LayerSpec:
    """Draw a layer: each option of `LayerConfig` with each other that it goes with."""
    return random_spec(draw(configs()), draw(st.integers(0, 2**16)))


@st.composite
def configs(draw: st.DrawFn) -> LayerConfig:
    """Draw a valid configuration."""
    group, kv_heads = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    head_dim = draw(st.sampled_from([2, 4, 8]))
    heads = group * kv_heads
    width = st.sampled_from([heads * head_dim, 6, 12])
    options: dict[str, Any] = {
        "embed_dim": draw(width),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "biases": tuple(name for name in PROJECTIONS if draw(st.booleans())),
        "scale": draw(st.sampled_from([None, 1.0, 0.3])),
        "softcap": draw(st.sampled_from([None, 2.0, 30.0])),
        "norm": draw(st.none() | norms()),
        "extra_keys": draw(extra_keys()),
    }
    if draw(st.sampled_from([False, False, True])):
        options["memory_dim"] = draw(width)
        options["value_memory_dim"] = draw(st.none() | width)
    else:
        options["causal"] = draw(st.booleans())
        options["window"] = draw(st.none() | st.integers(1, 5))
        options["rotary"] = draw(st.none() | rotaries(head_dim))
        options["position_bias"] = draw(st.none() | position_biases())
        options["positional"] = draw(st.sampled_from([None, "sinusoidal", "learned"]))
        if options["positional"] == "learned":
            options["max_positions"] = MAX_POSITION + 1
    return LayerConfig(**options)


def extra_keys() -> st.SearchStrategy[tuple[ExtraKey, ...]]:
    """Draw keys beside those of the sequence."""
    kinds: list[ExtraKey] = ["learned", "zero", "sink"]
    return st.permutations(kinds).flatmap(
        lambda order: st.integers(0, len(order)).map(lambda count: tuple(order[:count]))
    )


def norms() -> st.SearchStrategy[Norm]:
    """Draw a norm of queries and keys."""
    return st.builds(
        Norm,
        st.sampled_from(["rms", "layer"]),
        st.sampled_from([1e-6, 1e-2]),
        st.sampled_from(["head", "projection"]),
    )


@st.composite
def rotaries(draw: st.DrawFn, head_dim: int) -> Rotary:
    """Draw rotary positions."""
    dims = draw(st.sampled_from([dims for dims in (2, 4, 8) if dims <= head_dim]))
    scalings = ["none", "linear", "yarn", "longrope", "llama3", *(["dynamic"] if dims > 2 else [])]
    return Rotary(
        base=draw(st.sampled_from([100.0, 10000.0])),
        dims=dims,
        interleaved=draw(st.booleans()),
        scaling=draw(st.sampled_from(scalings)),
        factor=draw(st.sampled_from([1.0, 2.5])),
        original_length=draw(st.integers(1, MAX_POSITION)),
        magnitude=draw(st.sampled_from([1.0, 1.2])),
    )


def position_biases() -> st.SearchStrategy[PositionBias]:
    """Draw a position bias."""
    buckets = st.integers(1, 6).map(lambda reach: PositionBias("buckets", reach))
    return st.just(PositionBias("alibi")) | buckets


def call_of(config: LayerConfig, *, rows: int, length: int, keys: int, seed: int = 1) -> Inputs:
    """Return the layer's default call without masks; a self-attention layer takes no `keys`."""
    rng = np.random.default_rng(seed)
    widths = (config.embed_dim, config.memory_dim, config.value_memory_dim)
    tokens = [
        None if width is None else rng.standard_normal((rows, count, width)).astype(np.float32)
        for count, width in zip((length, keys, keys), widths, strict=True)
    ]
    embeddings, memory, value_memory = tokens
    assert embeddings is not None
    return Inputs(embeddings, memory, causal=config.causal, value_memory=value_memory)


@st.composite
def calls(draw: st.DrawFn, config: LayerConfig) -> Inputs:
    """Draw a call with any of the masks, and positions where the layer takes them."""
    seed, rows, length = (draw(st.integers(*span)) for span in ((0, 2**16), (1, 3), (1, 7)))
    keys = draw(st.integers(1, 7)) if config.is_cross else length
    inputs = call_of(config, rows=rows, length=length, keys=keys, seed=seed)
    rng = np.random.default_rng(seed + 1)
    if not config.is_cross:
        inputs.causal = draw(st.booleans())
    if draw(st.booleans()):
        inputs.attend_mask = rng.random((rows, keys)) < 0.7
    if draw(st.booleans()):
        ahead = draw(st.sampled_from([1, rows])), draw(st.sampled_from([1, config.num_heads]))
        inputs.pair_mask = rng.random((*ahead, length, keys)) < 0.7
    if draw(st.booleans()):
        heads = draw(st.sampled_from([(config.num_heads,), (rows, config.num_heads)]))
        inputs.head_mask = rng.uniform(-1, 1, heads).astype(np.float32)
    if config.takes_positions and draw(st.booleans()):
        inputs.positions = rng.integers(0, MAX_POSITION + 1, (rows, length))
    return inputs


def answer_of(spec: LayerSpec, inputs: Inputs) -> Answer:
    """Return the formula's answer to a call."""
    tensors = {name: tensor.numpy() for name, tensor in spec.tensors.items()}
    return Formula(spec.config, tensors)(
        inputs.embeddings,
        inputs.memory,
        inputs.value_memory,
        attend_mask=inputs.attend_mask,
        pair_mask=inputs.pair_mask,
        causal=inputs.causal,
        head_mask=inputs.head_mask,
        positions=inputs.positions,
    )
