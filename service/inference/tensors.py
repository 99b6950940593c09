"""The tensors of one call as a codec read them, before they are checked against a layer."""

from dataclasses import dataclass, field, replace
from typing import Any

from service.inference.calls import Bools, Floats, Lengths
from service.inference.unpadded import Unpadded, sizes_of, unpadded


@dataclass(eq=False, slots=True)
class Tensors:
    """
    What a codec read, dense: ragged sequences are padded, with their true lengths beside.

    Shapes: as `calls.Inputs`, not yet checked; lengths are None when all are equal.
    """

    embeddings: Floats
    memory: Floats | None = None
    attend_mask: Bools | None = None
    pair_mask: Bools | None = None
    head_mask: Floats | None = None
    lengths: Lengths | None = None
    memory_lengths: Lengths | None = None
    value_memory: Floats | None = None
    positions: Lengths | None = None
    is_single: bool = field(default=False, init=False)
    """One sequence, given one rank lower: messages show shapes as they came."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Go to another process without the padding, which may be far more than the rest."""
        queries = sizes_of(self.embeddings, self.lengths)
        keys = queries if self.memory is None else sizes_of(self.memory, self.memory_lengths)
        blocks = (
            unpadded(self.embeddings, [(length,) for length in queries]),
            unpadded(self.memory, [(length,) for length in keys]),
            unpadded(self.attend_mask, [(length,) for length in keys]),
            unpadded(self.pair_mask, list(zip(queries, keys, strict=False)), axis=2),
            self.head_mask,
        )
        others = (
            unpadded(self.value_memory, [(length,) for length in keys]),
            unpadded(self.positions, [(length,) for length in queries]),
        )
        return _tensors_again, (*blocks, self.lengths, self.memory_lengths, *others)

    @property
    def float_bytes(self) -> int:
        """The bytes of embeddings and memories."""
        size = self.embeddings.nbytes + (0 if self.memory is None else self.memory.nbytes)
        return size if self.value_memory is None else size + self.value_memory.nbytes


def add_batch_axis(tensors: Tensors) -> Tensors:
    """Return the tensors of one sequence, given one rank lower, as a batch of one."""
    memory, attend_mask, pair_mask = tensors.memory, tensors.attend_mask, tensors.pair_mask
    value_memory, positions = tensors.value_memory, tensors.positions
    batch = replace(
        tensors,
        embeddings=tensors.embeddings[None],
        memory=None if memory is None else memory[None],
        attend_mask=None if attend_mask is None else attend_mask[None],
        pair_mask=None if pair_mask is None else pair_mask[None],
        value_memory=None if value_memory is None else value_memory[None],
        positions=None if positions is None else positions[None],
    )
    batch.is_single = True
    return batch


def _tensors_again(*parts: Any) -> Tensors:
    """Return tensors that came from another process."""
    return Tensors(*[p.padded() if isinstance(p, Unpadded) else p for p in parts])
