"""
Ray Serve, of Anyscale, on a Ray of its own that only loopback sees.

- Body: `__call__` gets Starlette's request, so both formats are the application's own bytes
  (its guide "set up FastAPI and HTTP").
- `@serve.batch` with `max_batch_size` and `batch_wait_timeout_s`: its guide "dynamic request
  batching"; the layer joins calls of one length.
- `max_ongoing_requests` above the batch's size, as the same guide demands.
- `RAY_SERVE_THROUGHPUT_OPTIMIZED`: its guide "performance tuning".  HAProxy in front, of which
  the same guide tells, is not used: it listens on every address.
- Tried: batching won (1.2 times the calls of many clients); two replicas of one thread each
  gained nothing, and spinning threads made one client wait 1.6 times as long.
- Loopback: by default Ray listens on every address of the machine, even for
  `_node_ip_address="127.0.0.1"`, which it replaces.  Told that it is no cluster, as it is told
  on a Mac, it keeps to loopback; but for one port of each replica, whose address is written
  in the code and is changed there.
"""

from collections.abc import Mapping
from pathlib import Path

from bench.peers import environment, messages
from bench.peers.environment import Progress
from bench.peers.errors import Unavailable
from bench.peers.messages import Format
from bench.peers.peer import WIDTH, InstalledPeer, Tensors, Tuning, embeddings

_EVERYWHERE, _LOOPBACK = 'self._server, "[::]:0")', 'self._server, "127.0.0.1:0")'


class RayServe(InstalledPeer):
    """Ray Serve with one deployment for both formats."""

    name = package = "ray"
    ready_path = "/"
    tuning = Tuning(batching=True)
    candidates = (Tuning(), Tuning(workers=2), Tuning(batching=True), Tuning(spinning=True))

    def install(self, progress: Progress) -> None:
        """See `Peer.install`."""
        super().install(progress)
        code = environment.packages_of(self.name) / "ray" / "serve" / "_private" / "replica.py"
        text = code.read_text()
        if _LOOPBACK not in text:
            if text.count(_EVERYWHERE) != 1:
                raise Unavailable(f"ray: {self.version} would listen beyond loopback: {code}")
            code.write_text(text.replace(_EVERYWHERE, _LOOPBACK))

    def command(self, folder: Path, port: int, tuning: Tuning) -> list[str]:
        """See `Peer.command`."""
        module = "bench.peers.serving.ray_app"
        return [str(self.python), "-m", module, str(port), str(folder)]

    def environ(self, folder: Path) -> Mapping[str, str]:
        """Return what keeps it and its statistics here, and what its guide advises."""
        return {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        }

    def request(
        self, wire: Format, rows: int, length: int, *, weights: bool, width: int = WIDTH
    ) -> bytes:
        """See `Peer.request`."""
        return messages.raw_request(wire, "/", embeddings(rows, length, width), weights=weights)

    def read(self, wire: Format, body: bytes) -> Tensors:
        """See `Peer.read`."""
        return messages.read_raw(wire, body)
