"""The engine and transformers' own module compute the same layer, and a table says how fast."""

import pytest

from bench.wide_layers import Comparison, compare
from service.contract import FP32_TOLERANCE
from service.layer_config import LayerConfig, Rotary

TINY = LayerConfig(32, 4, num_kv_heads=2, biases=(), causal=True, rotary=Rotary(10000.0, 8))


def test_wide_layers_agree_and_are_timed_in_turn() -> None:
    """Each of both is timed once a round, at every shape."""
    shapes = ((1, 1), (2, 5))

    found = list(compare(TINY, shapes, rounds=2, seconds=0.001, threads=1))

    assert [row.shape for row in found] == list(shapes)
    assert all(len(row.ours_s) == len(row.theirs_s) == 2 for row in found)
    assert all(0 <= row.error <= FP32_TOLERANCE for row in found)
    assert all(min(*row.ours_s, *row.theirs_s) > 0 for row in found)


def test_wide_layers_row_has_the_median_of_the_ratios_of_each_round() -> None:
    """Ratios are taken within a round, since what else the machine does met both there."""
    row = Comparison((1, 8), (0.001, 0.004, 0.002), (0.002, 0.004, 0.001), 0.0)

    assert row.ratio == pytest.approx(1)
    assert str(row) == "| [1, 8] | 2.00 | 2.00 | 1.00 |"
