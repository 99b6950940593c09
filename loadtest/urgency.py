"""What a load asks of the operating system: exact timers, precedence, open files."""

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator
from typing import Final

from loadtest.errors import Unreachable

_PR_SET_TIMERSLACK: Final = 29


def sharpen_timers() -> None:
    """Have Linux wake this thread when it is to be woken, not up to 50 microseconds later."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


@contextlib.contextmanager
def ahead_of_others() -> Iterator[None]:
    """
    Have this thread run before all that is not as urgent, where the system lets it: sched(7).

    What is due must be sent, whoever computes; it takes little of a core.  What the thread
    starts meanwhile is as urgent as it was before.
    """
    with contextlib.ExitStack() as after:
        with contextlib.suppress(OSError, AttributeError):  # no right to it; no Linux
            before, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
            after.callback(os.sched_setscheduler, 0, before, parameter)
        yield


def allow_files(count: int) -> None:
    """
    Allow this process so many open files, where the system does.

    Raises:
        Unreachable: it does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise Unreachable(f"--connections: the system allows {hard} open files, needs {count}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
