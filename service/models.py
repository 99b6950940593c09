"""The artifacts that are served: found, loaded, warmed up, looked up by name."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from service.artifact import Golden, find_artifacts, read_artifact
from service.batcher import Batcher
from service.calls import Inputs
from service.contract import LayerConfig, Manifest
from service.engine import Engine, OnnxEngine, Provider
from service.errors import (
    ArtifactUnreadable,
    InferenceFailed,
    InvalidInput,
    NotReady,
    StartRefused,
    UnknownModel,
)
from service.logs import event
from service.parity import relative_error

DEFAULT_NAME = "mha"

_LOADING = "the models are being loaded"


@dataclass(frozen=True)
class Listed:
    """An artifact as the repository's index lists it."""

    name: str
    version: int
    problem: str | None
    """Why it takes no calls; None = it does."""


@dataclass
class Model:
    """One artifact, its engine and its queue."""

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

    def _difference(self, *, concurrent: bool) -> str | None:
        """Return which golden answer is not met, or None."""
        golden = self.golden
        plain = self.engine.run(
            Inputs(golden.embeddings, golden.memory), weights=False, concurrent=concurrent
        )
        masked = self.engine.run(
            Inputs(golden.embeddings, golden.memory, golden.attend_mask),
            weights=True,
            concurrent=concurrent,
        )
        errors = {
            "output without masks": relative_error(plain.output, golden.plain_output),
            "output": relative_error(masked.output, golden.output),
            "attention_weights": relative_error(masked.attention_weights, golden.attention_weights),
        }
        tolerance = self.manifest.tolerance
        wrong = next((name for name, error in errors.items() if not error <= tolerance), None)
        return wrong and (
            f"golden answer: {wrong} differs by {errors[wrong]:.3g}, allowed {tolerance:g}"
        )


