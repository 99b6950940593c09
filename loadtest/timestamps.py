"""The kernel's moments of arrival, and whether this process's clock agrees with them."""

import socket
import struct
import time
from typing import Final

SO_TIMESTAMPNS: Final = 35
"""Of Linux: what is received comes with the moment when it came."""
_MOMENT: Final = struct.Struct("@ll")
"""Seconds and nanoseconds of the wall clock."""
ROOM: Final = socket.CMSG_SPACE(_MOMENT.size)
TOLERANCE_S: Final = 1e-4
"""Clocks that differ by less do no harm worth a word."""
_LIMIT_S: Final = 1.0


def moment_in(told: list[tuple[int, int, bytes]]) -> float | None:
    """Return the moment, by the wall clock, that came with what was received; None = none did."""
    for _, kind, value in told:
        if kind == SO_TIMESTAMPNS and len(value) == _MOMENT.size:
            seconds, nanoseconds = _MOMENT.unpack(value)
            return float(seconds + nanoseconds / 1e9)
    return None


def clock_flaw() -> str | None:
    """
    Return how this process's wall clock differs from the kernel's; None where it does not.

    A packet to itself tells: it came after it was sent and before it was read.  None also
    where the kernel stamps nothing.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            own.bind(("127.0.0.1", 0))
            own.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            own.settimeout(_LIMIT_S)
            before = time.time()
            own.sendto(b"?", own.getsockname())
            _, told, _, _ = own.recvmsg(1, ROOM)
            after = time.time()
    except OSError:
        return None
    moment = moment_in(told)
    if moment is None or before - TOLERANCE_S <= moment <= after + TOLERANCE_S:
        return None
    ahead_s = before - moment if moment < before else after - moment
    return (
        f"the clock of this process is {abs(ahead_s) * 1e3:.4g} ms"
        f" {'ahead of' if ahead_s > 0 else 'behind'} the kernel's"
    )
