"""The memory that bodies under way may take together."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import QueueFull, TooLarge
from service.transport.body_memory import FREE_BYTES, BodyMemory

LIMIT = 10**6

SIZES = st.integers(0, 2 * LIMIT)


@pytest.mark.fault("A6")
@given(st.lists(st.lists(SIZES, min_size=1, max_size=4), max_size=8))
def test_bodies_hold_no_more_than_their_limit_and_nothing_afterwards(
    bodies: list[list[int]],
) -> None:
    """However they grow; only small ones may come on top of it."""
    memory = BodyMemory(LIMIT)
    with contextlib.ExitStack() as stack:
        for sizes in bodies:
            body = stack.enter_context(memory.held())
            for size in sizes:
                before = memory.bytes_held()
                try:
                    body.hold(size)
                except (QueueFull, TooLarge) as error:
                    refused = type(error), size > FREE_BYTES, memory.bytes_held()
                    assert refused == (TooLarge if size > LIMIT else QueueFull, True, before)
            assert memory.bytes_held() <= LIMIT + FREE_BYTES * len(bodies)
    assert memory.bytes_held() == 0


def test_body_that_is_over_holds_nothing_any_more() -> None:
    """A thread that still decompresses it may say so a moment later."""
    memory = BodyMemory(LIMIT)
    with memory.held() as body:
        body.hold(1000)
    body.hold(2000)

    assert memory.bytes_held() == 0
