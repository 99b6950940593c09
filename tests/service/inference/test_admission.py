"""How much may wait, and when a caller that is refused should come back."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import Draining, QueueFull
from service.inference.batches import Batch, BatchLimits, slices_of
from service.inference.calls import Call, Inputs
from service.inference.schedule import Admission, QueueLimits, Throughput

LIMITS = BatchLimits(10**9, 10**9, 0.999)


def batch_of(rows: int, length: int) -> Batch:
    """Return a batch of one call of equal lengths."""
    [slice_] = slices_of(Call(Inputs(np.zeros((rows, length, 1), np.float32))), LIMITS)
    return Batch.of(slice_)


def test_throughput_is_a_moving_average_of_runs() -> None:
    """The first run counts in full, each later one for a fifth."""
    throughput = Throughput()
    batch = batch_of(4, 3)  # 24 tokens, a cost of 32

    before = throughput.seconds_of(batch), throughput.retry_after_s(1000)
    throughput.record(batch, 2.0)
    once = throughput.seconds_of(batch), throughput.retry_after_s(24), throughput.retry_after_s(25)
    throughput.record(batch, 1.0)

    assert before == (math.inf, 1)
    assert once == (2.0, 2, 3)
    assert throughput.tokens_per_s == pytest.approx(12 + 0.2 * 12)
    assert throughput.seconds_of(batch) == pytest.approx(32 / (16 + 0.2 * 16))


@given(tokens=st.integers(0, 10**12), seconds=st.floats(0, 1e6))
def test_retry_after_is_between_a_second_and_a_minute(tokens: int, seconds: float) -> None:
    """Whatever was measured, even a run of no time at all."""
    throughput = Throughput()
    throughput.record(batch_of(1, 1), seconds)

    assert 1 <= throughput.retry_after_s(tokens) <= 60


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((3, 99), "queue: at most 3 calls may be in it, and so many are"),
        ((99, 6), "queue: at most 6 tokens may be in it: it holds 6, this call has 2"),
    ],
    ids=["calls", "tokens"],
)
def test_admission_beyond_a_limit_is_refused_and_counts_nothing(
    limits: tuple[int, int], message: str
) -> None:
    """The refusal says which limit; what is admitted stays so, and room that is freed is used."""
    admission = Admission(QueueLimits(*limits, timeout_s=30), Throughput(1.5, 1.0))
    for _ in range(3):
        admission.add(2)

    with pytest.raises(QueueFull, match=message) as caught:
        admission.add(2)

    assert caught.value.retry_after_s == 4  # 6 tokens at 1.5 a second
    assert (admission.calls, admission.tokens) == (3, 6)
    admission.remove(2)
    admission.add(2)


def test_admission_of_an_empty_queue_takes_a_call_of_any_size() -> None:
    """A call within the limits of one call always has its turn."""
    admission = Admission(QueueLimits(9, 1, timeout_s=30), Throughput())

    admission.add(6)

    assert (admission.calls, admission.tokens) == (1, 6)


def test_admission_after_close_is_draining_even_when_full() -> None:
    """A caller is sent to another server, not asked to retry here."""
    admission = Admission(QueueLimits(1, 1, timeout_s=30), Throughput())
    admission.add(1)

    admission.close()

    with pytest.raises(Draining, match="the server is stopping") as caught:
        admission.check()
    assert caught.value.retry_after_s == 1
