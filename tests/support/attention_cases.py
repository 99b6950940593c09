"""Calls with the answers that an independent module gives, tried on formula, engine and batches."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from export.formula import Formula
from export.graph import write_graph
from export.layer_spec import LayerSpec
from service.contract import FP32_TOLERANCE
from service.inference.artifact import read_graph
from service.inference.batches import Batch, BatchLimits, outputs_of, slices_of, stacked_inputs
from service.inference.calls import Call, Inputs, Outputs
from service.inference.engine import OnnxEngine
from service.inference.parity import absolute_error, relative_error
from service.layer_config import LayerConfig

LIMITS = BatchLimits(max_tokens=2**20, max_cells=2**30, max_waste=0.99)


@dataclass(frozen=True)
class Case:
    """
    One call and what an independent module answers to it.

    `inputs.causal` is resolved: say True for a layer that is causal by default.
    """

    inputs: Inputs
    output: npt.ArrayLike
    weights: npt.ArrayLike | None = None
    """[B, H, S, T]; None = the module does not tell."""
    extra_weights: npt.ArrayLike | None = None


def check_formula(spec: LayerSpec, cases: Sequence[Case]) -> None:
    """Return when the float64 formula gives every case's answer."""
    formula = Formula(spec.config, {name: tensor.numpy() for name, tensor in spec.tensors.items()})
    for case in cases:
        inputs = case.inputs
        answer = formula(
            inputs.embeddings,
            inputs.memory,
            inputs.value_memory,
            attend_mask=inputs.attend_mask,
            pair_mask=inputs.pair_mask,
            causal=inputs.causal,
            head_mask=inputs.head_mask,
            positions=inputs.positions,
        )
        _check(case, spec, answer.output, answer.weights, answer.extra_weights)


def check(spec: LayerSpec, cases: Sequence[Case]) -> None:
    """
    Return when formula and engine give every case's answer.

    The engine is asked each case alone, with weights and without, and all in one batch.
    """
    check_formula(spec, cases)
    engine = engine_of(spec)
    for case in cases:
        outputs = engine.run(case.inputs, weights=True)
        _check(case, spec, outputs.output, outputs.attention_weights, outputs.extra_weights)
        _check(case, spec, engine.run(case.inputs, weights=False).output, None, None)
    for weights in (False, True):
        for case, outputs in zip(cases, batched(engine, cases, weights=weights), strict=True):
            _check(case, spec, outputs.output, outputs.attention_weights, outputs.extra_weights)


def engine_of(spec: LayerSpec) -> OnnxEngine:
    """Return the engine that serves this layer."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "layer.onnx"
        write_graph(spec, path)
        return OnnxEngine(read_graph(path), spec.config)


def batched(engine: OnnxEngine, cases: Sequence[Case], *, weights: bool) -> list[Outputs]:
    """Return the answers of the engine to all cases, in one run for each kind of call."""
    answers: dict[int, Outputs] = {}
    batches: list[tuple[Batch, list[int]]] = []
    for i, case in enumerate(cases):
        [slice_] = slices_of(Call(case.inputs, weights=weights), LIMITS)
        batch, members = next(
            (each for each in batches if each[0].slices[0].kind == slice_.kind), (None, [])
        )
        if batch is None:
            batches.append((Batch.of(slice_), [i]))
        else:
            assert batch.try_add(slice_, LIMITS)
            members.append(i)
    for batch, members in batches:
        outputs = engine.run(stacked_inputs(batch, engine.layer), weights=weights)
        answers |= zip(members, outputs_of(batch, outputs), strict=True)
    return [answers[i] for i in range(len(cases))]


def _check(
    case: Case,
    spec: LayerSpec,
    output: npt.ArrayLike,
    weights: npt.ArrayLike | None,
    extra_weights: npt.ArrayLike | None,
) -> None:
    errors = compare(case, spec.config, output, weights, extra_weights)
    assert max(errors) <= FP32_TOLERANCE, f"{describe(case.inputs)}: {errors}"


def compare(
    case: Case,
    config: LayerConfig,
    output: npt.ArrayLike,
    weights: npt.ArrayLike | None,
    extra_weights: npt.ArrayLike | None,
) -> tuple[float, float]:
    """Return the relative error of an output, and the largest absolute one of its weights."""
    pairs = ((weights, case.weights), (extra_weights, case.extra_weights))
    errors = [
        absolute_error(found, expected)
        for found, expected in pairs
        if found is not None and expected is not None
    ]
    return relative_error(output, case.output), max(errors, default=0.0)


def describe(inputs: Inputs) -> str:
    """Say what a call is, for the message of a failure."""
    given = [
        name
        for name in ("memory", "value_memory", "attend_mask", "pair_mask", "head_mask", "positions")
        if getattr(inputs, name) is not None
    ]
    shape = list(np.shape(inputs.embeddings))
    return f"embeddings {shape}, causal {inputs.causal}, with {', '.join(given) or 'nothing else'}"
