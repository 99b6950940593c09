"""
The layer behind Ray Serve.

    python -m bench.peers.serving.ray_app PORT FOLDER
"""

import asyncio
import signal
import sys

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

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


class Attention:
    """Gets the proxy's request as it came."""

    def __init__(self) -> None:
        self._layer = Layer.from_environment()
        self._is_batching = is_batching()

    async def __call__(self, request: Request) -> Response:
        """Answer in the format of the request; a GET tells that it is ready."""
        if request.method == "GET":
            return Response("ready")
        header_size = request.headers.get(codec.HEADER_SIZE)
        question = codec.read(await request.body(), header_size)
        if self._is_batching:
            tensors = await self._together(question)
        else:
            tensors = await asyncio.to_thread(self._layer.run, question)
        content, headers = codec.write(tensors, binary=header_size is not None)
        return Response(content, headers=dict(headers))

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=MAX_DELAY_S)
    async def _together(self, questions: list[Question]) -> list[list[Floats]]:
        return await asyncio.to_thread(self._layer.run_together, questions)


app = serve.deployment(
    Attention,
    num_replicas=workers(),
    max_ongoing_requests=2 * MAX_BATCH,
    ray_actor_options={"num_cpus": 0},
).bind()


def main(port: int, folder: str) -> None:
    """Serve until told to end, then end all that was started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    ray.init(
        num_cpus=workers(),
        include_dashboard=False,
        object_store_memory=2**28,
        configure_logging=False,
        log_to_driver=False,
        _temp_dir=folder,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port, "access_log": False})
        serve.run(app)
        signal.pause()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
