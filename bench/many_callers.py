"""
Many callers at once: batched against alone, under load and beyond it.

    python -m bench.many_callers [mixed] [single] [overload] [health]

Every comparison takes turns in one run; medians are printed.  The layer is the
default one (768 wide, 12 heads), published into `artifacts` when it is missing.
"""

import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import orjson

from bench.servers import HOST, ROOT, Peer, echo, headwise, plain
from loadtest import oip
from loadtest.calls import FAILURES, GOOD
from loadtest.drive import closed_load, open_load
from loadtest.endpoint import Endpoint, request_bytes
from loadtest.plan import Plan
from loadtest.records import Records
from service.inference.artifact import read_graph
from service.inference.batches import (
    Batch,
    BatchLimits,
    slices_of,
    stacked_inputs,
)
from service.inference.calls import Call, Inputs
from service.inference.engine import OnnxEngine
from service.layer_config import LayerConfig
from service.settings import Settings

REPOSITORY = ROOT / "artifacts"
GRAPH = REPOSITORY / "mha" / "1" / "layer.onnx"
WIDTH = 768
PATH = "/v2/models/mha/infer"
ROUNDS = 3
SECONDS = 4.0
REFUSED = 429


def main(argv: Sequence[str]) -> None:
    """Run the named parts, or all of them."""
    publish()
    print(machine(), flush=True)
    parts = {"mixed": mixed, "single": single, "overload": overload, "health": health}
    for name in argv or parts:
        print(f"\n## {name}", flush=True)
        parts[name]()


