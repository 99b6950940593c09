"""safetensors bodies: what is refused, and how answers are packed."""

from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from tests.support.server import Server

HEADERS = {"Content-Type": "application/x-safetensors"}


def dense(**changes: Any) -> dict[str, np.ndarray]:
    """Return right tensors for `tiny`, with changes; None drops one."""
    tensors = {"embeddings": np.full((1, 2, 8), 0.5, np.float32), **changes}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def packed(**changes: Any) -> dict[str, np.ndarray]:
    """Return right packed tensors of lengths 1 and 2 for `tiny`, with changes."""
    right = {"embeddings": np.full((3, 8), 0.5, np.float32), "lengths": np.array([1, 2])}
    return {name: tensor for name, tensor in {**right, **changes}.items() if tensor is not None}


BOOLS = np.ones(3, bool)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (dense(embeddings=None), "embeddings: expected a tensor of that name, got none"),
        (
            dense(embeddings=np.zeros((1, 2, 8), bool)),
            "embeddings: expected F32 (also read: F16, BF16, F64, I8, I16, I32, I64, U8, U16, U32,"
            " U64), got 'BOOL'",
        ),
        (dense(embeddings=np.zeros((1, 2, 7), np.float32)), "expected [B, S, 8], got [1, 2, 7]"),
        (dense(embeddings=np.zeros((2, 8), np.float32)), "expected [B, S, 8], got [2, 8]"),
        (dense(embeddings=np.zeros((0, 4, 8), np.float32)), "at least one sequence of at least"),
        (dense(embeddings=np.zeros((2, 0, 8), np.float32)), "at least one sequence of at least"),
        (dense(embedings=BOOLS), "body: unknown key 'embedings'; did you mean embeddings?"),
        (dense(attention_mask=BOOLS), "unknown key 'attention_mask': send attend_mask [B, T]"),
        (
            dense(attend_mask=np.ones((1, 2), np.float32)),
            "attend_mask: expected BOOL or whole numbers 0 and 1 (I8, I16, I32, I64, U8, U16, U32,"
            " U64), got 'F32'; of a float mask that is added to the scores (0 and -inf) send the"
            " booleans mask == 0",
        ),
        (
            dense(attend_mask=np.array([[1, -1]])),
            "attend_mask: expected 0 or 1, got -1 at [0, 1]",
        ),
        (dense(attend_mask=BOOLS), "attend_mask: expected [1, 2], got [3]"),
        (dense(pair_mask=np.ones((2, 2), bool)), "pair_mask: expected [1, 2 or 1, 2, 2]"),
        (dense(pair_mask=np.ones((1, 3, 2, 2), bool)), "pair_mask: expected [1, 2 or 1, 2"),
        (dense(head_mask=np.ones(3, np.float32)), "head_mask: expected [2] or [1, 2], got [3]"),
        (dense(memory=np.ones((1, 1, 6), np.float32)), "memory: expected none for a self-att"),
        (dense(memory_lengths=np.array([1])), "lengths: expected beside memory_lengths, got none"),
        (packed(lengths=np.array([1, 1])), "embeddings: expected [2, E], the sum of the lengths"),
        (packed(lengths=np.array([0, 3])), "lengths[0]: expected at least one length, each at l"),
        (packed(lengths=np.array([-1, 4])), "lengths[0]: expected at least one length, each at l"),
        (packed(lengths=np.zeros(0, np.int64)), "lengths: expected at least one length"),
        (packed(lengths=np.array([1.0, 2.0])), "lengths: expected whole numbers [B], such as I64"),
        (packed(lengths=np.array([[1, 2]])), "such as I64, got I64 [1, 2]"),
        (packed(attend_mask=BOOLS[:2]), "attend_mask: expected [3], the sum of the lengths"),
        (packed(pair_mask=BOOLS), "pair_mask: expected pair_mask.0, pair_mask.1 … beside lengths"),
        ({**packed(), "pair_mask.0": np.ones((1, 1, 1), bool)}, "pair_mask.1: expected one mask"),
        (
            {**packed(), **{f"pair_mask.{i}": np.ones((1, 1, 1), bool) for i in (0, 1)}},
            "pair_mask.1: expected [1, 2, 2], got [1, 1, 1]",
        ),
        ({**packed(), "pair_mask.2": np.ones((1, 1, 1), bool)}, "unknown key 'pair_mask.2'"),
    ],
)
def test_safetensors_mistake_is_named(
    server: Server, tensors: dict[str, np.ndarray], message: str
) -> None:
    """A caller's mistake is a 400 that says where, what was expected and what came."""
    response = server.post("/v1/attention?model=tiny", content=save(tensors), headers=HEADERS)

    assert response.status_code == 400, response.text
    assert message in response.json()["error"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"memory": None}, "memory: expected [B, T, 6] for a cross-attention layer, got none"),
        ({"memory": np.zeros((1, 2, 5), np.float32)}, "memory: expected [1, T, 6], got [1, 2, 5]"),
        (
            {"memory": np.zeros((1, 0, 6), np.float32)},
            "memory: expected at least one key, got none",
        ),
        ({"memory": np.zeros((2, 1, 6), np.float32)}, "memory: expected [1, T, 6], got [2, 1, 6]"),
        (
            {"embeddings": np.zeros((1, 12), np.float32), "lengths": np.array([1])},
            "memory_lengths: expected beside lengths and memory, got none",
        ),
        (
            {
                "embeddings": np.zeros((1, 12), np.float32),
                "memory": np.zeros((2, 6), np.float32),
                "lengths": np.array([1]),
                "memory_lengths": np.array([1, 1]),
            },
            "memory_lengths: expected 1 lengths, got 2",
        ),
    ],
)
def test_safetensors_memory_mistake_is_named(
    server: Server, tensors: dict[str, np.ndarray | None], message: str
) -> None:
    """Cross-attention has one more tensor to get wrong."""
    right = {
        "embeddings": np.zeros((1, 2, 12), np.float32),
        "memory": np.zeros((1, 3, 6), np.float32),
    }
    given = {name: t for name, t in {**right, **tensors}.items() if t is not None}

    response = server.post("/v1/attention?model=cross", content=save(given), headers=HEADERS)

    assert response.status_code == 400, response.text
    assert message in response.json()["error"]


