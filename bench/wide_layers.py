"""
A grouped-query, rotary, causal layer against transformers' own module.

    python -m bench.wide_layers --rounds 7

The layer is that of LLaMA-like models of one billion parameters: 2048 wide, 32 heads that share 8
key/value heads.  The engine, with the settings of a server's run alone, and `LlamaAttention` with
PyTorch's fused attention (`attn_implementation="sdpa"`) take turns with as many threads each.  The
module is given cosine and sine, which its model computes once for all layers; the engine computes
them in every call.  The findings are in NOTES.md.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.turns import Candidate, Prepare, Run, embeddings_of
from service.contract import FP32_TOLERANCE
from service.host.cpu import cpu_budget
from service.inference.artifact import read_graph
from service.inference.calls import Inputs
from service.inference.engine import OnnxEngine
from service.inference.parity import relative_error
from service.layer_config import LayerConfig, Rotary

Array = npt.NDArray[Any]

LLAMA = LayerConfig(2048, 32, num_kv_heads=8, biases=(), causal=True, rotary=Rotary(10000.0, 64))
SHAPES = ((1, 1), (1, 8), (1, 128), (1, 512), (4, 128), (4, 512))

_SEED = 0


class AnswersDiffer(Exception):
    """The two did not compute the same."""


@dataclass(frozen=True)
class Comparison:
    """Median times of both at one shape [B, S], one a round, and how far the answers differ."""

    shape: tuple[int, int]
    ours_s: tuple[float, ...]
    theirs_s: tuple[float, ...]
    error: float
    """max|a-b| / max(1, max|expected|)"""

    @property
    def ratio(self) -> float:
        """Our speed as a ratio to theirs: the median of each round's."""
        pairs = zip(self.ours_s, self.theirs_s, strict=True)
        return statistics.median(theirs / ours for ours, theirs in pairs)

    def __str__(self) -> str:
        ours, theirs = (1000 * statistics.median(s) for s in (self.ours_s, self.theirs_s))
        return f"| {list(self.shape)} | {ours:.2f} | {theirs:.2f} | {self.ratio:.2f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one row of a table for each shape."""
    parser = argparse.ArgumentParser(prog="python -m bench.wide_layers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (default: 7)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn (default: 1)")
    parser.add_argument("--threads", type=int, default=cpu_budget().threads, help="of each")
    options = parser.parse_args(arguments)
    print("| shape | ours, ms | theirs, ms | our speed to theirs |\n| --- | --- | --- | --- |")
    for row in compare(
        LLAMA,
        SHAPES,
        rounds=options.rounds,
        seconds=options.seconds,
        threads=options.threads,
    ):
        print(row, flush=True)


def compare(
    config: LayerConfig,
    shapes: Sequence[tuple[int, int]],
    *,
    rounds: int,
    seconds: float,
    threads: int,
) -> Iterator[Comparison]:
    """
    Give what both took at each shape.

    Every other round goes backwards, so that neither is always the first.

    Raises:
        AnswersDiffer: further apart than the contract's tolerance.
        Failed: one of them cannot be made, or ended.
    """
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        graph = Path(directory) / "layer.onnx"
        # Theirs first: it writes the graph, since the engine's process shall not load PyTorch.
        their_process, our_process = (
            stack.enter_context(Candidate(partial(make, graph, config, threads)))
            for make in (theirs, ours)
        )
        both = [our_process, their_process]
        for shape in shapes:
            embeddings = embeddings_of(shape, config.embed_dim)
            (our,), (their,) = (one.answer(embeddings, weights=False) for one in both)
            error = relative_error(our, their)
            if not error <= FP32_TOLERANCE:
                raise AnswersDiffer(f"{list(shape)}: by {error:.3g}")
            times: Mapping[Candidate, list[float]] = {one: [] for one in both}
            for i in range(rounds):
                for one in both[:: -1 if i % 2 else 1]:
                    timing = one.time(embeddings, weights=False, seconds=seconds, warm_up=2)
                    times[one].append(timing.median_s)
            ours_s, theirs_s = (tuple(times[one]) for one in both)
            yield Comparison(shape, ours_s, theirs_s, error)


def ours(graph: Path, config: LayerConfig, threads: int) -> Prepare:
    """Return the engine."""
    engine = OnnxEngine(read_graph(graph), config, threads=threads)

    def prepare(embeddings: Array, weights: bool) -> Run:
        inputs = Inputs(embeddings, causal=config.causal)
        return lambda: (engine.run(inputs, weights=weights).output,)

    return prepare


def theirs(graph: Path, config: LayerConfig, threads: int) -> Prepare:
    """Return `LlamaAttention`, once its weights are written as our graph."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    from export.graph import write_graph
    from export.random_weights import random_spec

    torch.set_num_threads(threads)
    base = config.rotary.base if config.rotary is not None else None
    llama = LlamaConfig(
        hidden_size=config.embed_dim,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": base},
        attn_implementation="sdpa",
    )
    module, rotary = LlamaAttention(llama, layer_idx=0).eval(), LlamaRotaryEmbedding(llama)
    spec = random_spec(config, _SEED)
    write_graph(spec, graph)
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
    state = {f"{theirs}.weight": spec.tensors[f"{ours}.weight"] for theirs, ours in names.items()}
    module.load_state_dict(state)

    def prepare(embeddings: Array, weights: bool) -> Run:
        x = torch.from_numpy(embeddings)
        with torch.inference_mode():
            tables = rotary(x, torch.arange(x.shape[1])[None])

        def run() -> tuple[Array, ...]:
            with torch.inference_mode():
                # Without a mask the module is causal, by the fastest way that PyTorch has.
                output, _ = module(x, position_embeddings=tables, attention_mask=None)
            return (np.asarray(output),)

        return run

    return prepare


if __name__ == "__main__":
    main()
