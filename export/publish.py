"""Publish a layer: write it aside, prove it, then make it visible in one rename."""

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save

from export.errors import ExportRefused
from export.gate import Cell, GateFailed, Report, pass_gate
from export.graph import read_state, write_graph
from export.processor import processor
from export.sources import Source, SourceInvalid, from_state
from service.contract import (
    ATTEND_MASK,
    ATTENTION_WEIGHTS,
    EMBEDDINGS,
    FP32_TOLERANCE,
    GOLDEN_FILE,
    GRAPH_FILE,
    MANIFEST_FILE,
    MEMORY,
    OUTPUT,
    PLAIN_OUTPUT,
    WEIGHTS_FILE,
    FileEntry,
    Manifest,
    ParityRow,
    is_valid_version,
)
from service.errors import ArtifactUnreadable
from service.inference.artifact import (
    Artifact,
    Graph,
    published_versions,
    read_artifact,
    read_graph,
)
from service.inference.calls import Inputs
from service.inference.engine import OnnxEngine
from service.inference.parity import absolute_error, relative_error

_GOLDEN_SEED = 20260102

_YOUNG_S = 60.0
"""A staging directory of this age has been locked by its export, if that still runs."""


class PublishRefused(ExportRefused):
    """The repository cannot take a further version."""


@dataclass(frozen=True)
class Verified:
    """A published artifact that passed the gate once more, here."""

    manifest: Manifest
    """What it says of the first time."""
    rows: tuple[ParityRow, ...]
    proven_on: dict[str, str | int]
    versions: dict[str, str]

    @property
    def worst_error(self) -> float:
        """The largest difference of all rows, of outputs (relative) and weights (absolute)."""
        return max(max(row.output_error, row.weights_error or 0.0) for row in self.rows)


def publish(
    source: Source,
    repository: Path,
    name: str,
    *,
    threads: int = 1,
    on_cell: Callable[[Cell | None, float], None] = lambda cell, share: None,
    on_warning: Callable[[str], None] = lambda text: None,
) -> Artifact:
    """
    Return the layer as the next version of `name` in `repository`, proven.

    For `on_cell` see `pass_gate`; `on_warning` is called with each warning of PyTorch's exporter.

    Raises:
        GateFailed: the artifact does not answer as the layer does; nothing is
            visible in the repository.
        PublishRefused: no version is left, or the repository cannot be written to.
    """
    _next_version(repository, name)  # before minutes of proof
    with _written(repository), _staging(repository) as staging:
        for text in write_graph(source.layer, staging / GRAPH_FILE):
            on_warning(text)
        try:
            graph = read_graph(staging / GRAPH_FILE)
            engine = OnnxEngine(graph, source.config, threads=threads)
        except ArtifactUnreadable as error:
            raise GateFailed(str(error)) from error
        report = pass_gate(engine, source, on_cell=on_cell)
        _write_golden(source, staging / GOLDEN_FILE, report.input_scale)
        version = _next_version(repository, name)
        manifest = _manifest(source, report, _entries(graph, staging), name, version, threads)
        target = make_visible(staging, repository, manifest)
    return read_artifact(target)


def verify(
    path: Path,
    *,
    threads: int = 1,
    on_cell: Callable[[Cell | None, float], None] = lambda cell, share: None,
) -> Verified:
    """
    Repeat every check on a published artifact, with the weights that are in it.

    Raises:
        ArtifactUnreadable: a file is missing or altered, or the signature differs.
        GateFailed: the artifact does not answer as its weights say.
    """
    artifact = read_artifact(path)
    layer = artifact.manifest.layer
    engine = OnnxEngine(artifact.graph, layer, threads=threads)
    try:
        state = read_state(artifact.graph, layer)
        source = from_state(state, layer.num_heads, origin=dict(artifact.manifest.source))
    except (ValueError, SourceInvalid) as error:
        raise GateFailed(f"{artifact.graph.path}: {error}") from error
    _check_golden(artifact, source)
    report = pass_gate(engine, source, on_cell=on_cell)
    return Verified(artifact.manifest, report.rows, _proven_on(threads), _versions())


