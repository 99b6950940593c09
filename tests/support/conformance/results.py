"""
Which of ONNX's cases the exported core and the engine pass, and which cannot apply to a layer.

A case that cannot apply is changed in that one respect, ONNX's reference gives the outputs anew,
and this nearest case is run in its place.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np
from onnx import helper
from onnx.reference import ReferenceEvaluator

from export.formula import Formula
from service.contract import FP32_TOLERANCE, PAIR_MASK, graph_inputs
from service.inference.calls import Inputs
from service.inference.engine import OnnxEngine
from service.inference.parity import absolute_error, relative_error
from service.layer_config import LayerConfig, Rotary
from tests.support.attention_cases import engine_of
from tests.support.conformance.cases import Array, OperatorCase, operator_cases
from tests.support.conformance.layers import (
    AFTER_SOFTMAX,
    Attention,
    LayerCall,
    heads_of,
    identities,
    tokens_of,
)

_DTYPES: Final = {tensor.name: tensor.dtype for tensor in graph_inputs(LayerConfig(8, 2))}
"""Those of a layer's tensors."""

ROTARY_BASE: Final = 100.0
"""No pair turns so slowly that a wrong angle would go unseen."""


@dataclass(frozen=True)
class Reason:
    """Why a case cannot apply to a layer, and what makes it one that can."""

    words: str
    remedy: str
    holds: Callable[[OperatorCase], bool]
    changed: Callable[[OperatorCase], dict[str, Array]]
    """The inputs of the nearest case."""


def _has_other_floats(case: OperatorCase) -> bool:
    kinds = {str(array.dtype) for array in case.inputs.values()}
    return not kinds <= {*_DTYPES.values(), "int64"}


def _in_fp32(case: OperatorCase) -> dict[str, Array]:
    return {
        name: array if array.dtype in (bool, np.int64) else array.astype(np.float32)
        for name, array in case.inputs.items()
    }


def _adds_a_mask(case: OperatorCase) -> bool:
    """Say whether the mask adds numbers to logits, which booleans cannot."""
    mask = case.inputs.get("attn_mask")
    if mask is None or mask.dtype == _DTYPES[PAIR_MASK]:
        return False
    return not np.isin(mask, (0, -np.inf)).all()


def _with_booleans(case: OperatorCase) -> dict[str, Array]:
    return {**case.inputs, "attn_mask": case.inputs["attn_mask"] > 0.5}


def _has_caches_of_no_angle(case: OperatorCase) -> bool:
    """Say whether cos^2 + sin^2 is not the same for all angles."""
    if case.operator != "RotaryEmbedding":
        return False
    lengths = np.hypot(case.inputs["cos_cache"], case.inputs["sin_cache"])
    return bool(np.ptp(lengths) > FP32_TOLERANCE)


def _with_angles(case: OperatorCase) -> dict[str, Array]:
    shape = case.inputs["cos_cache"].shape
    frequencies = identities(_rotary_config(case)).tensors["rotary.frequencies"].numpy()
    angles = np.arange(shape[-2], dtype=np.float32)[:, None] * frequencies
    caches = {"cos_cache": np.cos(angles), "sin_cache": np.sin(angles)}
    return {**case.inputs, **{name: np.broadcast_to(x, shape) for name, x in caches.items()}}


REASONS: Final = (
    Reason("16-bit tensors", "FP32 tensors", _has_other_floats, _in_fp32),
    Reason("a mask that adds numbers", "a boolean mask", _adds_a_mask, _with_booleans),
    Reason("caches of random numbers", "caches of angles", _has_caches_of_no_angle, _with_angles),
)


def reasons_of(case: OperatorCase) -> list[Reason]:
    """Return why a case cannot apply; empty = it can."""
    return [reason for reason in REASONS if reason.holds(case)]


def nearest(case: OperatorCase) -> OperatorCase:
    """Return the case itself if it can apply, else the nearest that can."""
    reasons = reasons_of(case)
    for reason in reasons:
        case = replace(case, inputs=reason.changed(case))
    return _answered(case) if reasons else case


def _answered(case: OperatorCase) -> OperatorCase:
    """Return the case with the outputs that ONNX's reference gives to its inputs."""
    model = case.models["operator"]
    names = [parameter.name for parameter in model.graph.input]
    feeds = dict(zip(names, case.inputs.values(), strict=True))
    answers = ReferenceEvaluator(model).run(None, feeds)
    return replace(case, outputs=dict(zip(case.outputs, map(np.asarray, answers), strict=True)))


