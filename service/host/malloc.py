"""
How much freed memory the process keeps: much while it works, little while it rests.

By default glibc gives every larger block back to the system at once, and the next run
pays for it with page faults: 11-18 % at [1, 128] and [8, 128], half as much again at
[1, 2048].  The runtime's own arena avoids that by keeping the most that any shape ever
took, for good.  Here blocks are kept while runs follow each other (`keep_blocks`), and go
back when none has followed for a while (`give_back`); see bench/NOTES.md, "memory".
"""

import ctypes
from typing import Final

KEPT_BYTES: Final = 512 * 2**20
"""The most that is kept at once by default; what is freed above it goes back to the system."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_MAX: Final = -4
_M_ARENA_MAX: Final = -8


def keep_blocks(most_bytes: int = KEPT_BYTES) -> bool:
    """Return whether the C library keeps freed blocks, so many bytes at most: see mallopt(3)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # a C library other than glibc
        return False
    # A mapping of its own would be given back as soon as the block in it is free, and so
    # would the heaps of 64 MiB that each thread takes its blocks from: here all share one.
    wanted = {_M_MMAP_MAX: 0, _M_ARENA_MAX: 1, _M_TRIM_THRESHOLD: most_bytes}
    return all(mallopt(option, value) for option, value in wanted.items())


def give_back() -> bool:
    """Return whether freed memory went back to the system: see malloc_trim(3)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
