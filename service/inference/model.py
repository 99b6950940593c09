"""One version of an artifact, loaded: its engine, its queue, its warm-up."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from service.contract import (
    ATTENTION_WEIGHTS,
    EXTRA_WEIGHTS,
    OUTPUT,
    PLAIN_OUTPUT,
    Manifest,
)
from service.errors import ArtifactUnreadable, InferenceFailed
from service.inference.artifact import Golden, read_artifact
from service.inference.batcher import Batcher
from service.inference.engine import Engine, OnnxEngine, Provider
from service.inference.parity import relative_error
from service.layer_config import LayerConfig


@dataclass(eq=False)
class Model:
    """
    One version of an artifact that is served, with an engine and a queue of its own.

    It, its memory and its threads are gone with the last call that has it.
    """

    manifest: Manifest
    golden: Golden
    engine: Engine
    batcher: Batcher
    problem: str | None = "warm-up has not run yet"
    """Why it is not ready; None = ready."""

    @property
    def name(self) -> str:
        """The artifact's name."""
        return self.manifest.name

    @property
    def version(self) -> int:
        """The artifact's version."""
        return self.manifest.version

    @property
    def layer(self) -> LayerConfig:
        """The layer's shape."""
        return self.manifest.layer

    def warm_up(self) -> None:
        """Run the golden input on every path; afterwards `problem` says what was wrong, or None."""
        try:
            self.problem = self._difference(concurrent=False) or self._difference(concurrent=True)
        except InferenceFailed as failure:
            self.problem = f"{failure}: {failure.__cause__}".splitlines()[0]
        except Exception as failure:  # whatever it is, this version answers nothing
            self.problem = f"{type(failure).__name__}: {failure}".splitlines()[0]

    def _difference(self, *, concurrent: bool) -> str | None:
        """Return which golden answer is not met, or None."""
        golden = self.golden
        plain = self.engine.run(
            golden.inputs(self.layer, masked=False), weights=False, concurrent=concurrent
        )
        masked = self.engine.run(golden.inputs(self.layer), weights=True, concurrent=concurrent)
        found = {
            PLAIN_OUTPUT: plain.output,
            OUTPUT: masked.output,
            ATTENTION_WEIGHTS: masked.attention_weights,
            EXTRA_WEIGHTS: masked.extra_weights,
        }
        errors = {
            name: relative_error(found[name], answer) for name, answer in golden.answers.items()
        }
        tolerance = self.manifest.tolerance
        wrong = next((name for name, error in errors.items() if not error <= tolerance), None)
        if wrong is None:
            return None
        name = "output without masks" if wrong == PLAIN_OUTPUT else wrong
        return f"golden answer: {name} differs by {errors[wrong]:.3g}, allowed {tolerance:g}"


def _check_place(path: Path, manifest: Manifest) -> None:
    """Return when an artifact of this manifest belongs at `<repository>/<name>/<version>`."""
    name, version = path.parent.name, path.name
    cures = []
    if manifest.name != name:
        cures.append(f'"name" to {json.dumps(name)}')
    if str(manifest.version) != version:
        cures.append(f'"version" to {version}')
    if not cures:
        return
    back = "; to go back to a version, take those above it away instead"
    raise ArtifactUnreadable(
        f"{path}: expected a manifest of {name} version {version}, as its directories are named,"
        f" got one of {manifest.name} version {manifest.version}; if it is a copy, change"
        f" {' and '.join(cures)} in its manifest.json{back if manifest.name == name else ''}"
    )


def loader(
    *,
    provider: Provider,
    threads: int,
    concurrent_runs: int,
    batcher_of: Callable[[str, Engine], Batcher],
) -> Callable[[Path], Model]:
    """Return what makes a model of an artifact's directory `<repository>/<name>/<version>`."""

    def load(path: Path) -> Model:
        artifact = read_artifact(path)
        manifest = artifact.manifest
        _check_place(path, manifest)
        engine = OnnxEngine(
            artifact.graph,
            manifest.layer,
            provider=provider,
            threads=threads,
            concurrent_runs=concurrent_runs,
        )
        # The bytes of the graph and the weights go with `artifact`: the engine has its own.
        return Model(manifest, artifact.golden, engine, batcher_of(manifest.name, engine))

    return load
