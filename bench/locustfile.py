"""
Users of Headwise for Locust, for those who have it: JSON at /v1/attention, binary tensors at /v2.

`locust -f bench/locustfile.py --host http://127.0.0.1:8000 --model mha --shape 1x8`.  Locust's
users wait for their answers: what they see of a server that stalls is what clients in a closed
loop see, see docs/load-testing.md.
"""

import argparse
import json
import random
import struct

from locust import FastHttpUser, constant_throughput, events, tag, task
from locust.env import Environment

_BODIES = 16
"""Different calls, so that nothing can answer from memory; made before the clock starts."""


@events.init_command_line_parser.add_listener
def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="mha", help="model to call")
    parser.add_argument("--shape", default="1x8", help="batch x length of a call")
    parser.add_argument(
        "--per-user", type=float, default=10.0, help="calls a second that a user makes at most"
    )


class Caller(FastHttpUser):
    """A user whose connection is kept, and who calls at most so many times a second."""

    json_bodies: list[bytes]
    binary_bodies: list[bytes]
    header_bytes: int

    def wait_time(self) -> float:
        """Return the time until the next call, so that the rate is kept if the server can."""
        options = self.environment.parsed_options
        assert options is not None  # noqa: S101 (Locust has parsed its command line)
        waiting: float = constant_throughput(options.per_user)(self)
        return waiting

    def on_start(self) -> None:
        """Ask for the layer's width, and make all bodies."""
        model, rows, length = _work(self.environment)
        metadata = self.client.get(f"/v2/models/{model}", name="metadata").json()
        width = metadata["inputs"][0]["shape"][-1]
        inputs = {"name": "embeddings", "shape": [rows, length, width], "datatype": "FP32"}
        self.json_bodies, self.binary_bodies = [], []
        for seed in range(_BODIES):
            values = random.Random(seed)  # noqa: S311 (no secret)
            flat = [values.gauss(0, 1) for _ in range(rows * length * width)]
            token = [flat[i : i + width] for i in range(0, len(flat), width)]
            batch = [token[i : i + length] for i in range(0, len(token), length)]
            self.json_bodies.append(json.dumps({"model": model, "embeddings": batch}).encode())
            tensor = struct.pack(f"<{len(flat)}f", *flat)
            header = json.dumps(
                {
                    "inputs": [inputs | {"parameters": {"binary_data_size": len(tensor)}}],
                    "parameters": {"binary_data_output": True},
                }
            ).encode()
            self.header_bytes = len(header)
            self.binary_bodies.append(header + tensor)

    @tag("json")
    @task
    def attention(self) -> None:
        """Call /v1/attention with JSON."""
        self.client.post(
            "/v1/attention",
            data=random.choice(self.json_bodies),  # noqa: S311 (no secret)
            headers={"Content-Type": "application/json"},
            name="/v1/attention",
        )

    @tag("binary")
    @task
    def infer(self) -> None:
        """Call the Open Inference Protocol with binary tensors, both ways."""
        model, _, _ = _work(self.environment)
        self.client.post(
            f"/v2/models/{model}/infer",
            data=random.choice(self.binary_bodies),  # noqa: S311 (no secret)
            headers={
                "Content-Type": "application/octet-stream",
                "Inference-Header-Content-Length": str(self.header_bytes),
            },
            name="/v2/models/{model}/infer, binary",
        )


def _work(environment: Environment) -> tuple[str, int, int]:
    """Return model, batch and length, as told on the command line."""
    options = environment.parsed_options
    assert options is not None  # noqa: S101 (Locust has parsed its command line)
    rows, _, length = options.shape.partition("x")
    return options.model, int(rows), int(length)
