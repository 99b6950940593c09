"""Newer versions of an artifact, published while the server serves."""

import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from tests.support.layers import Layers
from tests.support.server import Server, until
from tests.system.test_main import serve

GOOD: dict[str, Any] = {"model": "tiny", "embeddings": [[0.5] * 8]}

INFER: dict[str, Any] = {
    "inputs": [{"name": "embeddings", "shape": [1, 1, 8], "datatype": "FP32", "data": [0.5] * 8}]
}


@pytest.fixture
def repository(layers: Layers, tmp_path: Path) -> Path:
    """Return a copy of the repository that a test may add to."""
    return Path(shutil.copytree(layers.repository, tmp_path / "repository"))


def publish(repository: Path, version: int, *, name: str = "tiny", broken: bool = False) -> None:
    """Publish the layer once more: aside first, then in one rename."""
    aside = repository / f".staging-{version}"
    shutil.copytree(repository / "tiny" / "1", aside)
    manifest = aside / "manifest.json"
    text = manifest.read_text().replace('"version": 1', f'"version": {version}')
    manifest.write_text(text.replace('"name": "tiny"', f'"name": "{name}"'))
    if broken:
        (aside / "layer.weights").write_bytes(b"")
    (repository / name).mkdir(exist_ok=True)
    aside.rename(repository / name / str(version))


def version_of(server: Server) -> int:
    """Return the version that answers."""
    return int(server.post("/v1/attention", json=GOOD).json()["version"])


@pytest.mark.fault("C4")
def test_reload_on_sighup_serves_the_newer_version_without_losing_a_call(repository: Path) -> None:
    """Calls are answered by the old version or the new one, each of them."""
    with Server(repository) as server:
        stop, seen = threading.Event(), []

        def call_on_and_on() -> None:
            while not stop.is_set():
                response = server.post("/v1/attention", json=GOOD)
                seen.append((response.status_code, response.json().get("version")))

        callers = [threading.Thread(target=call_on_and_on) for _ in range(8)]
        for caller in callers:
            caller.start()
        for version in (2, 3, 4):
            publish(repository, version)
            server.process.send_signal(signal.SIGHUP)
            server.wait_for_log(rf'"message":"reloaded","model":"tiny","version":{version}')
            until(lambda wanted=version: (200, wanted) in seen)  # type: ignore[misc]
        stop.set()
        for caller in callers:
            caller.join()

    assert {status for status, _ in seen} == {200}
    assert {version for _, version in seen} == {1, 2, 3, 4}


def test_reload_of_a_broken_version_leaves_the_old_one_serving(repository: Path) -> None:
    """The operator is told; the callers notice nothing."""
    with Server(repository) as server:
        publish(repository, 2, broken=True)
        server.process.send_signal(signal.SIGHUP)
        problem = server.wait_for_log(r'"message":"not reloaded","problem":"([^"]*)"')[1]
        version, ready = version_of(server), server.get("/v2/health/ready").status_code

    assert "tiny/2/layer.weights: expected 1184 bytes, found 0" in problem
    assert (version, ready) == (1, 200)


def test_reload_finds_a_new_model_and_ignores_older_versions(repository: Path) -> None:
    """A name that was not served before is served from now on."""
    with Server(repository) as server:
        publish(repository, 5, name="fresh")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_log(r'"message":"reloaded","model":"fresh","version":5')
        publish(repository, 4, name="fresh")
        server.process.send_signal(signal.SIGHUP)
        publish(repository, 6, name="fresh")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_log(r'"message":"reloaded","model":"fresh","version":6')
        log, answer = server.log(), server.post("/v1/attention", json={**GOOD, "model": "fresh"})

    assert '"version":4' not in log
    assert answer.json()["version"] == 6


