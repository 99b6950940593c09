"""Served models without a server around them."""

from pathlib import Path

from service.inference.batcher import Batcher
from service.inference.batches import BatchLimits
from service.inference.engine import Engine
from service.inference.model import Model, loader
from service.inference.schedule import QueueLimits
from service.telemetry.metrics import Metrics


def batcher_of(name: str, engine: Engine) -> Batcher:
    """Return a queue that these tests never fill."""
    return Batcher(
        engine, QueueLimits(1, 1, 1.0), BatchLimits(1, 1, 0.25), Metrics().of_model(name).queue()
    )


def load_model(path: Path) -> Model:
    """Return the version of an artifact in this directory, loaded and not yet warmed up."""
    return loader(provider="cpu", threads=1, concurrent_runs=2, batcher_of=batcher_of)(path)
