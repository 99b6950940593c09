"""Publishing is all or nothing, and what was published proves itself again, or says why not."""

import fcntl
import importlib.metadata
import json
import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.torch
import torch
from onnx import TensorProto, helper
from safetensors.numpy import load_file, save_file

from export.gate import GateFailed, ValuesDiffer
from export.grid import Cell, grid
from export.layer_spec import LayerSpec
from export.processor import processor
from export.publish import PublishRefused, make_visible, publish, verify
from export.sources import Source, random_layer
from service.contract import graph_inputs, graph_outputs
from service.errors import ArtifactUnreadable
from service.inference.artifact import (
    Artifact,
    find_artifacts,
    published_versions,
    read_artifact,
)
from service.inference.engine import OnnxEngine
from service.layer_config import LayerConfig
from tests.support.doubles import FaultyEngine
from tests.support.layers import CONFIGS, Layers, sha256_of
from tests.support.server import Server

SEED = 8
"""Any: publishing does not depend on the weights."""

TOLERANCE = 1e-5
"""The contract's promise for FP32."""

UMASK = 0o027
"""Leaves a group its reading and others nothing, unlike temporary files and unlike no umask."""

FILES = {"layer.onnx", "layer.weights", "golden.safetensors", "manifest.json"}


def _cross_of_equal_widths() -> Source:
    """Return a layer whose two sources have the same width, though they are two."""
    return random_layer(8, 2, seed=SEED, memory_dim=8)


@dataclass(frozen=True)
class Published:
    """A layer that was published into a repository with other things in it."""

    source: Source
    repository: Path
    artifact: Artifact
    cells: list[Cell]
    seen: list[dict[str, Path]]
    """What a server would have found after each cell."""
    before: datetime
    after: datetime


OTHER_ENTRIES = ("mha/7", "mha/3", "mha/08", "mha/0", "mha/next", "mha-weights/1", "Mha/1", ".x/1")
"""Version 7 and what is no version or no name; all but two are no artifacts."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Return the next version of a layer, published under the eyes of a server."""
    repository = tmp_path_factory.mktemp("published") / "repository"
    for entry in OTHER_ENTRIES:
        (repository / entry).mkdir(parents=True)
    source, cells, seen = _cross_of_equal_widths(), list[Cell](), list[dict[str, Path]]()

    def look(cell: Cell | None, share: float) -> None:
        if cell is not None:
            cells.append(cell)
            seen.append(find_artifacts(repository))

    before, umask = datetime.now().astimezone(), os.umask(UMASK)
    try:
        artifact = publish(source, repository, "mha", on_cell=look)
    finally:
        os.umask(umask)
    after = datetime.now().astimezone()
    return Published(source, repository, artifact, cells, seen, before, after)


def test_publish_takes_the_next_version(published: Published) -> None:
    """Versions only ever rise, past everything that is no version."""
    artifact = published.artifact

    assert artifact.path == published.repository / "mha" / "8"
    assert artifact.manifest.version == 8
    assert published_versions(published.repository, "mha") == [3, 7, 8]


def test_publish_shows_nothing_before_it_is_whole(published: Published) -> None:
    """Whoever looks meanwhile finds the version before, and nothing else."""
    found = published.seen

    assert found == [{"mha": published.repository / "mha" / "7"}] * len(published.cells)
    assert published.cells == grid(published.source.config)
    assert find_artifacts(published.repository) == {"mha": published.artifact.path}


def test_publish_leaves_nothing_else_behind(published: Published) -> None:
    """The staging directory became the artifact."""
    entries = {path.relative_to(published.repository) for path in published.repository.glob("*/*")}

    assert entries == {Path(entry) for entry in (*OTHER_ENTRIES, "mha/8")}
    assert {file.name for file in published.artifact.path.iterdir()} == FILES


def test_publish_opens_its_files_to_whom_the_umask_allows(published: Published) -> None:
    """A server of another user can read what was written by way of a private directory."""
    modes = {file.name: oct(file.stat().st_mode) for file in published.artifact.path.iterdir()}

    assert oct(published.artifact.path.stat().st_mode) == "0o40750"
    assert modes == dict.fromkeys(FILES, "0o100640")


def test_publish_first_artifact_of_a_new_repository_is_version_1(layers: Layers) -> None:
    """A repository that is not there yet is made."""
    artifact = read_artifact(layers.artifact("tiny"))

    assert artifact.manifest.version == 1
    assert artifact.manifest.name == "tiny"


