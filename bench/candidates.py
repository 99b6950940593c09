"""
The candidates of the comparison in one process: ways to compute the same layer.

Each returns how a run is prepared; PyTorch and its exporter are imported by those that need them.
"""

import logging
import math
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime

from bench.turns import Array, Prepare, Run, embeddings_of, once
from service.host.malloc import keep_blocks
from service.inference.artifact import read_graph
from service.inference.calls import Inputs
from service.inference.engine import OnnxEngine
from service.layer_config import LayerConfig

PEAK_SIZES: Final = (1024, 2048, 2048)


def engine(graph: Path, config: LayerConfig, threads: int) -> Prepare:
    """Return Headwise's engine, with its memory as the server sets it up."""
    keep_blocks()
    ours = OnnxEngine(read_graph(graph), config, threads=threads)

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

    rows, inner, columns = PEAK_SIZES
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


def product_gflops(threads: int, *, seconds: float = 1.0) -> float:
    """
    Return what this machine makes of one large product, in 10^9 operations a second.

    It is the best of all products within that time: what the machine can do when nothing
    else runs, to hold other figures of it against.
    """
    run = matrix_product(threads)(np.empty((1, 1, 1), np.float32), False)
    run()
    best, until = math.inf, time.perf_counter() + seconds
    while (started := time.perf_counter()) < until:
        run()
        best = min(best, time.perf_counter() - started)
    return float(2 * np.prod(PEAK_SIZES, dtype=float) / best / 1e9)


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
    from export.torch_reference import torch_layer
    from export.weights_file import read_spec

    return torch_layer(read_spec(read_graph(graph), config))


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
