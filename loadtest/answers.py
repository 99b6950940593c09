"""Whether an answer is the expected one: outputs by their own size, weights absolute."""

from typing import Final

from loadtest.oip import Arrays
from service.inference.parity import is_close

_WEIGHTS: Final = ("attention_weights", "extra_weights")


def agree(found: Arrays, expected: Arrays) -> bool:
    """
    Return whether all tensors are there, and agree by the rule of `service.inference.parity`.

    |found - expected| <= 1e-5 * max(1, max|expected|); for weights of either kind, 1e-5.
    Where one is not finite, the other is the same.
    """
    return found.keys() == expected.keys() and all(
        is_close(found[name], expected[name], absolute=name in _WEIGHTS) for name in expected
    )
