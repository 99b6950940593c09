"""What ONNX Runtime on the CPU answers to ONNX's cases, and which of them it fails."""

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import onnxruntime
from onnx import TensorProto

from tests.support.conformance.cases import Array, OperatorCase

ABSOLUTE_TOLERANCE: Final = 1e-7
RELATIVE_TOLERANCE: Final = 1e-3
"""Those of ONNX's own runner."""
FLOAT16_TOLERANCE: Final = 2.0**-9
"""Two units in the last place; 1e-3 is one, and sums in another order differ by more."""


@dataclass(frozen=True)
class RuntimeFailure:
    """A way in which ONNX Runtime on the CPU fails cases."""

    words: str
    message: str
    """A part of what `runtime_failure` says."""
    cases: frozenset[tuple[str, str]]
    """Names, and "operator" or "function"."""


RUNTIME_FAILURES: Final = (
    RuntimeFailure(
        "has no kernels for bfloat16",
        "Could not find an implementation for",
        frozenset(
            (f"attention_{name}_bf16", form)
            for name in (
                *("3d_causal", "4d_causal", "4d_attn_mask_causal"),
                *("4d_padded_kv", "4d_causal_padded_kv"),
            )
            for form in ("operator", "function")
        ),
    ),
    RuntimeFailure(
        "refuses a mask with fewer columns than there are keys",
        "inconsistent total_sequence_length",
        frozenset({("attention_4d_diff_heads_mask4d_padded_kv", "operator")}),
    ),
    RuntimeFailure(
        "its `qk_matmul_output` has the lowest finite number in place of -inf",
        "qk_matmul_output: expected -inf, got -3.4028234663852886e+38",
        frozenset(
            (f"attention_4d_with_past_and_present_qk_matmul_bias_{rank}d_mask_causal", "operator")
            for rank in (3, 4)
        ),
    ),
)


def runtime_words(case: OperatorCase, form: str) -> str | None:
    """Say how ONNX Runtime fails a case, in the words of the list where it is there."""
    failure = runtime_failure(case, form)
    if failure is None:
        return None
    for known in RUNTIME_FAILURES:
        if known.message in failure:
            return known.words
    return failure


@cache
def runtime_failure(case: OperatorCase, form: str) -> str | None:
    """Say how ONNX Runtime on the CPU fails a case ("operator" or "function"); None = it passes."""
    model = case.models[form]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        names = [parameter.name for parameter in session.get_inputs()]
        feeds = dict(zip(names, map(_value_of, case.inputs.values()), strict=True))
        answers = session.run_with_ort_values(None, feeds)
    except Exception as error:
        return str(error)
    for (name, expected), answer in zip(case.outputs.items(), answers, strict=True):
        if failure := _difference(answer.numpy(), expected):
            return f"{name}: {failure}"
    return None


def _value_of(array: Array) -> Any:
    if array.dtype.name != "bfloat16":
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
        array.view(np.uint16), TensorProto.BFLOAT16
    )


def _difference(found: Array, expected: Array) -> str | None:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"expected {expected.dtype} {expected.shape}, got {found.dtype} {found.shape}"
    tolerance = FLOAT16_TOLERANCE if expected.dtype == np.float16 else RELATIVE_TOLERANCE
    wrong = ~np.isclose(found, expected, tolerance, ABSOLUTE_TOLERANCE, equal_nan=True)
    if not wrong.any():
        return None
    place = tuple(np.argwhere(wrong)[0])
    return f"expected {expected[place]}, got {found[place]}"