def test_manifest_describes_the_artifact(published: Published) -> None:
    """Name, layer, precision, origin and time are there for whoever serves it."""
    manifest = json.loads((published.artifact.path / "manifest.json").read_text())

    created = datetime.fromisoformat(manifest["created"])
    assert manifest["format"] == 2
    assert (manifest["name"], manifest["version"]) == ("mha", 8)
    said = {
        key: value for key, value in manifest["layer"].items() if value not in (None, [], False)
    }
    assert said == {
        **{"embed_dim": 8, "num_heads": 2, "num_kv_heads": 2, "head_dim": 4, "memory_dim": 8},
        "biases": ["query", "key", "value", "output"],
    }
    assert manifest["layer"].keys() == {field.name for field in fields(LayerConfig)}
    assert manifest["proof"] == "whole"
    assert manifest["precision"] == "fp32"
    assert manifest["tolerance"] == TOLERANCE
    assert manifest["input_scale"] == 1
    assert manifest["source"] == {"kind": "random", "seed": SEED}
    assert manifest["created"].endswith("+00:00")
    assert published.before.replace(microsecond=0) <= created <= published.after
    assert manifest.keys() == {
        *("format", "name", "version", "layer", "precision", "tolerance", "input_scale"),
        *("parity", "files", "source", "versions", "proven_on", "created", "tensors", "proof"),
    }


def test_manifest_parity_holds_every_measured_cell(published: Published) -> None:
    """What a reader sees of the gate is what the gate found."""
    manifest = published.artifact.manifest

    cells = grid(published.source.config)
    counts = Counter(row.reference for row in manifest.parity)
    assert counts == {
        "formula": len(cells),
        "layer": len(cells),
        "torch": sum(cell.masks in ("none", "padding", "pair") for cell in cells),
        "alone": sum(cell.batch > 1 for cell in cells),
    }
    assert 0 < manifest.worst_output_error <= TOLERANCE
    assert 0 < manifest.worst_weights_error <= TOLERANCE
    assert manifest.worst_output_error == max(row.output_error for row in manifest.parity)


def test_manifest_checksums_are_those_of_the_files(published: Published) -> None:
    """Every file but the manifest itself is listed with its size and SHA-256."""
    path, entries = published.artifact.path, published.artifact.manifest.files

    found = {
        name: (sha256_of(path / name), (path / name).stat().st_size)
        for name in FILES - {"manifest.json"}
    }

    assert found == {name: (entry.sha256, entry.size_bytes) for name, entry in entries.items()}


def test_manifest_versions_are_those_installed(published: Published) -> None:
    """Who cannot reproduce an answer sees what made it."""
    versions = published.artifact.manifest.versions

    assert versions == {
        package: importlib.metadata.version(package)
        for package in ("torch", "onnx", "onnxruntime", "onnx-ir", "numpy", "headwise")
    }


@pytest.mark.fault("G12")
def test_manifest_says_on_which_processor_it_was_proven(published: Published) -> None:
    """The last digits of a proof are those of one processor and one runtime."""
    proven_on = published.artifact.manifest.proven_on

    assert proven_on == {**processor(), "threads": 1}
    assert proven_on["machine"] == platform.machine()
    assert proven_on["cpu"]


CPUINFO = {
    "x86": (
        "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: fpu avx2 sse4_2 fma ht\n\n"
        "processor\t: 1\nmodel name\t: Another\n",
        {"cpu": "Some CPU @ 2 GHz", "instructions": "sse4_2 avx2 fma"},
    ),
    "arm": (
        "processor\t: 0\nFeatures\t: fp asimd sve i8mm\nCPU part\t: 0xd40\n",
        {"instructions": "asimd i8mm sve"},
    ),
    "empty": ("", {"instructions": ""}),
}


@pytest.mark.fault("G12")
@pytest.mark.parametrize(("text", "wanted"), CPUINFO.values(), ids=CPUINFO)
def test_processor_is_read_from_the_system(
    text: str, wanted: dict[str, str], tmp_path: Path
) -> None:
    """Only what the runtime chooses its kernels by, in one order."""
    (tmp_path / "cpuinfo").write_text(text)

    found = processor(tmp_path / "cpuinfo")

    assert found.items() >= wanted.items()
    assert found["cpu"]
    assert processor(tmp_path / "none")["instructions"] == ""


