"""Repositories made of links, as orchestrators mount them."""

import shutil
import signal
from pathlib import Path

import pytest

from service.errors import ArtifactUnreadable
from service.inference.artifact import find_artifacts, read_artifact
from tests.support.layers import Layers
from tests.support.server import Server, until
from tests.system.test_reload import GOOD, publish

pytestmark = pytest.mark.fault("E8d")


def swap(directory: Path, name: str) -> None:
    """Point `..data` at another directory in one step, as the kubelet updates a ConfigMap."""
    (directory / "..data_tmp").symlink_to(name)
    (directory / "..data_tmp").rename(directory / "..data")


def mounted_files(source: Path, directory: Path) -> None:
    """Mount the files of a directory as Kubernetes mounts a ConfigMap or Secret of them."""
    shutil.copytree(source, directory / "..2026_12_01")
    swap(directory, "..2026_12_01")
    for file in source.iterdir():
        (directory / file.name).symlink_to(f"..data/{file.name}")


def test_version_mounted_from_a_config_map_is_read(layers: Layers, tmp_path: Path) -> None:
    """Each file is a link, which leads through another one into the directory itself."""
    version = tmp_path / "artifacts" / "tiny" / "1"
    version.mkdir(parents=True)
    mounted_files(layers.artifact("tiny"), version)

    artifact = read_artifact(find_artifacts(tmp_path / "artifacts")["tiny"])

    assert artifact.graph.weights == read_artifact(layers.artifact("tiny")).graph.weights


def test_repository_mounted_from_a_config_map_is_served_and_updated(
    layers: Layers, tmp_path: Path
) -> None:
    """Names are links into a tree that is swapped as a whole."""
    repository = tmp_path / "artifacts"
    first, second = repository / "..1", repository / "..2"
    shutil.copytree(layers.repository, first)
    swap(repository, "..1")
    (repository / "tiny").symlink_to("..data/tiny")

    with Server(repository) as server:
        before = server.post("/v1/attention", json=GOOD).json()["version"]
        shutil.copytree(first, second)
        publish(second, 2)
        swap(repository, "..2")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: server.post("/v1/attention", json=GOOD).json()["version"] == 2)

    assert before == 1


@pytest.mark.parametrize("linked", ["repository", "name", "version"])
def test_linked_directory_is_read_wherever_it_leads(
    layers: Layers, tmp_path: Path, linked: str
) -> None:
    """As KServe links a volume: the operator chose the whole directory."""
    source = {
        "repository": layers.repository,
        "name": layers.repository / "tiny",
        "version": layers.artifact("tiny"),
    }[linked]
    place = tmp_path / "artifacts"
    place = {"repository": place, "name": place / "tiny", "version": place / "tiny" / "1"}[linked]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(source)

    assert read_artifact(find_artifacts(tmp_path / "artifacts")["tiny"]).manifest.name == "tiny"


@pytest.mark.parametrize(
    "target", ["../elsewhere", "sub/../../elsewhere", "/etc/hostname", "out/x"]
)
def test_link_that_passes_through_another_directory_is_refused(
    layers: Layers, tmp_path: Path, target: str
) -> None:
    """Whatever the way out: upwards, an absolute path, a directory that is a link."""
    version = tmp_path / "tiny" / "1"
    shutil.copytree(layers.artifact("tiny"), version)
    (version / "sub").mkdir()
    (version / "out").symlink_to("..")
    for place in (tmp_path / "tiny" / "elsewhere", tmp_path / "tiny" / "x"):
        shutil.copy(version / "layer.weights", place)
    (version / "layer.weights").unlink()
    (version / "layer.weights").symlink_to(target)

    with pytest.raises(ArtifactUnreadable) as refused:
        read_artifact(version)

    assert str(refused.value) == (
        f"{version}/layer.weights: expected a plain file, found a link out of its directory, which"
        " is not followed; copy the file there, or make the whole directory a link"
    )


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("nowhere", "expected a plain file, found a link that leads nowhere"),
        ("layer.weights", "expected a plain file, found a link that leads nowhere"),
        ("sub", "expected a plain file, found a directory or device"),
    ],
)
def test_link_to_no_file_is_refused(
    layers: Layers, tmp_path: Path, target: str, reason: str
) -> None:
    """In one line that names the link."""
    version = tmp_path / "tiny" / "1"
    shutil.copytree(layers.artifact("tiny"), version)
    (version / "sub").mkdir()
    (version / "layer.weights").unlink()
    (version / "layer.weights").symlink_to(target)

    with pytest.raises(ArtifactUnreadable) as refused:
        read_artifact(version)

    assert str(refused.value) == f"{version}/layer.weights: {reason}"
