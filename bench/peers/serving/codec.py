"""
Bodies of the peers that leave their bytes to the application: binary, and JSON by orjson.

Binary is the Open Inference Protocol's: a JSON header, then the tensors.  Where a
request gives the header's length, it is binary; else it is JSON, with nested lists.
The server's side of the protocol; the client's is `loadtest.oip`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import orjson

from bench.peers.serving.layer import Floats, Question

HEADER_SIZE = "inference-header-content-length"
NAMES = ("output", "attention_weights")


def read(body: bytes, header_size: str | None) -> Question:
    """Return what a request asks."""
    if header_size is None:
        asked = orjson.loads(body)
        return Question(np.array(asked["embeddings"], np.float32), bool(asked.get("weights")))
    size = int(header_size)
    header = orjson.loads(body[:size])
    (tensor,) = header["inputs"]
    wanted = {output["name"] for output in header.get("outputs", ())}
    embeddings = np.frombuffer(body[size:], np.float32)
    return Question(embeddings.reshape(tensor["shape"]), "attention_weights" in wanted)


def write(tensors: Sequence[Floats], *, binary: bool) -> tuple[bytes, Mapping[str, str]]:
    """Return an answer's body and headers."""
    if not binary:
        content = orjson.dumps(
            dict(zip(NAMES, map(np.ascontiguousarray, tensors), strict=False)),
            option=orjson.OPT_SERIALIZE_NUMPY,
        )
        return content, {"Content-Type": "application/json"}
    entries = [
        {
            "name": name,
            "datatype": "FP32",
            "shape": tensor.shape,
            "parameters": {"binary_data_size": tensor.nbytes},
        }
        for name, tensor in zip(NAMES, tensors, strict=False)
    ]
    header = orjson.dumps({"model_name": "mha", "outputs": entries})
    content = b"".join([header, *(tensor.tobytes() for tensor in tensors)])
    return content, {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(header)),
    }
