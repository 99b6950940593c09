"""Tensors on their way between processes: the same afterwards, and without padding on the way."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.inference.tensors import Tensors
from service.inference.validation import Limits, pad, pad_last

LIMITS = Limits(max_rows=256, max_length=4096, max_tokens=131_072, max_answer_bytes=2**29)


def ragged(lengths: list[int], keys: list[int] | None, heads: int, width: int) -> Tensors:
    """Return every tensor there is, of sequences of these lengths."""
    random = np.random.default_rng(0)
    key_lengths = keys or lengths

    def block(sizes: list[int]) -> tuple[np.ndarray, np.ndarray | None]:
        values = random.standard_normal((sum(sizes), width)).astype(np.float32)
        return pad(values, sizes, "x", LIMITS)

    embeddings, true_lengths = block(lengths)
    memory, memory_lengths = block(keys) if keys else (None, None)
    masks = [random.random((heads, n, t)) < 0.5 for n, t in zip(lengths, key_lengths, strict=True)]
    values, _ = block(keys) if keys else (None, None)
    positions = [random.integers(0, 2**24, n) for n in lengths]
    return Tensors(
        embeddings,
        memory,
        pad_last([mask[0, 0] for mask in masks], "x", LIMITS),
        pad_last(masks, "x", LIMITS),
        np.ones(heads, np.float32),
        true_lengths,
        memory_lengths,
        values,
        pad_last(positions, "x", LIMITS),
    )


sizes = st.integers(1, 5)


@given(
    pairs=st.lists(st.tuples(sizes, sizes), min_size=1, max_size=5),
    is_cross=st.booleans(),
    heads=st.integers(1, 3),
    width=st.integers(1, 3),
)
def test_tensors_are_the_same_in_another_process(
    pairs: list[tuple[int, int]], is_cross: bool, heads: int, width: int
) -> None:
    """Property: whatever the lengths, padding included."""
    lengths, keys = [n for n, _ in pairs], [t for _, t in pairs]
    tensors = ragged(lengths, keys if is_cross else None, heads, width)

    again = pickle.loads(pickle.dumps(tensors, 5))  # noqa: S301

    assert again.is_single == tensors.is_single
    for name in set(Tensors.__slots__) - {"is_single"}:
        before, after = getattr(tensors, name), getattr(again, name)
        np.testing.assert_array_equal(before, after)
        assert before is None or before.dtype == after.dtype


@pytest.mark.fault("A3")
def test_padding_does_not_travel() -> None:
    """One long sequence and many short ones are sent as what they are."""
    tensors = ragged([1000, *[1] * 30], None, 1, 4)

    sent = pickle.dumps(tensors, 5)

    assert tensors.pair_mask is not None
    assert tensors.pair_mask.nbytes == 31_000_000
    assert len(sent) < 1_100_000


def test_mask_of_another_shape_travels_as_it_is() -> None:
    """Whether it fits is checked afterwards, with the other shapes."""
    block, lengths = pad(np.ones((3, 2), np.float32), [1, 2], "x", LIMITS)
    mask = np.ones((1, 1, 2, 2), bool)

    sent = pickle.dumps(Tensors(block, pair_mask=mask, lengths=lengths), 5)
    again = pickle.loads(sent)  # noqa: S301

    np.testing.assert_array_equal(again.pair_mask, mask)
    np.testing.assert_array_equal(again.lengths, [1, 2])
