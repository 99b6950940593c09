"""
Every way a load test cannot be made.

    LoadTestError
    ├── UsageWrong       what was asked for makes no sense; the message names the option
    ├── Unreachable      nobody answers there
    └── TargetRefused    the server says no to the very first call

All of them end the command with code 2 and one line.
"""


class LoadTestError(Exception):
    """A load test that cannot be made; the message says why."""


class UsageWrong(LoadTestError):
    """What was asked for makes no sense."""


class Unreachable(LoadTestError):
    """No connection could be made, or nothing sensible came over it."""


class TargetRefused(LoadTestError):
    """The server answers, but not to what it is asked."""
