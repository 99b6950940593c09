"""The layer as a service of BentoML."""

import io
from typing import Annotated, Any

import bentoml
import numpy as np
from bentoml.validators import ContentType
from pydantic import BeforeValidator, WithJsonSchema

from bench.peers.serving import codec
from bench.peers.serving.layer import MAX_BATCH, Floats, Layer, Question, is_batching, workers

_RAW = WithJsonSchema({"type": "string", "format": "binary"})
"""What makes BentoML pass a body on as it is, and an answer, too."""

# A batchable method takes and gives lists that BentoML joins and parts: here of one item a call.
Bodies = Annotated[list[Any], BeforeValidator(lambda body: [body]), _RAW]
_ONLY = BeforeValidator(lambda answers: answers[0])
Binary = Annotated[Any, _ONLY, ContentType("application/octet-stream")]
Json = Annotated[Any, _ONLY, ContentType("application/json")]

_JOINED = {"batchable": is_batching(), "max_batch_size": MAX_BATCH, "max_latency_ms": 10_000}


@bentoml.service(
    workers=workers(), traffic={"timeout": 60, "max_concurrency": 1024}, metrics={"enabled": False}
)
class Attention:
    """Bodies are numpy's own file format, one array after the other, or JSON."""

    def __init__(self) -> None:
        self._layer = Layer.from_environment()

    @bentoml.api(**_JOINED)
    def binary(self, bodies: Bodies, /) -> Binary:
        """Answer arrays by arrays."""
        return self._binary(bodies, weights=False)

    @bentoml.api(**_JOINED)
    def binary_weights(self, bodies: Bodies, /) -> Binary:
        """Answer arrays by arrays, the weights among them."""
        return self._binary(bodies, weights=True)

    @bentoml.api(**_JOINED)
    def json(self, bodies: Bodies, /) -> Json:
        """Answer in JSON."""
        questions = [codec.read(body, None) for body in bodies]
        answers = self._layer.run_together(questions)
        return [codec.write(tensors, binary=False)[0] for tensors in answers]

    def _binary(self, bodies: list[bytes], *, weights: bool) -> list[bytes]:
        questions = [Question(np.load(io.BytesIO(body)), weights) for body in bodies]
        return [_saved(tensors) for tensors in self._layer.run_together(questions)]


def _saved(tensors: list[Floats]) -> bytes:
    sink = io.BytesIO()
    for tensor in tensors:
        np.save(sink, tensor, allow_pickle=False)
    return sink.getvalue()
