"""The artifacts that are served: found, loaded, warmed up, looked up by name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from service.artifact import Artifact, find_artifacts, read_artifact
from service.batcher import Batcher
from service.calls import Inputs
from service.contract import LayerConfig
from service.engine import Engine, OnnxEngine, Provider
from service.errors import ArtifactUnreadable, InferenceFailed, InvalidInput, NotReady, UnknownModel

DEFAULT_NAME = "mha"


@dataclass
class Model:
    """One artifact, its engine and its queue."""

    artifact: Artifact
    engine: Engine
    batcher: Batcher
    problem: str | None = "warm-up has not run yet"
    """Why it is not ready; None = ready."""

    @property
    def name(self) -> str:
        """The artifact's name."""
        return self.artifact.manifest.name

    @property
    def version(self) -> int:
        """The artifact's version."""
        return self.artifact.manifest.version

    @property
    def layer(self) -> LayerConfig:
        """The layer's shape."""
        return self.artifact.manifest.layer

    def warm_up(self) -> None:
        """Run the golden input on both paths; afterwards `problem` says what was wrong, or None."""
        golden = self.artifact.golden
        try:
            plain = self.engine.run(Inputs(golden.embeddings, golden.memory), weights=False)
            masked = self.engine.run(
                Inputs(golden.embeddings, golden.memory, golden.attend_mask), weights=True
            )
        except InferenceFailed as failure:
            self.problem = f"{failure}: {failure.__cause__}".splitlines()[0]
            return
        errors = {
            "output without masks": _error(plain.output, golden.plain_output),
            "output": _error(masked.output, golden.output),
            "attention_weights": _error(masked.attention_weights, golden.attention_weights),
        }
        tolerance = self.artifact.manifest.tolerance
        wrong = next((name for name, error in errors.items() if not error <= tolerance), None)
        self.problem = wrong and (
            f"golden answer: {wrong} differs by {errors[wrong]:.3g}, allowed {tolerance:g}"
        )


class Models:
    """All models of one server, by name."""

    def __init__(self, models: dict[str, Model], *, default: str | None = None) -> None:
        self._models = models
        self._default = default

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def get(self, name: str | None = None, version: str | None = None) -> Model:
        """
        Return a model by name; without one, the default.

        The default is what the setting says, else `mha`, else the only one there is.

        Raises:
            UnknownModel: no such name or version.
            InvalidInput: no name was given and there is no default.
        """
        if name is None:
            name = self.default_name
        if name is None:
            raise InvalidInput(f"model: expected one of {self._listed()}, got none")
        model = self._models.get(name)
        if model is None:
            raise UnknownModel(f"model: expected one of {self._listed()}, got {_shown(name)}")
        if version is not None and version != str(model.version):
            raise UnknownModel(
                f"model {name}: version {model.version} is served, got {_shown(version)}"
            )
        return model

    @property
    def default_name(self) -> str | None:
        """The model of a call that names none; None = the caller has to say."""
        if self._default is not None:
            return self._default
        if DEFAULT_NAME in self._models:
            return DEFAULT_NAME
        return next(iter(self._models)) if len(self._models) == 1 else None

    @property
    def problem(self) -> str | None:
        """Why the server is not ready for calls; None = every model is."""
        return next((f"{m.name}: {m.problem}" for m in self if m.problem is not None), None)

    def warm_up(self) -> None:
        """Warm every model up."""
        for model in self:
            model.warm_up()

    def ready(self, model: Model) -> Model:
        """
        Return the model.

        Raises:
            NotReady: its warm-up has not passed.
        """
        if model.problem is not None:
            raise NotReady(f"model {model.name}: {model.problem}", retry_after_s=1)
        return model

    async def close(self) -> None:
        """Finish every queue."""
        for model in self:
            await model.batcher.close()

    def _listed(self) -> str:
        return ", ".join(sorted(self._models))


def load_models(
    repository: Path,
    *,
    provider: Provider,
    threads: int,
    default: str | None,
    batcher_of: Callable[[str, Engine], Batcher],
) -> Models:
    """
    Return every artifact of `repository`, loaded and not yet warmed up.

    Raises:
        ArtifactUnreadable: the repository is missing or empty, one of its artifacts
            cannot be read, or the default is none of them.
        ProviderUnavailable: see `OnnxEngine`.
    """
    models = {}
    for name, path in find_artifacts(repository).items():
        artifact = read_artifact(path)
        found = (artifact.manifest.name, str(artifact.manifest.version))
        if found != (name, path.name):
            raise ArtifactUnreadable(f"{path}: its manifest is of {found[0]} version {found[1]}")
        engine = OnnxEngine(
            artifact.graph_path, artifact.manifest.layer, provider=provider, threads=threads
        )
        models[name] = Model(artifact, engine, batcher_of(name, engine))
    if not models:
        raise ArtifactUnreadable(
            f"{repository}: no artifact in it; publish one:"
            " python -m export --name mha --embed-dim 768 --num-heads 12"
        )
    if default is not None and default not in models:
        raise ArtifactUnreadable(
            f"default model: expected one of {', '.join(sorted(models))}, got {default}"
        )
    return Models(models, default=default)


def _error(found: npt.NDArray[np.float32] | None, expected: npt.NDArray[np.float32]) -> float:
    """Return max|found - expected| / max(1, max|expected|); infinity for NaN or another shape."""
    if found is None or found.shape != expected.shape:
        return float("inf")
    scale = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
    return float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max(initial=0.0)) / scale


def _shown(name: str) -> str:
    """Show a caller's name without letting it flood or garble a message."""
    return repr(name[:64])