@dataclass(frozen=True)
class Result:
    """How far formula and engine are from what ONNX expects of one layer."""

    form: str
    formula_error: float
    engine_error: float
    """The larger of `relative_error` of outputs and `absolute_error` of weights."""

    @property
    def passes(self) -> bool:
        """True when both are within the contract's tolerance."""
        return max(self.formula_error, self.engine_error) <= FP32_TOLERANCE


@cache
def results(name: str) -> tuple[Result, ...]:
    """Return the results of a case, or of the nearest, for each layer that can express it."""
    case = nearest(operator_cases()[name])
    if case.operator == "RotaryEmbedding":
        return (_result(*_rotary_call(case)),)
    attention = Attention(case)
    return tuple(_result(attention, call) for call in attention.calls())


def _result(attention: Attention, call: LayerCall) -> Result:
    inputs = call.inputs
    tensors = {name: tensor.numpy() for name, tensor in call.spec.tensors.items()}
    answer = Formula(call.spec.config, tensors)(
        inputs.embeddings,
        inputs.memory,
        inputs.value_memory,
        attend_mask=inputs.attend_mask,
        pair_mask=inputs.pair_mask,
        causal=inputs.causal,
        positions=inputs.positions,
    )
    engine = _engine(call.spec.config)
    without, served = (engine.run(inputs, weights=weights) for weights in (False, True))
    formula = [relative_error(call.output(answer.output), attention.output)]
    engines = [
        relative_error(call.output(outputs.output), attention.output)
        for outputs in (without, served)
    ]
    if attention.weights is not None:
        assert served.attention_weights is not None
        formula.append(absolute_error(call.weights(answer.weights), attention.weights))
        engines.append(absolute_error(call.weights(served.attention_weights), attention.weights))
    return Result(call.form, max(formula), max(engines))


@cache
def _engine(config: LayerConfig) -> OnnxEngine:
    """Return the engine of the layer without projections, whose weights follow from `config`."""
    return engine_of(identities(config))


def _rotary_config(case: OperatorCase) -> LayerConfig:
    """Return a layer for a case of RotaryEmbedding; its tokens are queries, keys and values."""
    _, heads, _, width = _rotary_heads(case).shape
    rotary = Rotary(
        base=ROTARY_BASE,
        dims=2 * case.inputs["cos_cache"].shape[-1],
        interleaved=bool(case.attributes.get("interleaved", 0)),
    )
    return LayerConfig(3 * heads * width, heads, head_dim=width, biases=(), rotary=rotary)


def _rotary_heads(case: OperatorCase) -> Array:
    return heads_of(case.inputs["X"], case.attributes.get("num_heads", 0))


def _rotary_call(case: OperatorCase) -> tuple[Attention, LayerCall]:
    """
    Return a case of Attention and the call that answers it.

    Queries and keys of the former are the output of RotaryEmbedding, those of the latter its input.
    """
    x = _rotary_heads(case)
    rows, heads, length, width = x.shape
    turned, values = heads_of(case.outputs["Y"], heads), x[:, ::-1]
    inputs = Inputs(
        np.concatenate([tokens_of(part, width) for part in (x, x, values)], axis=2),
        positions=case.inputs.get("position_ids"),
    )
    places = np.broadcast_to(np.arange(length), (rows, length))
    spec = identities(_rotary_config(case))
    call = LayerCall("sequence", spec, inputs, places, length, width)
    return Attention(_attention_case(turned, turned, values)), call


def _attention_case(*inputs: Array) -> OperatorCase:
    """Return a case of Attention with these queries, keys and values."""
    names, outputs = ("Q", "K", "V"), ("Y", "qk_matmul_output")
    mode: dict[str, Any] = {"qk_matmul_output_mode": AFTER_SOFTMAX}
    node = helper.make_node("Attention", names, (outputs[0], "", "", outputs[1]), **mode)
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, 1, None) for name in names],
        [helper.make_tensor_value_info(name, 1, None) for name in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
    expected = dict.fromkeys(outputs, np.empty(0))
    case = OperatorCase(
        "attention",
        "Attention",
        mode,
        dict(zip(names, inputs, strict=True)),
        expected,
        {"operator": model},
    )
    return _answered(case)
