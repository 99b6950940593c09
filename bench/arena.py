"""
What the runtime's memory arena costs and gives: speed at several shapes, memory after a peak.

    python -m bench.arena

Each setting runs in a process of its own, in turn; medians of the rounds are printed.
"""

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime

from service.host.malloc import give_back, keep_blocks

ROOT = Path(__file__).parent.parent
GRAPH = ROOT / "artifacts" / "mha" / "1" / "layer.onnx"
SHAPES = ((1, 1), (1, 8), (1, 128), (8, 128), (1, 512), (4, 512), (1, 2048))
PEAK = (1, 4096)
SETTINGS = (
    "arena",
    "no arena",
    "no arena, malloc keeps",
    "no arena, as served",
    "arena, shrunk after each run",
)
ROUNDS = 5
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def main() -> None:
    """Print a line for each setting."""
    if len(sys.argv) > 1:
        print(json.dumps(_measure(sys.argv[1])))
        return
    seen: dict[str, list[dict[str, float]]] = {setting: [] for setting in SETTINGS}
    for _ in range(ROUNDS):
        for setting in SETTINGS:
            argv = [sys.executable, "-m", "bench.arena", setting]
            ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
            seen[setting].append(json.loads(ended.stdout))
    for setting, results in seen.items():
        medians = {key: statistics.median(r[key] for r in results) for key in results[0]}
        print(setting, {key: round(value, 2) for key, value in medians.items()})


def _measure(setting: str) -> dict[str, float]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = "no arena" not in setting
    if "malloc keeps" in setting:
        # mallopt(3): blocks up to 32 MiB from the heap, and up to 256 MiB of it kept.
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
        libc.mallopt(_M_TRIM_THRESHOLD, 256 * 2**20)
    if "as served" in setting:
        keep_blocks()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(GRAPH, options, providers=["CPUExecutionProvider"])
    run = onnxruntime.RunOptions()
    if "shrunk" in setting:
        run.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    result: dict[str, float] = {}
    for shape in SHAPES:
        feed = _feed(shape)
        times = []
        for _ in range(60 if shape[1] < 100 else 12):
            started = time.perf_counter()
            session.run(["output"], feed, run)
            times.append(time.perf_counter() - started)
        result[f"{list(shape)} ms"] = statistics.median(times) * 1e3
    result["MB before"] = _resident_mb()
    session.run(["output"], _feed(PEAK), run)
    session.run(["output"], _feed((1, 8)), run)
    result[f"MB after {list(PEAK)}"] = _resident_mb()
    give_back()
    result["MB at rest"] = _resident_mb()
    return result


def _feed(shape: tuple[int, int]) -> dict[str, np.ndarray]:
    return {
        "embeddings": np.random.default_rng(0).standard_normal((*shape, 768)).astype(np.float32),
        "pair_mask": np.ones((1, 1, 1, 1), bool),
        "head_mask": np.ones((1, 12), np.float32),
        "plain": np.array(True),
    }


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
