"""
Which calls share a run, and how their tensors are put together and taken apart.

Pure functions over numpy; time, threads and queues are the batcher's.  A run
costs its padded tokens and its attention cells (rows x queries x keys), not
its number of calls.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from service.calls import Bools, Call, Floats, Inputs, Outputs

RUN_TOKENS = 8
"""
What starting a run is worth, in queries and keys: about 0.2 ms where a token takes 0.05 ms
(bench/NOTES.md, "joining").
"""

Rows = slice | npt.NDArray[np.int64]


@dataclass(frozen=True)
class RunLimits:
    """What one run may cost; a single row may exceed it, since rows are never split."""

    max_tokens: int
    """Padded tokens: rows x the longer of queries and keys."""
    max_cells: int
    """Attention cells: rows x queries x keys, times the heads only in memory."""
    max_waste: float
    """The share of padding among the padded tokens of queries and keys, from 0 to below 1."""


@dataclass(eq=False, slots=True)
class Piece:
    """Rows of one call that go through the engine together."""

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
    """True when the piece is its call as it stands, with nothing to hide."""

    @property
    def kind(self) -> tuple[bool, bool]:
        """What must be equal among the pieces of one run: a difference would cost the others."""
        pair_mask = self.call.inputs.pair_mask
        return self.call.weights, pair_mask is not None and pair_mask.shape[1] > 1


@dataclass(eq=False, slots=True)
class Group:
    """Pieces that share one run, padded to the longest."""

    pieces: list[Piece]
    rows: int
    length: int
    key_length: int
    tokens: int

    @classmethod
    def of(cls, piece: Piece) -> "Group":
        """Return a run of one piece."""
        return cls([piece], piece.count, piece.length, piece.key_length, piece.tokens)

    @property
    def padded_tokens(self) -> int:
        """Queries and keys of all rows, padding included."""
        return self.rows * (self.length + self.key_length)

    @property
    def cost(self) -> int:
        """What the run takes, in tokens: its own and those that starting it is worth."""
        return RUN_TOKENS + self.padded_tokens

    def takes(self, piece: Piece, limits: RunLimits) -> bool:
        """Take one more piece in if it is of the same kind and fits; say whether."""
        rows = self.rows + piece.count
        length = max(self.length, piece.length)
        keys = max(self.key_length, piece.key_length)
        tokens = self.tokens + piece.tokens
        is_of_kind = piece.kind == self.pieces[0].kind
        if not is_of_kind or not _fits(rows, length, keys, tokens, limits):
            return False
        self.pieces.append(piece)
        self.rows, self.length, self.key_length, self.tokens = rows, length, keys, tokens
        return True


def pieces_of(call: Call, limits: RunLimits) -> list[Piece]:
    """Return the call in pieces that each fit a run: one, if the whole does."""
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
    # Neighbours in length share a piece, so that little is padded.
    order = np.lexsort((lengths, key_lengths))
    return [
        Piece(
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


def joined_inputs(group: Group) -> Inputs:
    """
    Return the group's batch, in the order of its pieces, padding hidden from every query.

    A piece that is a whole call and alone is passed on without a copy.
    """
    if len(group.pieces) == 1 and group.pieces[0].is_whole:
        return group.pieces[0].call.inputs
    pieces = group.pieces
    embeddings = [_rows(piece.call.inputs.embeddings, piece, piece.length) for piece in pieces]
    memories = [
        _rows(memory, piece, piece.key_length)
        for piece in pieces
        if (memory := piece.call.inputs.memory) is not None
    ]
    causal = {piece.call.inputs.causal for piece in pieces}
    return Inputs(
        _block(embeddings, group.length),
        _block(memories, group.key_length) if memories else None,
        _attend_mask(group),
        _pair_mask(group, mixed=len(causal) > 1),
        _head_mask(group),
        causal == {True},
    )


def outputs_of(group: Group, outputs: Outputs) -> Iterator[Outputs]:
    """Give each piece its own part of the run's outputs, as views, padding cut off."""
    for piece, at in _placed(group):
        weights = outputs.attention_weights
        if weights is not None:
            weights = weights[at, :, : piece.length, : piece.key_length]
        yield Outputs(outputs.output[at, : piece.length], weights)


