"""
kserve's own client for inference over REST, in a process of its own: one call at a time.

`make` keeps kserve apart from our packages, so this runs as a script: told where kserve lies
and which server to ask, it reads a call per line of JSON and prints an answer per line.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

HOME = Path(sys.prefix) / "tools" / "kserve"
"""Where kserve and what it needs lie, once fetched."""


class KserveClient:
    """A running script; each method of kserve's client is called by its name."""

    def __init__(self, url: str) -> None:
        # A script of a package's directory would see our test files before the libraries.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(HOME), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate(timeout=60)

    def call(self, method: str, **what: Any) -> Any:
        """Return what the client's method gave, or `{"error", "status"}`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"method": method, **what}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


async def _answer(client: Any, url: str, call: dict[str, Any]) -> Any:
    import httpx

    method = call.pop("method")
    try:
        if method == "infer":
            return await _infer(client, url, **call)
        return await getattr(client, method)(url, **call)
    except httpx.HTTPStatusError as error:
        return {"error": str(error), "status": error.response.status_code}


async def _infer(
    client: Any,
    url: str,
    model: str,
    inputs: list[dict[str, Any]],
    parameters: dict[str, Any],
    request_id: str,
) -> Any:
    import numpy as np
    from kserve.protocol.infer_type import InferInput, InferRequest

    dtypes = {"BOOL": np.bool_, "FP32": np.float32}
    tensors = []
    for given in inputs:
        name, shape, datatype = given["name"], given["shape"], given["datatype"]
        tensor = InferInput(name, shape, datatype)
        array = np.array(given["data"], dtypes[datatype]).reshape(shape)
        tensor.set_data_from_numpy(array, binary_data=given["binary"])
        tensors.append(tensor)
    request = InferRequest(model, tensors, request_id=request_id, parameters=parameters)
    answer = await client.infer(url, request, model_name=model)
    outputs = {
        output.name: {"shape": output.shape, "data": output.as_numpy().ravel().tolist()}
        for output in answer.outputs
    }
    return {"model": answer.model_name, "id": answer.id, "outputs": outputs}


async def _main(home: str, url: str) -> None:
    # The package's own first lines would import Kubernetes's client and a model server.
    package = ModuleType("kserve")
    package.__path__ = [f"{home}/kserve"]
    sys.modules["kserve"] = package
    sys.path.insert(0, home)
    from kserve.inference_client import InferenceRESTClient, RESTConfig

    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    for line in sys.stdin:
        print(json.dumps(await _answer(client, url, json.loads(line))), flush=True)  # noqa: T201
    await client.close()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
