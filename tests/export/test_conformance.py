"""The ONNX project's tests of its attention operators, through the exported core and the engine."""

import pytest

from service.contract import FP32_TOLERANCE
from tests.support.conformance.cases import all_tests, operator_cases
from tests.support.conformance.document import DOCUMENT, document
from tests.support.conformance.results import REASONS, Reason, reasons_of, results
from tests.support.conformance.runtime import RUNTIME_FAILURES, runtime_words

CASES = operator_cases()
APPLICABLE = [name for name, case in CASES.items() if not reasons_of(case)]
OTHERS = [name for name in CASES if name not in APPLICABLE]


def check(name: str) -> None:
    """Return when formula and engine give a case's outputs for every layer that expresses it."""
    found = results(name)
    assert found
    for result in found:
        assert result.formula_error <= FP32_TOLERANCE, result.form
        assert result.engine_error <= FP32_TOLERANCE, result.form


@pytest.mark.parametrize("name", APPLICABLE)
def test_layer_gives_what_the_operator_must(name: str) -> None:
    """Outputs, and weights where the case has them, are those that ONNX expects."""
    check(name)


@pytest.mark.parametrize("name", OTHERS)
def test_layer_passes_the_nearest_case_that_applies(name: str) -> None:
    """What cannot apply is changed in no more than that, and ONNX's reference answers anew."""
    check(name)


def test_all_cases_of_attention_but_two_are_run_as_a_sequence_too() -> None:
    """In those a query stands before the first token."""
    alone = [
        name
        for name, case in CASES.items()
        if case.operator == "Attention"
        and [result.form for result in results(name)] != ["memory", "sequence"]
    ]

    assert alone == [
        "attention_4d_causal_padded_kv_bf16",
        "attention_4d_causal_nonpad_negative_offset_structural_empty",
    ]


def test_every_test_belongs_to_a_case() -> None:
    """No expanded form is lost; none has other data than the operator's test."""
    assert sum(len(case.models) for case in CASES.values()) == len(all_tests())
    assert {case.operator for case in CASES.values()} == {"Attention", "RotaryEmbedding"}


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.words)
def test_reason_excludes_a_case(reason: Reason) -> None:
    """A reason that holds for no case any more is outdated."""
    assert any(reason.holds(case) for case in CASES.values())


def test_failures_of_onnxruntime_are_those_listed() -> None:
    """ONNX Runtime fails the listed cases in the listed way, and no others."""
    found = {
        (name, form, words)
        for name, case in CASES.items()
        for form in case.models
        if (words := runtime_words(case, form))
    }

    assert found == {(*case, known.words) for known in RUNTIME_FAILURES for case in known.cases}


def test_document_is_up_to_date() -> None:
    """`python -m tests.support.conformance.document` writes docs/conformance.md."""
    assert DOCUMENT.read_text() == document()