class Models:
    """
    The models of one server, by name, in the highest version of each that works.

    Loading and warming up take their time and belong in a thread; looking up is
    for the event loop.
    """

    def __init__(
        self, load: Callable[[Path], Model], repository: Path, *, default: str | None = None
    ) -> None:
        self._load = load
        self._repository = repository
        self._default = default
        self._models: dict[str, Model] = {}
        self._is_loaded = False
        self._broken: set[Path] = set()
        self._withdrawn: set[str] = set()
        self._refreshing = asyncio.Lock()

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._models.values()))

    def get(self, name: str | None = None, version: str | None = None) -> Model:
        """
        Return a model by name; without one, the default.

        The default is what the setting says, else `mha`, else the only one there is.

        Raises:
            UnknownModel: no such name or version.
            InvalidInput: no name was given and there is no default.
            NotReady: the models are still being loaded.
        """
        self.check_loaded()
        if name is None:
            name = self.default_name
        if name is None:
            raise InvalidInput(f"model: expected {self._listed()}, got none")
        model = self._models.get(name)
        if model is None:
            raise UnknownModel(f"model: expected {self._listed()}, got {_shown(name)}")
        if version is not None and version != str(model.version):
            raise UnknownModel(
                f"model {name}: version {model.version} is served, got {_shown(version)}"
            )
        return model

    def check_loaded(self) -> None:
        """
        Return once the models are loaded.

        Raises:
            NotReady: they are still being loaded.
        """
        if not self._is_loaded:
            raise NotReady(_LOADING, retry_after_s=1)

    @property
    def default_name(self) -> str | None:
        """The model of a call that names none; None = the caller has to say."""
        if self._default is not None:
            return self._default
        # Withdrawn, it still is: calls that name none must not silently get another layer.
        if DEFAULT_NAME in self._models or DEFAULT_NAME in self._withdrawn:
            return DEFAULT_NAME
        return next(iter(self._models)) if len(self._models) == 1 else None

    @property
    def problem(self) -> str | None:
        """Why the server is not ready for calls; None = every model is."""
        if not self._is_loaded:
            return _LOADING
        return next((f"{m.name}: {m.problem}" for m in self if m.problem is not None), None)

    def load(self) -> None:
        """
        Load every artifact of the repository; none is warmed up yet.

        Raises:
            ArtifactUnreadable: the repository is missing or empty, one of its artifacts
                cannot be read, or the default is none of them.
            ProviderUnavailable: see `OnnxEngine`.
        """
        models = {name: self._load(path) for name, path in find_artifacts(self._repository).items()}
        if not models:
            raise ArtifactUnreadable(
                f"{self._repository}: no artifact in it; publish one:"
                " python -m export --name mha --embed-dim 768 --num-heads 12;"
                " for a container, mount what is published:"
                ' docker run -v "$PWD/artifacts:/artifacts:ro" ...'
            )
        if self._default is not None and self._default not in models:
            raise ArtifactUnreadable(
                f"default model: expected one of {', '.join(sorted(models))}, got {self._default}"
            )
        self._models, self._is_loaded = models, True

    def warm_up(self) -> None:
        """Warm every model up."""
        for model in self:
            model.warm_up()

    async def refresh(self, *, retry: bool) -> None:
        """
        Serve what is newer in the repository, without losing a call.

        A newer artifact is loaded and warmed up beside the old one first.  A broken
        one is told in the log and leaves the old one serving; it is tried again only
        if `retry`.  What vanished from the repository is served on, and what was
        withdrawn stays so.
        """
        async with self._refreshing:
            if retry:
                self._broken.clear()
            found = await asyncio.to_thread(lambda: list(self._newer()))
            for path, model, problem in found:
                if model is None:
                    self._broken.add(path)
                    event("not reloaded", level=logging.ERROR, problem=problem)
                else:
                    self._serve(model)

    async def take_up(self, name: str) -> None:
        """
        Serve the highest version of one artifact in the repository, without losing a call.

        A version that is served already is left as it is.

        Raises:
            UnknownModel: the repository has no artifact of that name.
            NotReady: it does not load or answers wrong, which the log tells; what was
                served is served on.  Or the models are still being loaded.
        """
        self.check_loaded()
        async with self._refreshing:
            path = (await self._published()).get(name)
            if path is None:
                raise UnknownModel(f"model: nothing in the repository is named {_shown(name)}")
            served = self._models.get(name)
            if served is None or served.version < int(path.name):
                model, problem = await asyncio.to_thread(self._made, path)
                if model is None:
                    self._broken.add(path)
                    event("not reloaded", level=logging.ERROR, problem=problem)
                    raise NotReady(
                        f"model {name}: version {path.name} cannot be served; the log says why"
                    )
                self._serve(model)
            self._withdrawn.discard(name)

    async def withdraw(self, name: str) -> None:
        """
        Serve an artifact no more, until it is taken up again; calls already in finish.

        Raises:
            UnknownModel: it is not served.
            NotReady: the models are still being loaded.
        """
        self.check_loaded()
        async with self._refreshing:
            model = self.get(name)
            self._withdrawn.add(name)
            del self._models[name]
            event("withdrawn", model=name, version=model.version)

    async def index(self) -> list[Listed]:
        """
        List every artifact that is served, or that the repository holds, by name.

        Raises:
            NotReady: the models are still being loaded.
        """
        self.check_loaded()
        published = await self._published()
        listed = {
            name: Listed(name, int(path.name), self._absence(name))
            for name, path in published.items()
        }
        listed |= {model.name: Listed(model.name, model.version, model.problem) for model in self}
        return [listed[name] for name in sorted(listed)]

    def _absence(self, name: str) -> str:
        return "unloaded" if name in self._withdrawn else "not loaded"

    async def _published(self) -> dict[str, Path]:
        """Return what the repository holds; nothing when it cannot be read any more."""
        try:
            return await asyncio.to_thread(find_artifacts, self._repository)
        except ArtifactUnreadable as error:
            event("repository unreadable", level=logging.ERROR, problem=str(error))
            return {}

    def _serve(self, model: Model) -> None:
        # Calls that hold the old model finish with it; then it is gone.
        self._models[model.name] = model
        event("reloaded", model=model.name, version=model.version)

    def _newer(self) -> Iterator[tuple[Path, Model | None, str | None]]:
        """Give each artifact newer than what is served: ready, or what is wrong with it."""
        served = {model.name: model.version for model in self}
        for name, path in find_artifacts(self._repository).items():
            is_newer = int(path.name) > served.get(name, 0)
            if is_newer and name not in self._withdrawn and path not in self._broken:
                yield path, *self._made(path)

    def _made(self, path: Path) -> tuple[Model | None, str | None]:
        """Return the model in that directory, loaded and warmed up, or what is wrong with it."""
        try:
            model = self._load(path)
            model.warm_up()
        except StartRefused as error:
            return None, str(error)
        return (None, f"{path}: {model.problem}") if model.problem else (model, None)

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
        names = ", ".join(sorted(self._models))
        return f"one of {names}" if names else "one to be loaded first"


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
        if (manifest.name, str(manifest.version)) != (path.parent.name, path.name):
            raise ArtifactUnreadable(
                f"{path}: its manifest is of {manifest.name} version {manifest.version}"
            )
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


def _shown(name: str) -> str:
    """Show a caller's name without letting it flood or garble a message."""
    return repr(name[:64])
