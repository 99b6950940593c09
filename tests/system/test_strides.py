"""
Arrays that do not lie in C order: what is sent and answered are their numbers all the same.

safetensors.numpy writes an array's memory as it lies, and for a reversed one even what lies
behind it.
"""

import ast
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from safetensors.numpy import load, save

from loadtest import formats, oip
from loadtest.work import Tensors, Work
from service.codecs import chunks
from tests.support.calls import Case, send_safetensors
from tests.support.server import ROOT, Server

Array = npt.NDArray[Any]

pytestmark = pytest.mark.fault("G9")


@st.composite
def laid_out(draw: st.DrawFn, dtype: Any = np.float32) -> Array:
    """Return an array of three axes in any memory layout: permuted, sliced, reversed, repeated."""
    base = draw(nps.arrays(dtype, st.tuples(*[st.integers(2, 5)] * 3), elements=_elements(dtype)))
    view = base.transpose(draw(st.permutations(range(3))))
    steps = draw(st.tuples(*[st.sampled_from([1, 2, -1, -2])] * 3))
    view = view[tuple(slice(None, None, step) for step in steps)]
    if draw(st.booleans()):
        view = np.broadcast_to(view[:1], (3, *view.shape[1:]))
    return view


def _elements(dtype: Any) -> st.SearchStrategy[Any]:
    return st.booleans() if dtype == np.bool_ else st.floats(-4, 4, width=32)


class _Model:
    """What the load tester's formats ask of a target."""

    model, api = "tiny", "headwise"


@given(embeddings=laid_out(), mask=laid_out(np.bool_))
def test_load_testers_safetensors_holds_the_numbers(embeddings: Array, mask: Array) -> None:
    """Whatever the layout of its tensors."""
    work = Work(format="safetensors")
    tensors = Tensors({"embeddings": embeddings}, pair_mask=mask[:, None])

    found = load(formats.encode(_Model(), work, tensors).body)  # type: ignore[arg-type]

    np.testing.assert_array_equal(found["embeddings"], embeddings)
    np.testing.assert_array_equal(found["pair_mask"], mask[:, None])


@given(embeddings=laid_out())
def test_load_testers_binary_tensors_are_the_numbers(embeddings: Array) -> None:
    """The protocol's raw tensors are row-major."""
    body = oip.encode({"embeddings": embeddings})

    found = np.frombuffer(body.content[body.header_length :], np.float32)

    np.testing.assert_array_equal(found, embeddings.ravel())


@given(output=laid_out())
def test_servers_safetensors_holds_the_numbers(output: Array) -> None:
    """An answer that is a slice of a batch's is written by its numbers, not by its memory."""
    length, pieces = chunks.safetensors({"output": [output]}, {})
    content = b"".join(pieces)

    assert len(content) == length
    np.testing.assert_array_equal(load(content)["output"], output)


def test_servers_large_answer_holds_the_numbers() -> None:
    """Written piece by piece, without a copy where none is needed."""
    output = np.arange(3 * 700 * 512, dtype=np.float32).reshape(3, 512, 700).swapaxes(1, 2)[::-1]

    _, pieces = chunks.safetensors({"output": [output]}, {})

    np.testing.assert_array_equal(load(b"".join(pieces))["output"], output)


def test_library_itself_writes_memory_as_it_lies() -> None:
    """Why all this is needed; once it no longer does, the README's warning can go."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3).T

    assert not np.array_equal(load(save({"x": x}))["x"], x)


@pytest.mark.parametrize("layout", ["F", "reversed", "sliced"])
def test_readme_client_gets_the_same_answer_for_every_layout(server: Server, layout: str) -> None:
    """The README's way to send: the answer is that of the same numbers in C order."""
    x = np.random.default_rng(0).standard_normal((4, 5, 8)).astype(np.float32)
    views = {
        "F": np.asfortranarray(x),
        "reversed": np.ascontiguousarray(x[::-1])[::-1],
        "sliced": np.repeat(x, 2, axis=1)[:, ::2],
    }
    sent = views[layout]
    assert not sent.flags.c_contiguous
    np.testing.assert_array_equal(sent, x)

    bodies = [save({"embeddings": np.ascontiguousarray(array)}) for array in (sent, x)]
    query, headers = "/v1/attention?model=tiny", {"Content-Type": "application/x-safetensors"}
    answers = [load(server.post(query, content=b, headers=headers).content) for b in bodies]

    np.testing.assert_array_equal(answers[0]["output"], answers[1]["output"])
    reply = send_safetensors(server, Case("tiny", tuple(sent)))
    np.testing.assert_allclose(np.stack(reply.outputs), answers[1]["output"], atol=1e-5)


def _unsafe_saves(code: str) -> list[int]:
    """Return the lines that give `safetensors.numpy`'s writers arrays of any layout."""
    tree = ast.parse(code)
    writers = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("safetensors.numpy", "safetensors")
        for alias in node.names
        if alias.name in ("save", "save_file", "serialize", "serialize_file")
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[-1] in writers
        and "ascontiguousarray" not in ast.unparse(node.args[0])
    ]


PRODUCT = sorted(
    file
    for folder in ("service", "export", "loadtest", "bench", "tests/support")
    for file in (ROOT / folder).rglob("*.py")
    # torch's writer, which refuses what is not contiguous
    if "safetensors.torch" not in file.read_text()
)


@pytest.mark.parametrize("file", PRODUCT, ids=lambda file: str(file.relative_to(ROOT)))
def test_code_gives_the_library_arrays_in_c_order(file: Path) -> None:
    """Also where an array is contiguous today: nothing says so when that changes."""
    assert _unsafe_saves(file.read_text()) == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=str)
def test_pages_give_the_library_arrays_in_c_order(page: Path) -> None:
    """What is copied from a page must be right for the reader's own arrays."""
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        if "safetensors.torch" not in code:
            assert _unsafe_saves(code) == [], json.dumps(code)
