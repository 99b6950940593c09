"""
How the engine's time and memory grow, and what each artifact more costs a server.

    python -m bench.growth [--quick] [--out FILE]

Time against length, rows, heads (E fixed) and width (H fixed): every point of an axis is
measured once a round, in turn, so that no drift of the machine looks like growth.
Memory: the most that one call with weights added, each in a fresh process.
Artifacts: a real server with copies of the default layer, until it says it is ready.
"""

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from bench.candidates import engine
from bench.fits import Line, Points, Power, line, power, power_range
from bench.many_callers import GRAPH, publish
from bench.results import Results, Sample, Work, results_of, spread
from bench.servers import headwise
from bench.turns import Candidate, embeddings_of, once
from service.contract import GRAPH_FILE, MANIFEST_FILE
from service.host.cpu import cpu_budget
from service.host.malloc import keep_blocks
from service.inference.artifact import read_graph
from service.inference.calls import Inputs
from service.inference.engine import OnnxEngine
from service.layer_config import LayerConfig

US: Final = "headwise"
CONFIG: Final = LayerConfig(768, 12)
HELD: Final = 128
"""The length where rows, heads or width grow."""

BENCHES: Final = {
    "growth: length": "S",
    "growth: rows": "B",
    "growth: heads": "H",
    "growth: width": "E",
    "growth: memory": "B·H·S²",
    "growth: artifacts": "artifacts",
}
"""Each axis and its letter."""

LENGTHS: Final = tuple(2**i for i in range(13))  # 1..4096
ROWS: Final = (1, 2, 4, 8, 16, 32)
HEADS: Final = (1, 2, 4, 8, 12, 16, 24, 48, 96)
WIDTHS: Final = (96, 192, 384, 768, 1536)
PEAKS: Final = ((1, 128), (1, 256), (1, 512), (4, 512), (1, 1024), (2, 1024), (1, 2048), (1, 4096))
ARTIFACTS: Final = (1, 2, 4, 8, 16)
LINEAR: Final = ("growth: memory", "growth: artifacts")
"""Where a start and a slope say more than a power."""

ROUNDS: Final = 7
SECONDS: Final = 0.1
"""Of one point in one round; three runs at least."""

_RESET_PEAK: Final = "5"
"""To /proc/self/clear_refs: see proc(5)."""


def main(argv: list[str] | None = None) -> None:
    """Measure, print every point and fit, and write all samples."""
    parser = argparse.ArgumentParser(prog="python -m bench.growth")
    parser.add_argument("--quick", action="store_true", help="fewer points, fewer rounds")
    parser.add_argument("--out", type=Path, default=Path(".bench/growth.json"))
    arguments = parser.parse_args(argv)
    publish()
    results = measure(quick=arguments.quick)
    results.write(arguments.out)
    print(f"written: {arguments.out}")


def measure(*, quick: bool = False) -> Results:
    """Return every sample of every axis."""
    started = datetime.now(UTC)
    samples: list[Sample] = []
    for part in (_times, _memory, _artifacts):
        for bench, found in part(quick):
            samples += found
            for told in lines_of(found, bench):
                print(told, flush=True)
    return results_of(samples, started=started)


def points_of(samples: Sequence[Sample], bench: str, what: str) -> Points:
    """Return the medians of one quantity of one axis against that axis, ascending."""
    seen: dict[float, list[float]] = {}
    for sample in samples:
        if sample.bench == bench and sample.what == what:
            seen.setdefault(place_of(sample.work, bench), []).append(sample.value)
    return [(place, spread(values).median) for place, values in sorted(seen.items())]


def place_of(work: Work, bench: str) -> float:
    """
    Return where on its axis a piece of work lies.

    Raises:
        ValueError: it says nothing about that axis.
    """
    rows, length = work.shape or (None, None)
    cells = None
    if rows and length and work.heads:
        cells = rows * work.heads * length**2
    found = {
        "S": length,
        "B": rows,
        "H": work.heads,
        "E": work.width,
        "B·H·S²": cells,
        "artifacts": work.artifacts,
    }[BENCHES[bench]]
    if found is None:
        raise ValueError(f"{bench}: expected work with {BENCHES[bench]}, got {work}")
    return float(found)


def lines_of(samples: Sequence[Sample], bench: str) -> list[str]:
    """Return what there is to print about one axis: its points, then its fits."""
    told = []
    for what, unit in dict.fromkeys((s.what, s.unit) for s in samples if s.bench == bench):
        points = points_of(samples, bench, what)
        cells = [f"{place:g}: {value:.4g}" for place, value in points]
        told += [f"{bench}, {what} in {unit}: {', '.join(cells)}", *fits_of(points, bench, unit)]
    return told


def fits_of(points: Points, bench: str, unit: str) -> list[str]:
    """Return a sentence for each fit: what it is, over which range, and how far points are off."""
    axis = BENCHES[bench]
    if len(points) < 3:
        return []
    told = []
    if bench != "growth: artifacts":
        told += [_told_power(power_range(points), axis), _told_end(points, axis)]
    if bench in LINEAR:
        told.append(_told_line(line(points), axis, unit))
    return told


def _told_power(found: Power | None, axis: str) -> str:
    if found is None:
        return f"no three neighbouring points of {axis} keep to a power law"
    return (
        f"{axis}^{found.exponent:.2f} for {axis} {found.low:.4g}..{found.high:.4g}"
        f" ({found.count} points), none more than {found.residual:.1%} off"
    )


def _told_end(points: Points, axis: str) -> str:
    end = power(points[-3:])
    return f"{axis}^{end.exponent:.2f} over the last three points, {end.residual:.1%} off at most"


