"""The controlling terminal of this process, and whether its end is the end of the process."""

import os
import signal


def has_terminal() -> bool:
    """Say whether this process has a controlling terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def follows_terminal() -> bool:
    """Say whether SIGHUP may mean that the terminal was closed; under `nohup` it never does."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and has_terminal()