def test_reload_by_polling_needs_no_signal_and_tells_a_broken_version_once(
    repository: Path,
) -> None:
    """A repository on shared storage is watched by looking."""
    with Server(repository, repository_poll_s=0.05) as server:
        publish(repository, 2, broken=True)
        server.wait_for_log('"message":"not reloaded"')
        publish(repository, 3)
        until(lambda: version_of(server) == 3)
        log = server.log()

    assert log.count('"message":"not reloaded"') == 1


def copy_slowly(repository: Path, version: int) -> Path:
    """Begin to copy a version as `cp -r` does: the manifest, and half of the weights."""
    path = repository / "tiny" / str(version)
    path.mkdir()
    original = repository / "tiny" / "1"
    text = (original / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"version": 1', f'"version": {version}'))
    content = (original / "layer.weights").read_bytes()
    (path / "layer.weights").write_bytes(content[: len(content) // 2])
    return path


def finish_copy(path: Path) -> None:
    """Copy the rest."""
    for name in ("layer.weights", "layer.onnx", "golden.safetensors"):
        shutil.copyfile(path.parent / "1" / name, path / name)


@pytest.mark.fault("C2")
def test_reload_by_polling_goes_on_after_the_repository_was_away(repository: Path) -> None:
    """One line says that it is away, one that it is back; what was served is served throughout."""
    with Server(repository, repository_poll_s=0.05) as server:
        away = repository.rename(repository.with_name("away"))
        server.wait_for_log(f'"message":"repository unreadable","problem":"{repository}: No such')
        assert version_of(server) == 1
        away.rename(repository)
        server.wait_for_log('"message":"repository readable again"')
        publish(repository, 2)
        until(lambda: version_of(server) == 2)
        log = server.log()

    assert log.count('"message":"repository unreadable"') == 1
    assert "Traceback" not in log


@pytest.mark.fault("C2")
def test_reload_on_sighup_of_a_repository_that_is_away_is_one_line(repository: Path) -> None:
    """And the next one looks again."""
    with Server(repository) as server:
        away = repository.rename(repository.with_name("away"))
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_log('"message":"repository unreadable"')
        away.rename(repository)
        publish(repository, 2)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: version_of(server) == 2)
        log = server.log()

    assert log.count('"message":"repository unreadable"') == 1
    assert "Traceback" not in log


@pytest.mark.fault("C2b")
def test_reload_by_polling_takes_up_a_version_once_it_is_whole(repository: Path) -> None:
    """A copy is not atomic; that it was looked at too early is not held against it."""
    with Server(repository, repository_poll_s=0.05) as server:
        path = copy_slowly(repository, 2)
        server.wait_for_log(r'"message":"not reloaded","problem":"[^"]*tiny/2/')
        assert version_of(server) == 1
        finish_copy(path)
        until(lambda: version_of(server) == 2)
        log = server.log()

    assert log.count('"message":"not reloaded"') == 1


@pytest.mark.fault("C2b")
@pytest.mark.parametrize("by_polling", [True, False])
def test_reload_serves_the_best_good_version_and_names_the_broken_one(
    repository: Path, by_polling: bool
) -> None:
    """In the log, in the index and to whoever asks for readiness."""
    with Server(repository, repository_poll_s=0.05 if by_polling else 0) as server:
        publish(repository, 2)
        publish(repository, 4, broken=True)
        if not by_polling:
            server.process.send_signal(signal.SIGHUP)
        server.wait_for_log(r'"message":"not reloaded","problem":"[^"]*tiny/4/layer.weights')
        until(lambda: version_of(server) == 2)
        publish(repository, 3)
        if not by_polling:
            server.process.send_signal(signal.SIGHUP)
        until(lambda: version_of(server) == 3)
        index = server.post("/v2/repository/index").json()
        ready = server.get("/v2/health/ready")

    rows = [(row["version"], row["state"], row["reason"]) for row in index if row["name"] == "tiny"]
    assert rows == [
        ("1", "UNAVAILABLE", "not served: higher versions are"),
        ("2", "UNAVAILABLE", "not served: higher versions are"),
        ("3", "READY", ""),
        ("4", "UNAVAILABLE", "tiny/4/layer.weights: expected 1184 bytes, found 0"),
    ]
    assert (ready.status_code, ready.json()) == (200, {"ready": True, "broken": ["tiny/4"]})


@pytest.mark.fault("C3")
@pytest.mark.parametrize("how", ["polling", "SIGHUP", "load"])
def test_reload_goes_back_when_a_version_is_taken_away(repository: Path, how: str) -> None:
    """The way back from a bad version is to remove it."""
    publish(repository, 2)
    poll_s = 0.05 if how == "polling" else 0
    with Server(repository, repository_poll_s=poll_s, model_control=True) as server:
        assert version_of(server) == 2
        shutil.rmtree(repository / "tiny" / "2")
        if how == "SIGHUP":
            server.process.send_signal(signal.SIGHUP)
        if how == "load":
            assert server.post("/v2/repository/models/tiny/load").status_code == 200
        until(lambda: version_of(server) == 1)
        log = server.log()

    assert '"message":"gone from the repository","model":"tiny","version":2,"served":1' in log


def test_load_of_a_broken_version_serves_the_best_other_one_and_says_so(repository: Path) -> None:
    """Whoever asked for the newest must not believe that it is there."""
    with Server(repository, model_control=True) as server:
        publish(repository, 2)
        publish(repository, 3, broken=True)
        answer = server.post("/v2/repository/models/tiny/load")
        version = version_of(server)
        (repository / "tiny" / "3" / "layer.weights").write_bytes(
            (repository / "tiny" / "1" / "layer.weights").read_bytes()
        )
        mended = server.post("/v2/repository/models/tiny/load")
        mended_version = version_of(server)

    assert answer.status_code == 503
    assert answer.json()["error"] == (
        "model tiny: version 3 cannot be served, version 2 is; the log says why"
    )
    assert (version, mended.status_code, mended_version) == (2, 200, 3)


@pytest.mark.fault("C6")
def test_start_on_a_broken_highest_version_ends_though_a_lower_one_is_good(
    repository: Path,
) -> None:
    """At the start nothing else is served yet, and nobody is surprised by an old version."""
    publish(repository, 2, broken=True)

    ended = serve("--repository", str(repository), "--port", "0")

    assert ended.returncode == 2
    [line] = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert line.endswith("tiny/2/layer.weights: expected 1184 bytes, found 0")


def threads_of(server: Server) -> int:
    """Return how many threads the server's process has."""
    return len(list(Path(f"/proc/{server.process.pid}/task").iterdir()))


@pytest.mark.fault("A9", "C4")
def test_reload_leaves_nothing_of_the_versions_before(repository: Path) -> None:
    """Their threads end with their last calls, not with the deadlines of those calls."""
    raw = {"content": save({"embeddings": np.zeros((4, 64, 8), np.float32)})}
    headers = {"Content-Type": "application/x-safetensors"}
    with Server(repository, threads=2, concurrent_runs=2, timeout_s=3600) as server:

        def call_all_ways() -> None:
            server.post("/v1/attention", json=GOOD)
            server.post("/v1/attention?model=tiny", headers=headers, **raw)
            server.post("/v2/models/tiny/infer", json=INFER)

        def call_at_once() -> None:
            callers = [threading.Thread(target=call_all_ways) for _ in range(8)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join()

        call_at_once()
        counts = []
        for version in range(2, 10):
            publish(repository, version)
            server.process.send_signal(signal.SIGHUP)
            until(lambda wanted=version: version_of(server) == wanted)  # type: ignore[misc]
            call_at_once()
            counts.append(threads_of(server))
        # Threads of the pool that loads, and of the codecs, come one by one up to their number.
        until(lambda: threads_of(server) <= counts[1] + 4, limit_s=30)
