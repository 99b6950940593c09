"""Which version is served, whatever happens to the directories: decisions without engines."""

import asyncio
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from service.errors import ArtifactUnreadable, NotReady, UnknownModel
from service.inference.model import Model
from service.inference.models import Models
from service.inference.repository import Repository, Unservable

WHOLE = b"0123456789"
FILES = ("manifest", "weights")


@dataclass
class Stub:
    """A model that is nothing but its name and version."""

    name: str
    version: int
    problem: str | None = None

    def warm_up(self) -> None:
        """Find nothing wrong."""


def load(path: Path) -> Model:
    """
    Return the model of a version whose two files are whole.

    Raises:
        ArtifactUnreadable: one is not.
    """
    for name in FILES:
        try:
            content = (path / name).read_bytes()
        except OSError as error:
            raise ArtifactUnreadable(f"{path / name}: {error.strerror}") from error
        if content != WHOLE:
            raise ArtifactUnreadable(f"{path / name}: {content!r}")
    return cast(Model, Stub(path.parent.name, int(path.name)))


def write(directory: Path, *, whole: bool = True) -> Path:
    """Write a version; one that is not whole has a manifest and half of its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest").write_bytes(WHOLE)
    (directory / "weights").write_bytes(WHOLE if whole else WHOLE[:5])
    return directory


@dataclass
class Disk:
    """A repository that things happen to."""

    root: Path
    path: Path = field(init=False)

    def __post_init__(self) -> None:
        self.path = self.root / "repository"
        write(self.version("a", 1))

    def version(self, name: str, number: int) -> Path:
        """Return where a version lies."""
        return self.path / name / str(number)

    def publish(self, name: str, number: int) -> None:
        """Rename a whole version into its place, as the exporter does."""
        self.remove(name, number)
        aside = write(self.root / "aside")
        self.version(name, number).parent.mkdir(parents=True, exist_ok=True)
        aside.rename(self.version(name, number))

    def copy(self, name: str, number: int) -> None:
        """Copy a version there file by file, and do not come to the end."""
        write(self.version(name, number), whole=False)

    def finish(self, name: str, number: int) -> None:
        """Write the rest of a copy."""
        if self.version(name, number).is_dir():
            write(self.version(name, number))

    def spoil(self, name: str, number: int) -> None:
        """Write other bytes of the same number into a file."""
        if (file := self.version(name, number) / "weights").is_file():
            file.write_bytes(b"?" * len(WHOLE))

    def remove(self, name: str, number: int) -> None:
        """Take a version away."""
        shutil.rmtree(self.version(name, number), ignore_errors=True)

    def remove_name(self, name: str, number: int) -> None:
        """Take all versions of a name away, and its directory."""
        shutil.rmtree(self.path / name, ignore_errors=True)

    def move_away(self, name: str, number: int) -> None:
        """Take the whole repository away; what happens then, happens to an empty one."""
        shutil.rmtree(self.root / "away", ignore_errors=True)
        self.path.rename(self.root / "away")

    def present(self, name: str) -> dict[int, bool]:
        """Return which versions of a name are there, and which of them are whole."""
        found = {}
        for number in range(1, 5):
            directory = self.version(name, number)
            if directory.is_dir():
                contents = [directory / file for file in FILES]
                found[number] = all(f.is_file() and f.read_bytes() == WHOLE for f in contents)
        return found


EVENTS: tuple[Callable[[Disk, str, int], None], ...] = (
    Disk.publish,
    Disk.copy,
    Disk.finish,
    Disk.spoil,
    Disk.remove,
    Disk.remove_name,
    Disk.move_away,
)
NAMES = ("a", "b")

events = st.tuples(
    st.sampled_from(EVENTS), st.sampled_from(NAMES), st.integers(1, 4), st.booleans()
)
"""What happens, to which name and version, and whether the server looks afterwards."""


def served(models: Models) -> dict[str, int]:
    """Return the version of each model that answers where none is named."""
    return {model.name: models.get(model.name).version for model in models}


def kept(models: Models, name: str) -> list[int]:
    """Return the versions of a name that are served, the highest first."""
    return [model.version for model in models.versions_of(name)]


def callable_as(models: Models, name: str, version: str) -> bool:
    """Say whether a call of that version finds it, and no other."""
    try:
        return str(models.get(name, version).version) == version
    except UnknownModel:
        return False


def look(models: Models, *, retry: bool = False) -> None:
    """Look at the repository, as a poll does, or as SIGHUP does."""
    asyncio.run(models.refresh(retry=retry))


@pytest.mark.fault("C2", "C2b", "C3")
@given(st.lists(events, max_size=12), st.booleans(), st.integers(1, 3))
@example([(Disk.copy, "a", 2, True), (Disk.finish, "a", 2, False)], False, 1)
@example([(Disk.copy, "a", 3, True), (Disk.publish, "a", 2, True)], False, 1)
@example([(Disk.publish, "a", 2, True), (Disk.remove, "a", 2, False)], True, 1)
@example([(Disk.publish, "a", 2, True), (Disk.remove_name, "a", 1, False)], False, 2)
@example([(Disk.publish, "a", 3, True), (Disk.publish, "a", 2, False)], False, 2)
@example([(Disk.publish, "a", 2, True), (Disk.remove, "a", 1, True)], False, 2)
@settings(max_examples=200, deadline=None)
def test_looks_after_anything_serve_the_best_versions_that_are_there(
    happening: list[tuple[Callable[[Disk, str, int], None], str, int, bool]],
    retry: bool,
    versions_kept: int,
) -> None:
    """The highest that are whole or served already; where there are none, what was served stays."""
    with tempfile.TemporaryDirectory() as root:
        disk = Disk(Path(root))
        models = Models(load, disk.path, versions_kept=versions_kept)
        models.load_all()
        models.warm_up()
        for event, name, number, then_looks in happening:
            if disk.path.exists():
                event(disk, name, number)
            elif event is not Disk.move_away:
                (disk.root / "away").rename(disk.path)
            if then_looks:
                look(models, retry=retry)
        before = {name: kept(models, name) for name in NAMES}

        look(models, retry=retry)
        look(models, retry=retry)

        for name in NAMES:
            present = disk.present(name)
            good = {n for n in present if present[n] or n in before[name]}
            best = sorted(good, reverse=True)[:versions_kept] or before[name]
            assert kept(models, name) == best
            assert served(models).get(name) == next(iter(best), None)
            for version in range(1, 5):
                assert callable_as(models, name, str(version)) == (version in best)


class Loads:
    """Counts what is loaded; everything fails, for the reason given."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure
        self.paths: list[Path] = []

    def __call__(self, path: Path) -> None:
        """Fail."""
        self.paths.append(path)
        raise self.failure


