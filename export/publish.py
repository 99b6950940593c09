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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save

from export.check_file import Check, pass_check, read_check
from export.errors import ExportRefused
from export.format1 import read_spec as read_format1
from export.gate import GateFailed, Report, ask_layer, pass_gate
from export.graph import write_graph
from export.grid import Cell, proof_of
from export.processor import processor
from export.sources import Source, SourceInvalid
from export.weights_file import read_spec
from service.contract import (
    ATTEND_MASK,
    ATTENTION_WEIGHTS,
    EMBEDDINGS,
    EXTRA_WEIGHTS,
    FP32_TOLERANCE,
    GOLDEN_FILE,
    GRAPH_FILE,
    MANIFEST_FILE,
    MEMORY,
    OUTPUT,
    PLAIN_OUTPUT,
    VALUE_MEMORY,
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
from service.inference.engine import Engine, OnnxEngine
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
    checks: Sequence[Path] = (),
    on_cell: Callable[[Cell | None, float], None] = lambda cell, share: None,
) -> Artifact:
    """
    Return the layer as the next version of `name` in `repository`, proven.

    Once the weights are written, those of `source` are let go of: a caller who does not hold
    them either has the layer in memory once, not twice.

    `checks` are files with calls of the caller's and their answers (export/check_file.py), which
    the layer must meet, too; for `on_cell` see `pass_gate`.

    Raises:
        SourceInvalid: a check is no call to this layer.
        GateFailed: the artifact does not answer as the layer does; nothing is
            visible in the repository.
        PublishRefused: no version is left, or the repository cannot be written to.
    """
    calls = [read_check(file, source.config) for file in checks]  # before minutes of proof
    _next_version(repository, name)
    with _written(repository), _staging(repository) as staging:
        write_graph(source.spec, staging / GRAPH_FILE)
        try:
            graph = read_graph(staging / GRAPH_FILE)
            # From here on the weights are in memory once, as they were written.
            source = _as_written(source, graph)
            engine = OnnxEngine(graph, source.config, threads=threads)
        except ArtifactUnreadable as error:
            raise GateFailed(str(error)) from error
        report = _proven(engine, source, calls, on_cell)
        _write_golden(source, staging / GOLDEN_FILE, report.input_scale)
        version = _next_version(repository, name)
        manifest = _manifest(source, report, _entries(graph, staging), name, version, threads)
        target = make_visible(staging, repository, manifest)
    del engine, graph, source  # their memory holds the weights twice; the artifact is read anew
    return read_artifact(target)


def verify(
    path: Path,
    *,
    threads: int = 1,
    checks: Sequence[Path] = (),
    on_cell: Callable[[Cell | None, float], None] = lambda cell, share: None,
) -> Verified:
    """
    Repeat every check on a published artifact, with the weights that are in it.

    For `checks` and `on_cell` see `publish`.

    Raises:
        SourceInvalid: a check is no call to this layer.
        ArtifactUnreadable: a file is missing or altered, or the signature differs.
        GateFailed: the artifact does not answer as its weights say.
    """
    artifact = read_artifact(path)
    layer = artifact.manifest.layer
    calls = [read_check(file, layer) for file in checks]
    engine = OnnxEngine(artifact.graph, layer, threads=threads)
    try:
        read = read_format1 if artifact.manifest.format == 1 else read_spec
        source = Source(read(artifact.graph, layer), dict(artifact.manifest.source))
    except (ValueError, SourceInvalid) as error:
        raise GateFailed(f"{artifact.graph.path}: {error}") from error
    _check_golden(artifact, source)
    report = _proven(engine, source, calls, on_cell)
    return Verified(artifact.manifest, report.rows, _proven_on(threads), _versions())


