"""Newer versions of an artifact, published while the server serves."""

import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.layers import Layers
from tests.support.server import Server, until

GOOD: dict[str, Any] = {"model": "tiny", "embeddings": [[0.5] * 8]}


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

    assert "tiny/2/layer.weights: expected 1152 bytes, found 0" in problem
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
