"""What is served is what was proven: the checked bytes, whatever happens to the files."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from service.contract import ARTIFACT_FILES, MANIFEST_FILE
from service.errors import ArtifactUnreadable
from service.inference.artifact import Artifact, Graph, read_artifact
from service.inference.calls import Inputs
from service.inference.engine import OnnxEngine
from service.layer_config import LayerConfig
from tests.support.layers import CONFIGS, Layers
from tests.support.server import Server

FILES = (*ARTIFACT_FILES, MANIFEST_FILE)


@pytest.fixture
def repository(layers: Layers, tmp_path: Path) -> Path:
    """Return a copy of the repository that a test may spoil."""
    return Path(shutil.copytree(layers.repository, tmp_path / "repository"))


def calls() -> Iterator[tuple[str, bytes]]:
    """Give calls that together use every weight, on both paths of the graph, by path and body."""
    random = np.random.default_rng(0)
    for name in ("mha", "tiny"):
        for shape in ((1, 1), (3, 8), (1, 400)):
            embeddings = random.standard_normal((*shape, CONFIGS[name].embed_dim))
            body = save({"embeddings": embeddings.astype(np.float32)})
            for weights in ("true", "false"):
                yield f"/v1/attention?model={name}&weights={weights}", body


def answers(server: Server) -> list[bytes]:
    """Return the answers to all calls, as bytes."""
    headers = {"Content-Type": "application/x-safetensors"}
    replies = [server.post(path, content=body, headers=headers) for path, body in calls()]
    assert {reply.status_code for reply in replies} == {200}
    return [reply.content for reply in replies]


def overwrite(file: Path) -> None:
    """Write other bytes of the same number into the file itself."""
    with file.open("r+b") as content:
        content.write(os.urandom(file.stat().st_size))


def copy_over(file: Path) -> None:
    """Copy the same content over the file itself, which truncates it first."""
    shutil.copy(file, copy := file.with_suffix(".copy"))
    for _ in range(30):
        shutil.copyfile(copy, file)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "overwritten": overwrite,
    "truncated": lambda file: os.truncate(file, 0),
    "copied over": copy_over,
    "deleted": Path.unlink,
}


@pytest.mark.fault("C1")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_server_whose_files_change_answers_the_same_to_the_bit(
    repository: Path, damage: Callable[[Path], object]
) -> None:
    """Its process lives on, and computes with the bytes that were checked."""
    with Server(repository) as server:
        before = answers(server)
        for name in ("mha", "tiny"):
            for file in FILES:
                damage(repository / name / "1" / file)
                assert answers(server) == before
        assert server.process.poll() is None
        assert server.get("/v2/health/ready").status_code == 200


@pytest.mark.fault("C1")
def test_server_holds_no_file_of_the_repository(repository: Path) -> None:
    """Nothing of it is mapped or open, so that nothing done to it can be felt."""
    with Server(repository) as server:
        answers(server)
        process = Path("/proc") / str(server.process.pid)
        mapped = (process / "maps").read_text()
        opened = [os.readlink(file) for file in (process / "fd").iterdir()]

    assert "onnxruntime" in mapped
    assert str(repository) not in mapped
    assert not [file for file in opened if str(repository) in file]


def outputs(engine: OnnxEngine, layer: LayerConfig) -> list[bytes]:
    """Return what an engine answers at lengths of both its paths, as bytes."""
    random = np.random.default_rng(0)
    found = []
    for length in (1, 8, 400):
        shape = (2, length, layer.embed_dim)
        inputs = Inputs(random.standard_normal(shape).astype(np.float32))
        found += [
            engine.run(inputs, weights=weights, concurrent=beside).output.tobytes()
            for beside in (False, True)
            for weights in (False, True)
        ]
    return found


@pytest.mark.parametrize("name", ["mha", "tiny"])
def test_engine_has_copies_of_all_weights(layers: Layers, name: str) -> None:
    """The bytes it was made of are of no use to it: they may be freed, here even overwritten."""
    graph, layer = read_artifact(layers.artifact(name)).graph, CONFIGS[name]
    weights = bytearray(graph.weights)
    lent = Graph(graph.path, graph.model, weights)  # type: ignore[arg-type]
    engine = OnnxEngine(lent, layer, threads=2, concurrent_runs=2)
    before = outputs(engine, layer)

    weights[:] = b"\xff" * len(weights)

    assert outputs(engine, layer) == before
    assert outputs(OnnxEngine(graph, layer, threads=2, concurrent_runs=2), layer) == before


@pytest.mark.fault("C1")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_artifact_that_was_read_is_not_changed_by_its_files(
    repository: Path, damage: Callable[[Path], object]
) -> None:
    """Between the check and the engine there is no second look at a file."""
    path = repository / "tiny" / "1"
    artifact = read_artifact(path)
    proven = outputs(
        OnnxEngine(artifact.graph, CONFIGS["tiny"], concurrent_runs=2), CONFIGS["tiny"]
    )

    for file in FILES:
        damage(path / file)

    engine = OnnxEngine(artifact.graph, CONFIGS["tiny"], concurrent_runs=2)
    assert outputs(engine, CONFIGS["tiny"]) == proven
    assert golden_difference(artifact, engine) <= artifact.manifest.tolerance


def golden_difference(artifact: Artifact, engine: OnnxEngine) -> float:
    """Return how far the engine is from the golden answer."""
    golden = artifact.golden
    found = engine.run(Inputs(golden.embeddings, golden.memory), weights=False).output
    return float(np.abs(found - golden.plain_output).max())


def test_read_artifact_of_another_size_reads_nothing_of_it(repository: Path) -> None:
    """A file of a terabyte is refused for its size, not read for its checksum."""
    file = repository / "tiny" / "1" / "layer.weights"
    os.truncate(file, 2**40)

    with pytest.raises(ArtifactUnreadable, match=f"expected 1184 bytes, found {2**40}"):
        read_artifact(file.parent)


def test_read_artifact_whose_manifest_has_no_end_is_refused(repository: Path) -> None:
    """No manifest says how large it is itself."""
    file = repository / "tiny" / "1" / MANIFEST_FILE
    os.truncate(file, 2**40)

    with pytest.raises(ArtifactUnreadable, match="expected at most 16777216 bytes"):
        read_artifact(file.parent)


@pytest.mark.parametrize("file", FILES)
def test_read_artifact_pipe_in_the_place_of_a_file_is_refused(repository: Path, file: str) -> None:
    """It is not opened, which would wait for a writer for ever."""
    path = repository / "tiny" / "1"
    (path / file).unlink()
    os.mkfifo(path / file)

    with pytest.raises(ArtifactUnreadable, match=f"{file}: expected a plain file"):
        read_artifact(path)