def mixed() -> None:
    """64 clients, lengths 1..64: Headwise against the plain reference, and against its bound."""
    lengths = np.random.default_rng(0).permutation(np.tile(np.arange(1, 65), 4))
    requests = [infer_request(1, int(length)) for length in lengths]
    seen: dict[str, list[Records]] = {"headwise": [], "plain": [], "echo": []}
    engine_rates = []
    with headwise(REPOSITORY) as ours, plain(REPOSITORY) as theirs, echo() as floor:
        peers = {"headwise": ours, "plain": theirs, "echo": floor}
        for _ in range(ROUNDS):
            for name, peer in peers.items():
                seen[name].append(closed(peer, requests, clients=64))
            engine_rates.append(_engine_rate([int(length) for length in lengths]))
    rates = {name: statistics.median(r.rate for r in results) for name, results in seen.items()}
    engine = statistics.median(engine_rates)
    bound = 1 / (1 / engine + 1 / rates["echo"])
    for name, results in seen.items():
        p50, p99 = (statistics.median(percentile_ms(r, q) for r in results) for q in (50, 99))
        print(f"{name}: {rates[name]:.0f} calls/s, p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    print(f"engine alone, the same mix batched by hand: {engine:.0f} calls/s")
    print(f"headwise / plain: {rates['headwise'] / rates['plain']:.2f} (wanted >= 4)")
    print(f"headwise / bound of {bound:.0f}: {rates['headwise'] / bound:.2f} (wanted >= 0.9)")


def single() -> None:
    """One client: the batcher's price, against the same server without one."""
    for shape in ((1, 1), (1, 8), (1, 128)):
        requests = [infer_request(*shape)]
        p50s: dict[str, list[float]] = {"batcher": [], "direct": []}
        with (
            headwise(REPOSITORY) as ours,
            headwise(REPOSITORY, argv=("-m", "bench.direct")) as direct,
        ):
            for _ in range(ROUNDS * 2):
                for name, peer in (("batcher", ours), ("direct", direct)):
                    result = closed(peer, requests, clients=1, seconds=2)
                    p50s[name].append(percentile_ms(result, 50))
        medians = {name: statistics.median(values) for name, values in p50s.items()}
        ratio = statistics.median(
            a / b for a, b in zip(p50s["batcher"], p50s["direct"], strict=True)
        )
        print(
            f"{list(shape)}: with {medians['batcher']:.3f} ms, without"
            f" {medians['direct']:.3f} ms, ratio {ratio:.3f} (wanted <= 1.03)"
        )


def overload(seconds: float = 60) -> None:
    """
    Offer 0.5 to 10 times the capacity at [1, 32]; what is answered, refused, and how fast.

    Generator and server share the cores, so a refusal takes from both.  Its cost is
    measured by what is refused as early as a full queue refuses, an unknown model;
    the rate offered is capped at what could be refused at all.
    """
    requests = [infer_request(1, 32)]
    with headwise(REPOSITORY) as peer:
        capacity = closed(peer, requests, clients=64, seconds=10).rate
        unknown = closed(peer, [infer_request(1, 32, model="none")], clients=64)
        refusable = unknown.offered / unknown.seconds
        print(
            f"capacity (64 clients that wait): {capacity:.0f} calls/s;"
            f" refusing alone: {refusable:.0f} calls/s"
        )
        peak = capacity
        for factor in (0.5, 1, 2, 5, 10):
            before = peer.resident_mb()
            rate = min(capacity * factor, 0.8 * refusable)
            plan = Plan(seconds=seconds, warmup_s=0)
            at = _endpoint(peer)
            result = open_load(
                at, requests, rate=rate, connections=1024, plan=plan, keep_calls=True
            )
            p50, p99 = (percentile_ms(result, q) for q in (50, 99))
            refused_p50, refused_p99 = (percentile_ms(result, q, of=REFUSED) for q in (50, 99))
            refused = result.outcomes[REFUSED] / result.seconds
            left = peak * (1 - refused / refusable)
            print(
                f"{factor}x: offered {result.offered / seconds:.0f}/s, good {result.rate:.0f}/s:"
                f" {result.rate / peak:.2f} of peak, {result.rate / left:.2f} of what"
                f" {refused:.0f} refusals/s leave; p50 {p50:.1f} p99 {p99:.1f} ms;"
                f" refused p50 {refused_p50:.1f} p99 {refused_p99:.1f} ms; {outcomes(result)};"
                f" memory {before:.0f} -> {peer.resident_mb():.0f} MB",
                flush=True,
            )
            peak = max(peak, result.rate)
            started = time.perf_counter()
            while percentile_ms(closed(peer, requests, clients=1, seconds=0.05), 50) > 10:
                pass
            print(f"   as fast as before after {time.perf_counter() - started:.2f} s", flush=True)


def health() -> None:
    """Ask for `live` while clients send [8, 512] calls with weights, in binary and in JSON."""
    block = np.random.default_rng(0).standard_normal((8, 512, WIDTH)).astype(np.float32)
    binary = infer_request(8, 512, model="mha-weights")
    body = orjson.dumps(
        {"model": "mha", "weights": True, "embeddings": block}, option=orjson.OPT_SERIALIZE_NUMPY
    )
    for name, request in (("binary", binary), ("json", request_bytes(HOST, "/v1/attention", body))):
        with headwise(REPOSITORY, max_body_bytes=2**28) as peer:
            probes, calls = _probe_under(peer, request, clients=4, seconds=20)
        p50, p99, top = (percentile_ms(probes, q) for q in (50, 99, 100))
        print(
            f"{name} ({len(request) / 1e6:.0f} MB a request), 4 clients: live p50 {p50:.1f}"
            f" p99 {p99:.1f} max {top:.1f} ms over {probes.offered} probes,"
            f" {outcomes(probes)}; calls {outcomes(calls)}"
        )


def _probe_under(
    peer: Peer, request: bytes, *, clients: int, seconds: float
) -> tuple[Records, Records]:
    """Return what came of probes, due 20 times a second, and of the calls beside them."""
    probe = b"GET /v2/health/live HTTP/1.1\r\nHost: bench\r\n\r\n"
    at, plan = _endpoint(peer), Plan(seconds=seconds, warmup_s=2)
    # A process of its own: what large answers take of the interpreter delays no probe.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        load = pool.submit(closed_load, at, [request], clients=clients, plan=plan)
        probes = open_load(at, [probe], rate=20, arrivals="constant", plan=plan, keep_calls=True)
        return probes, load.result()


def closed(
    peer: Peer, requests: Sequence[bytes], *, clients: int, seconds: float = SECONDS
) -> Records:
    """Return what so many clients saw that wait for their answers."""
    plan = Plan(seconds=seconds, warmup_s=0)
    return closed_load(_endpoint(peer), requests, clients=clients, plan=plan, keep_calls=True)


def percentile_ms(records: Records, share: float, *, of: int = GOOD) -> float:
    """Return the latency, in ms, of answers of one status; NaN without an answer."""
    own = records.calls.latencies_s(of=of)
    return float(np.percentile(own, share)) * 1e3 if own.size else float("nan")


def outcomes(records: Records) -> dict[int | str, int]:
    """Return how many calls ended with each status, or in words how else."""
    return {FAILURES.get(how, how): count for how, count in records.outcomes.items()}


def _endpoint(peer: Peer) -> Endpoint:
    return Endpoint("http", HOST, peer.port)


def infer_request(rows: int, length: int, *, model: str = "mha") -> bytes:
    """Return a binary request of the protocol."""
    x = np.random.default_rng(length).standard_normal((rows, length, WIDTH)).astype(np.float32)
    body = oip.encode({"embeddings": x}, parameters={"binary_data_output": True})
    length_header = (oip.HEADER_LENGTH, str(body.header_length))
    return request_bytes(HOST, oip.infer_path(model), body.content, length_header)


def _engine_rate(lengths: list[int]) -> float:
    """Return calls a second of the engine alone, the mix sorted and batched by hand."""
    engine = OnnxEngine(read_graph(GRAPH), LayerConfig(WIDTH, 12), threads=2)
    settings = Settings()
    limits = BatchLimits(settings.max_batch_tokens, settings.max_batch_cells, settings.padding)
    batches: list[Batch] = []
    for length in sorted(lengths):
        call = Call(Inputs(np.ones((1, length, WIDTH), np.float32)))
        [slice_] = slices_of(call, limits)
        if not batches or not batches[-1].try_add(slice_, limits):
            batches.append(Batch.of(slice_))
    stacked = [stacked_inputs(batch, engine.layer) for batch in batches]
    started, runs = time.perf_counter(), 0
    while time.perf_counter() - started < SECONDS:
        for inputs in stacked:
            engine.run(inputs, weights=False)
        runs += 1
    return runs * len(lengths) / (time.perf_counter() - started)


def publish(checkout: Path = ROOT) -> Path:
    """Return the repository of a checkout, which now has the default layer by its own exporter."""
    argv = ["--name", "mha", "--embed-dim", str(WIDTH), "--num-heads", "12", "--if-missing"]
    environ = os.environ | {"PYTHONPATH": str(checkout.resolve())}
    subprocess.run([sys.executable, "-m", "export", *argv], cwd=checkout, env=environ, check=True)
    return checkout.resolve() / REPOSITORY.relative_to(ROOT)


def machine() -> str:
    """Return what the figures were measured on."""
    commit = subprocess.run(
        ["/usr/bin/env", "git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    cpu = next(
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return f"{cpu}, {platform.python_version()}, commit {commit}"


if __name__ == "__main__":
    main(sys.argv[1:])
