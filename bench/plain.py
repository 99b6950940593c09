"""
The plain reference: what one writes in half an hour with FastAPI and onnxruntime.

    python -m bench.plain GRAPH PORT
"""

import json
import sys

import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI, Request, Response

app = FastAPI()
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
(heads,) = (i.shape[1] for i in session.get_inputs() if i.name == "head_mask")


@app.post("/v2/models/mha/infer")
async def infer(request: Request) -> Response:
    """Run one request in FastAPI's way: read, run, answer."""
    body = await request.body()
    size = int(request.headers["inference-header-content-length"])
    (tensor,) = json.loads(body[:size])["inputs"]
    feed = {
        "embeddings": np.frombuffer(body[size:], np.float32).reshape(tensor["shape"]),
        "pair_mask": np.ones((1, 1, 1, 1), bool),
        "head_mask": np.ones((1, heads), np.float32),
        "plain": np.array(True),
    }
    (output,) = session.run(["output"], feed)
    parameters = {"binary_data_size": output.nbytes}
    entry = {"name": "output", "datatype": "FP32", "shape": output.shape, "parameters": parameters}
    header = json.dumps({"model_name": "mha", "outputs": [entry]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(header))}
    return Response(header + output.tobytes(), headers=headers)


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[2]), log_level="warning")
