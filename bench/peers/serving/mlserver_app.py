"""The layer as a custom runtime of MLServer."""

from fastapi import Request, Response
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.handlers import custom_handler
from mlserver.types import InferenceRequest, InferenceResponse

from bench.peers.serving import codec
from bench.peers.serving.layer import Layer, Question


class Attention(MLModel):
    """Answers the protocol in JSON, and binary bodies on a path of its own."""

    async def load(self) -> bool:
        """Open the layer."""
        self._layer = Layer.from_environment()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Answer in the protocol's JSON."""
        wanted = {output.name for output in payload.outputs or ()}
        embeddings = NumpyCodec.decode_input(payload.inputs[0])
        tensors = self._layer.run(Question(embeddings, "attention_weights" in wanted))
        return InferenceResponse(
            model_name=self.name,
            outputs=[
                NumpyCodec.encode_output(name, tensor)
                for name, tensor in zip(codec.NAMES, tensors, strict=False)
            ],
        )

    @custom_handler(rest_path="/binary")
    async def binary(self, request: Request) -> Response:
        """Answer in binary."""
        question = codec.read(await request.body(), request.headers[codec.HEADER_SIZE])
        content, headers = codec.write(self._layer.run(question), binary=True)
        return Response(content, headers=dict(headers))
