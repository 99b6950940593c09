"""
Blocks of sequences of different lengths without their padding, on their way between processes.

A block may be thirty times as large as the sequences in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from service.inference.calls import Floats, Lengths


@dataclass(frozen=True)
class Unpadded:
    """A block [B, ...] of sequences of different lengths, without its padding."""

    shape: tuple[int, ...]
    axis: int
    """The first axis that has padding."""
    sizes: list[tuple[int, ...]]
    """Of each row, how much of that axis and those after it is no padding."""
    values: npt.NDArray[Any]

    def padded(self) -> npt.NDArray[Any]:
        """Return the block as it was."""
        block = np.empty(self.shape, self.values.dtype)  # not `zeros`: see `validation.pad`
        start = 0
        for row, place in zip(block, self.places(), strict=True):
            part = row[place]
            row[...] = 0
            part[...] = self.values[start : start + part.size].reshape(part.shape)
            start += part.size
        return block

    def places(self) -> Iterator[tuple[slice, ...]]:
        """Give the part of each row that is no padding."""
        for sizes in self.sizes:
            yield (slice(None),) * (self.axis - 1) + tuple(map(slice, sizes))


def sizes_of(block: Floats, lengths: Lengths | None) -> list[int]:
    """Return the true length of each row of a block [B, S, ...]."""
    return [block.shape[1]] * len(block) if lengths is None else [int(n) for n in lengths]


def unpadded(
    block: npt.NDArray[Any] | None, sizes: list[tuple[int, ...]], axis: int = 1
) -> npt.NDArray[Any] | Unpadded | None:
    """Return a block without its padding; as it is where it has none, or not of these sizes."""
    if block is None or block.ndim < axis + len(sizes[:1]) or len(block) != len(sizes):
        return block
    whole = block.shape[axis : axis + len(sizes[0])]
    are_within = all(n <= m for size in sizes for n, m in zip(size, whole, strict=True))
    if not are_within or all(size == whole for size in sizes):
        return block
    empty = Unpadded(block.shape, axis, sizes, np.empty(0, block.dtype))
    parts = [row[place].reshape(-1) for row, place in zip(block, empty.places(), strict=True)]
    return replace(empty, values=np.concatenate(parts))
