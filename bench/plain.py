"""
The plain reference: what one writes in half an hour with FastAPI and onnxruntime.

    python -m bench.plain GRAPH PORT
"""

import sys

import numpy as np
import onnxruntime
import orjson
import uvicorn
from fastapi import FastAPI, Request, Response

app = FastAPI()
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
(heads,) = (i.shape[1] for i in session.get_inputs() if i.name == "head_mask")


def run(embeddings: np.ndarray) -> np.ndarray:
    """Return the layer's output."""
    feed = {
        "embeddings": embeddings,
        "pair_mask": np.ones((1, 1, 1, 1), bool),
        "head_mask": np.ones((len(embeddings), heads), np.float32),
        "plain": np.array(True),
    }
    (output,) = session.run(["output"], feed)
    return np.asarray(output)


@app.post("/v2/models/mha/infer")
async def infer(request: Request) -> Response:
    """Answer in binary, in FastAPI's way: read, run, answer."""
    body = await request.body()
    size = int(request.headers["inference-header-content-length"])
    (tensor,) = orjson.loads(body[:size])["inputs"]
    output = run(np.frombuffer(body[size:], np.float32).reshape(tensor["shape"]))
    parameters = {"binary_data_size": output.nbytes}
    entry = {"name": "output", "datatype": "FP32", "shape": output.shape, "parameters": parameters}
    header = orjson.dumps({"model_name": "mha", "outputs": [entry]})
    headers = {"Inference-Header-Content-Length": str(len(header))}
    return Response(header + output.tobytes(), headers=headers)


@app.post("/v1/attention")
async def attention(request: Request) -> Response:
    """Answer in JSON."""
    body = orjson.loads(await request.body())
    output = run(np.array(body["embeddings"], np.float32))
    content = orjson.dumps({"output": output}, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(content, media_type="application/json")


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[2]), log_level="warning")
