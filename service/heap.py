"""
How much freed memory the process keeps: some for its next run, little while it rests.

By default glibc gives every larger block back to the system at once and pays
for it with page faults at the next run: 11-18 % at [1, 128] and [8, 128].  The runtime's
own arena avoids that by keeping the most that any shape ever took, for good.
`keep_small_blocks` is between the two (bench/NOTES.md, "memory").
"""

import ctypes
from typing import Final

BLOCK_BYTES: Final = 32 * 2**20
"""Larger blocks go back to the system as soon as they are free."""

KEPT_BYTES: Final = 256 * 2**20
"""The most that is kept of what smaller blocks took."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def keep_small_blocks() -> bool:
    """Return whether the C library keeps freed blocks from now on: see mallopt(3)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # a C library other than glibc
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, BLOCK_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))


def give_back() -> bool:
    """Return whether freed memory went back to the system: see malloc_trim(3)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