def _told_line(found: Line, axis: str, unit: str) -> str:
    return (
        f"{found.start:.4g} {unit} + {found.slope:.4g} {unit} x {axis},"
        f" none more than {found.residual:.3g} {unit} off"
    )


Part = Iterator[tuple[str, list[Sample]]]


def _times(quick: bool) -> Part:
    """Yield each axis of time; what differs in heads or width has a graph of its own."""
    lengths = LENGTHS[:9] if quick else LENGTHS
    rows = ROWS[:4] if quick else ROWS
    heads = HEADS[::4] if quick else HEADS
    widths = WIDTHS[:4] if quick else WIDTHS
    yield _timed("growth: length", [(CONFIG, (1, length)) for length in lengths], quick)
    yield _timed("growth: rows", [(CONFIG, (count, HELD)) for count in rows], quick)
    yield _timed(
        "growth: heads", [(LayerConfig(CONFIG.embed_dim, h), (1, HELD)) for h in heads], quick
    )
    yield _timed(
        "growth: width", [(LayerConfig(e, CONFIG.num_heads), (1, HELD)) for e in widths], quick
    )


def _timed(
    bench: str, points: list[tuple[LayerConfig, tuple[int, int]]], quick: bool
) -> tuple[str, list[Sample]]:
    print(f"## {bench}", flush=True)
    threads = cpu_budget().threads
    samples = []
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        engines: dict[LayerConfig, Candidate] = {}
        for config in dict.fromkeys(config for config, _ in points):
            graph = _graph_of(config, Path(directory))
            running = Candidate(partial(engine, graph, config, threads))
            engines[config] = stack.enter_context(running)
        for turn in range(3 if quick else ROUNDS):
            # In another order each time: no point is always the one after the longest.
            for config, shape in random.Random(turn).sample(points, len(points)):  # noqa: S311
                timing = engines[config].time(
                    embeddings_of(shape, config.embed_dim),
                    weights=False,
                    seconds=SECONDS / 2 if quick else SECONDS,
                    warm_up=2,
                )
                work = Work(
                    shape=shape, weights=False, heads=config.num_heads, width=config.embed_dim
                )
                samples.append(Sample(bench, work, US, turn, "time", "ms", timing.median_s * 1e3))
    return bench, samples


def _graph_of(config: LayerConfig, directory: Path) -> Path:
    """Return the artifact's graph, or write that of another layer, in a process of its own."""
    if config == CONFIG:
        return GRAPH
    path = directory / f"{config.embed_dim}-{config.num_heads}" / GRAPH_FILE
    path.parent.mkdir()
    print(f"exporting {config.embed_dim} wide, {config.num_heads} heads ...", flush=True)
    once(write_random, config, path)
    return path


def write_random(config: LayerConfig, path: Path) -> None:
    """Write the graph of a random layer: the product that is measured, unproven."""
    from export.graph import write_graph
    from export.sources import random_layer

    write_graph(random_layer(config.embed_dim, config.num_heads, seed=0).spec, path)


def _memory(quick: bool) -> Part:
    bench = "growth: memory"
    print(f"## {bench}", flush=True)
    samples = []
    for turn in range(1 if quick else 3):
        for shape in PEAKS[:4] if quick else PEAKS:
            added = once(peak_mb, GRAPH, CONFIG, shape, cpu_budget().threads)
            work = Work(shape=shape, weights=True, heads=CONFIG.num_heads)
            samples.append(Sample(bench, work, US, turn, "peak", "MB", added))
    yield bench, samples


def peak_mb(graph: Path, config: LayerConfig, shape: tuple[int, int], threads: int) -> float:
    """
    Return how much memory one call with weights adds at its peak, in MB; for a fresh process.

    Counted from what is resident once the session has answered a short call and the
    embeddings are there, to the most while the call runs; its answer is in it.
    """
    keep_blocks()
    ours = OnnxEngine(read_graph(graph), config, threads=threads)
    ours.run(Inputs(embeddings_of((1, 1), config.embed_dim)), weights=True)
    inputs = Inputs(embeddings_of(shape, config.embed_dim))
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before = _status_mb("VmRSS")
    ours.run(inputs, weights=True)
    return _status_mb("VmHWM") - before


def _status_mb(field: str) -> float:
    for entry in Path("/proc/self/status").read_text().splitlines():
        name, _, value = entry.partition(":")
        if name == field:
            return int(value.split()[0]) / 1024
    raise ValueError(f"/proc/self/status: expected {field}, found none")


def _artifacts(quick: bool) -> Part:
    bench = "growth: artifacts"
    print(f"## {bench}", flush=True)
    samples = []
    for turn in range(1 if quick else 3):
        for count in ARTIFACTS[:3] if quick else ARTIFACTS:
            work = Work(artifacts=count)
            with tempfile.TemporaryDirectory() as directory:
                copy_artifact(GRAPH.parent, Path(directory), count)
                started = time.perf_counter()
                with headwise(Path(directory)) as peer:
                    ready = time.perf_counter() - started
                    resident = peer.resident_mb()
            samples += [
                Sample(bench, work, US, turn, "resident", "MB", resident),
                Sample(bench, work, US, turn, "ready", "s", ready),
            ]
    yield bench, samples


def copy_artifact(artifact: Path, repository: Path, count: int) -> None:
    """Publish so many copies, each under a name of its own, in files of its own."""
    for name in ["mha", *(f"mha-{i}" for i in range(2, count + 1))]:
        path = repository / name / "1"
        shutil.copytree(artifact, path)
        manifest = json.loads((path / MANIFEST_FILE).read_text())
        (path / MANIFEST_FILE).write_text(json.dumps(manifest | {"name": name}))


if __name__ == "__main__":
    main(sys.argv[1:])
