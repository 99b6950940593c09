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


def leader_waits() -> bool:
    """
    Say whether the leader of this session is another process that is still there.

    A leader that waits for this process, as `make` does where it is what a terminal window
    runs, is told that the window was closed, and does not pass it on.
    """
    leader = os.getsid(0)
    return leader != os.getpid() and os.path.exists(f"/proc/{leader}")


def follows_terminal() -> bool:
    """Say whether SIGHUP may mean that the terminal was closed; under `nohup` it never does."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and has_terminal()
