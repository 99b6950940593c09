"""
The layers that the tests serve, published once, and their weights for the oracles.

`python -m tests.support.layers DIRECTORY` publishes them for an interpreter that has no
torch; `HEADWISE_TEST_LAYERS=DIRECTORY` makes the tests there use them.
"""

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

from safetensors.numpy import load_file

from export.formula import Formula
from service.contract import LayerConfig
from tests.support.versions import factor_of

CONFIGS = {
    "mha": LayerConfig(embed_dim=24, num_heads=3),
    "tiny": LayerConfig(embed_dim=8, num_heads=2),
    "cross": LayerConfig(embed_dim=12, num_heads=3, memory_dim=6, bias=False),
}


@dataclass(frozen=True)
class Layers:
    """Where the published layers lie."""

    directory: Path

    @property
    def repository(self) -> Path:
        """What a server is pointed at."""
        return self.directory / "repository"

    def artifact(self, name: str) -> Path:
        """Return the directory of one artifact."""
        return self.repository / name / "1"

    def formula(self, name: str, version: int = 1) -> Formula:
        """Return the float64 oracle with the weights of one layer: see `publish_version`."""
        state = load_file(self._state(name))
        scaled = {key: tensor * factor_of(version) for key, tensor in state.items()}
        return Formula(scaled, CONFIGS[name].num_heads)

    def publish(self) -> None:
        """Publish every layer, and keep its PyTorch state dict beside the repository."""
        from safetensors.torch import save_file

        from export.publish import publish
        from export.sources import random_layer

        for name, config in CONFIGS.items():
            source = random_layer(
                config.embed_dim,
                config.num_heads,
                seed=0,
                memory_dim=config.memory_dim,
                bias=config.bias,
            )
            publish(source, self.repository, name)
            self._state(name).parent.mkdir(exist_ok=True)
            save_file(source.reference.state_dict(), self._state(name))

    def _state(self, name: str) -> Path:
        return self.directory / "states" / f"{name}.safetensors"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    Layers(Path(sys.argv[1])).publish()
