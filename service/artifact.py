"""
Read a published artifact from its directory, trusting nothing but its checksums.

Knows files, pydantic (to read the manifest strictly) and safetensors (to read
the golden answers); does not know what runs the graph.
"""

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file

from service.contract import (
    ARTIFACT_FILES,
    ATTEND_MASK,
    ATTENTION_WEIGHTS,
    EMBEDDINGS,
    FORMAT,
    GOLDEN_FILE,
    GRAPH_FILE,
    MANIFEST_FILE,
    MEMORY,
    NAME_PATTERN,
    OUTPUT,
    PLAIN_OUTPUT,
    Manifest,
    is_valid_name,
    is_valid_version,
)
from service.errors import ArtifactUnreadable

_MANIFEST = TypeAdapter(Manifest)


@dataclass(frozen=True)
class Golden:
    """An input and what the layer answered to it when it was published."""

    embeddings: npt.NDArray[np.float32]
    memory: npt.NDArray[np.float32] | None
    attend_mask: npt.NDArray[np.bool_]
    plain_output: npt.NDArray[np.float32]
    """Without the mask."""
    output: npt.NDArray[np.float32]
    """With the mask."""
    attention_weights: npt.NDArray[np.float32]
    """With the mask."""


@dataclass(frozen=True)
class Artifact:
    """One artifact whose files are exactly those that were published."""

    path: Path
    manifest: Manifest
    golden: Golden

    @property
    def graph_path(self) -> Path:
        """The ONNX file; its weights lie beside it."""
        return self.path / GRAPH_FILE


def read_artifact(path: Path) -> Artifact:
    """
    Return the artifact in the directory `path`, every file checked.

    Raises:
        ArtifactUnreadable: a file is missing, is no plain file or differs from
            its checksum, or the manifest is not one that this version reads.
    """
    manifest = _read_manifest(path)
    for name in ARTIFACT_FILES:
        if name not in manifest.files:
            raise ArtifactUnreadable(f"{path}: {MANIFEST_FILE} does not list {name}")
    for name, entry in sorted(manifest.files.items()):
        _check_file(path, name, entry.sha256, entry.size_bytes)
    return Artifact(path, manifest, _read_golden(path))


def find_artifacts(repository: Path) -> dict[str, Path]:
    """
    Return, by name, the directory of the highest version of every artifact in `repository`.

    Directories whose name or version is not valid are no artifacts and are passed over.

    Raises:
        ArtifactUnreadable: `repository` is no directory, or not open to us.
    """
    found = {}
    try:
        if not repository.is_dir():
            raise ArtifactUnreadable(f"{repository}: no such repository directory")
        for directory in sorted(repository.iterdir()):
            versions = published_versions(repository, directory.name)
            if versions:
                found[directory.name] = directory / str(versions[-1])
    except OSError as error:
        raise ArtifactUnreadable(f"{error.filename}: {error.strerror}") from error
    return found


def published_versions(repository: Path, name: str) -> list[int]:
    """Return the versions of `name` in `repository`, ascending; none = not published."""
    directory = repository / name
    if not is_valid_name(name) or not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if is_valid_version(path.name))


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST_FILE
    _check_is_plain_file(file)
    try:
        text = file.read_bytes()
        manifest = _MANIFEST.validate_json(text)
    except OSError as error:
        raise ArtifactUnreadable(f"{file}: {error.strerror}") from error
    except ValidationError as error:
        raise ArtifactUnreadable(f"{file}: {_first_problem(error)}") from error
    if not is_valid_name(manifest.name):
        raise ArtifactUnreadable(f"{file}: name: expected {NAME_PATTERN}, not ending in -weights")
    return manifest


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    if where == "format":
        return f"format: this version reads format {FORMAT} only; export the layer again"
    return f"{where}: {problem['msg']}" if where else problem["msg"]


def _check_is_plain_file(file: Path) -> None:
    try:
        mode = os.lstat(file).st_mode
    except OSError as error:
        raise ArtifactUnreadable(f"{file}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        # A link would let an artifact read any file of the host.
        raise ArtifactUnreadable(f"{file}: expected a plain file, found a link or a directory")


def _check_file(path: Path, name: str, sha256: str, size_bytes: int) -> None:
    file = path / name
    if name != Path(name).name or "\0" in name:
        raise ArtifactUnreadable(f"{path}: {MANIFEST_FILE} names {name!r}, which is no file name")
    _check_is_plain_file(file)
    try:
        size = file.stat().st_size
        found = sha256_of(file) if size == size_bytes else "a size of its own"
    except OSError as error:
        raise ArtifactUnreadable(f"{file}: {error.strerror}") from error
    if size != size_bytes:
        raise ArtifactUnreadable(f"{file}: expected {size_bytes} bytes, found {size}")
    if found != sha256:
        raise ArtifactUnreadable(f"{file}: its SHA-256 is not the one in {MANIFEST_FILE}")


def _read_golden(path: Path) -> Golden:
    file = path / GOLDEN_FILE
    try:
        tensors = load_file(file)
    except (SafetensorError, AttributeError) as error:  # AttributeError: a dtype numpy lacks
        raise ArtifactUnreadable(f"{file}: expected safetensors: {error}") from error
    floats = (EMBEDDINGS, PLAIN_OUTPUT, OUTPUT, ATTENTION_WEIGHTS)
    dtypes = dict.fromkeys(floats, np.float32) | {ATTEND_MASK: np.bool_}
    for name, dtype in dtypes.items():
        if name not in tensors or tensors[name].dtype != dtype:
            raise ArtifactUnreadable(f"{file}: expected a tensor {name} of {dtype.__name__}")
    return Golden(
        embeddings=tensors[EMBEDDINGS],
        memory=tensors.get(MEMORY),
        attend_mask=tensors[ATTEND_MASK],
        plain_output=tensors[PLAIN_OUTPUT],
        output=tensors[OUTPUT],
        attention_weights=tensors[ATTENTION_WEIGHTS],
    )
