"""
Every check on a call's tensors, whatever format they came in.

Axes: B batch, S query length, T key length (= S for self-attention),
E embed_dim, M memory width, H heads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from service.contract import ATTEND_MASK, EMBEDDINGS, HEAD_MASK, MEMORY, PAIR_MASK, LayerConfig
from service.errors import InvalidInput, TooLarge
from service.inference.calls import Bools, Call, Floats, Inputs, Lengths, Options
from service.inference.unpadded import Unpadded, sizes_of, unpadded


@dataclass(frozen=True)
class Limits:
    """What one call may ask for, and whether NaN and infinity may come in."""

    max_rows: int
    max_length: int
    max_tokens: int
    max_answer_bytes: int
    refuse_nonfinite: bool = False


@dataclass(eq=False, slots=True)
class Tensors:
    """
    What a codec read, dense: ragged sequences are padded, with their true lengths beside.

    Shapes: as `engine.Inputs`, not yet checked; lengths are None when all are equal.
    """

    embeddings: Floats
    memory: Floats | None = None
    attend_mask: Bools | None = None
    pair_mask: Bools | None = None
    head_mask: Floats | None = None
    lengths: Lengths | None = None
    memory_lengths: Lengths | None = None
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
        return _tensors_again, (*blocks, self.lengths, self.memory_lengths)

    @property
    def float_bytes(self) -> int:
        """The bytes of embeddings and memory."""
        return self.embeddings.nbytes + (0 if self.memory is None else self.memory.nbytes)


def _tensors_again(*parts: Any) -> Tensors:
    """Return tensors that came from another process."""
    return Tensors(*[p.padded() if isinstance(p, Unpadded) else p for p in parts])


def to_call(tensors: Tensors, options: Options, layer: LayerConfig, limits: Limits) -> Call:
    """
    Return the call, every shape checked against the layer and the limits.

    Raises:
        InvalidInput: a tensor is missing, unwanted or of the wrong shape.
        TooLarge: above a limit.
    """
    single = tensors.is_single
    _check_shape(EMBEDDINGS, tensors.embeddings, ("B", "S", layer.embed_dim), single=single)
    rows, length, _ = tensors.embeddings.shape
    _check_limits(rows, length, limits)
    keys = _check_memory(tensors, layer, limits)
    padded = rows * (length + keys)
    if padded > limits.max_tokens:
        raise TooLarge(
            f"call: at most {limits.max_tokens} queries and keys with their padding,"
            f" got {rows} sequences of {length} and {keys}: {padded}; send fewer at once"
        )
    if options.causal and layer.is_cross:
        raise InvalidInput("causal: expected false for a cross-attention layer, got true")
    if tensors.attend_mask is not None:
        _check_shape(ATTEND_MASK, tensors.attend_mask, (rows, keys), single=single)
    if tensors.pair_mask is not None:
        _check_pair_mask(tensors, tensors.pair_mask, layer.num_heads, keys)
    head_mask = tensors.head_mask
    if head_mask is not None:
        expected = (layer.num_heads,) if head_mask.ndim == 1 else (rows, layer.num_heads)
        if head_mask.shape != expected:
            raise InvalidInput(
                f"{HEAD_MASK}: expected [{layer.num_heads}] or [{rows}, {layer.num_heads}],"
                f" got {list(head_mask.shape)}"
            )
    _check_heads(options.heads, layer)
    _check_answer(rows, length, keys, layer, options, limits)
    if limits.refuse_nonfinite:
        _check_finite(tensors)
    return unchecked_call(tensors, options)


def answer_bytes(call: Call, layer: LayerConfig) -> int:
    """Return how much memory the answer to a checked call takes, in FP32."""
    rows, length, _ = call.inputs.embeddings.shape
    keys = call.inputs.key_length
    return _answer_bytes(rows, length, keys, layer, weights=call.weights, heads=call.heads)


def unchecked_call(tensors: Tensors, options: Options) -> Call:
    """Return the call as `to_call` does, where one of the same shapes and options has passed."""
    inputs = Inputs(
        tensors.embeddings,
        tensors.memory,
        tensors.attend_mask,
        tensors.pair_mask,
        tensors.head_mask,
        options.causal,
    )
    return Call(
        inputs,
        tensors.lengths,
        tensors.memory_lengths,
        weights=options.weights,
        heads=options.heads,
        priority=options.priority,
        timeout_s=options.timeout_s,
    )


def pad(
    packed: Floats, lengths: Sequence[int], name: str, limits: Limits
) -> tuple[Floats, Lengths | None]:
    """
    Return sequences that lie one after the other [sum of lengths, E] as a block [B, S, E].

    Beyond a sequence's own length the block holds zeros.  The lengths come back
    as an array, or None when all are equal (then nothing is copied).

    Raises:
        TooLarge: the block would be above a limit; it is not made.
    """
    width, length = packed.shape[-1], max(lengths)
    if len(set(lengths)) == 1:
        return packed.reshape(len(lengths), length, width), None
    check_size(name, len(lengths), length, limits)
    # Not `zeros`: it holds the interpreter's lock while it clears memory that is used again.
    block = np.empty((len(lengths), length, width), packed.dtype)
    start = 0
    for row, own in zip(block, lengths, strict=True):
        row[:own] = packed[start : start + own]
        row[own:] = 0
        start += own
    return block, np.array(lengths, np.int64)


def pad_last(parts: Sequence[Bools], name: str, limits: Limits) -> Bools:
    """
    Return equally ranked arrays stacked, each padded with false to the largest of all.

    Raises:
        TooLarge: the stack would take more than the largest answer.
    """
    shape = tuple(max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True))
    size = len(parts) * math.prod(shape)
    if size > limits.max_answer_bytes:
        raise TooLarge(
            f"{name}: at most {limits.max_answer_bytes} bytes with its padding, got {size}"
        )
    block = np.empty((len(parts), *shape), np.bool_)  # not `zeros`: see `pad`
    for row, part in zip(block, parts, strict=True):
        row[...] = False
        row[tuple(slice(size) for size in part.shape)] = part
    return block


def check_size(name: str, rows: int, length: int, limits: Limits) -> None:
    """
    Return when a block of so many sequences may be made.

    Raises:
        TooLarge: too many sequences, too long ones, or too many tokens together.
    """
    if rows > limits.max_rows:
        raise TooLarge(
            f"{name}: at most {limits.max_rows} sequences, got {rows}; send fewer at once"
        )
    if length > limits.max_length:
        raise TooLarge(f"{name}: at most {limits.max_length} tokens long, got {length}")
    if rows * length > limits.max_tokens:
        raise TooLarge(
            f"{name}: at most {limits.max_tokens} tokens with their padding,"
            f" got {rows} sequences of {length}; send fewer at once"
        )


def add_batch_axis(tensors: Tensors) -> Tensors:
    """Return the tensors of one sequence, given one rank lower, as a batch of one."""
    memory, attend_mask, pair_mask = tensors.memory, tensors.attend_mask, tensors.pair_mask
    batch = replace(
        tensors,
        embeddings=tensors.embeddings[None],
        memory=None if memory is None else memory[None],
        attend_mask=None if attend_mask is None else attend_mask[None],
        pair_mask=None if pair_mask is None else pair_mask[None],
    )
    batch.is_single = True
    return batch


def _check_shape(
    name: str, tensor: Floats | Bools, expected: tuple[int | str, ...], *, single: bool
) -> None:
    """Refuse another shape; it is shown as it came, so for a single sequence without [B]."""
    fits = tensor.ndim == len(expected) and all(
        isinstance(want, str) or have == want
        for have, want in zip(tensor.shape, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join(str(axis) for axis in expected[single:])
        raise InvalidInput(f"{name}: expected [{wanted}], got {list(tensor.shape[single:])}")


def _check_limits(rows: int, length: int, limits: Limits) -> None:
    if rows < 1 or length < 1:
        raise InvalidInput(
            f"{EMBEDDINGS}: expected at least one sequence of at least one token,"
            f" got {rows} of {length}"
        )
    check_size(EMBEDDINGS, rows, length, limits)


def _check_memory(tensors: Tensors, layer: LayerConfig, limits: Limits) -> int:
    """Return T."""
    rows, length, _ = tensors.embeddings.shape
    if layer.memory_dim is None:
        if tensors.memory is not None:
            raise InvalidInput(f"{MEMORY}: expected none for a self-attention layer, got one")
        return int(length)
    if tensors.memory is None:
        raise InvalidInput(
            f"{MEMORY}: expected [B, T, {layer.memory_dim}] for a cross-attention layer, got none"
        )
    expected = (rows, "T", layer.memory_dim)
    _check_shape(MEMORY, tensors.memory, expected, single=tensors.is_single)
    keys = tensors.memory.shape[1]
    if keys < 1:
        raise InvalidInput(f"{MEMORY}: expected at least one key, got none")
    check_size(MEMORY, rows, keys, limits)
    return int(keys)


def _check_pair_mask(tensors: Tensors, mask: Bools, heads: int, keys: int) -> None:
    rows, length, _ = tensors.embeddings.shape
    single = tensors.is_single
    fits = mask.ndim == 4 and all(
        have in want
        for have, want in zip(mask.shape, ({1, rows}, {1, heads}, {length}, {keys}), strict=True)
    )
    if not fits:
        sizes = [_or_one(rows), _or_one(heads), str(length), str(keys)]
        axes = ["batch", "heads", "queries", "keys"]
        raise InvalidInput(
            f"{PAIR_MASK}: expected [{', '.join(sizes[single:])}] ({', '.join(axes[single:])}),"
            f" got {list(mask.shape[single:])}"
        )


def _or_one(size: int) -> str:
    return "1" if size == 1 else f"{size} or 1"


def _check_heads(heads: tuple[int, ...] | None, layer: LayerConfig) -> None:
    if heads is None:
        return
    last = layer.num_heads - 1
    odd = next((head for head in heads if not 0 <= head <= last), None)
    if odd is not None:
        told = odd if abs(odd) < 2**31 else "a larger number"
        raise InvalidInput(f"weights: expected heads from 0 to {last}, got {told}")
    if len(set(heads)) < len(heads):
        twice = next(head for i, head in enumerate(heads) if head in heads[:i])
        raise InvalidInput(f"weights: expected each head once, got {twice} again")


def _check_answer(
    rows: int, length: int, keys: int, layer: LayerConfig, options: Options, limits: Limits
) -> None:
    size = _answer_bytes(rows, length, keys, layer, weights=options.weights, heads=options.heads)
    if size > limits.max_answer_bytes:
        raise TooLarge(
            f"answer: at most {limits.max_answer_bytes} bytes, this call asks for {size}, counted"
            " as FP32; send fewer sequences at once, or ask for fewer heads' weights"
        )


def _answer_bytes(
    rows: int,
    length: int,
    keys: int,
    layer: LayerConfig,
    *,
    weights: bool,
    heads: tuple[int, ...] | None,
) -> int:
    numbers = rows * length * layer.embed_dim
    if weights:
        count = layer.num_heads if heads is None else len(heads)
        # A sequence is run with all of its heads, whichever are asked for.
        numbers += max(rows * count, layer.num_heads) * length * keys
    return 4 * numbers


def _check_finite(tensors: Tensors) -> None:
    floats = {
        EMBEDDINGS: tensors.embeddings,
        MEMORY: tensors.memory,
        HEAD_MASK: tensors.head_mask,
    }
    for name, tensor in floats.items():
        if tensor is None:
            continue
        is_finite = np.isfinite(tensor)
        if not is_finite.all():
            place = [int(i) for i in np.unravel_index(int(is_finite.argmin()), tensor.shape)]
            found = tensor[tuple(place)]
            raise InvalidInput(f"{name}: expected finite numbers, got {found} at {place}")
