"""
The layer without a server: Headwise's engine against PyTorch, and against a naive export.

    python -m bench.inprocess [--quick] [--out FILE]

Every candidate has the artifact's weights and as many threads as the engine, and runs in a
process of its own while the others are stopped (bench/turns.py).  They take turns in
rounds, each round in another order.  At every shape all answers are compared once.
Beside each time stands its share of the machine's peak: the layer's floating-point
operations a second, over those of one large matrix product in the same round.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from bench.candidates import PEAK_SIZES, bare, compiled, eager, engine, matrix_product, naive
from bench.many_callers import GRAPH, publish
from bench.results import US, Results, Sample, Work, ratios, results_of, spread
from bench.turns import Array, Candidate, Failed, Prepare, embeddings_of
from service.host.cpu import cpu_budget
from service.inference.parity import relative_error
from service.layer_config import LayerConfig

BENCH: Final = "inprocess"
PEAK: Final = "matrix product"
CONFIG: Final = LayerConfig(768, 12)
TOLERANCE: Final = 1e-4
"""Of answers: |a-b| <= tolerance * max(1, max|expected|)."""

_WARM_UP: Final = 2


@dataclass(frozen=True)
class Plan:
    """Which shapes [B, S], how many rounds, and how long a turn."""

    shapes: tuple[tuple[int, int], ...]
    rounds: int
    seconds: float
    """Of one candidate's turn; three runs at least."""


FULL: Final = Plan(
    ((1, 1), (1, 8), (1, 32), (1, 128), (8, 128), (1, 512), (4, 512), (1, 2048)), 7, 0.1
)
QUICK: Final = Plan(((1, 1), (1, 8), (1, 128)), 3, 0.05)


def main(argv: list[str] | None = None) -> None:
    """Measure, print a line for each shape and write all samples."""
    parser = argparse.ArgumentParser(prog="python -m bench.inprocess")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, shorter rounds")
    parser.add_argument("--out", type=Path, default=Path(".bench/inprocess.json"))
    arguments = parser.parse_args(argv)
    publish()
    with tempfile.TemporaryDirectory() as directory:
        makes = candidates(GRAPH, CONFIG, cpu_budget().threads, Path(directory))
        results = measure(makes, CONFIG, QUICK if arguments.quick else FULL)
    results.write(arguments.out)
    for who, reason in results.missing.items():
        print(f"missing: {who}: {reason}")
    print(f"written: {arguments.out}")


def measure(makes: Mapping[str, Callable[[], Prepare]], config: LayerConfig, plan: Plan) -> Results:
    """
    Return every sample; whoever fails is named in `missing` and left out from there on.

    Raises:
        Failed: the failing one is the engine, which all others are set against.
    """
    started = datetime.now(UTC)
    samples: list[Sample] = []
    missing: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        running: dict[str, Candidate] = {}
        for who, make in makes.items():
            print(f"starting {who} ...", flush=True)
            try:
                running[who] = stack.enter_context(Candidate(make))
            except Failed as failure:
                if who == US:
                    raise
                missing[who] = str(failure)
        peak = stack.enter_context(Candidate(partial(matrix_product, cpu_budget().threads)))
        for shape in plan.shapes:
            embeddings = embeddings_of(shape, config.embed_dim)
            for weights in (False, True):
                work = Work(shape=shape, weights=weights)
                _compare(running, embeddings, work, missing)
                own = _race(running, peak, embeddings, work, plan)
                print(_told(own, work), flush=True)
                samples += own
    return results_of(samples, started=started, missing=missing)


def candidates(
    graph: Path, config: LayerConfig, threads: int, directory: Path
) -> dict[str, Callable[[], Prepare]]:
    """Return how each candidate is made; `directory` is for the naive export."""
    given = (graph, config, threads)
    return {
        US: partial(engine, *given),
        "our graph, bare": partial(bare, *given),
        "naive export": partial(naive, *given, directory),
        "torch": partial(eager, *given),
        "torch.compile": partial(compiled, *given),
    }


def flops(shape: tuple[int, int], width: int) -> int:
    """Return the layer's floating-point operations in its four projections and two products."""
    rows, length = shape
    projections = 2 * rows * length * width * 4 * width
    attention = 2 * 2 * rows * length * length * width
    return projections + attention


def disagreement(answers: Mapping[str, tuple[Array, ...]], to: str) -> dict[str, float]:
    """
    Return who differs from `to` by more than the tolerance, and by how much.

    Another number of tensors, another shape and NaN differ infinitely.
    """
    found = {}
    for who, answer in answers.items():
        error = _error(answer, answers[to])
        if error > TOLERANCE:
            found[who] = error
    return found


def _compare(
    running: dict[str, Candidate],
    embeddings: npt.NDArray[np.float32],
    work: Work,
    missing: dict[str, str],
) -> None:
    """Ask each for its answer, and dismiss who gives none or another than ours."""
    answers = {}
    for who, candidate in list(running.items()):
        try:
            answers[who] = candidate.answer(embeddings, weights=bool(work.weights))
        except Failed as failure:
            if who == US:
                raise
            missing[who] = f"at {work}: {failure}"
            del running[who]
    for who, error in disagreement(answers, US).items():
        missing[who] = f"at {work}: its answer differs by {error:.1e}, more than {TOLERANCE:.0e}"
        del running[who]


def _race(
    running: dict[str, Candidate],
    peak: Candidate,
    embeddings: npt.NDArray[np.float32],
    work: Work,
    plan: Plan,
) -> list[Sample]:
    rows, length, width = embeddings.shape
    weights, seconds = bool(work.weights), plan.seconds
    samples: list[Sample] = []
    for turn in range(plan.rounds):
        best = peak.time(embeddings[:1, :1], weights=False, seconds=seconds, warm_up=1).best_s
        rate = 2 * np.prod(PEAK_SIZES, dtype=float) / best
        samples.append(Sample(BENCH, work, PEAK, turn, "rate", "GFLOP/s", rate / 1e9))
        names = list(running)
        # Each round begins with another, so that nobody always follows the same one.
        for who in names[turn % len(names) :] + names[: turn % len(names)]:
            timing = running[who].time(
                embeddings, weights=weights, seconds=seconds, warm_up=_WARM_UP
            )
            share = flops((rows, length), width) / timing.median_s / rate
            samples += [
                Sample(BENCH, work, who, turn, "time", "ms", timing.median_s * 1e3),
                Sample(BENCH, work, who, turn, "share of peak", "%", share * 100),
            ]
    return samples


def _told(own: list[Sample], work: Work) -> str:
    """Return a line: medians, each with its ratio to ours, and our share of the peak."""
    times = [sample for sample in own if sample.what == "time"]
    cells = []
    for who in dict.fromkeys(sample.who for sample in times):
        median = spread([sample.value for sample in times if sample.who == who]).median
        cells.append(f"{who} {median:.3f} ({ratios(times, who, US).median:.2f})")
    shares = [s.value for s in own if s.what == "share of peak" and s.who == US]
    return f"{work}: ms {' | '.join(cells)}; {US} at {spread(shares).median:.0f} % of the peak"


def _error(answer: tuple[Array, ...], expected: tuple[Array, ...]) -> float:
    if len(answer) != len(expected):
        return float("inf")
    return max((relative_error(a, b) for a, b in zip(answer, expected, strict=True)), default=0.0)


if __name__ == "__main__":
    main(sys.argv[1:])