def _uniform(call: Call, start: int, end: int, length: int, keys: int, *, is_whole: bool) -> Piece:
    count = end - start
    tokens = count * (length + keys)
    return Piece(call, slice(start, end), count, length, keys, tokens, is_whole)


def _fits(rows: int, length: int, keys: int, tokens: int, limits: RunLimits) -> bool:
    return (
        rows * max(length, keys) <= limits.max_tokens
        and rows * length * keys <= limits.max_cells
        and tokens >= (1 - limits.max_waste) * rows * (length + keys)
    )


def _parts(
    order: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    key_lengths: npt.NDArray[np.int64],
    limits: RunLimits,
) -> list[npt.NDArray[np.int64]]:
    """Cut rows that are sorted by length into runs that fit."""
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


def _placed(group: Group) -> Iterator[tuple[Piece, slice]]:
    """Give each piece with the rows of the run that are its own."""
    start = 0
    for piece in group.pieces:
        yield piece, slice(start, start + piece.count)
        start += piece.count


def _rows(tensor: Floats, piece: Piece, length: int) -> Floats:
    return tensor if piece.is_whole else tensor[piece.rows, :length]


def _block(parts: list[Floats], length: int) -> Floats:
    """Return all rows, each padded to that length."""
    if all(part.shape[1] == length for part in parts):
        return np.concatenate(parts)
    # Zeros: padding that is not finite would spoil even what it is hidden from.
    rows = sum(map(len, parts))
    block = np.zeros((rows, length, parts[0].shape[-1]), np.float32)
    start = 0
    for part in parts:
        block[start : start + len(part), : part.shape[1]] = part
        start += len(part)
    return block


def _attend_mask(group: Group) -> Bools | None:
    padded = group.tokens < group.padded_tokens
    if not padded and all(piece.call.inputs.attend_mask is None for piece in group.pieces):
        return None
    mask = np.zeros((group.rows, group.key_length), np.bool_)
    for piece, at in _placed(group):
        own, lengths = piece.call.inputs.attend_mask, piece.call.key_lengths
        part = mask[at, : piece.key_length]
        part[:] = True if own is None else own[piece.rows, : piece.key_length]
        if lengths is not None:
            part &= np.arange(piece.key_length) < lengths[piece.rows, None]
    return mask


def _pair_mask(group: Group, *, mixed: bool) -> Bools | None:
    """Return the full masks together; `mixed` = some pieces are causal and some are not."""
    owned = [piece.call.inputs.pair_mask for piece in group.pieces]
    heads = {mask.shape[1] for mask in owned if mask is not None}
    if not heads and not mixed:
        return None
    shape = (group.rows, max(heads, default=1), group.length, group.key_length)
    mask = np.ones(shape, np.bool_)
    for piece, at in _placed(group):
        inputs = piece.call.inputs
        part = mask[at, :, : piece.length, : piece.key_length]
        if inputs.pair_mask is not None:
            rows = slice(None) if inputs.pair_mask.shape[0] == 1 else piece.rows
            part &= inputs.pair_mask[rows, :, : piece.length, : piece.key_length]
        if mixed and inputs.causal:
            part &= np.tri(piece.length, piece.key_length, dtype=np.bool_)
    return mask


def _head_mask(group: Group) -> Floats | None:
    owned = (piece.call.inputs.head_mask for piece in group.pieces)
    heads = next((mask.shape[-1] for mask in owned if mask is not None), None)
    if heads is None:
        return None
    mask = np.ones((group.rows, heads), np.float32)
    for piece, at in _placed(group):
        own = piece.call.inputs.head_mask
        if own is not None:
            mask[at] = own if own.ndim == 1 else own[piece.rows]
    return mask