def test_safetensors_causal_cross_attention_is_refused(server: Server) -> None:
    """Queries and keys share no order."""
    tensors = {
        "embeddings": np.zeros((1, 2, 12), np.float32),
        "memory": np.zeros((1, 3, 6), np.float32),
    }

    response = server.post(
        "/v1/attention?model=cross&causal=true", content=save(tensors), headers=HEADERS
    )

    assert response.status_code == 400
    assert "causal: expected false for a cross-attention layer" in response.json()["error"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        b"\xff" * 64,
        b'{"a": 1}',
        save(dense())[:-1],
        save(dense()) + b"x",
        b"\x08\0\0\0\0\0\0\0{" + b" " * 7,
        (2**63).to_bytes(8, "little") + b"{}",
    ],
)
def test_safetensors_garbage_is_refused(server: Server, content: bytes) -> None:
    """What is no safetensors file is a 400, whatever it is."""
    response = server.post("/v1/attention?model=tiny", content=content, headers=HEADERS)

    assert response.status_code == 400, response.text
    assert "body: expected safetensors" in response.json()["error"]


def test_safetensors_boolean_bytes_other_than_0_and_1_are_refused(server: Server) -> None:
    """A mask never means two things."""
    content = save(dense(attend_mask=np.ones((1, 2), bool)))
    # The two mask bytes are the only 1s side by side.
    assert content.count(b"\1\1") == 1

    response = server.post(
        "/v1/attention?model=tiny", content=content.replace(b"\1\1", b"\1\2"), headers=HEADERS
    )

    assert response.status_code == 400
    assert "attend_mask: expected 0 or 1, got 2 at [0, 1]" in response.json()["error"]


def test_safetensors_packed_answer_has_own_lengths(server: Server) -> None:
    """Answers are packed as their questions were."""
    response = server.post(
        "/v1/attention?model=tiny&weights=true", content=save(packed()), headers=HEADERS
    )

    answer = load(response.content)
    assert {name: tensor.shape for name, tensor in answer.items()} == {
        "output": (3, 8),
        "lengths": (2,),
        "attention_weights.0": (2, 1, 1),
        "attention_weights.1": (2, 2, 2),
    }
    assert answer["lengths"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("wieghts=true", "query: unknown key 'wieghts'; did you mean weights?"),
        ("weights=yes", "query: weights: expected true, false or heads such as 0,3, got 'yes'"),
        ("weights=true&weights=false", "query: weights: expected once, got it twice"),
        ("priority=high", "query: priority: expected a number, got 'high'"),
        ("timeout_s=inf", "query: timeout_s: expected a finite number, got 'inf'"),
        ("timeout_s=0", "timeout_s: expected seconds above 0 and at most 3600, got 0"),
    ],
)
def test_query_mistake_is_named(server: Server, query: str, message: str) -> None:
    """Options in the query are checked like those in a body."""
    response = server.post(
        f"/v1/attention?model=tiny&{query}", content=save(dense()), headers=HEADERS
    )

    assert response.status_code == 400
    assert message in response.json()["error"]
