"""
The table in docs/conformance.md.

`python -m tests.support.conformance.document` writes it.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tests.support.conformance.cases import OperatorCase, operator_cases
from tests.support.conformance.layers import AFTER_SOFTMAX
from tests.support.conformance.results import Result, reasons_of, results
from tests.support.conformance.runtime import runtime_words

DOCUMENT: Final = Path(__file__).parents[3] / "docs" / "conformance.md"
HEADING: Final = "## Results\n"
"""What follows it is generated."""

COLUMNS: Final = ("case", "Headwise", "ONNX Runtime, operator", "ONNX Runtime, function")


def document() -> str:
    """Return the text of the document with the results of now."""
    prose, heading, _ = DOCUMENT.read_text().partition(HEADING)
    assert heading, f"{DOCUMENT.name}: expected the line {HEADING!r}, got none"
    cells = [_cells(case) for case in operator_cases().values()]
    lines = [COLUMNS, ("---",) * len(COLUMNS), ("all", *map(_sum, zip(*cells, strict=True)))]
    lines += [(f"`{name}`", *row) for name, row in zip(operator_cases(), cells, strict=True)]
    return "".join((prose, heading, "\n", *(f"| {' | '.join(line)} |\n" for line in lines)))


def _sum(column: Iterable[str]) -> str:
    """Return how many cells begin with the same words."""
    return ", ".join(
        f"{count} {words}"
        for words, count in Counter(cell.split(":")[0] for cell in column).most_common()
    )


def _cells(case: OperatorCase) -> tuple[str, str, str]:
    failures = (runtime_words(case, form) for form in ("operator", "function"))
    operator, function = ("pass" if words is None else f"fail: {words}" for words in failures)
    return _headwise(case), operator, function


def _headwise(case: OperatorCase) -> str:
    found = results(case.name)
    if reasons := reasons_of(case):
        why, remedy = (
            ", ".join(words) for words in zip(*((r.words, r.remedy) for r in reasons), strict=True)
        )
        return f"cannot apply: {why}; with {remedy}: {_verdict(found)}"
    missing = ", ".join(f"`{name}`" for name in not_compared(case))
    return f"{_verdict(found)} in part: no {missing}" if missing else _verdict(found)


def _verdict(found: Iterable[Result]) -> str:
    return "pass" if all(result.passes for result in found) else "fail"


def not_compared(case: OperatorCase) -> list[str]:
    """Return the outputs of a case that a layer does not have."""
    compared = {"Y"}
    if case.attributes.get("qk_matmul_output_mode", 0) == AFTER_SOFTMAX:
        compared.add("qk_matmul_output")
    return [name for name in case.outputs if name not in compared]


if __name__ == "__main__":
    DOCUMENT.write_text(document())
