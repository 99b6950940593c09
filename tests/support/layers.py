"""
The layers that the tests serve, published once, and their weights for the oracles.

`python -m tests.support.layers DIRECTORY` publishes them for an interpreter that has no
torch; `HEADWISE_TEST_LAYERS=DIRECTORY` makes the tests there use them.
"""

import dataclasses
import hashlib
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from export.formula import Formula
from service.contract import GRAPH_FILE
from service.inference.artifact import Golden, read_artifact, read_graph
from service.layer_config import LayerConfig, PositionBias, Rotary
from tests.support.versions import factor_of, publish_unproven

CONFIGS = {
    "mha": LayerConfig(embed_dim=24, num_heads=3),
    "tiny": LayerConfig(embed_dim=8, num_heads=2),
    "cross": LayerConfig(embed_dim=12, num_heads=3, memory_dim=6, biases=()),
}
"""The layers of most tests: multi-head attention as in the formula, and nothing else."""

WIDE = {
    "rotary": LayerConfig(
        embed_dim=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        causal=True,
        rotary=Rotary(base=10_000.0, dims=4),
        biases=("query", "key", "value"),
    ),
    "stretched": LayerConfig(
        embed_dim=8,
        num_heads=2,
        causal=True,
        rotary=Rotary(
            base=100.0, dims=4, interleaved=True, scaling="dynamic", factor=2.0, original_length=4
        ),
    ),
    "buckets": LayerConfig(
        embed_dim=12,
        num_heads=3,
        scale=1.0,
        position_bias=PositionBias("buckets", reach=3),
        biases=(),
    ),
    "extra": LayerConfig(embed_dim=8, num_heads=2, extra_keys=("learned", "zero")),
    "sinks": LayerConfig(
        embed_dim=8,
        num_heads=2,
        num_kv_heads=1,
        causal=True,
        window=3,
        softcap=5.0,
        position_bias=PositionBias("alibi"),
        extra_keys=("sink",),
    ),
    "values": LayerConfig(embed_dim=12, num_heads=3, memory_dim=6, value_memory_dim=5),
    "learned": LayerConfig(embed_dim=8, num_heads=2, positional="learned", max_positions=9),
}
"""Layers that between them have every input, output and default that a layer may have."""

ALL = CONFIGS | WIDE


@dataclass(frozen=True)
class Layers:
    """Where the published layers lie."""

    directory: Path

    @property
    def repository(self) -> Path:
        """What a server of the layers of `CONFIGS` is pointed at."""
        return self.directory / "repository"

    @property
    def wide(self) -> Path:
        """What a server of the layers of `WIDE` is pointed at."""
        return self.directory / "wide"

    def artifact(self, name: str) -> Path:
        """Return the directory of one artifact."""
        return (self.repository if name in CONFIGS else self.wide) / name / "1"

    def formula(self, name: str, version: int = 1) -> Formula:
        """Return the float64 oracle with the weights of one layer: see `publish_version`."""
        tensors = self.tensors(name).items()
        return Formula(ALL[name], {key: tensor * factor_of(version) for key, tensor in tensors})

    def tensors(self, name: str) -> dict[str, npt.NDArray[np.float32]]:
        """Return the weights of one layer, by the names of `export.layer_spec`."""
        return load_file(self._file(name))

    def publish(self) -> None:
        """
        Publish every layer, and keep its weights beside the repositories.

        Those of `WIDE` are published without a proof, which would take seconds each.
        """
        from export.publish import publish
        from export.sources import random_layer

        self._file("").parent.mkdir(parents=True)
        for name, config in CONFIGS.items():
            source = random_layer(
                config.embed_dim,
                config.num_heads,
                seed=0,
                memory_dim=config.memory_dim,
                bias=bool(config.biases),
            )
            publish(source, self.repository, name)
            tensors = {key: tensor.numpy() for key, tensor in source.spec.tensors.items()}
            self._keep(name, tensors)
        for name, config in WIDE.items():
            self._publish_wide(name, config)

    def _publish_wide(self, name: str, config: LayerConfig) -> None:
        """Publish a layer of random weights that answers its golden inputs as it does."""
        from export.graph import write_graph
        from tests.support.specs import random_spec

        random = np.random.default_rng(len(name))
        spec = random_spec(config, seed=len(name))
        self._keep(name, {key: tensor.numpy() for key, tensor in spec.tensors.items()})
        manifest = read_artifact(self.artifact("tiny")).manifest
        manifest = dataclasses.replace(manifest, name=name, layer=config, parity=())
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / GRAPH_FILE
            write_graph(spec, path)
            publish_unproven(self.wide, manifest, read_graph(path), _golden(config, random))

    def _keep(self, name: str, tensors: dict[str, npt.NDArray[np.float32]]) -> None:
        save_file(
            {key: np.ascontiguousarray(value) for key, value in tensors.items()}, self._file(name)
        )

    def _file(self, name: str) -> Path:
        return self.directory / "tensors" / f"{name}.safetensors"


def _golden(config: LayerConfig, random: np.random.Generator) -> Golden:
    """Return golden inputs; the answers in it mean nothing yet: see `publish_unproven`."""

    def tokens(width: int | None) -> npt.NDArray[np.float32] | None:
        return None if width is None else random.normal(size=(2, 5, width)).astype(np.float32)

    embeddings = random.normal(size=(2, 5, config.embed_dim)).astype(np.float32)
    return Golden(
        embeddings=embeddings,
        memory=tokens(config.memory_dim),
        attend_mask=np.array([[True] * 5, [True, True, False, True, False]]),
        plain_output=embeddings,
        output=embeddings,
        attention_weights=embeddings,
        value_memory=tokens(config.value_memory_dim),
    )


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    Layers(Path(sys.argv[1])).publish()
