"""
LitServe, of Lightning AI.

- Body: `decode_request` may name its own type of request; a FastAPI dependency gives the bytes
  as they came, so that both formats are decoded in the worker (its documentation's "request
  and response format").
- `fast_queue`: on, as its documentation of `LitServer` advises above 100 requests a second.
- `max_batch_size`, `batch_timeout`: its page "batching"; the layer joins calls of one length.
- `workers_per_device`: "for CPU, set to the number of cores".
- Tried: one worker with two threads and batching won; as many workers as cores, one thread each,
  and spinning threads lost.
"""

from pathlib import Path

from bench.peers import messages
from bench.peers.messages import Format
from bench.peers.peer import WIDTH, InstalledPeer, Tensors, Tuning, embeddings


class LitServe(InstalledPeer):
    """LitServe with one route for both formats."""

    name = package = "litserve"
    ready_path = "/health"
    tuning = Tuning(batching=True)
    candidates = (
        Tuning(),
        Tuning(workers=2),
        Tuning(batching=True),
        Tuning(batching=True, workers=2),
        Tuning(spinning=True),
    )

    def command(self, folder: Path, port: int, tuning: Tuning) -> list[str]:
        """See `Peer.command`."""
        return [str(self.python), "-m", "bench.peers.serving.litserve_app", str(port)]

    def request(
        self, wire: Format, rows: int, length: int, *, weights: bool, width: int = WIDTH
    ) -> bytes:
        """See `Peer.request`."""
        return messages.raw_request(
            wire, "/predict", embeddings(rows, length, width), weights=weights
        )

    def read(self, wire: Format, body: bytes) -> Tensors:
        """See `Peer.read`."""
        return messages.read_raw(wire, body)