def _as_written(source: Source, graph: Graph) -> Source:
    """
    Return the source with views of the graph's weights in place of its tensors.

    Raises:
        GateFailed: a number that was written is another.
    """
    try:
        spec = read_spec(graph, source.config)
    except (ValueError, SourceInvalid) as error:
        raise GateFailed(f"{graph.path}: {error}") from error
    for name, tensor in source.spec.tensors.items():
        if not torch.equal(spec.tensors[name], tensor):
            raise GateFailed(f"{graph.path}: {name} was not written as it is")
    return dataclasses.replace(source, spec=spec)


def _proven(
    engine: Engine,
    source: Source,
    calls: Sequence[Check],
    on_cell: Callable[[Cell | None, float], None],
) -> Report:
    """Return the gate's report with the caller's checks; these first, since they are quick."""
    rows = [pass_check(engine, call) for call in calls]
    report = pass_gate(engine, source, on_cell=on_cell)
    return dataclasses.replace(report, rows=(*report.rows, *rows))


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
        tensors=source.tensors,
        versions=_versions(),
        proof=proof_of(source.config),
        proven_on=_proven_on(threads),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _versions() -> dict[str, str]:
    packages = ("torch", "onnx", "onnxruntime", "onnx-ir", "numpy", "headwise")
    return {package: importlib.metadata.version(package) for package in packages}


def _proven_on(threads: int) -> dict[str, str | int]:
    return {**processor(), "threads": threads}


def _write_golden(source: Source, path: Path, scale: float) -> None:
    """Write an input and the PyTorch layer's answer, masked and plain, to a safetensors file."""
    random, config = np.random.default_rng(_GOLDEN_SEED), source.config
    rows, length = 2, min(5, config.max_positions or 5)
    keys = 4 if config.is_cross else length
    shapes = {
        EMBEDDINGS: (length, config.embed_dim),
        MEMORY: (keys, config.memory_dim),
        VALUE_MEMORY: (keys, config.value_memory_dim),
    }
    tensors = {
        name: (scale * random.standard_normal((rows, size, width))).astype(np.float32)
        for name, (size, width) in shapes.items()
        if width is not None
    }
    attend_mask = np.ones((rows, keys), np.bool_)
    attend_mask[1, 2:] = False
    inputs = Inputs(
        tensors[EMBEDDINGS],
        tensors.get(MEMORY),
        attend_mask,
        causal=config.causal,
        value_memory=tensors.get(VALUE_MEMORY),
    )
    golden = {**tensors, ATTEND_MASK: attend_mask, **_answers(source, inputs)}
    # The library writes an array's memory as it lies, whatever its order.
    path.write_bytes(save({name: np.ascontiguousarray(array) for name, array in golden.items()}))


def _answers(source: Source, inputs: Inputs) -> dict[str, npt.NDArray[Any]]:
    plain, _ = ask_layer(source.layer, dataclasses.replace(inputs, attend_mask=None))
    output, weights = ask_layer(source.layer, inputs)
    answers = {PLAIN_OUTPUT: plain, OUTPUT: output}
    keys = weights.shape[-1] - len(source.config.extra_keys)
    answers[ATTENTION_WEIGHTS] = weights[..., :keys]
    if source.config.extra_keys:
        answers[EXTRA_WEIGHTS] = weights[..., keys:]
    return answers


def _check_golden(artifact: Artifact, source: Source) -> None:
    golden = artifact.golden
    try:
        answers = _answers(source, golden.inputs(source.config))
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise GateFailed(f"golden input: the layer refuses it: {reason}") from error
    kept = golden.answers
    for name, answer in answers.items():
        if kept[name].shape != answer.shape:
            raise GateFailed(
                f"golden {name}: expected shape {list(answer.shape)}, got {list(kept[name].shape)}"
            )
        is_output = name in (OUTPUT, PLAIN_OUTPUT)
        difference = (relative_error if is_output else absolute_error)(kept[name], answer)
        if not difference <= FP32_TOLERANCE:
            raise GateFailed(f"golden {name}: differs from the layer by {difference:.3g}")