@pytest.mark.fault("G12")
def test_manifest_of_before_is_still_read_and_verified(copy: Path) -> None:
    """An artifact without the field was published by an older exporter."""
    _edit(copy, lambda manifest: manifest.pop("proven_on"))

    assert read_artifact(copy).manifest.proven_on == {}
    assert verify(copy).manifest.proven_on == {}


@pytest.mark.fault("G12")
def test_model_page_says_on_which_processor_it_was_proven(server: Server, layers: Layers) -> None:
    """Whoever serves an artifact elsewhere can see where it came from."""
    page = server.get("/v1/models/tiny").json()

    assert page["proven_on"] == read_artifact(layers.artifact("tiny")).manifest.proven_on != {}


@pytest.mark.parametrize("name", CONFIGS)
def test_golden_answers_are_those_of_the_formula(layers: Layers, name: str) -> None:
    """A server can check itself without PyTorch against what the layer truly answers."""
    golden, formula = read_artifact(layers.artifact(name)).golden, layers.formula(name)

    masked = formula(golden.embeddings, golden.memory, attend_mask=golden.attend_mask)
    plain = formula(golden.embeddings, golden.memory)

    assert np.abs(golden.plain_output - plain.output).max() < TOLERANCE
    assert np.abs(golden.output - masked.output).max() < TOLERANCE
    assert np.abs(golden.attention_weights - masked.weights).max() < TOLERANCE
    assert np.abs(plain.output - masked.output).max() > 100 * TOLERANCE
    assert (golden.memory is not None) == CONFIGS[name].is_cross


def test_publish_layer_that_fails_the_gate_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter would rather publish nothing than something wrong."""
    source, repository = random_layer(8, 2, seed=SEED), tmp_path / "repository"

    def wrong(*arguments: Any, **options: Any) -> FaultyEngine:
        return FaultyEngine(
            OnnxEngine(*arguments, **options),
            answer=lambda inputs, outputs: replace(outputs, output=outputs.output + 0.001),
        )

    monkeypatch.setattr("export.publish.OnnxEngine", wrong)

    with pytest.raises(ValuesDiffer, match=r"^batch 1, length 1, masks none: output differs"):
        publish(source, repository, "mha")

    assert not list(repository.iterdir())


def test_publish_weights_beyond_fp32_leave_no_trace(tmp_path: Path) -> None:
    """Finite weights whose products are not finite are found out by the gate."""
    spec = random_layer(8, 2, seed=SEED).spec
    tensors = {name: 1e30 * tensor for name, tensor in spec.tensors.items()}
    large = Source(LayerSpec(spec.config, tensors), {})

    with pytest.raises(ValuesDiffer, match=r"differs from formula by inf, allowed 1e-05$"):
        publish(large, tmp_path, "mha")

    assert not list(tmp_path.iterdir())


class _Interrupted(Exception):
    """Stands for whatever ends a publishing half-way."""


def test_publish_interrupted_leaves_no_trace(tmp_path: Path) -> None:
    """Half an artifact is removed by whoever wrote it."""
    entries: list[list[str]] = []

    def interrupt(cell: Cell | None, share: float) -> None:
        entries.append([path.name for path in tmp_path.iterdir()])
        raise _Interrupted

    with pytest.raises(_Interrupted):
        publish(random_layer(8, 2, seed=SEED), tmp_path, "mha", on_cell=interrupt)

    assert [re.fullmatch(r"\.staging-\w+", name) is not None for name in entries[0]] == [True]
    assert not list(tmp_path.iterdir())


def _interrupt(cell: Cell | None, share: float) -> None:
    raise _Interrupted


@pytest.mark.fault("G8")
def test_publish_removes_what_killed_exports_left(tmp_path: Path) -> None:
    """A killed export cannot clean up; the next one does, and leaves those alone that still run."""
    names = (".staging-killed", ".staging-running", ".staging-begun", "mha")
    killed, running, begun, other = (tmp_path / name for name in names)
    for directory in (killed, running, begun, other):
        directory.mkdir()
        (directory / "layer.weights").write_bytes(b"half")
    for directory in (killed, running, other):
        os.utime(directory, (0, 0))
    lock = os.open(running, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)

    with pytest.raises(_Interrupted):
        publish(random_layer(8, 2, seed=SEED), tmp_path, "mha", on_cell=_interrupt)

    os.close(lock)
    assert {path.name for path in tmp_path.iterdir()} == {*names} - {".staging-killed"}


@pytest.mark.fault("G8")
def test_make_visible_version_taken_meanwhile_becomes_the_next_free_one(
    published: Published, tmp_path: Path
) -> None:
    """Of two exports of one name both are published: a proof is not thrown away."""
    staging, repository = tmp_path / ".staging-x", tmp_path / "repository"
    shutil.copytree(published.artifact.path, staging)
    manifest = published.artifact.manifest
    for taken in (manifest.version, manifest.version + 1):
        (repository / manifest.name / str(taken)).mkdir(parents=True)
        (repository / manifest.name / str(taken) / "manifest.json").write_text("another's")

    path = make_visible(staging, repository, manifest)

    assert path == repository / manifest.name / str(manifest.version + 2)
    assert read_artifact(path).manifest == replace(manifest, version=manifest.version + 2)
    assert not staging.exists()


@pytest.mark.fault("G8")
def test_publish_without_a_version_left_is_refused_before_the_proof(tmp_path: Path) -> None:
    """A version of ten digits would never be served."""
    (tmp_path / "mha" / "999999999").mkdir(parents=True)

    with pytest.raises(PublishRefused) as caught:
        publish(random_layer(8, 2, seed=SEED), tmp_path, "mha", on_cell=_interrupt)

    assert str(caught.value) == (
        f"{tmp_path / 'mha'}: expected a version of at most 9 digits, got 1000000000 as the next"
        " one; remove or rename version 999999999 to publish another"
    )


def test_find_artifacts_takes_the_highest_version(published: Published) -> None:
    """8 is above 7, and 10 above 9, though not by the alphabet."""
    repository = published.repository.parent / "versions"
    for version in ("9", "10", "2"):
        (repository / "mha" / version).mkdir(parents=True)

    assert find_artifacts(repository) == {"mha": repository / "mha" / "10"}
    assert published_versions(repository, "mha") == [2, 9, 10]


def test_find_artifacts_passes_over_what_has_no_valid_name(tmp_path: Path) -> None:
    """Staging directories, files, reserved and unsafe names are nobody's artifacts."""
    for entry in (".staging-abc/1", "mha-weights/1", "Mha/1", "-mha/1", "a b/1", "empty", "x/v1"):
        (tmp_path / entry).mkdir(parents=True)
    (tmp_path / "file").write_text("1")

    assert find_artifacts(tmp_path) == {}
    assert published_versions(tmp_path, "mha-weights") == []
    assert published_versions(tmp_path, "../mha") == []


