"""
The layer behind LitServe.

    python -m bench.peers.serving.litserve_app PORT
"""

import sys
from typing import Annotated, Any

import litserve
from fastapi import Depends, Request, Response

from bench.peers.serving import codec
from bench.peers.serving.layer import (
    MAX_BATCH,
    MAX_DELAY_S,
    Floats,
    Layer,
    Question,
    is_batching,
    workers,
)

Raw = tuple[bytes, str | None]
Asked = tuple[Question, bool]
Answered = tuple[list[Floats], bool]


async def raw(request: Request) -> Raw:
    """Return the body as it came, and the length of its header if it is binary."""
    return await request.body(), request.headers.get(codec.HEADER_SIZE)


class Attention(litserve.LitAPI):
    """Decodes, runs and encodes in the worker process: the HTTP process passes bytes on."""

    def setup(self, device: str) -> None:
        """Open the layer."""
        self.layer = Layer.from_environment()

    def decode_request(self, request: Annotated[Raw, Depends(raw)]) -> Asked:
        """Return the question, and whether it came in binary."""
        body, header_size = request
        return codec.read(body, header_size), header_size is not None

    def batch(self, inputs: list[Asked]) -> list[Asked]:
        """Leave joining to the layer, which knows which calls are alike."""
        return inputs

    def predict(self, x: Any) -> Any:
        """Answer one question, or a list of them."""
        if isinstance(x, list):
            tensors = self.layer.run_together([question for question, _ in x])
            return [(own, binary) for own, (_, binary) in zip(tensors, x, strict=True)]
        question, binary = x
        return self.layer.run(question), binary

    def unbatch(self, output: list[Answered]) -> list[Answered]:
        """Leave the answers as they are: one each."""
        return output

    def encode_response(self, output: Answered) -> Response:
        """Return the answer's bytes."""
        tensors, binary = output
        content, headers = codec.write(tensors, binary=binary)
        return Response(content, headers=dict(headers))


if __name__ == "__main__":
    joining = {"max_batch_size": MAX_BATCH, "batch_timeout": MAX_DELAY_S} if is_batching() else {}
    server = litserve.LitServer(
        Attention(**joining),
        accelerator="cpu",
        workers_per_device=workers(),
        fast_queue=True,
    )
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[1]),
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )
