"""
Versions of a layer whose answers tell them apart: the same graph, every weight scaled.

They are published without a proof, which would take seconds each; a server holds them to
their golden answers, and the tests to the formula with the scaled weights.
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from service.contract import (
    ATTEND_MASK,
    ATTENTION_WEIGHTS,
    EMBEDDINGS,
    EXTRA_WEIGHTS,
    GOLDEN_FILE,
    GRAPH_FILE,
    MANIFEST_FILE,
    MEMORY,
    OUTPUT,
    PLAIN_OUTPUT,
    VALUE_MEMORY,
    WEIGHTS_FILE,
    FileEntry,
    Manifest,
)
from service.inference.artifact import Golden, Graph, read_artifact
from service.inference.engine import OnnxEngine

Arrays = dict[str, npt.NDArray[Any]]


def factor_of(version: int) -> np.float32:
    """Return what the weights of a version are those of version 1 times; exact in FP32."""
    return np.float32(1 + (version - 1) / 64)


def publish_version(repository: Path, name: str, version: int, *, base: Path | None = None) -> Path:
    """
    Publish a version in one rename, and return where it lies.

    `base` is the artifact with the weights of version 1, by default that of this name.
    """
    artifact = read_artifact(base or repository / name / "1")
    numbers = np.frombuffer(artifact.graph.weights, np.float32) * factor_of(version)
    graph = dataclasses.replace(artifact.graph, weights=numbers.tobytes())
    manifest = dataclasses.replace(artifact.manifest, name=name, version=version)
    return publish_unproven(repository, manifest, graph, artifact.golden)


def publish_unproven(repository: Path, manifest: Manifest, graph: Graph, golden: Golden) -> Path:
    """Publish a graph with its own answers to the golden inputs, and return where it lies."""
    answered = _answered(OnnxEngine(graph, manifest.layer), golden)
    contents = {
        GRAPH_FILE: graph.model,
        WEIGHTS_FILE: graph.weights,
        GOLDEN_FILE: save({name: np.ascontiguousarray(a) for name, a in answered.items()}),
    }
    files = {
        file: FileEntry(hashlib.sha256(content).hexdigest(), len(content))
        for file, content in contents.items()
    }
    aside = repository / f".staging-{manifest.name}-{manifest.version}"
    aside.mkdir(parents=True)
    for file, content in contents.items():
        (aside / file).write_bytes(content)
    (aside / MANIFEST_FILE).write_text(dataclasses.replace(manifest, files=files).to_json())
    (repository / manifest.name).mkdir(exist_ok=True)
    return aside.rename(repository / manifest.name / str(manifest.version))


def _answered(engine: OnnxEngine, golden: Golden) -> Arrays:
    """Return the golden inputs, and what this engine answers to them."""
    plain = engine.run(golden.inputs(engine.layer, masked=False), weights=False)
    masked = engine.run(golden.inputs(engine.layer), weights=True)
    tensors = {
        EMBEDDINGS: golden.embeddings,
        MEMORY: golden.memory,
        VALUE_MEMORY: golden.value_memory,
        ATTEND_MASK: golden.attend_mask,
        PLAIN_OUTPUT: plain.output,
        OUTPUT: masked.output,
        ATTENTION_WEIGHTS: masked.attention_weights,
        EXTRA_WEIGHTS: masked.extra_weights,
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