def test_find_artifacts_without_a_repository_is_refused(tmp_path: Path) -> None:
    """A misspelt directory is no empty repository."""
    repository = tmp_path / "artefacts"

    with pytest.raises(ArtifactUnreadable) as caught:
        find_artifacts(repository)

    assert str(caught.value) == f"{repository}: no such repository directory"


@pytest.fixture
def copy(layers: Layers, tmp_path: Path) -> Path:
    """Return an artifact of the test's own, to be spoilt."""
    return Path(shutil.copytree(layers.artifact("tiny"), tmp_path / "tiny"))


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change an artifact's manifest."""
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))


def _sign(path: Path) -> None:
    """Correct the sizes and checksums in the manifest, as who alters an artifact on purpose."""
    entries = {
        name: {"sha256": sha256_of(path / name), "size_bytes": (path / name).stat().st_size}
        for name in FILES - {"manifest.json"}
    }
    _edit(path, lambda manifest: manifest.update(files=entries))


def _append(file: Path, more: bytes) -> None:
    file.write_bytes(file.read_bytes() + more)


def _flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def _link(file: Path) -> None:
    """Put a link in the place of a file, to a file of the very same content."""
    target = file.parent.parent / f"elsewhere-{file.name}"
    file.rename(target)
    file.symlink_to(target)


def _list_file(path: Path, name: str) -> None:
    """Add a file to the manifest."""
    entry = {"sha256": "", "size_bytes": 0}
    _edit(path, lambda manifest: manifest["files"].update({name: entry}))


def _alter_golden(path: Path, **changes: Callable[[Any], Any] | None) -> None:
    """Change tensors of the golden file; None takes one away."""
    tensors = load_file(path / "golden.safetensors")
    for name, change in changes.items():
        if change is None:
            del tensors[name]
        else:
            tensors[name] = np.ascontiguousarray(change(tensors[name]))
    save_file(tensors, path / "golden.safetensors")
    _sign(path)


