"""
Triton, of NVIDIA: its server, 2.51.0, as the package `nvidia-pytriton` ships it, run directly.

- The wheel holds `tritonserver`, its Python backend and one stub a Python version; the backend
  runs the stub that lies beside it, so that is where ours is copied
  (the backend's README, "Building Custom Python Backend Stub").
- onnxruntime runs inside that backend: the package has no backend for ONNX.
- `dynamic_batching {}`: its "Optimization" guide's first step.  It joins only requests of one
  shape, for `max_batch_size` > 0.
- `instance_group`: the same guide's second step.
- Tried: dynamic batching won (1.9 times the calls of many clients); two instances of one thread
  each and spinning threads lost.
- Binary tensors: https://github.com/triton-inference-server/server, "extension_binary_data".
"""

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from bench.peers import environment, messages
from bench.peers.environment import Progress
from bench.peers.errors import Unavailable
from bench.peers.messages import Format
from bench.peers.peer import WIDTH, InstalledPeer, Tensors, Tuning, embeddings
from bench.peers.serving.layer import MAX_BATCH
from bench.servers import HOST

_CONFIG = """\
name: "mha"
backend: "python"
max_batch_size: {max_batch}
input [{{ name: "embeddings", data_type: TYPE_FP32, dims: [-1, {width}] }}]
output [
  {{ name: "output", data_type: TYPE_FP32, dims: [-1, {width}] }},
  {{ name: "attention_weights", data_type: TYPE_FP32, dims: [-1, -1, -1] }}
]
instance_group [{{ kind: KIND_CPU, count: {workers} }}]
{batching}
"""


class Triton(InstalledPeer):
    """Triton with one model, asked by the protocol that Headwise speaks, too."""

    name = "triton"
    package = "nvidia-pytriton"
    ready_path = "/v2/health/ready"
    note = "onnxruntime inside its Python backend; the package has no C++ backend for ONNX"
    tuning = Tuning(batching=True)
    candidates = (
        Tuning(),
        Tuning(batching=True),
        Tuning(batching=True, workers=2),
        Tuning(spinning=True),
    )

    def install(self, progress: Progress) -> None:
        """See `Peer.install`."""
        super().install(progress)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = self._server / "python_backend_stubs" / version / "triton_python_backend_stub"
        if not stub.exists():
            raise Unavailable(f"triton: {self.version} has no backend for Python {version}")
        shutil.copy(stub, self._server / "backends" / "python")

    def command(self, folder: Path, port: int, tuning: Tuning) -> list[str]:
        """See `Peer.command`."""
        model = folder / "models" / "mha"
        (model / "1").mkdir(parents=True)
        source = Path(__file__).parent / "serving" / "triton_model.py"
        shutil.copy(source, model / "1" / "model.py")
        config = _CONFIG.format(
            max_batch=MAX_BATCH,
            width=WIDTH,
            workers=tuning.workers,
            batching="dynamic_batching { }" if tuning.batching else "",
        )
        (model / "config.pbtxt").write_text(config)
        return [
            str(self._server / "bin" / "tritonserver"),
            f"--model-repository={folder / 'models'}",
            f"--backend-directory={self._server / 'backends'}",
            f"--http-address={HOST}",
            f"--http-port={port}",
            "--allow-grpc=false",
            "--allow-metrics=false",
            "--exit-timeout-secs=5",
            # Several servers may run at once: each needs a name of its own in /dev/shm.
            f"--backend-config=python,shm-region-prefix-name={folder.name}",
        ]

    def environ(self, folder: Path) -> Mapping[str, str]:
        """Return where the backend finds Python's library, and which packages it is to use."""
        return {
            # Its interpreter takes the packages of the `python` that is found first.
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": sysconfig.get_config_var("LIBDIR"),
        }

    def request(
        self, wire: Format, rows: int, length: int, *, weights: bool, width: int = WIDTH
    ) -> bytes:
        """See `Peer.request`."""
        return messages.oip_request(
            wire, "/v2/models/mha/infer", embeddings(rows, length, width), weights=weights
        )

    def read(self, wire: Format, body: bytes) -> Tensors:
        """See `Peer.read`."""
        return messages.read_oip(wire, body)

    @property
    def _server(self) -> Path:
        return environment.packages_of(self.name) / "pytriton" / "tritonserver"
