"""
What a repository holds, and what is known of the versions in it: broken, gone, changed.

Knows directories and the state of their files, not what loads them.
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from service.errors import ArtifactUnreadable, StartRefused
from service.inference.artifact import published_versions
from service.logs import event

State = tuple[tuple[str, int, int, int, int], ...]
"""Name, inode, size in bytes, mtime and ctime in ns: of a version's directory and of its files."""

_FRESH_NS: Final = 2 * 10**9
"""
What changed so recently may change again without a trace: file systems keep times in ticks of
up to 2 s.
"""

_UNNAMED: Final = "cannot be loaded; the log says why"
"""What callers are told of a failure whose own words are not for them."""

_T = TypeVar("_T")


class Unservable(Exception):
    """A version cannot be served: its files do not load, or it answers wrong."""


@dataclass(frozen=True)
class Found:
    """What one look at a repository found."""

    versions: Mapping[str, tuple[int, ...]]
    """By name, every version that is there, ascending."""
    unreadable: Mapping[str, str]
    """By name, why its directory could not be looked into."""

    @property
    def problem(self) -> str | None:
        """What an operator must know of the look; None = nothing."""
        return "; ".join(self.unreadable.values()) or None


@dataclass
class _Broken:
    """A version that could not be served when it was last tried."""

    state: State | None
    """Of its files, just before that try; None = to be tried again in any case."""
    problem: str
    reason: str
    """The problem in words for callers: without paths of the host."""
    logged: str | None = None
    """The problem that the log already has."""


@dataclass(frozen=True)
class _Read:
    """What the files of a version were like just before it was loaded."""

    state: State | None
    """None = they had just changed, or could not be looked at."""
    written: dict[str, tuple[int, int]]
    """Size in bytes and mtime in ns of each."""


