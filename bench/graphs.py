"""
Which graph answers every kind of call at the least cost?

    python -m bench.graphs

Compares, in turn and in one run, the ways to give one artifact masks and weights
that cost nothing when they are not asked for.  The findings are in NOTES.md.
"""

import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from export.graph import write_graph
from export.sources import random_layer

EMBED_DIM, HEADS = 768, 12
SHAPES = ((1, 1), (1, 8), (1, 32), (1, 128), (8, 128), (1, 512), (1, 2048))
Feed = dict[str, np.ndarray]


@dataclass(frozen=True)
class Candidate:
    """One way to answer one kind of call."""

    name: str
    session: onnxruntime.InferenceSession
    fetch: list[str]
    feed: Callable[[np.ndarray], Feed]


class _Variant(nn.Module):
    """A layer of random weights with one projection or three, and a core behind them."""

    def __init__(
        self, core: Callable[..., tuple[Tensor, Tensor]], *, is_fused: bool = True
    ) -> None:
        super().__init__()
        widths = [3 * EMBED_DIM] if is_fused else [EMBED_DIM] * 3
        self.parts = nn.ModuleList(nn.Linear(EMBED_DIM, width) for width in widths)
        self.core, self.out = core, nn.Linear(EMBED_DIM, EMBED_DIM)

    def forward(self, x: Tensor, mask: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
        parts = [part(x) for part in self.parts]
        q, k, v = parts[0].chunk(3, dim=-1) if len(parts) == 1 else parts
        concat, weights = self.core(q, k, v, mask, heads)
        return self.out(concat), weights


def bare(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
    """Attend with the operator alone: no masks, no weights."""
    concat, _, _, weights = torch.onnx.ops.attention(q, k, v, q_num_heads=HEADS, kv_num_heads=HEADS)
    return concat, weights


def decomposed(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, heads: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend in single operators, as a naive export does: no masks."""
    q, k, v = (x.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for x in (q, k, v))
    weights = torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, dim=-1)
    return (weights @ v).transpose(1, 2).flatten(2), weights


def full(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
    """Attend with every mask and the weights, wanted or not."""
    concat, _, _, weights = torch.onnx.ops.attention(
        q, k, v, mask, q_num_heads=HEADS, kv_num_heads=HEADS, qk_matmul_output_mode=3
    )
    scaled = concat.view(*concat.shape[:2], HEADS, -1) * heads[:, None, :, None]
    return scaled.flatten(2), weights


def main() -> None:
    """Print a table of medians in milliseconds, and each as a ratio to the first column."""
    with tempfile.TemporaryDirectory() as directory:
        candidates, memory = _candidates(Path(directory))
        print("resident memory each session added, MB:", memory)
        for shape in SHAPES:
            medians = _race(candidates, shape)
            base = next(iter(medians.values()))
            cells = [f"{name} {ms:.2f} ({ms / base:.2f})" for name, ms in medians.items()]
            print(list(shape), " | ".join(cells), flush=True)


def _candidates(directory: Path) -> tuple[list[Candidate], dict[str, int]]:
    spec = random_layer(EMBED_DIM, HEADS, seed=0).spec
    memory: dict[str, int] = {}

    def session(name: str, write: Callable[[Path], object]) -> onnxruntime.InferenceSession:
        path = directory / name
        path.mkdir()
        write(path / "layer.onnx")
        before = _resident_mb()
        opened = _open(path / "layer.onnx")
        memory[name] = _resident_mb() - before
        return opened

    def export(module: nn.Module) -> Callable[[Path], object]:
        return lambda path: _export(module, path)

    three = session("bare, 3 projections", export(_Variant(bare, is_fused=False)))
    fused = session("bare, fused", export(_Variant(bare)))
    neutral = session("neutral masks", export(_Variant(full)))
    plain = session("decomposed", export(_Variant(decomposed)))
    chosen = session("if", lambda path: write_graph(spec, path))
    return [
        Candidate("bare, 3 projections", three, ["output"], _neutral),
        Candidate("bare, fused", fused, ["output"], _neutral),
        Candidate("neutral masks", neutral, ["output"], _neutral),
        Candidate("decomposed", plain, ["output"], _neutral),
        Candidate("if: plain", chosen, ["output"], lambda x: _if(x, plain=True)),
        Candidate("if: masked", chosen, ["output"], lambda x: _if(x, plain=False)),
        Candidate("if: weights", chosen, ["output", "weights"], lambda x: _if(x, plain=False)),
    ], memory


def _race(candidates: list[Candidate], shape: tuple[int, int]) -> dict[str, float]:
    x = np.random.default_rng(0).standard_normal((*shape, EMBED_DIM)).astype(np.float32)
    feeds = {c.name: c.feed(x) for c in candidates}
    times: dict[str, list[float]] = {c.name: [] for c in candidates}
    for _ in range(max(7, min(40, 6000 // (shape[0] * shape[1])))):
        for c in random.sample(candidates, len(candidates)):
            fetch = [_output_name(c.session, name) for name in c.fetch]
            # The first run brings the weights into the cache; the others count.
            for repeat in range(4 if shape[1] < 1000 else 2):
                started = time.perf_counter()
                c.session.run(fetch, feeds[c.name])
                if repeat:
                    times[c.name].append(time.perf_counter() - started)
    return {name: statistics.median(seen) * 1e3 for name, seen in times.items()}


def _neutral(x: np.ndarray) -> Feed:
    rows, length, _ = x.shape
    ones = np.ones((rows, HEADS), np.float32)
    return {"x": x, "mask": np.ones((rows, 1, length, length), bool), "heads": ones}


def _if(x: np.ndarray, *, plain: bool) -> Feed:
    neutral = _neutral(x)
    mask = np.ones((1, 1, 1, 1), bool) if plain else neutral["mask"]
    return {
        "embeddings": x,
        "pair_mask": mask,
        "head_mask": neutral["heads"],
        "plain": np.array(plain),
    }


def _export(module: nn.Module, path: Path) -> None:
    free: Any = torch.export.Dim.DYNAMIC
    program = torch.onnx.export(
        module.eval(),
        (
            torch.zeros(2, 3, EMBED_DIM),
            torch.ones(2, HEADS, 3, 3, dtype=torch.bool),
            torch.ones(2, HEADS),
        ),
        dynamo=True,
        opset_version=23,
        input_names=["x", "mask", "heads"],
        output_names=["output", "weights"],
        dynamic_shapes=({0: free, 1: free}, {0: free, 1: free, 2: free, 3: free}, {0: free}),
        verbose=False,
    )
    if program is None:
        raise RuntimeError("nothing was exported")
    program.save(path)


def _open(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _output_name(session: onnxruntime.InferenceSession, wanted: str) -> str:
    names: list[str] = [output.name for output in session.get_outputs()]
    return names[0] if wanted == "output" else names[1]


def _resident_mb() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 2**20


if __name__ == "__main__":
    main()
