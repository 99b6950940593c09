"""
What a benchmark writes down, and the only two figures read out of it: medians and ratios.

A sample is one number of one candidate in one round.  Candidates take turns within
a round, so whatever else the machine did in it met them all: a ratio is taken in
each round, and the median of those is told, never a ratio of medians.
"""

import dataclasses
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar, Final, Literal

from pydantic import TypeAdapter, ValidationError

from service import __version__
from service.host.cpu import cpu_budget
from service.host.memory_limit import memory_limit

ROOT = Path(__file__).parent.parent
US: Final = "headwise"
"""Whom all others are set against, where it took part."""
FORMAT: Final = 1
"""The record format that this code writes and reads."""

_FLAGS: Final = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)
_STRICT: Final = {"extra": "forbid", "strict": True}


@dataclass(frozen=True)
class Machine:
    """What the figures were measured on."""

    __pydantic_config__: ClassVar = _STRICT

    cpu: str
    cores: int
    """Those that affinity and quota allow."""
    memory_mb: int
    flags: tuple[str, ...]
    """Vector and matrix extensions, as Linux names them."""


@dataclass(frozen=True)
class Work:
    """What was to be done; None = does not apply."""

    __pydantic_config__: ClassVar = _STRICT

    shape: tuple[int, int] | None = None
    """Rows and length, [B, S]."""
    weights: bool | None = None
    wire: str | None = None
    """`binary` or `json`."""
    clients: int | None = None
    lengths: str | None = None
    """Where the calls of one load differ in length: how, such as `1..64`."""
    heads: int | None = None
    width: int | None = None
    """E."""
    artifacts: int | None = None

    def __str__(self) -> str:
        parts = [
            None if self.shape is None else str(list(self.shape)),
            self.lengths and f"lengths {self.lengths}",
            "weights" if self.weights else None,
            self.wire,
            self.clients and f"{self.clients} client{'s' if self.clients > 1 else ''}",
            self.heads and f"H {self.heads}",
            self.width and f"E {self.width}",
            self.artifacts and f"{self.artifacts} artifact{'s' if self.artifacts > 1 else ''}",
        ]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Sample:
    """One number."""

    __pydantic_config__: ClassVar = _STRICT

    bench: str
    work: Work
    who: str
    round: int
    what: str
    """Which quantity, such as `time`, `p99`, `rate` or `memory`."""
    unit: str
    value: float


@dataclass(frozen=True)
class Results:
    """One run of one benchmark."""

    __pydantic_config__: ClassVar = _STRICT

    machine: Machine
    versions: dict[str, str]
    commit: str
    """With `-dirty` where the tree held what is not committed."""
    command: str
    started: str
    """UTC, ISO 8601."""
    samples: tuple[Sample, ...]
    missing: dict[str, str] = field(default_factory=dict)
    """Who could not be measured, and why."""
    format: Literal[1] = FORMAT

    def write(self, path: Path) -> None:
        """Write all of it as JSON; what is None is left out."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dataclasses.asdict(self, dict_factory=_present), indent=1)
        path.write_text(text + "\n")


@dataclass(frozen=True)
class Spread:
    """A median, and the least and the most that it stands for."""

    median: float
    low: float
    high: float
    count: int


_RESULTS = TypeAdapter(Results)


def read(path: Path) -> Results:
    """
    Return what `Results.write` wrote.

    Raises:
        ValueError: the file holds anything else; the message names file and field.
    """
    try:
        return _RESULTS.validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise ValueError(f"{path}: {where + ': ' if where else ''}{problem['msg']}") from None


def results_of(
    samples: Iterable[Sample], *, started: datetime, missing: dict[str, str] | None = None
) -> Results:
    """Return samples of this process's run, with what there is to say about where they are from."""
    return Results(
        machine=_machine(),
        versions=_versions(),
        commit=_commit(),
        command=_command(),
        started=started.astimezone(UTC).isoformat(timespec="seconds"),
        samples=tuple(samples),
        missing=missing or {},
    )


def spread(values: Sequence[float]) -> Spread:
    """
    Return median, least and most.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("spread: expected at least one value, got none")
    return Spread(statistics.median(values), min(values), max(values), len(values))


def ratios(samples: Iterable[Sample], who: str, to: str) -> Spread:
    """
    Return the spread of `who`'s values over `to`'s, each taken within one round.

    All samples must be of one quantity and one piece of work; several of one round
    and candidate count as their median.  Rounds in which either is missing do not count.

    Raises:
        ValueError: there is no common round.
    """
    rounds: dict[int, dict[str, list[float]]] = {}
    for sample in samples:
        if sample.who in (who, to):
            in_round = rounds.setdefault(sample.round, {})
            in_round.setdefault(sample.who, []).append(sample.value)
    pairs = [seen for _, seen in sorted(rounds.items()) if who in seen and to in seen]
    if not pairs:
        raise ValueError(f"ratios: expected rounds with both {who} and {to}, found none")
    return spread([statistics.median(seen[who]) / statistics.median(seen[to]) for seen in pairs])


def _present(pairs: list[tuple[str, object]]) -> dict[str, object]:
    return {key: value for key, value in pairs if value is not None}


def _machine() -> Machine:
    entries: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        entries.setdefault(key.strip(), value.strip())
    # ARM names its processors elsewhere, and its extensions `Features`.
    found = entries.get("flags", entries.get("Features", "")).split()
    return Machine(
        cpu=entries.get("model name", os.uname().machine),
        cores=cpu_budget().threads,
        memory_mb=memory_limit() // 2**20,
        flags=tuple(flag for flag in _FLAGS if flag in found),
    )


def _versions() -> dict[str, str]:
    # Of the metadata: importing torch would take its memory, and start its threads.
    found = {"python": sys.version.split()[0], "headwise": __version__}
    for package in ("onnxruntime", "numpy", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _commit() -> str:
    head, changes = _git("rev-parse", "--short", "HEAD"), _git("status", "--porcelain")
    if head is None:
        return "unknown"
    return f"{head}-dirty" if changes else head


def _git(*argv: str) -> str | None:
    """Return what git says, or None where it or its repository is missing."""
    try:
        ended = subprocess.run(
            ["/usr/bin/env", "git", "--no-optional-locks", *argv],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def _command() -> str:
    main = Path(sys.argv[0])
    is_bench = main.resolve().parent == ROOT / "bench"
    head = ["python", "-m", f"bench.{main.stem}"] if is_bench else [main.name]
    return shlex.join([*head, *sys.argv[1:]])
