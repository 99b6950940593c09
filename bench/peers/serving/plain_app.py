"""
The plain reference: what one writes in half an hour with FastAPI and onnxruntime.

    python -m bench.peers.serving.plain_app PORT
"""

import sys

import uvicorn
from fastapi import FastAPI, Request, Response

from bench.peers.serving import codec
from bench.peers.serving.layer import Layer

app = FastAPI()


@app.get("/")
def ready() -> str:
    """Answer once the layer is there."""
    return "ready"


@app.post("/v2/models/mha/infer")
@app.post("/v1/attention")
async def attention(request: Request) -> Response:
    """Answer in FastAPI's way: read, run, answer."""
    header_size = request.headers.get(codec.HEADER_SIZE)
    tensors = layer.run(codec.read(await request.body(), header_size))
    content, headers = codec.write(tensors, binary=header_size is not None)
    return Response(content, headers=dict(headers))


if __name__ == "__main__":
    layer = Layer.from_environment()
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
