"""A layer whose weights exceed what one protobuf message holds."""

from pathlib import Path

import numpy as np
import pytest

from export.gate import formula_of
from export.publish import publish
from export.sources import Source, random_layer
from service.contract import FP32_TOLERANCE
from service.inference.artifact import read_artifact
from service.inference.calls import Inputs
from service.inference.engine import OnnxEngine
from service.inference.parity import relative_error

PROTOBUF_BYTES = 2**31
"""No message may be larger."""


def _source() -> Source:
    return random_layer(16384, 128, seed=0, num_kv_heads=1, bias=False)


@pytest.mark.slow
def test_layer_above_two_gigabytes_is_published_and_answered(tmp_path: Path) -> None:
    """Its weights lie in a file beside the graph; the proof says that it was a reduced one."""
    artifact = publish(_source(), tmp_path, "large", threads=2)

    manifest = artifact.manifest
    del artifact
    path = tmp_path / "large" / "1"
    assert (path / "layer.weights").stat().st_size > PROTOBUF_BYTES
    assert (path / "layer.onnx").stat().st_size < 2**20
    assert manifest.proof == "reduced"
    assert manifest.worst_output_error <= FP32_TOLERANCE
    embeddings = np.random.default_rng(0).standard_normal((1, 3, 16384), np.float32)
    expected = formula_of(_source()).plain_output(embeddings)
    served = read_artifact(path)
    engine = OnnxEngine(served.graph, manifest.layer, threads=2)
    found = engine.run(Inputs(embeddings), weights=False).output
    assert relative_error(found, expected) <= FP32_TOLERANCE