class Repository:
    """
    A repository, and what is known of its versions.

    For one thread at a time; only `problems` and `unreadable` may be read from another
    meanwhile.
    """

    def __init__(self, path: Path, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.path = path
        self._clock_ns = clock_ns
        self.unreadable: Mapping[str, str] = {}
        """By name, why the last look could not look into its directory."""
        self._broken: dict[tuple[str, int], _Broken] = {}
        self._read: dict[tuple[str, int], _Read] = {}
        """Of each version that is served."""
        self._missing: set[tuple[str, int]] = set()
        """What is served on though it is not in the repository any more, as the log has it."""
        self._changed: set[tuple[str, int]] = set()
        """What is served though its files are others by now, as the log has it."""
        self._look_problem: str | None = None
        """What was wrong with the last look, as the log has it."""

    def first_look(self) -> Found:
        """
        Return what is there now, for a start.

        Raises:
            ArtifactUnreadable: it is no directory, not open to us, or empty.
        """
        try:
            if not self.path.is_dir():
                raise ArtifactUnreadable(f"{self.path}: no such repository directory")
            found = self.look()
        except OSError as error:
            raise ArtifactUnreadable(described(error)) from error
        if not found.versions and not found.unreadable:
            raise ArtifactUnreadable(
                f"{self.path}: no artifact in it; publish one:"
                " python -m export --name mha --embed-dim 768 --num-heads 12;"
                " for a container, mount what is published:"
                ' docker run -v "$PWD/artifacts:/artifacts:ro" ...'
            )
        return found

    def look(self) -> Found:
        """
        Return what is there now, and forget what was wrong with anything else.

        Raises:
            OSError: the repository cannot be listed.
        """
        found = self.contents()
        self.unreadable = found.unreadable
        for name, version in list(self._broken):
            if version not in found.versions.get(name, ()) and name not in found.unreadable:
                del self._broken[name, version]
        return found

    def note_look(self, problem: str | None, *, again: bool) -> None:
        """
        Log how a look went, unless it went like the one before; a problem also if `again`.

        `problem` is what was wrong with all that came of it; None = nothing.
        """
        if problem is not None and (again or problem != self._look_problem):
            event("repository unreadable", level=logging.ERROR, problem=problem)
        if problem is None and self._look_problem is not None:
            event("repository readable again")
        self._look_problem = problem

    def note_served(
        self, name: str, before: Sequence[int], served: Sequence[int], present: Collection[int]
    ) -> None:
        """
        Log, once, which versions were taken away, and whose files are not those that were read.

        `before` and `served` are the versions of `name` that were served before a look and
        are now, the default first; `present` are those that are in the repository.
        """
        for version in before:
            if version not in present:
                self._note_gone(name, version, served)
        for version in served:
            if version in present:
                self._missing.discard((name, version))
                self._note_change(name, version)
        over = {(name, version) for version in before if version not in served}
        self._missing -= over
        self._changed -= over
        for key in over:
            self._read.pop(key, None)

    def _note_gone(self, name: str, version: int, served: Sequence[int]) -> None:
        """Log that a version is not there any more: it is served no longer, or for want of any."""
        is_served_on = version in served
        if is_served_on and (name, version) in self._missing:
            return
        event(
            "gone from the repository",
            level=logging.WARNING if is_served_on else logging.INFO,
            model=name,
            version=version,
            served=version if is_served_on else served[0],
        )
        if is_served_on:
            self._missing.add((name, version))

    def _note_change(self, name: str, version: int) -> None:
        """
        Log that the files of a version that is served were written since they were read.

        Sizes and times tell: no file is read.
        """
        written = _written(self._path(name, version))
        if written is None:
            return  # it cannot be looked into just now
        if written.items() >= self._read[name, version].written.items():
            self._changed.discard((name, version))
        elif (name, version) not in self._changed:
            self._changed.add((name, version))
            event(
                "files of a served version changed",
                level=logging.WARNING,
                model=name,
                version=version,
                problem=f"the files of {name}/{version} changed since they were read; what was"
                " read is served on: publish another layer as another version",
            )

    def contents(self) -> Found:
        """
        Return what is there now, and change nothing.

        Raises:
            OSError: it cannot be listed.
        """
        versions, unreadable = {}, {}
        for name in sorted(os.listdir(self.path)):
            try:
                published = published_versions(self.path, name)
            except FileNotFoundError:
                continue  # it was removed just now
            except OSError as error:
                unreadable[name] = described(error)
                continue
            if published:
                versions[name] = tuple(published)
        return Found(versions, unreadable)

    def loaded(self, name: str, version: int, load: Callable[[Path], _T]) -> _T:
        """Return a version as `load` makes it of its directory, and remember its files."""
        path = self._path(name, version)
        read = _Read(self.state(name, version), _written(path) or {})
        loaded = load(path)
        self._read[name, version] = read
        self._broken.pop((name, version), None)
        return loaded

    def attempt(self, name: str, version: int, load: Callable[[Path], _T]) -> _T | None:
        """
        Return a version as `load` makes it; None = it cannot be served, which the log has.

        One that failed before is left alone until its files change, unless it was not the
        files that failed.  `load` raises `Unservable` or `StartRefused` for a version that
        cannot be served; any other exception counts as the same.
        """
        state = self.state(name, version)
        if self._failed_like_this(name, version, state):
            return None
        try:
            return self.loaded(name, version, load)
        except Exception as error:  # whatever it is, the next version must be tried
            self._note_broken(name, version, state if _is_of_files(error) else None, error)
            return None

    def state(self, name: str, version: int) -> State | None:
        """Return the state of a version's files; None = it could change without showing."""
        try:
            state = tuple(_entries(self._path(name, version)))
        except OSError:
            return None
        newest_ns = max(changed_ns for *_, changed_ns in state)
        return None if abs(self._clock_ns() - newest_ns) < _FRESH_NS else state

    def note_wrong(self, name: str, version: int, problem: str) -> None:
        """Remember that a version that was loaded answers wrong; whoever calls this logs it."""
        error = Unservable(f"{name}/{version}: {problem}")
        broken = self._remember(name, version, self._read[name, version].state, error)
        broken.logged = broken.problem

    def _note_broken(self, name: str, version: int, state: State | None, error: Exception) -> None:
        """
        Remember that a version cannot be served, and log it.

        A version that fails again while its files keep changing, as while it is copied,
        is logged once more at most: when it has come to rest.
        """
        broken = self._remember(name, version, state, error)
        if broken.logged is None:
            self._log(name, version, broken)

    def _remember(self, name: str, version: int, state: State | None, error: Exception) -> _Broken:
        broken = self._broken.get((name, version))
        if broken is None:
            broken = self._broken[name, version] = _Broken(state, "", "")
        broken.state, broken.problem = state, described(error)
        broken.reason = self._reason(error)
        return broken

    def note_present(self, name: str, present: Sequence[int]) -> None:
        """Forget what was wrong with versions of a name that are gone; try the others again."""
        for key in list(self._broken):
            if key[0] == name and key[1] not in present:
                del self._broken[key]
        self.retry(name)

    def retry(self, name: str | None = None) -> None:
        """Let what is wrong, with all versions or those of one name, be tried and logged again."""
        for (broken_name, _), broken in self._broken.items():
            if name in (None, broken_name):
                broken.state = broken.logged = None
        self._changed = {key for key in self._changed if name not in (None, key[0])}

    def problems(self) -> dict[tuple[str, int], str]:
        """Return why versions cannot be served, by name and version, in words for callers."""
        return {key: broken.reason for key, broken in dict(self._broken).items()}

    def first_problem(self) -> str | None:
        """Return, for an operator, one of the things that are wrong; None = nothing is."""
        problems = [broken.problem for broken in self._broken.values()]
        return next(iter([*problems, *self.unreadable.values()]), None)

    def _path(self, name: str, version: int) -> Path:
        return self.path / name / str(version)

    def _failed_like_this(self, name: str, version: int, state: State | None) -> bool:
        broken = self._broken.get((name, version))
        if broken is None or state is None or state != broken.state:
            return False
        if broken.logged != broken.problem:
            self._log(name, version, broken)
        return True

    def _log(self, name: str, version: int, broken: _Broken) -> None:
        broken.logged = broken.problem
        event(
            "not reloaded",
            level=logging.ERROR,
            problem=broken.problem,
            model=name,
            version=version,
        )

    def _reason(self, error: Exception) -> str:
        if isinstance(error, ArtifactUnreadable | Unservable):
            return str(error).replace(f"{self.path}{os.sep}", "")
        return _UNNAMED


def _written(directory: Path) -> dict[str, tuple[int, int]] | None:
    """Return size and mtime of each file, by name; None = it cannot be looked into."""
    try:
        entries = list(_entries(directory))
    except OSError:
        return None
    return {name: (size, mtime_ns) for name, _, size, mtime_ns, _ in entries if name}


def _entries(directory: Path) -> Iterator[tuple[str, int, int, int, int]]:
    yield _entry("", os.stat(directory))
    with os.scandir(directory) as files:
        for file in sorted(files, key=lambda entry: entry.name):
            yield _entry(file.name, file.stat(follow_symlinks=False))


def _entry(name: str, status: os.stat_result) -> tuple[str, int, int, int, int]:
    return name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _is_of_files(error: Exception) -> bool:
    """Say whether loading the same files again would fail again: memory may be free by then."""
    is_known = isinstance(error, ArtifactUnreadable | Unservable)
    return is_known and not isinstance(error.__cause__, OSError | MemoryError)


def described(error: Exception) -> str:
    """Say in one line what is wrong, for the log."""
    if isinstance(error, StartRefused | Unservable):
        return str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error}".splitlines()[0]
