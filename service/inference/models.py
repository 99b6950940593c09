"""The artifacts that are served: found, loaded, warmed up, looked up by name."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from service.contract import LayerConfig, Manifest
from service.errors import (
    ArtifactUnreadable,
    InferenceFailed,
    InvalidInput,
    NotReady,
    UnknownModel,
)
from service.inference.artifact import Golden, find_artifacts, published_versions, read_artifact
from service.inference.batcher import Batcher
from service.inference.calls import Inputs
from service.inference.engine import Engine, OnnxEngine, Provider
from service.inference.parity import relative_error
from service.inference.repository import Repository, State, Unservable, described
from service.logs import event

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
    """One artifact that is served; it and its threads are gone with the last call that has it."""

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
    The models of one server, by name, each in the best version that the repository holds.

    The best is the highest that loads and answers right.  Loading and warming up take
    their time and belong in a thread; looking up is for the event loop.
    """

    def __init__(
        self, load: Callable[[Path], Model], repository: Path, *, default: str | None = None
    ) -> None:
        self._load = load
        self._repository = Repository(repository)
        self._default = default
        self._models: dict[str, Model] = {}
        self._is_loaded = False
        self._states: dict[str, State | None] = {}
        """Of the files that each model was loaded from at the start."""
        self._withdrawn: set[str] = set()
        self.changes = 0
        """How often a model came or went."""
        self.changing = asyncio.Lock()
        """Held while what is served changes; whoever loads the models first holds it, too."""

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
    def widest_token(self) -> int | None:
        """How many numbers a token of any model has at most; None = no model is served."""
        return max((model.layer.token_width for model in self._models.values()), default=None)

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

    def load_all(self) -> None:
        """
        Load every artifact of the repository; none is warmed up yet.

        Raises:
            ArtifactUnreadable: the repository is missing or empty, one of its artifacts
                cannot be read, or the default is none of them.
            ProviderUnavailable: see `OnnxEngine`.
        """
        models = {}
        for name, path in find_artifacts(self._repository.path).items():
            self._states[name] = self._repository.state(name, int(path.name))
            models[name] = self._load(path)
        if not models:
            raise ArtifactUnreadable(
                f"{self._repository.path}: no artifact in it; publish one:"
                " python -m export --name mha --embed-dim 768 --num-heads 12;"
                " for a container, mount what is published:"
                ' docker run -v "$PWD/artifacts:/artifacts:ro" ...'
            )
        if self._default is not None and self._default not in models:
            raise ArtifactUnreadable(
                f"default model: expected one of {', '.join(sorted(models))}, got {self._default}"
            )
        self._models, self._is_loaded = models, True
        self.changes += len(models)

    def warm_up(self) -> None:
        """Warm every model up; one that answers wrong stays, but any other version is better."""
        for model in self:
            model.warm_up()
            if model.problem is not None:
                why = Unservable(f"{model.name}/{model.version}: {model.problem}")
                state = self._states.get(model.name)
                # Whoever asks for `problem` logs it.
                self._repository.note_broken(model.name, model.version, state, why, is_logged=True)

    async def refresh(self, *, retry: bool) -> None:
        """
        Serve the best version of every artifact in the repository, without losing a call.

        It is loaded and warmed up beside the old one first.  What is broken is logged and
        left alone until its files change, or tried once more if `retry`.  A model of which
        nothing good is left is served on, and what was withdrawn stays so.  A look that
        fails is logged, and the next one looks again.
        """
        async with self.changing:
            if not self._is_loaded:
                return  # the start was refused
            try:
                problem = await self._refresh(retry=retry)
            except Exception as error:  # whatever it is, the next look must come
                problem = described(error)
            self._repository.note_look(problem, again=retry)

    async def _refresh(self, *, retry: bool) -> str | None:
        """Return what was wrong with the look, once the best of what it found is served."""
        if retry:
            self._repository.retry()
        found = await asyncio.to_thread(self._repository.look)
        known = {*found.versions, *self._models} - {*found.unreadable}
        for name in sorted(known - self._withdrawn):
            await self._serve_best(name, found.versions.get(name, ()))
        return found.problem

    async def _serve_best(self, name: str, present: Sequence[int]) -> None:
        """Serve the best of the versions that are present, if it is not served yet."""
        old = self._models.get(name)
        good = old.version if old is not None and old.problem is None else None
        best = await asyncio.to_thread(self._repository.best, name, present, good, self._made)
        if old is not None:
            better = None if best is None else best.version
            self._repository.note_served(name, old.version, present, better)
        if best is not None:
            # Calls that hold the old model finish with it; then it is gone.
            self._models[name] = best
            self.changes += 1
            event("reloaded", model=name, version=best.version)

    async def load(self, name: str) -> None:
        """
        Serve the best version of one artifact in the repository, without losing a call.

        A version that is served already is left as it is.

        Raises:
            UnknownModel: the repository has no artifact of that name.
            NotReady: the highest version does not load or answers wrong, which the log
                tells; what is served then is the best of the others, or still the same.
                Or the repository cannot be read, or the models are still being loaded.
        """
        self.check_loaded()
        async with self.changing:
            try:
                present = await asyncio.to_thread(published_versions, self._repository.path, name)
            except OSError as error:
                event("repository unreadable", level=logging.ERROR, problem=described(error))
                raise NotReady("the repository cannot be read; the log says why") from error
            if not present:
                raise UnknownModel(f"model: nothing in the repository is named {_shown(name)}")
            self._repository.retry(name)
            await self._serve_best(name, present)
            served = self._models.get(name)
            if served is not None:
                self._withdrawn.discard(name)
            if served is None or served.version != present[-1] or served.problem is not None:
                others = "" if served is None else f", version {served.version} is"
                raise NotReady(
                    f"model {name}: version {present[-1]} cannot be served{others};"
                    " the log says why"
                )

    async def unload(self, name: str) -> None:
        """
        Serve an artifact no more, until it is taken up again; calls already in finish.

        Raises:
            UnknownModel: it is not served.
            NotReady: the models are still being loaded.
        """
        self.check_loaded()
        async with self.changing:
            model = self.get(name)
            self._withdrawn.add(name)
            del self._models[name]
            self.changes += 1
            event("withdrawn", model=name, version=model.version)

    async def index(self) -> list[Listed]:
        """
        List what is served, what is known to be broken, and the highest version of the rest.

        Raises:
            NotReady: the models are still being loaded.
        """
        self.check_loaded()
        try:
            published = (await asyncio.to_thread(self._repository.contents)).versions
        except OSError:
            published = {}
        listed: dict[tuple[str, int], str | None] = {
            (name, versions[-1]): "unloaded" if name in self._withdrawn else "not loaded"
            for name, versions in published.items()
            if name not in self._models
        }
        broken = self._repository.problems()
        listed |= {key: why for key, why in broken.items() if key[1] in published.get(key[0], ())}
        listed |= {(model.name, model.version): model.problem for model in self}
        return [Listed(*key, problem) for key, problem in sorted(listed.items())]

    @property
    def broken(self) -> list[str]:
        """Name the versions in the repository that cannot be served: `<name>/<version>`."""
        return [f"{name}/{version}" for name, version in sorted(self._repository.problems())]

    def _made(self, path: Path) -> Model:
        """
        Return the model in that directory, loaded and warmed up.

        Raises:
            StartRefused, Unservable: it does not load, or answers wrong.
        """
        model = self._load(path)
        model.warm_up()
        if model.problem is not None:
            raise Unservable(f"{path}: {model.problem}")
        return model

    def require_ready(self, model: Model) -> Model:
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
