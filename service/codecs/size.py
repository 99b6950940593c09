"""How much there is to read or write, which decides where that is done and what it takes."""

from dataclasses import dataclass
from typing import Final

_INLINE_JSON_BYTES: Final = 320 * 1024
_INLINE_RAW_BYTES: Final = 4 * 2**20
"""
Up to here the work is done at once: 0.5 to 1 ms.  As much in a thread would hold the
interpreter's lock for as long, and cost two changes of threads besides.
"""

JSON_PER_RAW_BYTE: Final = 5
"""An FP32 number takes four bytes, and some twenty as JSON."""

PROCESS_JSON_BYTES: Final = 4 * 2**20
"""From here JSON is read in another process: 4 MiB hold the lock for about 15 ms."""

MEMORY_PER_JSON_BYTE: Final = 6
MEMORY_PER_RAW_BYTE: Final = 3
"""
What a body takes for each of its bytes, from its receipt to its tensors: 5.3 was measured for
JSON with nine digits a number, 3.5 with 17.  Shorter numbers take up to 20; how much it really
is, is looked at while a large body is decoded.
"""


@dataclass(frozen=True)
class Size:
    """How much there is to read or write: JSON takes a hundred times as long as raw tensors."""

    json_bytes: int = 0
    raw_bytes: int = 0

    @property
    def is_small(self) -> bool:
        """True when the work is done at once."""
        return self.json_bytes <= _INLINE_JSON_BYTES and self.raw_bytes <= _INLINE_RAW_BYTES

    @property
    def memory_bytes(self) -> int:
        """About how much memory reading a body of this size takes, itself included."""
        return MEMORY_PER_JSON_BYTE * self.json_bytes + MEMORY_PER_RAW_BYTE * self.raw_bytes