def years_later() -> int:
    """Return a time at which no file is fresh any more."""
    return 2**62


def renew(path: Path) -> None:
    """Put a copy with the same names, sizes and times in a version's place."""
    copy = shutil.copytree(path, path.with_name("copy"))
    shutil.rmtree(path)
    copy.rename(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "grown": lambda path: (path / "weights").write_bytes(WHOLE + b"more"),
    "deleted": lambda path: (path / "weights").unlink(),
    "added": lambda path: (path / "more").write_bytes(b""),
    "renamed": lambda path: (path / "weights").rename(path / "other"),
    "touched": lambda path: os.utime(path / "weights"),
    "opened": lambda path: (path / "weights").chmod(0o600),
    "replaced": renew,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_broken_version_is_tried_again_only_when_its_files_change(
    change: Callable[[Path], object], tmp_path: Path
) -> None:
    """A look at what failed before costs a few calls of stat(2), no loading."""
    path = write(tmp_path / "a" / "1")
    repository, loads = Repository(tmp_path, clock_ns=years_later), Loads(Unservable("wrong"))
    for _ in range(3):
        assert repository.attempt("a", 1, loads) is None
    assert len(loads.paths) == 1

    change(path)
    for _ in range(3):
        repository.attempt("a", 1, loads)

    assert len(loads.paths) == 2
    repository.retry("b")
    repository.attempt("a", 1, loads)
    assert len(loads.paths) == 2
    repository.retry("a")
    repository.attempt("a", 1, loads)
    assert len(loads.paths) == 3


@pytest.mark.fault("C2b")
def test_broken_version_that_has_just_changed_is_tried_again(tmp_path: Path) -> None:
    """What is written twice within a tick of the file system's clock shows only once."""
    write(tmp_path / "a" / "1")
    repository, loads = Repository(tmp_path), Loads(Unservable("wrong"))

    for _ in range(3):
        repository.attempt("a", 1, loads)

    assert len(loads.paths) == 3


@pytest.mark.parametrize(
    "failure",
    [
        MemoryError("no room"),
        RuntimeError("no threads"),
        OSError(errno.EMFILE, "too many open files"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_version_that_failed_for_want_of_something_is_tried_again(
    failure: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its files are right: there may be memory, threads or descriptors next time."""
    write(tmp_path / "a" / "1")
    caplog.set_level(logging.INFO, "headwise")
    unreadable = ArtifactUnreadable("a/1: it was not to be opened")
    unreadable.__cause__ = failure
    causes = (failure, unreadable) if isinstance(failure, OSError | MemoryError) else (failure,)
    for raised in causes:
        repository, loads = Repository(tmp_path, clock_ns=years_later), Loads(raised)
        caplog.clear()

        for _ in range(3):
            repository.attempt("a", 1, loads)

        assert len(loads.paths) == 3
        assert [record.message for record in caplog.records] == ["not reloaded"]


@pytest.mark.fault("C2b")
def test_version_that_is_being_copied_is_logged_at_its_beginning_and_when_it_rests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not at every look; and not as broken for what it was when it was first looked at."""
    caplog.set_level(logging.INFO, "headwise")
    path = tmp_path / "a" / "1"
    path.mkdir(parents=True)
    repository = Repository(tmp_path, clock_ns=years_later)
    for size in range(5):
        (path / "manifest").write_bytes(WHOLE[:size])
        repository.attempt("a", 1, load)
    for _ in range(3):
        repository.attempt("a", 1, load)

    problems = [record.__dict__["fields"]["problem"] for record in caplog.records]

    assert problems == [f"{path}/manifest: b''", f"{path}/manifest: b'0123'"]
    assert repository.problems() == {("a", 1): "a/1/manifest: b'0123'"}


def test_reason_that_callers_read_has_no_path_of_the_host(tmp_path: Path) -> None:
    """The log has it all; what is no failure of the files is only said to be there."""
    write(tmp_path / "a" / "1")
    for failure, reason in (
        (ArtifactUnreadable(f"{tmp_path}/a/1/manifest: gone"), "a/1/manifest: gone"),
        (Unservable(f"{tmp_path}/a/1: wrong"), "a/1: wrong"),
        (OSError(f"{tmp_path}/lib.so"), "cannot be loaded; the log says why"),
    ):
        repository = Repository(tmp_path)
        repository.attempt("a", 1, Loads(failure))
        assert repository.problems() == {("a", 1): reason}


@pytest.mark.fault("C2")
def test_look_that_fails_is_logged_once_until_it_works_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line a poll would drown the rest of the log; SIGHUP gets a line each time."""
    caplog.set_level(logging.INFO, "headwise")
    disk = Disk(tmp_path)
    models = Models(load, disk.path)
    models.load_all()
    disk.path.rename(tmp_path / "away")
    for retry in (False, False, True, False):
        look(models, retry=retry)
    (tmp_path / "away").rename(disk.path)
    look(models)
    look(models)

    assert [record.message for record in caplog.records] == [
        "repository unreadable",
        "repository unreadable",
        "repository readable again",
    ]
    problem = caplog.records[0].__dict__["fields"]["problem"]
    assert problem == f"{disk.path}: No such file or directory"


@pytest.mark.fault("C2")
def test_name_that_cannot_be_looked_into_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is served on, and the log names it; the others are looked at as ever."""
    caplog.set_level(logging.INFO, "headwise")
    disk = Disk(tmp_path)
    write(disk.version("b", 1))
    models = Models(load, disk.path)
    models.load_all()
    write(disk.version("b", 2))
    iterdir = Path.iterdir

    def refusing(path: Path) -> Iterator[Path]:
        if path.name == "a":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refusing)
    look(models)
    look(models)

    assert served(models) == {"a": 1, "b": 2}
    lines = [(r.message, r.__dict__["fields"].get("problem")) for r in caplog.records]
    assert lines == [
        ("reloaded", None),
        ("repository unreadable", f"{disk.path}/a: Permission denied"),
    ]


@pytest.mark.fault("C2")
def test_look_that_fails_in_an_unforeseen_way_is_logged_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No exception ends the watching."""
    caplog.set_level(logging.INFO, "headwise")
    disk = Disk(tmp_path)
    models = Models(load, disk.path)
    models.load_all()
    disk.publish("a", 2)

    with monkeypatch.context() as broken:
        broken.setattr(Repository, "attempt", lambda *_: 1 / 0)
        look(models)
        look(models)
    look(models)

    assert served(models) == {"a": 2}
    assert [record.message for record in caplog.records] == [
        "repository unreadable",
        "reloaded",
        "repository readable again",
    ]


@pytest.mark.fault("C3")
def test_version_taken_away_is_logged_whether_or_not_another_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a lower one the server goes back to it; without, it serves on, and says so once."""
    caplog.set_level(logging.INFO, "headwise")
    disk = Disk(tmp_path)
    disk.publish("a", 2)
    models = Models(load, disk.path)
    models.load_all()
    disk.remove("a", 2)
    look(models)
    disk.remove_name("a", 1)
    look(models)
    look(models)

    gone = [r for r in caplog.records if r.message == "gone from the repository"]
    assert [r.__dict__["fields"] for r in gone] == [
        {"model": "a", "version": 2, "served": 1},
        {"model": "a", "version": 1, "served": 1},
    ]
    assert [r.levelname for r in gone] == ["INFO", "WARNING"]
    assert served(models) == {"a": 1}


@pytest.mark.fault("C4")
def test_look_during_the_first_load_waits_for_it_and_loads_nothing_twice(tmp_path: Path) -> None:
    """Whoever loads first holds the lock that every look takes."""
    disk = Disk(tmp_path)
    loaded: list[Path] = []

    def counting(path: Path) -> Model:
        loaded.append(path)
        return load(path)

    async def start() -> None:
        models = Models(counting, disk.path)
        async with models.changing:
            looks = [asyncio.create_task(models.refresh(retry=True)) for _ in range(3)]
            await asyncio.sleep(0)
            await asyncio.to_thread(models.load_all)
            models.warm_up()
        await asyncio.gather(*looks)

    asyncio.run(start())

    assert loaded == [disk.version("a", 1)]


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[str, object, object]]:
    """Return message, model and version of what was logged."""
    fields = [record.__dict__["fields"] for record in caplog.records]
    return [
        (record.message, of.get("model"), of.get("version"))
        for record, of in zip(caplog.records, fields, strict=True)
    ]


def test_look_that_was_asked_for_and_changed_nothing_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator who sends SIGHUP reads that it came; a poll every second says nothing."""
    caplog.set_level(logging.INFO, "headwise")
    disk = Disk(tmp_path)
    models = Models(load, disk.path)
    models.load_all()

    look(models)
    assert caplog.records == []
    look(models, retry=True)
    disk.publish("a", 2)
    look(models, retry=True)

    assert [record.message for record in caplog.records] == [
        "looked at the repository: nothing to change",
        "reloaded",
    ]
    assert caplog.records[0].__dict__["fields"] == {"served": ["a/1"]}


def empty(path: Path) -> None:
    """Put an empty directory in a version's place."""
    shutil.rmtree(path)
    path.mkdir()


WRITES: dict[str, Callable[[Path], object]] = {
    "grown": lambda path: (path / "weights").write_bytes(WHOLE + b"more"),
    "rewritten": lambda path: os.utime(path / "weights", ns=(1, 1)),
    "deleted": lambda path: (path / "weights").unlink(),
    "emptied": empty,
}
UNWRITTEN: dict[str, Callable[[Path], object]] = {
    "added": lambda path: (path / "notes").write_bytes(b""),
    "opened": lambda path: (path / "weights").chmod(0o600),
    "moved": lambda path: path.rename(path.with_name("away")).rename(path),
    "copied with its times": renew,
}


@pytest.mark.fault("C3")
@pytest.mark.parametrize("write_it", WRITES.values(), ids=WRITES)
def test_files_of_a_served_version_that_change_are_named_once(
    write_it: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is reloaded; SIGHUP says it once more, and the next version ends it."""
    caplog.set_level(logging.INFO, "headwise")
    disk = Disk(tmp_path)
    models = Models(load, disk.path)
    models.load_all()
    write_it(disk.version("a", 1))

    for _ in range(3):
        look(models)
    assert messages(caplog) == [("files of a served version changed", "a", 1)]
    assert "publish another layer as another version" in str(caplog.records[0].__dict__["fields"])
    assert kept(models, "a") == [1]
    look(models, retry=True)
    assert messages(caplog)[1:] == [
        ("files of a served version changed", "a", 1),
        ("looked at the repository: nothing to change", None, None),
    ]
    disk.publish("a", 2)
    look(models)
    look(models)
    assert messages(caplog)[3:] == [("reloaded", "a", 2)]


@pytest.mark.parametrize("leave_it", UNWRITTEN.values(), ids=UNWRITTEN)
def test_files_of_a_served_version_that_are_the_same_are_no_news(
    leave_it: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another file beside them, another mode, a way there and back: what was read lies there."""
    caplog.set_level(logging.INFO, "headwise")
    disk = Disk(tmp_path)
    models = Models(load, disk.path)
    models.load_all()
    leave_it(disk.version("a", 1))

    look(models)

    assert caplog.records == []


@pytest.mark.fault("C3")
def test_versions_that_come_and_go_are_logged_each_with_what_is_served_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who reads the log knows which versions could be called at any time."""
    caplog.set_level(logging.INFO, "headwise")
    disk = Disk(tmp_path)
    models = Models(load, disk.path, versions_kept=2)
    models.load_all()
    for step, version in (
        (disk.publish, 2),
        (disk.publish, 3),
        (disk.remove, 2),
        (disk.remove_name, 0),
    ):
        step("a", version)
        look(models)
        look(models)

    lines = [(r.message, r.__dict__["fields"]) for r in caplog.records]
    assert lines == [
        ("reloaded", {"model": "a", "version": 2, "served": [2, 1]}),
        ("reloaded", {"model": "a", "version": 3, "served": [3, 2]}),
        ("reloaded", {"model": "a", "version": 1, "served": [3, 1]}),
        ("gone from the repository", {"model": "a", "version": 2, "served": 3}),
        ("gone from the repository", {"model": "a", "version": 3, "served": 3}),
        ("gone from the repository", {"model": "a", "version": 1, "served": 1}),
    ]
    assert kept(models, "a") == [3, 1]


@pytest.mark.fault("C6")
def test_start_that_skips_serves_all_that_is_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A lower version in place of a broken one; names with nothing good are not there."""
    caplog.set_level(logging.INFO, "headwise")
    disk = Disk(tmp_path)
    disk.copy("a", 2)
    disk.copy("b", 1)
    disk.copy("mha", 1)
    with pytest.raises(ArtifactUnreadable, match="weights: b'01234'"):
        Models(load, disk.path).load_all()

    models = Models(load, disk.path, skip_broken=True)
    models.load_all()
    models.warm_up()

    assert (served(models), models.problem) == ({"a": 1}, None)
    assert models.broken == ["a/2", "b/1", "mha/1"]
    assert messages(caplog) == [
        (("not reloaded"), name, n) for name, n in (("a", 2), ("b", 1), ("mha", 1))
    ]
    with pytest.raises(NotReady, match="model b: no version of it can be served"):
        models.get("b")
    # The default is not silently another layer.
    with pytest.raises(NotReady, match="model mha: no version of it can be served"):
        models.get()
    disk.finish("b", 1)
    look(models)
    assert served(models) == {"a": 1, "b": 1}


@pytest.mark.fault("C6")
def test_start_that_skips_with_nothing_good_is_refused(tmp_path: Path) -> None:
    """It names one of the things that are wrong; the log has them all."""
    disk = Disk(tmp_path)
    disk.spoil("a", 1)
    disk.copy("b", 1)

    with pytest.raises(
        ArtifactUnreadable, match=r"nothing in it can be served: .*weights: b'"
    ) as e:
        Models(load, disk.path, skip_broken=True).load_all()

    assert str(disk.version("a", 1)) in str(e.value)
    disk.remove_name("b", 1)
    write(disk.version("b", 1))
    with pytest.raises(ArtifactUnreadable, match="default model: expected one of a, b, got c"):
        Models(load, disk.path, skip_broken=True, default="c").load_all()
    Models(load, disk.path, skip_broken=True, default="a").load_all()


@pytest.mark.fault("C6")
@pytest.mark.parametrize("skips", [False, True])
def test_start_that_meets_what_nobody_thought_of_ends_or_skips_it(
    tmp_path: Path, skips: bool
) -> None:
    """It does not hang: whatever loading raises is the artifact's failure."""
    disk = Disk(tmp_path)
    disk.publish("b", 1)

    def surprising(path: Path) -> Model:
        if path.parent.name == "b":
            raise RuntimeError("can't start new thread")
        return load(path)

    models = Models(surprising, disk.path, skip_broken=skips)
    if skips:
        models.load_all()
        assert served(models) == {"a": 1}
    else:
        with pytest.raises(ArtifactUnreadable, match="b/1: RuntimeError: can't start new thread"):
            models.load_all()


@pytest.mark.fault("C6")
def test_start_that_skips_a_name_that_cannot_be_looked_into_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no version to name then."""
    disk = Disk(tmp_path)
    disk.publish("b", 1)
    iterdir = Path.iterdir

    def refusing(path: Path) -> Iterator[Path]:
        if path.name == "b":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refusing)
    with pytest.raises(ArtifactUnreadable, match="b: Permission denied"):
        Models(load, disk.path).load_all()
    models = Models(load, disk.path, skip_broken=True)
    models.load_all()

    assert (served(models), models.broken) == ({"a": 1}, ["b"])


@pytest.mark.fault("C3")
def test_load_of_a_name_that_was_taken_away_says_that_it_is_served_on(tmp_path: Path) -> None:
    """Whoever asked learns that nothing was loaded, and that calls are still answered."""
    disk = Disk(tmp_path)
    models = Models(load, disk.path)
    models.load_all()
    disk.remove_name("a", 1)

    with pytest.raises(UnknownModel, match="nothing in the repository is named 'a', which is serv"):
        asyncio.run(models.load("a"))
    with pytest.raises(UnknownModel, match=r"nothing in the repository is named 'b'$"):
        asyncio.run(models.load("b"))

    assert kept(models, "a") == [1]


@pytest.mark.fault("C2b", "C6")
def test_load_forgets_what_was_wrong_with_versions_that_are_gone(tmp_path: Path) -> None:
    """Also where nothing of the name is left: no look at the whole repository may follow."""
    disk = Disk(tmp_path)
    models = Models(load, disk.path)

    async def scenario() -> list[list[str]]:
        models.load_all()
        disk.copy("a", 2)
        disk.copy("gone", 1)
        await models.refresh(retry=False)
        found = [sorted(models.broken)]
        disk.remove("a", 2)
        await models.load("a")
        found.append(models.broken)
        disk.remove_name("gone", 1)
        with pytest.raises(UnknownModel):
            await models.load("gone")
        return [*found, models.broken]

    assert asyncio.run(scenario()) == [["a/2", "gone/1"], ["gone/1"], []]
