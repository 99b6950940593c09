"""
Read a published artifact from its directory, trusting nothing but its checksums.

Every file is read once, and the bytes that were checked are the bytes that are used:
what happens to the files afterwards changes nothing.

Knows files, pydantic (to read the manifest strictly) and safetensors (to read
the golden answers); does not know what runs the graph.
"""

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load

from service.contract import (
    ARTIFACT_FILES,
    ATTEND_MASK,
    ATTENTION_WEIGHTS,
    EMBEDDINGS,
    EXTRA_WEIGHTS,
    FORMAT,
    GOLDEN_FILE,
    GRAPH_FILE,
    MANIFEST_FILE,
    MEMORY,
    NAME_PATTERN,
    OUTPUT,
    PLAIN_OUTPUT,
    VALUE_MEMORY,
    WEIGHTS_FILE,
    FileEntry,
    Manifest,
    is_valid_name,
    is_valid_version,
)
from service.errors import ArtifactUnreadable
from service.inference.calls import Inputs
from service.layer_config import PROJECTIONS, LayerConfig

_MANIFEST = TypeAdapter(Manifest)
_LAYER = TypeAdapter(LayerConfig)

_MAX_MANIFEST_BYTES: Final = 16 * 2**20
"""A thousand times what the exporter writes: the manifest says how large the other files are."""


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
    value_memory: npt.NDArray[np.float32] | None = None
    extra_weights: npt.NDArray[np.float32] | None = None
    """With the mask; None = the layer has no extra keys."""

    def inputs(self, layer: LayerConfig, *, masked: bool = True) -> Inputs:
        """Return the input as the layer's default call, with the mask or without."""
        return Inputs(
            self.embeddings,
            self.memory,
            self.attend_mask if masked else None,
            causal=layer.causal,
            value_memory=self.value_memory,
        )

    @property
    def answers(self) -> dict[str, npt.NDArray[np.float32]]:
        """What the layer answered, by the names in the file."""
        answers = {
            PLAIN_OUTPUT: self.plain_output,
            OUTPUT: self.output,
            ATTENTION_WEIGHTS: self.attention_weights,
        }
        extra = self.extra_weights
        return answers if extra is None else answers | {EXTRA_WEIGHTS: extra}


@dataclass(frozen=True)
class Graph:
    """An ONNX graph and its weights in memory, as the runtime takes them."""

    path: Path
    """Where it was read from: for messages only."""
    model: bytes = field(repr=False)
    weights: bytes = field(repr=False)
    """The content of `WEIGHTS_FILE`, the only external file that `model` may name."""


@dataclass(frozen=True)
class Artifact:
    """One artifact, in memory; its bytes are those that were published."""

    path: Path
    manifest: Manifest
    golden: Golden
    graph: Graph


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
        if name not in ARTIFACT_FILES:
            _check_further_file(path, name, entry)
    model, weights, golden = (
        _read_checked(path / name, manifest.files[name])
        for name in (GRAPH_FILE, WEIGHTS_FILE, GOLDEN_FILE)
    )
    return Artifact(
        path,
        manifest,
        _parse_golden(path / GOLDEN_FILE, golden, manifest.layer),
        Graph(path / GRAPH_FILE, model, weights),
    )


def read_graph(path: Path) -> Graph:
    """
    Return the ONNX graph in the file `path` and the weights beside it, checked against nothing.

    Raises:
        ArtifactUnreadable: one of the two files cannot be read.
    """
    try:
        return Graph(path, path.read_bytes(), (path.parent / WEIGHTS_FILE).read_bytes())
    except OSError as error:
        raise ArtifactUnreadable(f"{error.filename}: {error.strerror}") from error


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


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST_FILE
    with _opened(file) as (content, size_bytes):
        if size_bytes > _MAX_MANIFEST_BYTES:
            raise ArtifactUnreadable(
                f"{file}: expected at most {_MAX_MANIFEST_BYTES} bytes, found {size_bytes}"
            )
        text = content.read(_MAX_MANIFEST_BYTES)
    try:
        manifest = _MANIFEST.validate_json(_with_todays_names(text))
    except ValidationError as error:
        raise ArtifactUnreadable(f"{file}: {_first_problem(error)}") from error
    _check_integers(file, text)
    if not is_valid_name(manifest.name):
        raise ArtifactUnreadable(f"{file}: name: expected {NAME_PATTERN}, not ending in -weights")
    return manifest


def _check_integers(file: Path, text: bytes) -> None:
    """Return when every integer has at most 64 bits: callers are shown the manifest as JSON."""

    def checked(digits: str) -> int:
        value = int(digits) if len(digits) <= 20 else 2**64
        if not -(2**63) <= value < 2**64:
            raise ArtifactUnreadable(f"{file}: expected integers of 64 bits, got {digits[:24]}")
        return value

    json.loads(text, parse_int=checked)


