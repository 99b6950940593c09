"""
The plain reference: FastAPI and onnxruntime without a server product around them.

Tried: the runtime's own default, spinning threads, lost (less than half the calls of many
clients): they take the cores that the event loop needs.
"""

import sys
from importlib.metadata import version
from pathlib import Path

from bench.peers import messages
from bench.peers.environment import Progress
from bench.peers.messages import Format
from bench.peers.peer import WIDTH, Peer, Tensors, Tuning, embeddings


class Plain(Peer):
    """What one writes in half an hour; it runs in Headwise's own environment."""

    name = "plain"
    ready_path = "/"
    tuning = Tuning()
    candidates = (Tuning(), Tuning(spinning=True))

    @property
    def version(self) -> str:
        """See `Peer.version`."""
        return f"fastapi {version('fastapi')}"

    @property
    def python(self) -> Path:
        """See `Peer.python`."""
        return Path(sys.executable)

    def install(self, progress: Progress) -> None:
        """Return: what it needs, Headwise needs."""

    def command(self, folder: Path, port: int, tuning: Tuning) -> list[str]:
        """See `Peer.command`."""
        return [str(self.python), "-m", "bench.peers.serving.plain_app", str(port)]

    def request(
        self, wire: Format, rows: int, length: int, *, weights: bool, width: int = WIDTH
    ) -> bytes:
        """See `Peer.request`."""
        path = "/v2/models/mha/infer" if wire == "binary" else "/v1/attention"
        return messages.raw_request(wire, path, embeddings(rows, length, width), weights=weights)

    def read(self, wire: Format, body: bytes) -> Tensors:
        """See `Peer.read`."""
        return messages.read_raw(wire, body)
