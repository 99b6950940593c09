"""Counting that costs next to nothing."""

import numpy as np

from service.telemetry.histogram import Histogram


def test_distribution_counts_what_numpy_counts() -> None:
    """Each bound holds all values up to and with it; sum and count are exact."""
    bounds = (0.1, 0.5, 2.0)
    values = np.random.default_rng(0).exponential(1, 1000).round(1)
    seen = Histogram(bounds)

    for value in values:
        seen.add(float(value))

    expected = [(str(bound), float((values <= bound).sum())) for bound in bounds]
    assert seen.buckets() == [*expected, ("+Inf", 1000.0)]
    assert seen.count == 1000
    assert np.isclose(seen.sum, values.sum())


def test_distribution_of_nothing_is_all_zeros() -> None:
    """A series is there before its first value."""
    assert Histogram((1, 2)).buckets() == [("1.0", 0.0), ("2.0", 0.0), ("+Inf", 0.0)]
