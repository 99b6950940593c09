"""What JSON costs an answer, as README says: bytes, and no bit."""

import re

import numpy as np
import orjson
import pytest

from service.codecs import attention_json
from service.codecs.size import JSON_PER_RAW_BYTE
from service.inference.calls import Answer, Stages
from tests.support.server import ROOT, Server


def answer_of(heads: int, length: int) -> Answer:
    """Return weights as a layer gives them: each row a softmax."""
    scores = np.random.default_rng(4).standard_normal((1, heads, length, length))
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    output = np.random.default_rng(5).standard_normal((1, length, 8)).astype(np.float32)
    return Answer(output, weights.astype(np.float32), None, None, Stages(0, 0, 0))


@pytest.mark.fault("E14")
def test_json_gives_back_every_bit_at_the_documented_size() -> None:
    """By a byte: the smaller the weights, the longer they are written."""
    answer = answer_of(4, 128)
    assert answer.attention_weights is not None

    body = b"".join(bytes(piece) for piece in attention_json.encode("m", 1, answer, single=False))

    document = orjson.loads(body)
    found = np.array(document["attention_weights"], np.float32)
    np.testing.assert_array_equal(found.view(np.uint32), answer.attention_weights.view(np.uint32))
    [said] = re.findall(r"about (\d+) bytes a weight", (ROOT / "README.md").read_text())
    size = len(body) - len(orjson.dumps(document["output"])) - 50
    assert abs(size / found.size - int(said)) < 1
    assert len(body) <= JSON_PER_RAW_BYTE * answer.nbytes


@pytest.mark.fault("E14")
def test_longest_number_in_json_takes_the_documented_bytes() -> None:
    """17 with its comma: a sign, nine digits, a point, and an exponent."""
    exponents = np.arange(-126, 128, dtype=np.float32)
    random = np.random.default_rng(6).uniform(1, 2, (2000, 1)).astype(np.float32)
    with np.errstate(over="ignore"):
        numbers = -np.ldexp(random, exponents[None].astype(np.int32))
    numbers = numbers[np.isfinite(numbers)]

    longest = max(map(len, orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY).split(b",")))

    assert longest + 1 <= 17


@pytest.mark.fault("E14")
def test_answer_limit_counts_fp32_and_not_the_bytes_of_json(server: Server) -> None:
    """The limit that is shown is that of the numbers: 4 bytes each, whatever the format."""
    limit = server.get("/v1/models/tiny").json()["limits"]["max_answer_bytes"]
    length = 4096
    body = {"model": "tiny", "embeddings": [[[0.5] * 8] * length] * 5, "weights": True}

    response = server.post("/v1/attention", content=orjson.dumps(body))

    wanted = 4 * (5 * length * 8 + 5 * 2 * length * length)
    assert wanted > limit
    assert response.status_code == 413
    assert f"this call asks for {wanted}, counted as FP32" in response.json()["error"]
