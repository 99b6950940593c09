"""
How much memory this process may hold.

Inside a container the machine's own size says little: whoever passes the limit of
its control group (v1 or v2) is ended, however much is free elsewhere.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from service.host import cgroup

_FILES = ("memory.max", "memory.limit_in_bytes")
"""Where the limit stands, in v2 and in v1."""


def memory_limit(*, root: Path = cgroup.ROOT, membership: Path = cgroup.MEMBERSHIP) -> int:
    """Return the tightest limit over this process, in bytes; without one, the machine's memory."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_limits(root, membership)])


def _limits(root: Path, membership: Path) -> Iterator[int]:
    for group in cgroup.groups("memory", root=root, membership=membership):
        for file in _FILES:
            text = cgroup.read(group / file)
            if text.isdecimal():  # else "max", or no such file
                yield int(text)
