"""Whether an answer is the expected one: outputs by their own size, weights absolute."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loadtest.formats import Arrays

TOLERANCE: Final = 1e-5
"""What the same call may differ by, whoever shares its run."""


def agree(found: Arrays, expected: Arrays) -> bool:
    """
    Return whether all tensors are there, and agree.

    |found - expected| <= 1e-5 * max(1, max|expected|); for `attention_weights`, 1e-5.
    Where one is not finite, the other is the same.
    """
    if found.keys() != expected.keys():
        return False
    return all(_one_agrees(name, found[name], expected[name]) for name in expected)


def _one_agrees(name: str, found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> bool:
    if found.shape != expected.shape:
        return False
    have, want = found.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(want)
    if not np.array_equal(have[~finite], want[~finite], equal_nan=True):
        return False
    if not finite.any():
        return True
    scale = 1.0 if name == "attention_weights" else max(1.0, float(np.abs(want[finite]).max()))
    difference = np.abs(have[finite] - want[finite]).max()
    return bool(difference <= TOLERANCE * scale)  # also false for NaN