def make_visible(staging: Path, repository: Path, manifest: Manifest) -> Path:
    """
    Return where the staged artifact now is: its manifest's version, or the next free one.

    Another export of the same name may have taken the version during the proof.

    Raises:
        PublishRefused: no version is left.
    """
    while True:
        (staging / MANIFEST_FILE).write_text(manifest.to_json())
        _open_to_readers(staging)
        target = repository / manifest.name / str(manifest.version)
        target.parent.mkdir(exist_ok=True)
        try:
            staging.rename(target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        else:
            return target
        version = _checked(repository, manifest.name, manifest.version + 1)
        manifest = dataclasses.replace(manifest, version=version)


def _next_version(repository: Path, name: str) -> int:
    versions = published_versions(repository, name)
    return _checked(repository, name, versions[-1] + 1 if versions else 1)


def _checked(repository: Path, name: str, version: int) -> int:
    if not is_valid_version(str(version)):
        raise PublishRefused(
            f"{repository / name}: expected a version of at most 9 digits, got {version} as the"
            f" next one; remove or rename version {version - 1} to publish another"
        )
    return version


@contextlib.contextmanager
def _written(repository: Path) -> Iterator[None]:
    """Refuse what the system refuses, by the repository and with the cure."""
    try:
        yield
    except OSError as error:
        cures = {
            errno.ENOSPC: "free some space there, or",
            errno.EDQUOT: "free some of your quota there, or",
            errno.EFBIG: "raise the limit of a file's size (ulimit -f), or",
            errno.EEXIST: "expected a directory, got a file;",
            errno.ENOTDIR: "expected a directory, got a file;",
        }
        cure = cures.get(error.errno or 0, "make it writable, or")
        raise PublishRefused(
            f"{repository}: the artifact cannot be written there: {error.strerror or error};"
            f" {cure} name another directory with --repository"
        ) from error


@contextlib.contextmanager
def _staging(repository: Path) -> Iterator[Path]:
    """Give a directory on the repository's own disk that no reader takes for an artifact."""
    repository.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(repository)
    staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=repository))
    lock = os.open(staging, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # where the file system has no locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


def _remove_leftovers(repository: Path) -> None:
    """Remove what exports that were killed left behind; those that still run hold a lock."""
    for leftover in repository.glob(".staging-*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if time.time() - leftover.stat().st_mtime < _YOUNG_S:
                continue
            lock = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover)


def _open_to_readers(directory: Path) -> None:
    """Undo the owner-only modes of temporary files: a server may run as another user."""
    umask = os.umask(0)
    os.umask(umask)
    directory.chmod(0o777 & ~umask)
    for file in directory.iterdir():
        file.chmod(0o666 & ~umask)


def _entries(graph: Graph, directory: Path) -> dict[str, FileEntry]:
    """Return what the manifest says of each file: of the graph, the very bytes that were proven."""
    contents = {
        GRAPH_FILE: graph.model,
        WEIGHTS_FILE: graph.weights,
        GOLDEN_FILE: (directory / GOLDEN_FILE).read_bytes(),
    }
    return {
        name: FileEntry(hashlib.sha256(content).hexdigest(), len(content))
        for name, content in contents.items()
    }


def _manifest(
    source: Source,
    report: Report,
    files: dict[str, FileEntry],
    name: str,
    version: int,
    threads: int,
) -> Manifest:
    return Manifest(
        name=name,
        version=version,
        layer=source.config,
        precision="fp32",
        tolerance=FP32_TOLERANCE,
        input_scale=report.input_scale,
        parity=report.rows,
        files=files,
        source=source.origin,
        versions=_versions(),
        proven_on=_proven_on(threads),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _versions() -> dict[str, str]:
    packages = ("torch", "onnx", "onnxruntime", "onnxscript", "numpy", "headwise")
    return {package: importlib.metadata.version(package) for package in packages}


def _proven_on(threads: int) -> dict[str, str | int]:
    return {**processor(), "threads": threads}


def _write_golden(source: Source, path: Path, scale: float) -> None:
    """Write an input and the PyTorch layer's answer, masked and plain, to a safetensors file."""
    random, config = np.random.default_rng(_GOLDEN_SEED), source.config
    rows, length, keys = 2, 5, 4 if config.is_cross else 5
    shapes = {EMBEDDINGS: (rows, length, config.embed_dim)}
    if config.memory_dim is not None:
        shapes[MEMORY] = (rows, keys, config.memory_dim)
    tensors = {
        name: (scale * random.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    attend_mask = np.ones((rows, keys), np.bool_)
    attend_mask[1, 2:] = False
    inputs = Inputs(tensors[EMBEDDINGS], tensors.get(MEMORY), attend_mask)
    golden = {**tensors, ATTEND_MASK: attend_mask, **_answers(source, inputs)}
    # The library writes an array's memory as it lies, whatever its order.
    path.write_bytes(save({name: np.ascontiguousarray(array) for name, array in golden.items()}))


def _answers(source: Source, inputs: Inputs) -> dict[str, np.ndarray]:
    embeddings = torch.from_numpy(inputs.embeddings)
    memory = None if inputs.memory is None else torch.from_numpy(inputs.memory)
    mask = None if inputs.attend_mask is None else torch.from_numpy(inputs.attend_mask)
    with torch.no_grad():
        plain, _ = source.layer(embeddings, memory)
        output, weights = source.layer(embeddings, memory, attend_mask=mask)
    answers = {PLAIN_OUTPUT: plain, OUTPUT: output, ATTENTION_WEIGHTS: weights}
    return {name: tensor.numpy() for name, tensor in answers.items()}


def _check_golden(artifact: Artifact, source: Source) -> None:
    golden = artifact.golden
    try:
        answers = _answers(source, Inputs(golden.embeddings, golden.memory, golden.attend_mask))
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise GateFailed(f"golden input: the layer refuses it: {reason}") from error
    kept = {
        PLAIN_OUTPUT: golden.plain_output,
        OUTPUT: golden.output,
        ATTENTION_WEIGHTS: golden.attention_weights,
    }
    for name, answer in answers.items():
        if kept[name].shape != answer.shape:
            raise GateFailed(
                f"golden {name}: expected shape {list(answer.shape)}, got {list(kept[name].shape)}"
            )
        measure = absolute_error if name == ATTENTION_WEIGHTS else relative_error
        difference = measure(kept[name], answer)
        if not difference <= FP32_TOLERANCE:
            raise GateFailed(f"golden {name}: differs from the layer by {difference:.3g}")
