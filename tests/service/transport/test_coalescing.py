"""The transport that watches what its caller takes."""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.transport.coalescing import CoalescingTransport, Delivery

LOOKS = 4
"""A connection is looked at so often within its time limit."""


class Transport:
    """A transport whose other side takes only what the test says."""

    def __init__(self, end: socket.socket) -> None:
        self.buffered = 0
        self.is_aborted = False
        self._end = end

    def get_extra_info(self, name: str) -> Any:
        """Pose as TLS: everything goes through this transport."""
        return {"socket": self._end, "sslcontext": object()}[name]

    def get_write_buffer_size(self) -> int:
        """Return what was not taken."""
        return self.buffered

    def set_write_buffer_limits(self, *, high: int, low: int) -> None:
        """Have none."""

    def is_closing(self) -> bool:
        """Stay open."""
        return False

    def writelines(self, pieces: list[bytes]) -> None:
        """Keep them."""
        self.buffered += sum(map(len, pieces))

    def abort(self) -> None:
        """Remember it."""
        self.is_aborted = True


class Loop:
    """A loop whose one timer rings when the test says so."""

    def __init__(self) -> None:
        self.timer: Callable[[], None] | None = None

    def call_later(self, seconds: float, call: Callable[[], None]) -> "Loop":
        """Set the timer; there is never more than one."""
        assert self.timer is None
        self.timer = call
        return self

    def cancel(self) -> None:
        """Take it back."""
        self.timer = None

    def ring(self) -> bool:
        """Ring, if it is set."""
        timer, self.timer = self.timer, None
        if timer is not None:
            timer()
        return timer is not None


@pytest.fixture(scope="module")
def end() -> Iterator[socket.socket]:
    """Return one end of a connection."""
    one, other = socket.socketpair()
    with one, other:
        yield one


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 1000)),
        st.tuples(st.just("take"), st.integers(1, 1000)),
        st.tuples(st.just("look"), st.just(0)),
    ),
    max_size=40,
)


@given(EVENTS)
def test_caller_is_cut_off_when_it_took_nothing_for_so_many_looks_and_never_else(
    end: socket.socket, events: list[tuple[str, int]]
) -> None:
    """In any order of writing, taking and looking; what became of the bytes is always told."""
    transport, loop = Transport(end), Loop()
    output = CoalescingTransport(transport, loop, answer_timeout_s=1)  # type: ignore[arg-type]
    told: list[Delivery] = []
    writes = idle_looks = 0
    for what, size in events:
        if transport.is_aborted:
            break
        if what == "write":
            idle_looks = idle_looks if transport.buffered else 0
            output.send(bytes(size))
            output.when_delivered(told.append)
            writes += 1
        elif what == "take" and transport.buffered:
            transport.buffered -= min(size, transport.buffered)
            idle_looks = -1  # the next look sees it
            if not transport.buffered:
                output.on_drained()
        elif what == "look" and loop.ring():
            idle_looks = max(0, idle_looks + 1)
            assert transport.is_aborted == (idle_looks == LOOKS)
        assert output.delivery().unsent_bytes == transport.buffered
        assert transport.buffered == 0 or transport.is_aborted or loop.timer is not None

    left = transport.buffered
    output.on_lost()

    assert len(told) == writes
    lost = output.delivery()
    assert lost.is_stalled == transport.is_aborted
    assert lost.is_whole == (left == 0)
    # Of a caller that leaves, what it took since the last look is not known.
    assert lost.unsent_bytes == left or (lost.unsent_bytes > left and not lost.is_stalled)
    assert loop.timer is None
