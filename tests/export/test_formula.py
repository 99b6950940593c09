"""The float64 formula against PyTorch's scaled_dot_product_attention."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (PyTorch's own convention)

from export.layer_spec import LayerSpec
from service.inference.calls import Inputs
from service.inference.parity import absolute_error
from service.layer_config import PROJECTIONS, LayerConfig, PositionBias
from tests.support.specs import random_spec
from tests.support.wide_layers import answer_of, calls, extra_keys

TOLERANCE = 1e-12
"""Both compute in float64."""


@st.composite
def configs(draw: st.DrawFn) -> LayerConfig:
    """Draw what the function can say: heads, scale, causality, and what is added to logits."""
    group, kv_heads, head_dim = (
        draw(st.sampled_from(sizes)) for sizes in ((1, 2, 3), (1, 2), (2, 5))
    )
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["memory_dim"] = draw(st.sampled_from([6, 7]))
        options["value_memory_dim"] = draw(st.sampled_from([None, 6, 7]))
    else:
        options["causal"] = draw(st.booleans())
        biases = (None, PositionBias("alibi"), PositionBias("buckets", 3))
        options["position_bias"] = draw(st.sampled_from(biases))
    return LayerConfig(
        embed_dim=6,
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        biases=tuple(name for name in PROJECTIONS if draw(st.booleans())),
        scale=draw(st.sampled_from([None, 1.0, 0.3])),
        extra_keys=draw(extra_keys()),
        **options,
    )


@settings(max_examples=60)
@given(st.data())
def test_formula_is_scaled_dot_product_attention(data: st.DataObject) -> None:
    """Output and weights; with values of the identity that function gives its weights too."""
    spec = random_spec(data.draw(configs()), data.draw(st.integers(0, 2**16)))
    inputs = data.draw(calls(spec.config))
    answer = answer_of(spec, inputs)

    assert absolute_error(answer.output, _output(spec, inputs)) <= TOLERANCE
    found = np.concatenate([answer.weights, answer.extra_weights], axis=-1)
    assert absolute_error(found, _weights(spec, inputs)) <= TOLERANCE


@settings(max_examples=20)
@given(st.data())
def test_formula_is_causal_as_that_function_is(data: st.DataObject) -> None:
    """Without masks, `causal` is what `is_causal` says, and grouped heads are `enable_gqa`."""
    heads, kv_heads = data.draw(st.sampled_from([(4, 4), (4, 2), (4, 1)]))
    config = LayerConfig(8, heads, num_kv_heads=kv_heads, causal=data.draw(st.booleans()))
    spec = random_spec(config, data.draw(st.integers(0, 2**16)))
    x = (
        np.random.default_rng(1)
        .standard_normal((2, data.draw(st.integers(1, 6)), 8))
        .astype(np.float32)
    )
    q, k, v = (_heads(spec, name, torch.from_numpy(x)) for name in ("query", "key", "value"))

    attended = F.scaled_dot_product_attention(q, k, v, is_causal=config.causal, enable_gqa=True)

    found = answer_of(spec, Inputs(x, causal=config.causal)).output
    assert absolute_error(found, _projected(spec, "output", _concat(attended))) <= TOLERANCE


def _output(spec: LayerSpec, inputs: Inputs) -> Tensor:
    """Return the layer's output [B, S, E] by that function."""
    q, k, v, mask = _arguments(spec, inputs)
    heads = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=spec.config.scale, enable_gqa=True
    )
    if inputs.head_mask is not None:
        factors = torch.from_numpy(inputs.head_mask).double().expand(len(q), -1)
        heads = heads * factors[:, :, None, None]
    return _projected(spec, "output", _concat(heads))


def _weights(spec: LayerSpec, inputs: Inputs) -> Tensor:
    """Return the weights of all keys, extra ones last, [B, H, S, T + n]."""
    q, k, _, mask = _arguments(spec, inputs)
    identity = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1)
    return F.scaled_dot_product_attention(
        q, k, identity, attn_mask=mask, scale=spec.config.scale, enable_gqa=True
    )


def _arguments(spec: LayerSpec, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values with the extra ones, and what is added to the logits."""
    memory = inputs.embeddings if inputs.memory is None else inputs.memory
    value_memory = memory if inputs.value_memory is None else inputs.value_memory
    sources = {"query": inputs.embeddings, "key": memory, "value": value_memory}
    q, k, v = (_heads(spec, name, torch.from_numpy(x)) for name, x in sources.items())
    mask = _distances(spec, inputs).masked_fill(~_allowed(inputs), -torch.inf)
    mask = mask.expand(len(q), q.shape[1], -1, -1)
    for kind in spec.config.extra_keys:
        shape = (1, k.shape[1], 1, k.shape[3])
        rows = [torch.zeros(shape, dtype=torch.float64)] * 2
        column = torch.zeros(q.shape[1], dtype=torch.float64)
        if kind == "learned":
            rows = [spec.tensors[f"extra.{name}"].double().view(shape) for name in ("key", "value")]
        elif kind == "sink":
            column = spec.tensors["extra.sinks"].double()
        k, v = (
            torch.cat([x, row.expand(len(x), -1, -1, -1)], 2)
            for x, row in zip((k, v), rows, strict=True)
        )
        column = column.view(1, -1, 1, 1).expand(*mask.shape[:3], 1)
        mask = torch.cat([mask, column], dim=-1)
    return q, k, v, mask


def _distances(spec: LayerSpec, inputs: Inputs) -> Tensor:
    """Return what the distances of positions add to the logits, [B or 1, H or 1, S, T]."""
    bias, shape = spec.config.position_bias, (1, 1, inputs.embeddings.shape[1], inputs.key_length)
    if bias is None:
        return torch.zeros(shape, dtype=torch.float64)
    positions = (
        torch.arange(shape[2])[None]
        if inputs.positions is None
        else torch.from_numpy(inputs.positions)
    )
    ahead = positions[:, None, :] - positions[:, :, None]
    if bias.kind == "alibi":
        return spec.tensors["position_bias.slopes"].double()[:, None, None] * ahead[:, None]
    table = spec.tensors["position_bias.table"].double()
    return table[ahead.clamp(-bias.reach, bias.reach) + bias.reach].permute(0, 3, 1, 2)


def _allowed(inputs: Inputs) -> Tensor:
    allowed = torch.ones(inputs.embeddings.shape[1], inputs.key_length, dtype=torch.bool)[
        None, None
    ]
    if inputs.causal:
        allowed = allowed.tril()
    if inputs.attend_mask is not None:
        allowed = allowed & torch.from_numpy(inputs.attend_mask)[:, None, None]
    if inputs.pair_mask is not None:
        allowed = allowed & torch.from_numpy(inputs.pair_mask)
    return allowed


def _heads(spec: LayerSpec, name: str, x: Tensor) -> Tensor:
    """Return a projection of x as [B, heads, L, D]."""
    projected = _projected(spec, name, x)
    rows, length, _ = projected.shape
    return projected.view(rows, length, -1, spec.config.head_dim).transpose(1, 2)


def _concat(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def _projected(spec: LayerSpec, name: str, x: Tensor) -> Tensor:
    bias = spec.tensors.get(f"{name}.bias")
    return F.linear(
        x.double(), spec.tensors[f"{name}.weight"].double(), None if bias is None else bias.double()
    )
