"""
Every check on a call's tensors, whatever format they came in.

Axes: B batch, S query length, T key length (= S for self-attention),
E embed_dim, M memory width, M_v value memory width, H heads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from service.contract import (
    ATTEND_MASK,
    EMBEDDINGS,
    HEAD_MASK,
    MEMORY,
    PAIR_MASK,
    POSITIONS,
    VALUE_MEMORY,
)
from service.errors import InvalidInput, TooLarge
from service.inference.calls import Bools, Call, Floats, Inputs, Lengths, Options
from service.inference.tensors import Tensors
from service.layer_config import MAX_POSITION, LayerConfig

_Item = TypeVar("_Item", bound=np.generic)


@dataclass(frozen=True)
class Limits:
    """What one call may ask for, and whether NaN and infinity may come in."""

    max_rows: int
    max_length: int
    max_tokens: int
    max_answer_bytes: int
    refuse_nonfinite: bool = False


def to_call(tensors: Tensors, options: Options, layer: LayerConfig, limits: Limits) -> Call:
    """
    Return the call, every shape checked against the layer and the limits.

    Raises:
        InvalidInput: a tensor is missing, unwanted or of the wrong shape.
        TooLarge: above a limit, or longer than the layer's table of positions.
    """
    single = tensors.is_single
    _check_shape(EMBEDDINGS, tensors.embeddings, ("B", "S", layer.embed_dim), single=single)
    rows, length, _ = tensors.embeddings.shape
    _check_limits(rows, length, limits)
    keys = _check_memory(tensors, layer, limits)
    if layer.value_memory_dim is not None or tensors.value_memory is not None:
        _check_value_memory(tensors, layer, keys)
    if layer.max_positions is not None or tensors.positions is not None:
        _check_positions(tensors, layer)
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
    return unchecked_call(tensors, options, layer)


def answer_bytes(call: Call, layer: LayerConfig) -> int:
    """Return how much memory the answer to a checked call takes, in FP32."""
    rows, length, _ = call.inputs.embeddings.shape
    keys = call.inputs.key_length
    return _answer_bytes(rows, length, keys, layer, weights=call.weights, heads=call.heads)


def unchecked_call(tensors: Tensors, options: Options, layer: LayerConfig) -> Call:
    """
    Return the call as `to_call` does, where one of the same shapes and options has passed.

    Raises:
        InvalidInput: a position is out of bounds; no other value depends on the layer.
    """
    if tensors.positions is not None:
        _check_position_values(tensors.positions, layer)
    inputs = Inputs(
        tensors.embeddings,
        tensors.memory,
        tensors.attend_mask,
        tensors.pair_mask,
        tensors.head_mask,
        layer.causal if options.causal is None else options.causal,
        tensors.value_memory,
        tensors.positions,
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


def pad_last(parts: Sequence[npt.NDArray[_Item]], name: str, limits: Limits) -> npt.NDArray[_Item]:
    """
    Return equally ranked arrays stacked, each padded with false or 0 to the largest of all.

    Raises:
        TooLarge: the stack would take more than the largest answer.
    """
    shape = tuple(max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True))
    size = len(parts) * math.prod(shape) * parts[0].itemsize
    if size > limits.max_answer_bytes:
        raise TooLarge(
            f"{name}: at most {limits.max_answer_bytes} bytes with its padding, got {size}"
        )
    block = np.empty((len(parts), *shape), parts[0].dtype)  # not `zeros`: see `pad`
    for row, part in zip(block, parts, strict=True):
        row[...] = 0
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


def _check_shape(
    name: str, tensor: Floats | Bools | Lengths, expected: tuple[int | str, ...], *, single: bool
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


def _check_value_memory(tensors: Tensors, layer: LayerConfig, keys: int) -> None:
    if layer.value_memory_dim is None:
        raise InvalidInput(
            f"{VALUE_MEMORY}: expected none for a layer whose keys and values have one source,"
            " got one"
        )
    if tensors.value_memory is None:
        raise InvalidInput(
            f"{VALUE_MEMORY}: expected [B, T, {layer.value_memory_dim}], the source of values"
            f" beside {MEMORY}, got none"
        )
    expected = (len(tensors.embeddings), keys, layer.value_memory_dim)
    _check_shape(VALUE_MEMORY, tensors.value_memory, expected, single=tensors.is_single)


def _check_positions(tensors: Tensors, layer: LayerConfig) -> None:
    """Return when the positions fit the layer, and if there are none, those that count from 0."""
    rows, length, _ = tensors.embeddings.shape
    if tensors.positions is None:
        if layer.max_positions is not None and length > layer.max_positions:
            raise TooLarge(
                f"{EMBEDDINGS}: at most {layer.max_positions} tokens long, as many as the layer's"
                f" table of positions has rows, got {length}"
            )
        return
    if not layer.takes_positions:
        raise InvalidInput(f"{POSITIONS}: expected none for a layer without positions, got some")
    _check_shape(POSITIONS, tensors.positions, (rows, length), single=tensors.is_single)


def _check_position_values(positions: Lengths, layer: LayerConfig) -> None:
    last = MAX_POSITION if layer.max_positions is None else layer.max_positions - 1
    if positions.min() < 0 or positions.max() > last:
        outside = (positions < 0) | (positions > last)
        place = [int(i) for i in np.unravel_index(int(outside.argmax()), positions.shape)]
        reason = "" if layer.max_positions is None else ", the last row of the layer's table"
        raise InvalidInput(
            f"{POSITIONS}: expected whole numbers from 0 to {last}{reason},"
            f" got {positions[tuple(place)]} at {place}"
        )


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
        width = keys + len(layer.extra_keys)
        numbers += max(rows * count, layer.num_heads) * length * width
    return 4 * numbers


def _check_finite(tensors: Tensors) -> None:
    floats = {
        EMBEDDINGS: tensors.embeddings,
        MEMORY: tensors.memory,
        VALUE_MEMORY: tensors.value_memory,
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
