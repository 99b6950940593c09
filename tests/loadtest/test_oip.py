"""The protocol's client: what it writes it reads again, and it counts every byte."""

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from loadtest import oip

TENSORS = st.dictionaries(
    st.text(min_size=1),
    st.sampled_from(sorted(oip.DTYPES.values())).flatmap(
        lambda dtype: arrays(
            dtype,
            array_shapes(max_dims=3, max_side=3),
            elements=(
                {"allow_nan": False, "allow_infinity": False} if dtype.startswith("float") else None
            ),
        )
    ),
    min_size=1,
    max_size=3,
)


@given(TENSORS, st.data())
def test_tensors_are_read_as_they_were_written(tensors: oip.Arrays, data: st.DataObject) -> None:
    """Raw or in JSON, in any mixture, whatever the datatype."""
    raw = data.draw(st.sets(st.sampled_from(sorted(tensors))))

    body = oip.encode(tensors, is_binary=lambda name: name in raw, id="7")
    found = oip.decode(body.content, body.header_length, "inputs")

    assert list(found) == list(tensors)
    for name, values in tensors.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)
    assert (oip.HEADER_LENGTH in body.headers) == bool(raw)
    assert oip.json_length(body.content) == body.header_length


@given(st.integers(-3, 3).filter(bool))
def test_answer_of_another_length_than_its_tensors_is_refused(difference: int) -> None:
    """A byte too many is no answer, nor is one too few."""
    body = oip.encode({"x": np.ones(4, np.float32)})
    content = body.content[: len(body.content) + difference] + bytes(max(0, difference))

    with pytest.raises(ValueError, match=r"expected|buffer size|reshape"):
        oip.decode(content, body.header_length, "inputs")


def test_datatype_that_numpy_has_not_is_named() -> None:
    """Texts and brain floats are no numbers that a load could carry."""
    entry = {"name": "y", "datatype": "BYTES", "shape": [1], "data": ["a"]}

    with pytest.raises(ValueError, match="expected numbers, got BYTES"):
        oip.decode(orjson.dumps({"outputs": [entry]}))


def test_shortest_numbers_have_the_digits_of_fp32() -> None:
    """A body as orjson writes it from numpy; else as Python writes floats."""
    tenth = {"x": np.array([0.1], np.float32)}

    assert b"[0.1]" in oip.encode_json(tenth, shortest=True).content
    assert b"[0.10000000149011612]" in oip.encode_json(tenth).content


def test_model_name_is_quoted_in_the_path() -> None:
    """A name is one segment of the path, whatever it holds."""
    assert oip.infer_path("a/b c") == "/v2/models/a%2Fb%20c/infer"