def _golden_of_other_bytes(path: Path) -> None:
    (path / "golden.safetensors").write_bytes(b"no tensors here, only text\n")
    _sign(path)


def _replace_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _claim_two_memories(path: Path) -> None:
    _add_golden_memory(path)
    _edit(path, lambda manifest: manifest["layer"].update(memory_dim=8, value_memory_dim=8))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no artifact at all": (
        shutil.rmtree,
        "{path}/manifest.json: No such file or directory",
    ),
    "no manifest": (
        lambda path: (path / "manifest.json").unlink(),
        "{path}/manifest.json: No such file or directory",
    ),
    "no weights": (
        lambda path: (path / "layer.weights").unlink(),
        "{path}/layer.weights: No such file or directory",
    ),
    "no graph": (
        lambda path: (path / "layer.onnx").unlink(),
        "{path}/layer.onnx: No such file or directory",
    ),
    "no golden answers": (
        lambda path: (path / "golden.safetensors").unlink(),
        "{path}/golden.safetensors: No such file or directory",
    ),
    "one bit of the weights": (
        lambda path: _flip(path / "layer.weights", -1),
        "{path}/layer.weights: its SHA-256 is not the one in manifest.json",
    ),
    "one bit of the graph": (
        lambda path: _flip(path / "layer.onnx", 20),
        "{path}/layer.onnx: its SHA-256 is not the one in manifest.json",
    ),
    "one byte more": (
        lambda path: _append(path / "layer.weights", b"x"),
        "{path}/layer.weights: expected 1184 bytes, found 1185",
    ),
    "weights cut off": (
        lambda path: os.truncate(path / "layer.weights", 1000),
        "{path}/layer.weights: expected 1184 bytes, found 1000",
    ),
    "weights linked": (
        lambda path: _link(path / "layer.weights"),
        "{path}/layer.weights: expected a plain file, found a link out of its directory,"
        " which is not followed; copy the file there, or make the whole directory a link",
    ),
    "manifest linked": (
        lambda path: _link(path / "manifest.json"),
        "{path}/manifest.json: expected a plain file, found a link out of its directory,"
        " which is not followed; copy the file there, or make the whole directory a link",
    ),
    "graph a directory": (
        lambda path: _replace_by_directory(path / "layer.onnx"),
        "{path}/layer.onnx: expected a plain file, found a directory or device",
    ),
    "another format": (
        lambda path: _edit(path, lambda manifest: manifest.update(format=3)),
        "{path}/manifest.json: format: this version reads formats 1 to 2; export the layer again",
    ),
    "an unknown key": (
        lambda path: _edit(path, lambda manifest: manifest.update(quantised=True)),
        "{path}/manifest.json: quantised: Unexpected keyword argument",
    ),
    "an unknown key of the layer": (
        lambda path: _edit(path, lambda manifest: manifest["layer"].update(dropout=0.1)),
        "{path}/manifest.json: layer.dropout: Unexpected keyword argument",
    ),
    "a missing key": (
        lambda path: _edit(path, lambda manifest: manifest.pop("layer")),
        "{path}/manifest.json: layer: Field required",
    ),
    "no JSON": (
        lambda path: (path / "manifest.json").write_text("{"),
        "{path}/manifest.json: Invalid JSON: EOF while parsing an object at line 1 column 1",
    ),
    "no UTF-8": (
        lambda path: (path / "manifest.json").write_bytes(b'{"name": "\xff"}'),
        "{path}/manifest.json: Invalid JSON: ",
    ),
    "empty": (
        lambda path: (path / "manifest.json").write_text(""),
        "{path}/manifest.json: Invalid JSON: EOF while parsing a value at line 1 column 0",
    ),
    "a list": (
        lambda path: (path / "manifest.json").write_text("[]"),
        "{path}/manifest.json: Input should be an object",
    ),
    "a number as text": (
        lambda path: _edit(path, lambda manifest: manifest["layer"].update(num_heads="2")),
        "{path}/manifest.json: layer.num_heads: Input should be a valid integer",
    ),
    "a number that no caller can be shown": (
        lambda path: _edit(path, lambda manifest: manifest["parity"][0].update(batch=10**20)),
        "{path}/manifest.json: expected integers of 64 bits, got 100000000000000000000",
    ),
    "a version as boolean": (
        lambda path: _edit(path, lambda manifest: manifest.update(version=True)),
        "{path}/manifest.json: version: Input should be a valid integer",
    ),
    "another precision": (
        lambda path: _edit(path, lambda manifest: manifest.update(precision="int3")),
        "{path}/manifest.json: precision: Input should be 'fp32'",
    ),
    "heads that do not divide": (
        lambda path: _edit(path, lambda manifest: manifest["layer"].update(num_heads=3)),
        "{path}/manifest.json: layer: num_kv_heads: expected a divisor of num_heads 3, got 2",
    ),
    "heads without a width": (
        lambda path: _edit(path, lambda m: m["layer"].update(num_heads=3, head_dim=0)),
        "{path}/manifest.json: layer: embed_dim: expected a multiple of num_heads 3, got 8",
    ),
    "a bias as in format 1": (
        lambda path: _edit(path, lambda manifest: manifest["layer"].update(bias=True)),
        "{path}/manifest.json: layer.bias: Unexpected keyword argument",
    ),
    "an option that nothing here computes": (
        lambda path: _edit(
            path, lambda m: m["layer"].update(position_bias={"kind": "kerple", "reach": 0})
        ),
        "{path}/manifest.json: layer.position_bias.kind: Input should be 'alibi' or 'buckets'",
    ),
    "an option that lacks a number": (
        lambda path: _edit(
            path, lambda m: m["layer"].update(position_bias={"kind": "buckets", "reach": 0})
        ),
        "{path}/manifest.json: layer.position_bias: position_bias.reach: expected a"
        " positive number for buckets, 0 for alibi, got 0 for buckets",
    ),
    "no golden memory of a layer that has one": (
        lambda path: _edit(path, lambda manifest: manifest["layer"].update(memory_dim=8)),
        "{path}/golden.safetensors: expected a tensor memory of float32",
    ),
    "no golden value memory of a layer that has one": (
        lambda path: _claim_two_memories(path),
        "{path}/golden.safetensors: expected a tensor value_memory of float32",
    ),
    "no golden weights of extra keys": (
        lambda path: _edit(path, lambda m: m["layer"].update(extra_keys=["zero"])),
        "{path}/golden.safetensors: expected a tensor extra_weights of float32",
    ),
    "a path as name": (
        lambda path: _edit(path, lambda manifest: manifest.update(name="../../etc")),
        "{path}/manifest.json: name: expected [a-z0-9][a-z0-9._-]{{0,62}}, not ending in -weights",
    ),
    "a reserved name": (
        lambda path: _edit(path, lambda manifest: manifest.update(name="mha-weights")),
        "{path}/manifest.json: name: expected [a-z0-9][a-z0-9._-]{{0,62}}, not ending in -weights",
    ),
    "a file above": (
        lambda path: _list_file(path, "../x"),
        "{path}: manifest.json names '../x', which is no file name",
    ),
    "a file of the host": (
        lambda path: _list_file(path, "/etc/passwd"),
        "{path}: manifest.json names '/etc/passwd', which is no file name",
    ),
    "the directory itself": (
        lambda path: _list_file(path, ".."),
        "{path}/..: expected a plain file, found a directory or device",
    ),
    "weights not listed": (
        lambda path: _edit(path, lambda manifest: manifest["files"].pop("layer.weights")),
        "{path}: manifest.json does not list layer.weights",
    ),
    "no files listed": (
        lambda path: _edit(path, lambda manifest: manifest.update(files={})),
        "{path}: manifest.json does not list layer.onnx",
    ),
    "no golden output": (
        lambda path: _alter_golden(path, output=None),
        "{path}/golden.safetensors: expected a tensor output of float32",
    ),
    "no golden embeddings": (
        lambda path: _alter_golden(path, embeddings=None),
        "{path}/golden.safetensors: expected a tensor embeddings of float32",
    ),
    "golden embeddings of another type": (
        lambda path: _golden_as(path, torch.bfloat16),
        "{path}/golden.safetensors: expected ",
    ),
    "golden mask of numbers": (
        lambda path: _alter_golden(path, attend_mask=lambda array: array.astype(np.float32)),
        "{path}/golden.safetensors: expected a tensor attend_mask of bool",
    ),
    "golden answers in words": (
        _golden_of_other_bytes,
        "{path}/golden.safetensors: expected safetensors: Error while ",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_read_artifact_that_is_not_as_published_is_refused(
    copy: Path, damage: Callable[[Path], object], message: str
) -> None:
    """The message names the file or key, what was expected and what came, in one line."""
    damage(copy)

    with pytest.raises(ArtifactUnreadable) as caught:
        read_artifact(copy)

    assert str(caught.value).startswith(message.format(path=copy))
    assert len(str(caught.value).splitlines()) == 1


def test_read_artifact_name_that_no_file_can_have_is_refused(copy: Path) -> None:
    """JSON can hold characters that a file name cannot."""
    _list_file(copy, "layer\0")

    with pytest.raises(ArtifactUnreadable, match=r"which is no file name$"):
        read_artifact(copy)


def test_read_artifact_golden_tensor_that_numpy_has_no_type_for_is_refused(copy: Path) -> None:
    """The golden file holds FP32 and BOOL, whatever else its format can hold."""
    _golden_as(copy, torch.float8_e4m3fn)

    with pytest.raises(ArtifactUnreadable, match=r"golden\.safetensors: "):
        read_artifact(copy)


def test_read_artifact_unspoilt_copy_is_read(copy: Path) -> None:
    """The refusals above are of their one damage each, and an artifact may be moved."""
    artifact = read_artifact(copy)

    assert artifact.graph.path == copy / "layer.onnx"
    assert artifact.graph.model == (copy / "layer.onnx").read_bytes()
    assert artifact.graph.weights == (copy / "layer.weights").read_bytes()
    assert artifact.manifest.layer == CONFIGS["tiny"]


def test_read_artifact_further_listed_files_are_checked_as_well(copy: Path) -> None:
    """Whatever the manifest lists must be as it says."""
    (copy / "notes.txt").write_text("trained on a Tuesday")
    entry = {"sha256": sha256_of(copy / "notes.txt"), "size_bytes": 20}
    _edit(copy, lambda manifest: manifest["files"].update({"notes.txt": entry}))
    assert read_artifact(copy).manifest.files["notes.txt"].size_bytes == 20

    (copy / "notes.txt").write_text("trained on a Monday.")

    with pytest.raises(ArtifactUnreadable, match=r"notes.txt: its SHA-256 is not the one"):
        read_artifact(copy)


def test_verify_good_artifact_passes_every_check_again(published: Published) -> None:
    """An artifact alone is proof enough: graph, weights and golden answers say the same."""
    cells: list[Cell | None] = []

    report = verify(published.artifact.path, on_cell=lambda cell, share: cells.append(cell))

    assert cells == [None, None, *grid(published.source.config)]
    assert len(report.rows) == len(published.artifact.manifest.parity)
    assert max(row.output_error for row in report.rows) <= TOLERANCE


def _alter_weight(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the last number of the weights, one of the output bias."""
    numbers = np.fromfile(path / "layer.weights", np.float32)
    numbers[-1] = change(numbers[-1])
    numbers.tofile(path / "layer.weights")
    _sign(path)


def _golden_as(path: Path, dtype: torch.dtype) -> None:
    """Write the golden embeddings in another type."""
    file = path / "golden.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["embeddings"] = tensors["embeddings"].to(dtype)
    safetensors.torch.save_file(tensors, file)
    _sign(path)


def _other_graph(path: Path) -> None:
    """Put a graph in the layer's place that takes and gives the same but holds no weights."""
    config = CONFIGS["tiny"]
    types = {"float32": TensorProto.FLOAT, "bool": TensorProto.BOOL}
    inputs, outputs = (
        [helper.make_tensor_value_info(t.name, types[t.dtype], t.axes) for t in tensors]
        for tensors in (graph_inputs(config), graph_outputs(config))
    )
    nodes = [
        helper.make_node("Identity", ["embeddings"], ["output"]),
        helper.make_node("Shape", ["pair_mask"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["attention_weights"]),
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "other", inputs, outputs),
        opset_imports=[helper.make_opsetid("", 23)],
        ir_version=10,
    )
    onnx.save(model, path / "layer.onnx")
    _sign(path)


FORGERIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a weight": (
        lambda path: _alter_weight(path, lambda number: number + 0.5),
        r"golden plain_output: differs from the layer by 0\.\d+",
    ),
    "a weight that is no number": (
        lambda path: _alter_weight(path, lambda number: np.nan),
        r".*/layer\.onnx: output\.bias: expected finite numbers, got NaN or infinity",
    ),
    "a golden output": (
        lambda path: _alter_golden(path, output=lambda array: array + 0.001),
        r"golden output: differs from the layer by 0\.00\d+",
    ),
    "a golden output that is no number": (
        lambda path: _alter_golden(path, plain_output=lambda array: array * np.nan),
        r"golden plain_output: differs from the layer by inf",
    ),
    "golden weights": (
        lambda path: _alter_golden(path, attention_weights=lambda array: array[:, ::-1]),
        r"golden attention_weights: differs from the layer by 0\.\d+",
    ),
    "golden weights of one head": (
        lambda path: _alter_golden(path, attention_weights=lambda array: array[:, :1]),
        r"golden attention_weights: expected shape \[2, 2, 5, 5\], got \[2, 1, 5, 5\]",
    ),
    "golden output too short": (
        lambda path: _alter_golden(path, output=lambda array: array[:, :4]),
        r"golden output: expected shape \[2, 5, 8\], got \[2, 4, 8\]",
    ),
    "golden embeddings too narrow": (
        lambda path: _alter_golden(path, embeddings=lambda array: array[..., :4]),
        r"golden input: the layer refuses it: .+",
    ),
    "golden memory of a self-attention layer": (
        lambda path: _add_golden_memory(path),
        r"golden input: the layer refuses it: memory: expected none, got one",
    ),
    "a graph of no layer": (
        _other_graph,
        r".*/layer\.onnx: graph: expected the weights query_key_value\.weight,"
        r" query_key_value\.bias, output\.weight, output\.bias, found none",
    ),
}


