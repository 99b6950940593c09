"""
Signals while the server is loading.

Importing its libraries takes a second or two.  Until the event loop takes the signals over,
Python would answer Ctrl-C with a traceback, and as a container's first process it would not
be ended by SIGTERM at all: the kernel gives that one no default actions.
"""

import contextlib
import os
import signal
from types import FrameType

from service.host.terminal import follows_terminal, has_terminal


def handle_signals() -> None:
    """
    End at once, in one line and with 128 + its number, on SIGINT and SIGTERM.

    SIGHUP does the same where it means that the terminal was closed; there is nothing to
    reload yet.
    """
    signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)
    ends_with_terminal = follows_terminal()

    def on_hangup(number: int, frame: FrameType | None) -> None:
        if ends_with_terminal and not has_terminal():
            _end(number, frame)

    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, on_hangup)


def _end(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # nobody reads standard error any more
        os.write(2, f"stopped by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)
