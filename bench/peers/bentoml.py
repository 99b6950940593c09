"""
BentoML.

- Body: it has JSON and files, and no form of its own for arrays as bytes but pickle, which it
  takes only between its own services.  A root input of raw content is passed on as it came
  (its guide "input and output types"); it holds numpy's own file format, or JSON.
- `batchable`: its guide "adaptive batching".  It joins arrays by `numpy.concatenate`, which
  takes one length only; so what it joins here are lists of bodies, and the layer joins calls
  of one length.
- `workers`: its guide "workers": for work on processors, as many as cores.
- Tried: batching won (1.2 times the calls of many clients); two workers of one thread each and
  spinning threads lost (0.9 and 0.4 of the calls).
- `BENTOML_DO_NOT_TRACK`: nothing but the word True switches its statistics off.
"""

from collections.abc import Mapping
from pathlib import Path

from bench.peers import messages
from bench.peers.messages import Format
from bench.peers.peer import WIDTH, InstalledPeer, Tensors, Tuning, embeddings
from bench.servers import HOST
from loadtest.endpoint import request_bytes


class BentoML(InstalledPeer):
    """BentoML with one service."""

    name = package = "bentoml"
    ready_path = "/readyz"
    note = "binary as numpy files in a body of raw content: it has no form of its own for arrays"
    tuning = Tuning(batching=True)
    candidates = (Tuning(), Tuning(workers=2), Tuning(batching=True), Tuning(spinning=True))

    def command(self, folder: Path, port: int, tuning: Tuning) -> list[str]:
        """See `Peer.command`."""
        service = "bench.peers.serving.bentoml_app:Attention"
        return [
            str(self.python.with_name("bentoml")),
            "serve",
            service,
            f"--host={HOST}",
            f"--port={port}",
        ]

    def environ(self, folder: Path) -> Mapping[str, str]:
        """Return what keeps its statistics and its files here."""
        return {
            "BENTOML_DO_NOT_TRACK": "True",
            "BENTOML_HOME": str(folder / "home"),
        }

    def request(
        self, wire: Format, rows: int, length: int, *, weights: bool, width: int = WIDTH
    ) -> bytes:
        """See `Peer.request`."""
        x = embeddings(rows, length, width)
        if wire == "json":
            return messages.nested_json_request("/json", x, weights=weights)
        path = "/binary_weights" if weights else "/binary"
        content_type = ("Content-Type", "application/octet-stream")
        return request_bytes(HOST, path, messages.saved(x), content_type)

    def read(self, wire: Format, body: bytes) -> Tensors:
        """See `Peer.read`."""
        if wire == "json":
            return messages.read_nested_json(body)
        return messages.read_saved(body)
