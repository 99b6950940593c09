"""Memory stays flat, whatever the shapes: the slow check, and proof that it can fail."""

import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from safetensors.numpy import save

from bench.servers import HOST, Peer, headwise
from loadtest.drive import closed_load
from loadtest.endpoint import Endpoint, request_bytes
from loadtest.plan import Plan
from tests.support.layers import Layers

CALLS = 100_000
EARLY = 5_000
LATE = 1_000
"""The last calls, whose median memory counts."""

ALLOWED_MB = 16

LEAK = """
import sys
from service.inference import engine
from service.__main__ import main

kept, run = [], engine.OnnxEngine.run

def leaking_run(self, inputs, **options):
    kept.extend(bytearray(1024) for _ in range(len(inputs.embeddings)))
    return run(self, inputs, **options)

engine.OnnxEngine.run = leaking_run
sys.exit(main())
"""


def requests(count: int) -> list[bytes]:
    """Return calls of random shapes, with and without weights, masks and padding."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(count):
        lengths = np.minimum(1 + random.lognormal(2.5, 1.2, random.integers(1, 4)), 400).astype(int)
        tensors = {
            "embeddings": random.standard_normal((lengths.sum(), 24)).astype(np.float32),
            "lengths": lengths,
        }
        if random.random() < 0.3:
            tensors["attend_mask"] = random.random(lengths.sum()) < 0.9
        weights = "true" if random.random() < 0.3 else "false"
        made.append(
            request_bytes(
                HOST,
                f"/v1/attention?model=mha&weights={weights}",
                save(tensors),
                ("Content-Type", "application/x-safetensors"),
            )
        )
    return made


def memory_by_calls(peer: Peer, sent: Sequence[bytes], calls: int) -> list[tuple[int, float]]:
    """Return (calls so far, resident MB), taken every few hundred calls."""
    endpoint, plan = Endpoint("http", HOST, peer.port), Plan(seconds=0.2, warmup_s=0)
    samples, done = [], 0
    while done < calls:
        records = closed_load(endpoint, sent, clients=8, plan=plan)
        assert set(records.outcomes) == {200}
        done += records.offered
        samples.append((done, peer.resident_mb()))
    return samples


def growth_mb(samples: list[tuple[int, float]]) -> float:
    """Return how much more memory the last calls saw than call number `EARLY`."""
    last = samples[-1][0]
    late = statistics.median(mb for calls, mb in samples if calls > last - LATE)
    return late - next(mb for calls, mb in samples if calls >= EARLY)


@pytest.mark.slow
def test_memory_is_flat_over_many_calls_of_random_shapes(layers: Layers) -> None:
    """The runtime's arena, the queue and the codecs all give back what they took."""
    with headwise(layers.repository) as peer:
        samples = memory_by_calls(peer, requests(2000), CALLS)

    assert growth_mb(samples) <= ALLOWED_MB, samples[:: len(samples) // 20]


@pytest.mark.slow
def test_memory_check_sees_a_leak_of_one_kilobyte_a_call(layers: Layers) -> None:
    """The check above can fail."""
    with headwise(layers.repository, argv=("-c", LEAK)) as peer:
        samples = memory_by_calls(peer, requests(2000), CALLS // 3)

    assert growth_mb(samples) > ALLOWED_MB, samples[:: len(samples) // 20]
