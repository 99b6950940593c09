"""The artifacts that are served: found, loaded, warmed up, looked up by name and version."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from service.errors import (
    ArtifactUnreadable,
    HeadwiseError,
    InvalidInput,
    NotReady,
    StartRefused,
    UnknownModel,
)
from service.inference.artifact import published_versions
from service.inference.model import Model
from service.inference.repository import Repository, Unservable, described
from service.inference.repository_index import Listed, index_of
from service.logs import event

DEFAULT_NAME = "mha"

_LOADING = "the models are being loaded"


class Models:
    """
    The models of one server, by name and version.

    Of each name the `versions_kept` highest versions that load and answer right are
    served; the highest is the one that answers where no version is named.  Loading and
    warming up take their time and belong in a thread; looking up is for the event loop.

    With `skip_broken` the start goes on without what cannot be served, as every later look.
    """

    def __init__(
        self,
        load: Callable[[Path], Model],
        repository: Path,
        *,
        default: str | None = None,
        versions_kept: int = 1,
        skip_broken: bool = False,
    ) -> None:
        self._load = load
        self._repository = Repository(repository)
        self._default = default
        self._versions_kept = versions_kept
        self._skip_broken = skip_broken
        self._served: dict[str, dict[str | None, Model]] = {}
        """By name, then by version, the highest first; under None once more the highest."""
        self._is_loaded = False
        self._withdrawn: set[str] = set()
        self._skipped: set[str] = set()
        """The names of which nothing could be served at the start."""
        self.changes = 0
        """How often a model came or went."""
        self.changing = asyncio.Lock()
        """Held while what is served changes; whoever loads the models first holds it, too."""

    def __iter__(self) -> Iterator[Model]:
        return (model for name in list(self._served) for model in self.versions_of(name))

    def versions_of(self, name: str) -> list[Model]:
        """Return the versions of a name that are served, the highest first."""
        served = self._served.get(name, {})
        return [model for version, model in served.items() if version is not None]

    def get(self, name: str | None = None, version: str | None = None) -> Model:
        """
        Return a model; without a version the highest, without a name the default.

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
        served = self._served.get(name)
        model = None if served is None else served.get(version)
        if model is None:
            raise self._unknown(name, version)
        return model

    def _unknown(self, name: str, version: str | None) -> HeadwiseError:
        """Return what to answer where a name, or a version of it, is not served."""
        versions = [str(model.version) for model in self.versions_of(name)]
        if versions and version is not None:
            are = "versions {} are" if len(versions) > 1 else "version {} is"
            served = are.format(", ".join(versions))
            return UnknownModel(f"model {name}: {served} served, got {_shown(version)}")
        if name in self._skipped and name not in self._withdrawn:
            return NotReady(f"model {name}: no version of it can be served; the log says why")
        return UnknownModel(f"model: expected {self._listed()}, got {_shown(name)}")

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
        return max((model.layer.token_width for model in self), default=None)

    @property
    def default_name(self) -> str | None:
        """The model of a call that names none; None = the caller has to say."""
        if self._default is not None:
            return self._default
        # Withdrawn or broken, it still is: calls that name none must not get another layer.
        if any(DEFAULT_NAME in names for names in (self._served, self._withdrawn, self._skipped)):
            return DEFAULT_NAME
        return next(iter(self._served)) if len(self._served) == 1 else None

    @property
    def problem(self) -> str | None:
        """Why the server is not ready for calls; None = every model is."""
        if not self._is_loaded:
            return _LOADING
        return next((f"{self._label(m)}: {m.problem}" for m in self if m.problem is not None), None)

    def load_all(self) -> None:
        """
        Load what is to be served of every artifact of the repository.

        None of it is warmed up yet, except where the start skips what is broken: what
        answers wrong is broken, too.

        Raises:
            ArtifactUnreadable: the repository is missing or empty, one of its artifacts (with
                `skip_broken`, each of them) cannot be loaded, or the default is none of them.
            ProviderUnavailable: see `OnnxEngine`.
        """
        found = self._repository.first_look()
        if not self._skip_broken and found.problem is not None:
            raise ArtifactUnreadable(found.problem)
        self._repository.note_look(found.problem, again=False)
        served = {name: list(self._first(name, found.versions[name])) for name in found.versions}
        names = {*served, *found.unreadable}
        if not any(served.values()):
            raise ArtifactUnreadable(
                f"{self._repository.path}: nothing in it can be served:"
                f" {self._repository.first_problem()}"
            )
        if self._default is not None and self._default not in names:
            raise ArtifactUnreadable(
                f"default model: expected one of {', '.join(sorted(names))}, got {self._default}"
            )
        self._served = {name: _by_version(models) for name, models in served.items() if models}
        self._skipped = names - {*self._served}
        self.changes += sum(map(len, served.values()))
        self._is_loaded = True

    def _first(self, name: str, present: Sequence[int]) -> Iterator[Model]:
        """
        Give the versions of a name that a start serves, the highest first.

        Raises:
            StartRefused: one cannot be served, and the start must not skip it.
        """
        if self._skip_broken:
            tried = (self._repository.attempt(name, n, self._made) for n in reversed(present))
            good = (model for model in tried if model is not None)
            yield from itertools.islice(good, self._versions_kept)
            return
        for version in present[: -self._versions_kept - 1 : -1]:
            try:
                yield self._repository.loaded(name, version, self._load)
            except StartRefused:
                raise
            except Exception as error:  # whatever it is, the start must not hang
                raise ArtifactUnreadable(f"{name}/{version}: {described(error)}") from error

    def warm_up(self) -> None:
        """Warm up what is not yet; one that answers wrong stays, but any other is better."""
        for model in self:
            if model.problem is not None:
                model.warm_up()
            if model.problem is not None:
                self._repository.note_wrong(model.name, model.version, model.problem)

    async def refresh(self, *, retry: bool) -> None:
        """
        Serve the best versions of every artifact in the repository, without losing a call.

        They are loaded and warmed up beside the old ones first.  What is broken is logged
        and left alone until its files change, or tried once more if `retry`.  A model of
        which nothing good is left is served on, and what was withdrawn stays so.  A look
        that fails is logged, and the next one looks again; so is, if `retry`, one that
        changed nothing, for whoever asked for it.
        """
        async with self.changing:
            if not self._is_loaded:
                return  # the start was refused
            changes = self.changes
            try:
                problem = await self._refresh(retry=retry)
            except Exception as error:  # whatever it is, the next look must come
                problem = described(error)
            self._repository.note_look(problem, again=retry)
            if retry and problem is None and self.changes == changes:
                served = [f"{model.name}/{model.version}" for model in self]
                event("looked at the repository: nothing to change", served=served)

    async def _refresh(self, *, retry: bool) -> str | None:
        """Return what was wrong with the look, once the best of what it found is served."""
        if retry:
            self._repository.retry()
        found = await asyncio.to_thread(self._repository.look)
        known = {*found.versions, *self._served} - {*found.unreadable}
        for name in sorted(known - self._withdrawn):
            await self._serve_best(name, found.versions.get(name, ()))
        return found.problem

    async def _serve_best(self, name: str, present: Sequence[int]) -> None:
        """
        Serve the best of the versions that are present, and what is served already of them.

        One more than is kept is in memory at most, besides what calls still hold.  Where
        nothing present is good, what is served is served on.
        """
        before = [model.version for model in self.versions_of(name)]
        kept: list[Model] = []
        for version in sorted(present, reverse=True):
            if len(kept) == self._versions_kept:
                break
            model = self._good(name, version)
            if model is None:
                attempt = self._repository.attempt
                model = await asyncio.to_thread(attempt, name, version, self._made)
            if model is not None:
                kept.append(model)
                lower = [self._good(name, n) for n in before if n in present and n < version]
                models = [*kept, *(other for other in lower if other is not None)]
                self._serve(name, models[: self._versions_kept])
                del lower, models  # what is served no more is not held meanwhile
        served = [model.version for model in self.versions_of(name)]
        await asyncio.to_thread(self._repository.note_served, name, before, served, present)

    def _good(self, name: str, version: int) -> Model | None:
        """Return a version if it is served and answers right."""
        model = self._served.get(name, {}).get(str(version))
        return model if model is not None and model.problem is None else None

    def _serve(self, name: str, models: Sequence[Model]) -> None:
        """
        Serve these versions of a name, the highest first, and no others.

        Calls that hold another finish with it; then it is gone.
        """
        before = self.versions_of(name)
        if before == models:
            return
        self._served[name] = _by_version(models)
        self.changes += 1
        versions = [model.version for model in models]
        for model in models:
            if model not in before:
                event("reloaded", model=name, version=model.version, served=versions)

    async def load(self, name: str) -> None:
        """
        Serve the best versions of one artifact in the repository, without losing a call.

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
            self._repository.note_present(name, present)
            if not present:
                on = ", which is served on" if name in self._served else ""
                raise UnknownModel(f"model: nothing in the repository is named {_shown(name)}{on}")
            await self._serve_best(name, present)
            served = self._served.get(name, {}).get(None)
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
        Serve no version of an artifact until it is loaded again; admitted calls still finish.

        Raises:
            UnknownModel: it is not served.
            NotReady: the models are still being loaded.
        """
        self.check_loaded()
        async with self.changing:
            self.get(name)
            versions = [model.version for model in self.versions_of(name)]
            self._withdrawn.add(name)
            del self._served[name]
            self.changes += 1
            for version in versions:
                event("withdrawn", model=name, version=version)

    async def index(self) -> list[Listed]:
        """
        List every version that is served or in the repository.

        Raises:
            NotReady: the models are still being loaded.
        """
        self.check_loaded()
        try:
            present = (await asyncio.to_thread(self._repository.contents)).versions
        except OSError:
            present = {}
        served = {name: self.versions_of(name) for name in self._served}
        problems = self._repository.problems()
        return index_of(present, served, self._withdrawn, problems, self._versions_kept)

    @property
    def broken(self) -> list[str]:
        """
        Name what is in the repository and cannot be served: `<name>/<version>`.

        A name alone = its directory could not be looked into.
        """
        versions = [f"{name}/{version}" for name, version in sorted(self._repository.problems())]
        return [*versions, *self._repository.unreadable]

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

    def _label(self, model: Model) -> str:
        """Name a model in a message: with its version where it is not the default one."""
        is_default = self._served[model.name][None] is model
        return model.name if is_default else f"{model.name}/{model.version}"

    def _listed(self) -> str:
        names = ", ".join(sorted(self._served))
        return f"one of {names}" if names else "one to be loaded first"


def _shown(name: str) -> str:
    """Show a caller's name without letting it flood or garble a message."""
    return repr(name[:64])


def _by_version(models: Sequence[Model]) -> dict[str | None, Model]:
    """Return models of one name, the highest version first, as `Models` looks them up."""
    return {None: models[0]} | {str(model.version): model for model in models}
