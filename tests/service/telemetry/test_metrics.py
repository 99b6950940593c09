"""What a run adds to the metrics, and what they say of memory."""

import re

import pytest

from service.host.memory_limit import memory_limit
from service.inference.calls import Run
from service.telemetry.metrics import Metrics


def run(tokens: int, padded_tokens: int) -> Run:
    """Return a run of one call that took a quarter of a second, most of it in the runtime."""
    return Run(1, 1, tokens, padded_tokens, 0.0, assembly_s=0.0625, compute_s=0.1875)


def value(metrics: Metrics, sample: str) -> float:
    """Return one sample's value."""
    found = re.search(rf"^{re.escape(sample)} (\S+)$", metrics.render().decode(), re.MULTILINE)
    assert found, sample
    return float(found[1])


@pytest.fixture
def metrics() -> Metrics:
    """Return metrics of two models, one of which has run twice."""
    made = Metrics()
    made.of_model("idle")
    made.of_model("busy").on_run(run(30, 40))
    made.of_model("busy").on_run(run(7, 7))
    return made


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ('headwise_tokens_total{kind="content",model="busy"}', 37),
        ('headwise_tokens_total{kind="padding",model="busy"}', 10),
        ('headwise_tokens_total{kind="content",model="idle"}', 0),
        ('headwise_tokens_total{kind="padding",model="idle"}', 0),
        ('headwise_engine_seconds_total{model="busy"}', 0.5),
        ('headwise_engine_seconds_total{model="idle"}', 0),
        ("headwise_memory_limit_bytes", memory_limit()),
    ],
)
def test_metric_has_the_value(metrics: Metrics, sample: str, expected: float) -> None:
    """Tokens by kind and seconds add up by model, from zero before its first run."""
    assert value(metrics, sample) == expected
