"""The ONNX project's tests of its attention operators."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, defs, helper
from onnx.backend.test.case import node as generators
from onnx.backend.test.case.test_case import TestCase

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class OperatorCase:
    """
    One test of an operator: inputs, and the outputs that ONNX's reference gives.

    Inputs and outputs have the operator's names for them ("attn_mask"); those left out are absent.
    """

    name: str
    operator: str
    attributes: Mapping[str, Any]
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    models: Mapping[str, ModelProto]
    """A model of the operator, and one of the function that defines it ("function")."""


@cache
def operator_cases() -> Mapping[str, OperatorCase]:
    """Return every case of Attention and RotaryEmbedding by its name without `test_`."""
    tests = all_tests()
    return {name: _case(name, tests) for name in tests if "_expanded" not in name}


@cache
def all_tests() -> Mapping[str, TestCase]:
    """Return all tests, among them those of the expanded functions."""
    state = np.random.get_state()  # the generators seed NumPy's global one
    for module in ("attention", "rotaryembedding"):
        import_module(f"{generators.__name__}.{module}")
    np.random.set_state(state)
    names = re.compile("test_(attention|rotary_embedding)(_.*)?")
    tests = [test for test in generators._NodeTestCases if names.fullmatch(test.name)]
    return {test.name.removeprefix("test_"): test for test in tests}


def _case(name: str, tests: Mapping[str, TestCase]) -> OperatorCase:
    model = _model_of(tests[name])
    (node,) = model.graph.node
    schema = defs.get_schema(node.op_type, model.opset_import[0].version)
    inputs, outputs = _data_of(tests[name])
    models = {"operator": model}
    for other, test in tests.items():
        if other.removesuffix("_expanded") == name != other:
            expanded = _data_of(test)
            assert all(map(np.array_equal, (*inputs, *outputs), (*expanded[0], *expanded[1])))
            models["function"] = _model_of(test)
    return OperatorCase(
        name,
        node.op_type,
        {part.name: helper.get_attribute_value(part) for part in node.attribute},
        dict(zip(_present(node.input, schema.inputs), inputs, strict=True)),
        dict(zip(_present(node.output, schema.outputs), outputs, strict=True)),
        models,
    )


def _model_of(test: TestCase) -> ModelProto:
    assert test.model is not None
    return test.model


def _data_of(test: TestCase) -> tuple[Sequence[Array], Sequence[Array]]:
    assert test.data_sets is not None
    ((inputs, outputs),) = test.data_sets
    return inputs, outputs


def _present(names: Sequence[str], parameters: Sequence[Any]) -> list[str]:
    """Return the operator's names for those parameters that a node gives."""
    return [parameter.name for name, parameter in zip(names, parameters, strict=False) if name]