def _with_todays_names(text: bytes) -> bytes:
    """
    Return a manifest of format 1 with its `bias` as the `biases` of format 2.

    Any other is returned as it is, also one that is malformed: reading it says how.
    """
    try:
        values = json.loads(text)
        if values["format"] != 1 or not isinstance(values["layer"]["bias"], bool):
            return text
        values["layer"]["biases"] = PROJECTIONS if values["layer"].pop("bias") else ()
    except (ValueError, TypeError, KeyError, RecursionError):
        return text
    return json.dumps(values).encode()


def as_read(layer: LayerConfig) -> LayerConfig:
    """
    Return a configuration as a manifest of it will be read: numbers as floats where fields are.

    Raises:
        ValueError: a value is of another type than its field.
    """
    try:
        return _LAYER.validate_json(layer.to_json())
    except ValidationError as error:
        raise ValueError(_first_problem(error)) from None
    except TypeError as error:  # nothing that JSON has
        raise ValueError(str(error)) from None


def _first_problem(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_input=False)
    if any(problem["loc"] == ("format",) for problem in problems):  # which explains all others
        return f"format: this version reads formats 1 to {FORMAT}; export the layer again"
    where = ".".join(str(part) for part in problems[0]["loc"])
    words = problems[0]["msg"].removeprefix("Value error, ")
    return f"{where}: {words}" if where else words


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[tuple[BufferedReader, int]]:
    """
    Give a plain file, open for reading, and its size in bytes.

    It may be a link to one within its own directory, as in a mounted ConfigMap.

    Raises:
        ArtifactUnreadable: it is no plain file, cannot be opened or read, or does not fit
            into memory; also when reading fails inside the `with`.
    """
    try:
        real = _followed(file)
        # Opening a device or a pipe may already do something: they are not opened.
        _check_is_plain(file, os.lstat(real).st_mode)
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as content:
            status = os.fstat(descriptor)
            _check_is_plain(file, status.st_mode)  # it may have been replaced since
            yield content, status.st_size
    except OSError as error:
        raise ArtifactUnreadable(f"{file}: {error.strerror}") from error
    except MemoryError as error:
        raise ArtifactUnreadable(f"{file}: does not fit into memory") from error


def _followed(file: Path) -> str:
    """
    Return the path of what a file is once its links are followed.

    Raises:
        ArtifactUnreadable: they lead nowhere, or out of its directory, where an artifact
            could read any file of the host.
        OSError: there is no such file.
    """
    if file.is_symlink() and not file.exists():
        raise ArtifactUnreadable(f"{file}: expected a plain file, found a link that leads nowhere")
    directory, real = os.path.realpath(file.parent), os.path.realpath(file, strict=True)
    if file.is_symlink() and os.path.commonpath([directory, real]) != directory:
        raise ArtifactUnreadable(
            f"{file}: expected a plain file, found a link out of its directory, which is not"
            " followed; copy the file there, or make the whole directory a link"
        )
    return real


def _check_is_plain(file: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise ArtifactUnreadable(f"{file}: expected a plain file, found a directory or device")


def _check_size(file: Path, entry: FileEntry, found_bytes: int) -> None:
    if found_bytes != entry.size_bytes:
        raise ArtifactUnreadable(f"{file}: expected {entry.size_bytes} bytes, found {found_bytes}")


def _check_digest(file: Path, entry: FileEntry, found: str) -> None:
    if found != entry.sha256:
        raise ArtifactUnreadable(f"{file}: its SHA-256 is not the one in {MANIFEST_FILE}")


def _read_checked(file: Path, entry: FileEntry) -> bytes:
    """
    Return the file's content, once it has the size and the SHA-256 of its entry.

    No more is read into memory than the entry says.

    Raises:
        ArtifactUnreadable: it is another.
    """
    with _opened(file) as (content, size_bytes):
        _check_size(file, entry, size_bytes)
        checked = content.read(entry.size_bytes)
    _check_size(file, entry, len(checked))  # it may have shrunk meanwhile
    _check_digest(file, entry, hashlib.sha256(checked).hexdigest())
    return checked


def _check_further_file(path: Path, name: str, entry: FileEntry) -> None:
    """Return when a file that the manifest lists, and that nothing here uses, is as it says."""
    file = path / name
    if name != Path(name).name or "\0" in name:
        raise ArtifactUnreadable(f"{path}: {MANIFEST_FILE} names {name!r}, which is no file name")
    with _opened(file) as (content, size_bytes):
        _check_size(file, entry, size_bytes)
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    _check_digest(file, entry, digest)


def _parse_golden(file: Path, content: bytes, layer: LayerConfig) -> Golden:
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise ArtifactUnreadable(f"{file}: expected safetensors: {error}") from error
    except (KeyError, AttributeError) as error:  # a type that numpy lacks
        raise ArtifactUnreadable(f"{file}: expected float32 and bool, found {error}") from error
    floats = [EMBEDDINGS, PLAIN_OUTPUT, OUTPUT, ATTENTION_WEIGHTS]
    floats += [MEMORY] if layer.is_cross else []
    floats += [VALUE_MEMORY] if layer.value_memory_dim is not None else []
    floats += [EXTRA_WEIGHTS] if layer.extra_keys else []
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
        value_memory=tensors.get(VALUE_MEMORY),
        extra_weights=tensors.get(EXTRA_WEIGHTS),
    )
