"""Answers are written in steps, none of which holds the interpreter's lock for long."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from service.codecs import attention_json, attention_safetensors, chunks, oip_response
from service.codecs.chunks import Chunk
from service.codecs.oip_request import InferRequest
from service.inference.calls import Answer, Options, Stages
from service.inference.validation import Limits

NUMBERS = 64 * 1024
BYTES = 2**20
LIMITS = Limits(max_rows=4, max_length=16, max_tokens=64, max_answer_bytes=2**20)

shapes = st.tuples(st.integers(1, 3), st.integers(1, 600), st.integers(1, 3), st.booleans())


def answer_of(rows: int, length: int, heads: int, is_ragged: bool) -> Answer:
    """Return an answer with weights, of sequences of different lengths if it is ragged."""
    lengths = np.linspace(1, length, rows).astype(np.int64) if is_ragged else None
    output = np.ones((rows, length, 8), np.float32)
    weights = np.ones((rows, heads, length, length), np.float32)
    return Answer(output, weights, lengths, lengths, Stages(0, 0, 0))


def infer_answer(answer: Answer, *, binary: bool) -> Iterator[Chunk]:
    """Write the answer to an infer call."""
    outputs = {"output": binary, "attention_weights": binary}
    request = InferRequest("", {}, {}, {}, Options(), outputs, {})
    return oip_response.encode("mha", 1, request, answer, {})[2]


@pytest.mark.fault("A3")
@settings(max_examples=25)
@given(shape=shapes)
def test_numbers_and_bytes_of_a_step_are_bounded(shape: tuple[int, int, int, bool]) -> None:
    """Property: in every format, whatever the shape, by the same number as for any other."""
    answer = answer_of(*shape)
    written: list[int] = []
    dumps = chunks._dumps

    def counted(array: np.ndarray) -> bytes:
        written.append(array.size)
        return dumps(array)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_dumps", counted)
        raw: list[Chunk] = [*attention_safetensors.encode("mha", 1, answer)[1]]
        raw += infer_answer(answer, binary=True)
        as_json = b"".join(attention_json.encode("mha", 1, answer, single=False))
        infer_json = b"".join(infer_answer(answer, binary=False))

    assert max(written) <= NUMBERS
    assert max(map(len, raw)) <= BYTES
    for content in (as_json, infer_json):
        json.loads(content)


def test_ragged_safetensors_are_written_from_their_parts() -> None:
    """The outputs of all sequences are one tensor, of which no copy is made."""
    answer = answer_of(3, 5, 2, True)
    length, pieces = attention_safetensors.encode("mha", 1, answer)
    content = b"".join(pieces)

    tensors: dict[str, Any] = safetensors.numpy.load(content)

    assert length == len(content)
    np.testing.assert_array_equal(tensors["output"], np.concatenate(answer.outputs()))
    for i, weights in enumerate(answer.weights()):
        np.testing.assert_array_equal(tensors[f"attention_weights.{i}"], weights)