def _add_golden_memory(path: Path) -> None:
    tensors = load_file(path / "golden.safetensors")
    save_file(tensors | {"memory": tensors["embeddings"]}, path / "golden.safetensors")
    _sign(path)


@pytest.mark.parametrize(("forge", "message"), FORGERIES.values(), ids=FORGERIES)
def test_verify_forged_artifact_fails_though_its_checksums_are_right(
    copy: Path, forge: Callable[[Path], object], message: str
) -> None:
    """Checksums show accidents; against intent the parts of an artifact witness for each other."""
    forge(copy)
    read_artifact(copy)

    with pytest.raises(GateFailed, match=f"^{message}$"):
        verify(copy)


@pytest.mark.parametrize(
    "change",
    [
        {"biases": []},
        {"num_kv_heads": 1},
        {"causal": True},
        {"scale": 3.0},
        {"softcap": 5.0},
        {"window": 12},
        {"norm": {"kind": "rms", "epsilon": 1e-6, "span": "head"}},
    ],
    ids=str,
)
def test_manifest_of_a_layer_that_the_graph_is_not_of_is_refused(
    copy: Path, change: dict[str, Any]
) -> None:
    """Also what no call of a proof would show, such as a window longer than its sequences."""
    _edit(copy, lambda manifest: manifest["layer"].update(change))
    artifact = read_artifact(copy)

    for refused in (
        lambda: verify(copy),
        lambda: OnnxEngine(artifact.graph, artifact.manifest.layer),
    ):
        with pytest.raises(ArtifactUnreadable, match="the graph is of another layer than the man"):
            refused()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_heads": 4},
            "input head_mask axes: expected ['mask_rows', 4], found ['mask_rows', 2]",
        ),
        (
            {"embed_dim": 16},
            "input embeddings axes: expected ['batch', 'length', 16], found ['batch', 'length', 8]",
        ),
        (
            {"positional": "sinusoidal"},
            "input names: expected ['embeddings', 'positions', 'pair_mask', 'head_mask', 'plain'],"
            " found ['embeddings', 'pair_mask', 'head_mask', 'plain']",
        ),
    ],
    ids=str,
)
def test_verify_manifest_of_another_layer_is_refused(
    copy: Path, change: dict[str, object], message: str
) -> None:
    """The graph must be the one that the manifest describes."""
    _edit(copy, lambda manifest: manifest["layer"].update(change))

    with pytest.raises(ArtifactUnreadable) as caught:
        verify(copy)

    assert str(caught.value) == f"{copy / 'layer.onnx'}: {message}"


def test_verify_altered_artifact_is_refused_before_it_runs(copy: Path) -> None:
    """What is not as published is not even opened."""
    _flip(copy / "layer.weights", 0)

    with pytest.raises(ArtifactUnreadable, match=r"layer\.weights: its SHA-256"):
        verify(copy)
