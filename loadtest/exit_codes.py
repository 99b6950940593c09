"""The command's exit codes, which `--help` describes."""

from typing import Final

TRUSTWORTHY: Final = 0
UNTRUSTWORTHY: Final = 1
IMPOSSIBLE: Final = 2
BROKEN: Final = 3
STOPPED: Final = 130
