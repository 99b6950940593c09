"""
MLServer, of Seldon, with a custom runtime.

- JSON: the Open Inference Protocol.  Its REST server has no binary tensors (they are offered
  only over gRPC), so binary goes to a custom handler, which gets FastAPI's request (its guide
  "custom inference runtimes").
- `parallel_workers` 0 (its guide "parallel inference"): with workers a call to a custom handler
  never comes back.
- Adaptive batching (`max_batch_size`, `max_batch_time`; its guide "adaptive batching") is off: it
  joins requests whatever their shapes, so that calls of two lengths at once are both answered
  with 500, and calls to a custom handler are never joined.
- Spinning threads lost: 0.4 of the calls of many clients.
- `gzip_enabled` and metrics are off: nobody asks for them here.
"""

import json
from pathlib import Path

from bench.peers import messages
from bench.peers.messages import Format
from bench.peers.peer import WIDTH, InstalledPeer, Tensors, Tuning, embeddings
from bench.servers import HOST, free_port


class MLServer(InstalledPeer):
    """MLServer with one model."""

    name = package = "mlserver"
    ready_path = "/v2/models/mha/ready"  # the server itself says ready before its model is
    note = "binary by a custom handler: its REST server has no binary tensors"
    tuning = Tuning()
    candidates = (Tuning(), Tuning(spinning=True))

    def command(self, folder: Path, port: int, tuning: Tuning) -> list[str]:
        """See `Peer.command`."""
        settings = {
            "host": HOST,
            "http_port": port,
            "grpc_port": free_port(),
            "metrics_endpoint": None,
            "debug": False,
            "parallel_workers": 0,
            "gzip_enabled": False,
        }
        model = {
            "name": "mha",
            "implementation": "bench.peers.serving.mlserver_app.Attention",
        }
        (folder / "settings.json").write_text(json.dumps(settings))
        (folder / "model-settings.json").write_text(json.dumps(model))
        return [str(self.python.with_name("mlserver")), "start", str(folder)]

    def request(
        self, wire: Format, rows: int, length: int, *, weights: bool, width: int = WIDTH
    ) -> bytes:
        """See `Peer.request`."""
        x = embeddings(rows, length, width)
        if wire == "binary":
            return messages.oip_binary_request("/binary", x, weights=weights)
        return messages.oip_json_request("/v2/models/mha/infer", x, weights=weights)

    def read(self, wire: Format, body: bytes) -> Tensors:
        """See `Peer.read`."""
        return messages.read_oip(wire, body)
