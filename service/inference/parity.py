"""
The rule by which two answers count as equal: |a - b| <= 1e-5 * max(1, max|expected|).

The server holds its golden answers against it, the exporter its proof, and the load tester and
the benchmarks what servers answer.  Attention weights lie between 0 and 1, so that the bound is
absolute for them.  Only numpy is known here.
"""

import numpy as np
import numpy.typing as npt

from service.contract import FP32_TOLERANCE


def absolute_error(found: npt.ArrayLike | None, expected: npt.ArrayLike) -> float:
    """
    Return max|found - expected|, 0 for empty tensors.

    Infinity where there is no answer, where the shapes differ, and where either holds NaN or
    infinity: what is to be proven must be finite.
    """
    if found is None:
        return float("inf")
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if found.shape != expected.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):  # infinity less infinity
        difference = np.abs(found - expected)
    return float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max(initial=0.0))


def relative_error(found: npt.ArrayLike | None, expected: npt.ArrayLike) -> float:
    """Return `absolute_error` divided by max(1, max|expected|)."""
    error = absolute_error(found, expected)
    if not np.isfinite(error):
        return error  # an infinite expectation would make it small
    return error / max(1.0, float(np.max(np.abs(expected), initial=0.0)))


def is_close(
    found: npt.ArrayLike,
    expected: npt.ArrayLike,
    tolerance: float = FP32_TOLERANCE,
    *,
    absolute: bool = False,
) -> bool:
    """
    Return whether an answer is the expected one by the rule; `absolute` leaves the size out.

    Non-finite values, which an answer to non-finite input may hold, must stand in the same
    places with the same value; the rule applies to the finite ones.
    """
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if found.shape != expected.shape:
        return False
    finite = np.isfinite(expected)
    if not np.array_equal(found[~finite], expected[~finite], equal_nan=True):
        return False
    error = absolute_error if absolute else relative_error
    return error(found[finite], expected[finite]) <= tolerance
