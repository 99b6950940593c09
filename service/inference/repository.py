"""
What a repository holds, and which version of each artifact is the best that can be served.

Knows directories and the state of their files, not what loads them: the decisions are
here, `Models` carries them out.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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


class Repository:
    """
    A repository, and what is known to be wrong with some of its versions.

    For one thread at a time; only `problems` may be read from another meanwhile.
    """

    def __init__(self, path: Path, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.path = path
        self._clock_ns = clock_ns
        self._broken: dict[tuple[str, int], _Broken] = {}
        self._missing: set[str] = set()
        """What is served on though its version is not in the repository any more."""
        self._look_problem: str | None = None
        """What was wrong with the last look, as the log has it."""

    def look(self) -> Found:
        """
        Return what is there now, and forget what was wrong with anything else.

        Raises:
            OSError: the repository cannot be listed.
        """
        found = self.contents()
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
        self, name: str, version: int, present: Iterable[int], better: int | None
    ) -> None:
        """
        Log, once, that the served version is not there any more.

        `better` is what is served in its place; None = it is served on.
        """
        if version in present:
            self._missing.discard(name)
            return
        if better is None and name in self._missing:
            return
        event(
            "gone from the repository",
            level=logging.WARNING if better is None else logging.INFO,
            model=name,
            version=version,
            served=better or version,
        )
        if better is None:
            self._missing.add(name)
        else:
            self._missing.discard(name)

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

    def best(
        self, name: str, present: Iterable[int], served: int | None, load: Callable[[Path], _T]
    ) -> _T | None:
        """
        Return the best version of `name` that is not served yet, loaded; None = there is none.

        Versions that failed before are left out until their files change, unless it was not
        the files that failed.  `served` is the version that is served and answers right.
        `load` raises `Unservable` or `StartRefused` for a version that cannot be served; any
        other exception counts as the same.
        """
        for version in candidates(present, served):
            path = self._path(name, version)
            state = self.state(name, version)
            if self._failed_like_this(name, version, state):
                continue
            try:
                loaded = load(path)
            except Exception as error:  # whatever it is, the next version must be tried
                self.note_broken(name, version, state if _is_of_files(error) else None, error)
            else:
                self._broken.pop((name, version), None)
                return loaded
        return None

    def state(self, name: str, version: int) -> State | None:
        """Return the state of a version's files; None = it could change without showing."""
        try:
            state = tuple(_entries(self._path(name, version)))
        except OSError:
            return None
        newest_ns = max(changed_ns for *_, changed_ns in state)
        return None if abs(self._clock_ns() - newest_ns) < _FRESH_NS else state

    def note_broken(
        self,
        name: str,
        version: int,
        state: State | None,
        error: Exception,
        *,
        is_logged: bool = False,
    ) -> None:
        """
        Remember that a version cannot be served, and log it.

        A version that fails again while its files keep changing, as while it is copied,
        is logged once more at most: when it has come to rest.  One that `is_logged`
        already is not.
        """
        broken = self._broken.get((name, version))
        if broken is None:
            broken = self._broken[name, version] = _Broken(state, "", "")
        broken.state, broken.problem = state, described(error)
        broken.reason = self._reason(error)
        if is_logged:
            broken.logged = broken.problem
        elif broken.logged is None:
            self._log(name, version, broken)

    def retry(self, name: str | None = None) -> None:
        """Let all broken versions, or those of one name, be tried and logged again."""
        for (broken_name, _), broken in self._broken.items():
            if name in (None, broken_name):
                broken.state = broken.logged = None

    def problems(self) -> dict[tuple[str, int], str]:
        """Return why versions cannot be served, by name and version, in words for callers."""
        return {key: broken.reason for key, broken in dict(self._broken).items()}

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


def candidates(present: Iterable[int], served: int | None) -> Iterator[int]:
    """
    Give the versions that are better to serve than what is served, best first.

    The best is the highest that is there: where the served one is not there any more,
    every other is better.
    """
    for version in sorted(present, reverse=True):
        if version == served:
            return
        yield version


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
