"""
The layer as a model of Triton's Python backend: one batch of requests in, their answers out.

It is copied into Triton's model repository as `model.py`.
"""

import os
import sys
from typing import Any

# The backend's interpreter does not read PYTHONPATH.
sys.path.append(os.environ["PYTHONPATH"])

import triton_python_backend_utils as triton

from bench.peers.serving.layer import Layer, Question


class TritonPythonModel:
    """One instance; the backend runs each in a process of its own."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the layer."""
        self.layer = Layer.from_environment()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer what the dynamic batcher joined: requests of one shape, or a single one."""
        questions = [
            Question(
                triton.get_input_tensor_by_name(request, "embeddings").as_numpy(),
                "attention_weights" in request.requested_output_names(),
            )
            for request in requests
        ]
        return [
            triton.InferenceResponse(
                [
                    triton.Tensor(name, tensor)
                    for name, tensor in zip(("output", "attention_weights"), tensors, strict=False)
                ]
            )
            for tensors in self.layer.run_together(questions)
        ]
