"""
Slices of calls, the batches they form, and how their tensors are stacked and split again.

Pure functions over numpy: the order of the queue belongs to `schedule`, threads to
`batcher`.  The cost of a run is its padded tokens and its attention cells
(rows x queries x keys), not its number of calls.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from service.inference.calls import Bools, Call, Floats, Inputs, Lengths, Outputs
from service.layer_config import LayerConfig

RUN_OVERHEAD_TOKENS = 8
"""
The fixed cost of a run, in queries and keys: about 0.2 ms where a token takes 0.05 ms
(bench/NOTES.md, "Batching").
"""

Rows = slice | npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchLimits:
    """Bounds on one batch; a single row may exceed them, since rows are never split."""

    max_tokens: int
    """Padded tokens: rows x the longer of queries and keys."""
    max_cells: int
    """Attention cells: rows x queries x keys, times the heads only in memory."""
    max_waste: float
    """Largest share of padding among the padded queries and keys, from 0 to below 1."""


@dataclass(eq=False, slots=True)
class Slice:
    """Rows of one call that go through the engine in one run."""

    call: Call
    rows: Rows
    count: int
    length: int
    """The longest true query length among the rows."""
    key_length: int
    """The longest true key length among the rows."""
    tokens: int
    """True queries and keys of all rows."""
    is_whole: bool
    """True when the slice is the entire call and none of it is padding."""

    @property
    def kind(self) -> tuple[bool, bool]:
        """Equal for all slices of a batch: one that differs would make the others slower."""
        pair_mask = self.call.inputs.pair_mask
        return self.call.weights, pair_mask is not None and pair_mask.shape[1] > 1


@dataclass(eq=False, slots=True)
class Batch:
    """Slices that share one run, padded to the longest of them."""

    slices: list[Slice]
    rows: int
    length: int
    key_length: int
    tokens: int

    @classmethod
    def of(cls, slice_: Slice) -> "Batch":
        """Return a batch of one slice."""
        return cls([slice_], slice_.count, slice_.length, slice_.key_length, slice_.tokens)

    @property
    def padded_tokens(self) -> int:
        """Queries and keys of all rows, padding included."""
        return self.rows * (self.length + self.key_length)

    @property
    def cost(self) -> int:
        """The cost of the run in tokens: the padded ones plus the fixed cost."""
        return RUN_OVERHEAD_TOKENS + self.padded_tokens

    def try_add(self, slice_: Slice, limits: BatchLimits) -> bool:
        """Add the slice and return True if it is of the same kind and fits; else change nothing."""
        rows = self.rows + slice_.count
        length = max(self.length, slice_.length)
        keys = max(self.key_length, slice_.key_length)
        tokens = self.tokens + slice_.tokens
        is_same_kind = slice_.kind == self.slices[0].kind
        if not is_same_kind or not _fits(rows, length, keys, tokens, limits):
            return False
        self.slices.append(slice_)
        self.rows, self.length, self.key_length, self.tokens = rows, length, keys, tokens
        return True


def slices_of(call: Call, limits: BatchLimits) -> list[Slice]:
    """Split the call into slices that each fit the limits; one slice if the entire call fits."""
    rows, length, _ = call.inputs.embeddings.shape
    keys = call.inputs.key_length
    if call.lengths is None and call.memory_lengths is None:
        step = max(
            1, min(limits.max_tokens // max(length, keys), limits.max_cells // (length * keys))
        )
        return [
            _uniform(call, start, min(start + step, rows), length, keys, is_whole=rows <= step)
            for start in range(0, rows, step)
        ]
    lengths = np.full(rows, length) if call.lengths is None else call.lengths
    key_lengths = np.full(rows, keys) if call.key_lengths is None else call.key_lengths
    # Rows of similar length share a slice, which keeps padding small.
    order = np.lexsort((lengths, key_lengths))
    return [
        Slice(
            call,
            part,
            len(part),
            int(lengths[part].max()),
            int(key_lengths[part].max()),
            int(lengths[part].sum() + key_lengths[part].sum()),
            is_whole=False,
        )
        for part in _parts(order, lengths, key_lengths, limits)
    ]


def stacked_inputs(batch: Batch, layer: LayerConfig) -> Inputs:
    """
    Return the tensors of all slices, stacked in their order, with padding masked out.

    The tensors of a batch that is one entire call are returned without a copy.  Positions are
    there if a call gives some, or if padding would otherwise change the largest of a sequence
    and `layer` depends on that; a call without any then has 0, 1, 2, …
    """
    if len(batch.slices) == 1 and batch.slices[0].is_whole:
        return batch.slices[0].call.inputs
    slices = batch.slices
    embeddings = [_rows(slice_.call.inputs.embeddings, slice_, slice_.length) for slice_ in slices]
    memories = [
        _rows(memory, slice_, slice_.key_length)
        for slice_ in slices
        if (memory := slice_.call.inputs.memory) is not None
    ]
    value_memories = [
        _rows(memory, slice_, slice_.key_length)
        for slice_ in slices
        if (memory := slice_.call.inputs.value_memory) is not None
    ]
    causal = {slice_.call.inputs.causal for slice_ in slices}
    return Inputs(
        _block(embeddings, batch.length),
        _block(memories, batch.key_length) if memories else None,
        _attend_mask(batch),
        _pair_mask(batch, mixed=len(causal) > 1),
        _head_mask(batch),
        causal == {True},
        _block(value_memories, batch.key_length) if value_memories else None,
        _positions(batch, layer) if layer.takes_positions else None,
    )


def outputs_of(batch: Batch, outputs: Outputs) -> Iterator[Outputs]:
    """Yield each slice's share of the run's outputs, as views without padding."""
    for slice_, at in _placed(batch):
        weights, extra = outputs.attention_weights, outputs.extra_weights
        if weights is not None:
            weights = weights[at, :, : slice_.length, : slice_.key_length]
        if extra is not None:
            extra = extra[at, :, : slice_.length]
        yield Outputs(outputs.output[at, : slice_.length], weights, extra)


def _uniform(call: Call, start: int, end: int, length: int, keys: int, *, is_whole: bool) -> Slice:
    count = end - start
    tokens = count * (length + keys)
    return Slice(call, slice(start, end), count, length, keys, tokens, is_whole)


def _fits(rows: int, length: int, keys: int, tokens: int, limits: BatchLimits) -> bool:
    return (
        rows * max(length, keys) <= limits.max_tokens
        and rows * length * keys <= limits.max_cells
        and tokens >= (1 - limits.max_waste) * rows * (length + keys)
    )


def _parts(
    order: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    key_lengths: npt.NDArray[np.int64],
    limits: BatchLimits,
) -> list[npt.NDArray[np.int64]]:
    """Split rows, sorted by length, into parts that fit the limits."""
    parts: list[list[int]] = []
    longest = widest = tokens = 0
    for row in order:
        size, keys = int(lengths[row]), int(key_lengths[row])
        longest, widest, tokens = max(longest, size), max(widest, keys), tokens + size + keys
        if parts and _fits(len(parts[-1]) + 1, longest, widest, tokens, limits):
            parts[-1].append(int(row))
        else:
            parts.append([int(row)])
            longest, widest, tokens = size, keys, size + keys
    return [np.array(part, np.int64) for part in parts]


def _placed(batch: Batch) -> Iterator[tuple[Slice, slice]]:
    """Yield each slice with the rows that it occupies in the batch."""
    start = 0
    for slice_ in batch.slices:
        yield slice_, slice(start, start + slice_.count)
        start += slice_.count


def _rows(tensor: Floats, slice_: Slice, length: int) -> Floats:
    return tensor if slice_.is_whole else tensor[slice_.rows, :length]


def _block(parts: list[Floats], length: int) -> Floats:
    """Return all rows in one array, padded to that length."""
    if all(part.shape[1] == length for part in parts):
        return np.concatenate(parts)
    # Padding must be finite: a masked NaN would still spoil the result.
    rows = sum(map(len, parts))
    block = np.zeros((rows, length, parts[0].shape[-1]), np.float32)
    start = 0
    for part in parts:
        block[start : start + len(part), : part.shape[1]] = part
        start += len(part)
    return block


def _attend_mask(batch: Batch) -> Bools | None:
    padded = batch.tokens < batch.padded_tokens
    if not padded and all(slice_.call.inputs.attend_mask is None for slice_ in batch.slices):
        return None
    mask = np.zeros((batch.rows, batch.key_length), np.bool_)
    for slice_, at in _placed(batch):
        attend, lengths = slice_.call.inputs.attend_mask, slice_.call.key_lengths
        part = mask[at, : slice_.key_length]
        part[:] = True if attend is None else attend[slice_.rows, : slice_.key_length]
        if lengths is not None:
            part &= np.arange(slice_.key_length) < lengths[slice_.rows, None]
    return mask


def _pair_mask(batch: Batch, *, mixed: bool) -> Bools | None:
    """Return the stacked pair masks; `mixed` = some slices are causal and others are not."""
    masks = [slice_.call.inputs.pair_mask for slice_ in batch.slices]
    heads = {mask.shape[1] for mask in masks if mask is not None}
    if not heads and not mixed:
        return None
    shape = (batch.rows, max(heads, default=1), batch.length, batch.key_length)
    mask = np.ones(shape, np.bool_)
    for slice_, at in _placed(batch):
        inputs = slice_.call.inputs
        part = mask[at, :, : slice_.length, : slice_.key_length]
        if inputs.pair_mask is not None:
            rows = slice(None) if inputs.pair_mask.shape[0] == 1 else slice_.rows
            part &= inputs.pair_mask[rows, :, : slice_.length, : slice_.key_length]
        if mixed and inputs.causal:
            part &= np.tri(slice_.length, slice_.key_length, dtype=np.bool_)
    return mask


def _positions(batch: Batch, layer: LayerConfig) -> Lengths | None:
    """Return the positions of all rows, 0 in padding; None = each has 0, 1, 2, …"""
    is_padded = batch.tokens < batch.padded_tokens
    is_needed = is_padded and layer.rotary is not None and layer.rotary.depends_on_length
    if not is_needed and all(slice_.call.inputs.positions is None for slice_ in batch.slices):
        return None
    positions = np.zeros((batch.rows, batch.length), np.int64)
    for slice_, at in _placed(batch):
        given, lengths = slice_.call.inputs.positions, slice_.call.lengths
        part = positions[at, : slice_.length]
        if given is not None:
            part[:] = given[slice_.rows, : slice_.length]
            continue
        part[:] = np.arange(slice_.length)
        if lengths is not None:
            part[part >= lengths[slice_.rows, None]] = 0
    return positions


def _head_mask(batch: Batch) -> Floats | None:
    masks = (slice_.call.inputs.head_mask for slice_ in batch.slices)
    heads = next((mask.shape[-1] for mask in masks if mask is not None), None)
    if heads is None:
        return None
    mask = np.ones((batch.rows, heads), np.float32)
    for slice_, at in _placed(batch):
        factors = slice_.call.inputs.head_mask
        if factors is not None:
            mask[at] = factors if factors.ndim == 1 else factors[slice_.rows]
    return mask
