"""A call whose tensors lie in system shared memory, as the protocol's extension has it."""

import contextlib
from collections.abc import Iterator, Mapping
from multiprocessing.shared_memory import SharedMemory

import httpx
import numpy as np
import numpy.typing as npt
import orjson

from bench.servers import HOST
from loadtest import oip
from loadtest.endpoint import request_bytes


@contextlib.contextmanager
def shared_request(
    port: int, embeddings: npt.NDArray[np.float32], outputs: Mapping[str, int], *, model: str
) -> Iterator[bytes]:
    """
    Give a whole request to a Headwise with `shared_memory`, its region registered there.

    `outputs` are those that are asked for, and the bytes of each; all who send the request
    write to one place.  The memory is gone when left.
    """
    sizes = {"embeddings": embeddings.nbytes, **outputs}
    memory = SharedMemory(create=True, size=sum(sizes.values()))
    try:
        np.ndarray(embeddings.shape, np.float32, memory.buf)[:] = embeddings
        region = {"key": f"/{memory.name}", "offset": 0, "byte_size": memory.size}
        url = f"http://{HOST}:{port}/v2/systemsharedmemory/region/{memory.name}/register"
        httpx.post(url, json=region).raise_for_status()
        yield _request(embeddings.shape, sizes, memory.name, model)
    finally:
        memory.close()
        memory.unlink()


def _request(shape: tuple[int, ...], sizes: Mapping[str, int], region: str, model: str) -> bytes:
    """Return a request whose tensors lie one after the other in one region."""
    places, offset = {}, 0
    for name, size in sizes.items():
        places[name] = oip.in_shared_memory(region, offset, size)
        offset += size
    given, *wanted = places
    entry = {"name": given, "shape": shape, "datatype": "FP32", "parameters": places[given]}
    asked = [{"name": name, "parameters": places[name]} for name in wanted]
    body = orjson.dumps({"inputs": [entry], "outputs": asked})
    return request_bytes(HOST, oip.infer_path(model), body)
