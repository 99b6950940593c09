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
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime

from bench.many_callers import GRAPH, publish
from bench.results import Results, Sample, Work, ratios, results_of, spread
from bench.turns import Array, Candidate, Failed, Prepare, Run, embeddings_of, once
from service.calls import Inputs
from service.contract import LayerConfig
from service.cpu import cpu_budget
from service.engine import OnnxEngine
from service.heap import keep_blocks
from service.parity import relative_error

BENCH: Final = "inprocess"
US: Final = "headwise"
PEAK: Final = "matrix product"
CONFIG: Final = LayerConfig(768, 12)
TOLERANCE: Final = 1e-4
"""Of answers: |a-b| <= tolerance * max(1, max|expected|)."""

_PEAK_SIZES: Final = (1024, 2048, 2048)
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


def engine(graph: Path, config: LayerConfig, threads: int) -> Prepare:
    """Return Headwise's engine, with its memory as the server sets it up."""
    keep_blocks()
    ours = OnnxEngine(graph, config, threads=threads)

    def prepare(embeddings: Array, weights: bool) -> Run:
        inputs = Inputs(embeddings)

        def run() -> tuple[Array, ...]:
            found = ours.run(inputs, weights=weights)
            return tuple(t for t in (found.output, found.attention_weights) if t is not None)

        return run

    return prepare


def bare(graph: Path, config: LayerConfig, threads: int) -> Prepare:
    """Return our graph in a session of the runtime's own defaults, fed by hand."""
    session = _session(graph, threads)

    def prepare(embeddings: Array, weights: bool) -> Run:
        rows, length = embeddings.shape[:2]
        feed = {
            "embeddings": embeddings,
            "pair_mask": np.ones((1, 1, length, length) if weights else (1, 1, 1, 1), bool),
            "head_mask": np.ones((rows, config.num_heads), np.float32),
            "plain": np.array(not weights),
        }
        return _fetching(session, ["output", "attention_weights"] if weights else ["output"], feed)

    return prepare


def naive(graph: Path, config: LayerConfig, threads: int, directory: Path) -> Prepare:
    """Return `nn.MultiheadAttention` as `torch.onnx.export` leaves it, in a default session."""
    # In another process: this one shall hold no threads of PyTorch's.
    paths = once_exported(graph, config, directory)
    sessions = {weights: _session(path, threads) for weights, path in paths.items()}

    def prepare(embeddings: Array, weights: bool) -> Run:
        names = ["output", "weights"] if weights else ["output"]
        return _fetching(sessions[weights], names, {"x": embeddings})

    return prepare


def eager(graph: Path, config: LayerConfig, threads: int) -> Prepare:
    """Return PyTorch's own layer, with whatever fast path it takes."""
    import torch

    torch.set_num_threads(threads)
    layer = _torch_layer(graph, config)

    def prepare(embeddings: Array, weights: bool) -> Run:
        x = torch.from_numpy(embeddings)

        def run() -> tuple[Array, ...]:
            with torch.inference_mode():
                return _arrays(*layer(x, x, x, need_weights=weights, average_attn_weights=False))

        return run

    return prepare


def compiled(graph: Path, config: LayerConfig, threads: int) -> Prepare:
    """
    Return the same layer under `torch.compile`, which needs a C++ compiler.

    Raises:
        Exception: whatever the compiler says where there is none.
    """
    # Its own pool of compiling processes would outlive this one.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch

    torch.set_num_threads(threads)
    layer = _torch_layer(graph, config)

    @torch.compile
    def attend(x: torch.Tensor, weights: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        found: tuple[torch.Tensor, torch.Tensor | None] = layer(
            x, x, x, need_weights=weights, average_attn_weights=False
        )
        return found

    def prepare(embeddings: Array, weights: bool) -> Run:
        x = torch.from_numpy(embeddings)

        def run() -> tuple[Array, ...]:
            with torch.inference_mode():
                return _arrays(*attend(x, weights))

        return run

    prepare(embeddings_of((1, 2), config.embed_dim), False)()
    return prepare


def matrix_product(threads: int) -> Prepare:
    """Return one large product through onnxruntime; embeddings and weights are not looked at."""
    from onnx import TensorProto, helper, numpy_helper

    rows, inner, columns = _PEAK_SIZES
    factor = np.random.default_rng(0).standard_normal((inner, columns), np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "factor"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, inner])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, columns])],
        [numpy_helper.from_array(factor, "factor")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x = np.random.default_rng(1).standard_normal((rows, inner), np.float32)
    session = _session(model.SerializeToString(), threads)
    return lambda embeddings, weights: _fetching(session, ["y"], {"x": x})


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


def once_exported(graph: Path, config: LayerConfig, directory: Path) -> dict[bool, Path]:
    """
    Return the naive exports, without and with weights, written by a process of their own.

    Raises:
        Failed: PyTorch's exporter refused.
    """
    paths = {weights: directory / f"naive-{weights}.onnx" for weights in (False, True)}
    once(export_naively, graph, config, paths)
    return paths


def export_naively(graph: Path, config: LayerConfig, paths: Mapping[bool, Path]) -> None:
    """Write `nn.MultiheadAttention` with the graph's weights by `torch.onnx.export`'s defaults."""
    import torch
    from torch import Tensor, nn

    # Of operators of torchvision that it does without, and of its own use of what it deprecates.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    class Naive(nn.Module):
        def __init__(self, weights: bool) -> None:
            super().__init__()
            self.layer, self.weights = _torch_layer(graph, config), weights

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            found = self.layer(x, x, x, need_weights=self.weights, average_attn_weights=False)
            return tuple(found) if self.weights else (found[0],)

    free: Any = torch.export.Dim.DYNAMIC
    for weights, path in paths.items():
        program = torch.onnx.export(
            Naive(weights).eval(),
            (torch.zeros(2, 3, config.embed_dim),),
            dynamo=True,
            input_names=["x"],
            output_names=["output", "weights"][: 1 + weights],
            dynamic_shapes=({0: free, 1: free},),
            verbose=False,
        )
        if program is None:
            raise RuntimeError("torch.onnx.export returned nothing")
        program.save(path)


def _torch_layer(graph: Path, config: LayerConfig) -> Any:
    """Return `nn.MultiheadAttention` with the weights of one of our graphs."""
    from export.graph import read_state
    from export.sources import from_state

    origin: dict[str, str | int] = {"kind": "graph"}
    return from_state(read_state(graph, config), config.num_heads, origin=origin).reference


def _session(model: Path | bytes, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _fetching(
    session: onnxruntime.InferenceSession, names: list[str], feed: dict[str, Array]
) -> Run:
    return lambda: tuple(session.run(names, feed))


def _arrays(*tensors: Any) -> tuple[Array, ...]:
    return tuple(tensor.numpy() for tensor in tensors if tensor is not None)


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
        rate = 2 * np.prod(_PEAK_SIZES, dtype=float) / best
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
