"""
What the way in and out costs: binary and JSON against their floors and the plain reference.

    python -m bench.wire [binary] [json] [codec] [shared] [plain]

Every comparison takes turns in one run; medians are printed.  The layer is the
default one (768 wide, 12 heads).
"""

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import orjson

from bench.many_callers import (
    GRAPH,
    REPOSITORY,
    ROUNDS,
    WIDTH,
    closed,
    infer_request,
    machine,
    outcomes,
    percentile_ms,
    publish,
)
from bench.servers import HOST, Peer, echo, headwise, plain
from bench.shared_request import shared_request
from loadtest.endpoint import request_bytes
from service.codecs import attention_json
from service.codecs.chunks import gathered
from service.host.malloc import keep_blocks
from service.inference.artifact import read_graph
from service.inference.calls import Answer, Inputs, Stages
from service.inference.engine import OnnxEngine
from service.inference.validation import Limits
from service.layer_config import LayerConfig

SHAPES = ((1, 1), (1, 8), (1, 32), (1, 128))


def main(argv: Sequence[str]) -> None:
    """Run the named parts, or all of them."""
    publish()
    print(machine(), flush=True)
    parts = {
        "binary": binary,
        "json": as_json,
        "codec": codec,
        "shared": shared,
        "plain": against_plain,
    }
    for name in argv or parts:
        print(f"\n## {name}", flush=True)
        parts[name]()


def binary() -> None:
    """One client, [1, 8]: against a bare echo of the same bytes and the engine's own run."""
    request = infer_request(1, 8)
    keep_blocks()
    engine = OnnxEngine(read_graph(GRAPH), LayerConfig(WIDTH, 12), threads=2, concurrent_runs=2)
    inputs = Inputs(np.random.default_rng(8).standard_normal((1, 8, WIDTH)).astype(np.float32))
    seen: dict[str, list[float]] = {"headwise": [], "echo": [], "engine": []}
    with headwise(REPOSITORY) as ours, echo() as floor:
        for _ in range(ROUNDS * 2):
            seen["headwise"].append(_p50(ours, request))
            seen["echo"].append(_p50(floor, request))
            seen["engine"].append(_time(lambda: engine.run(inputs, weights=False)) * 1e3)
    p50 = {name: statistics.median(values) for name, values in seen.items()}
    ratio = statistics.median(
        ours / (wire + run)
        for ours, wire, run in zip(seen["headwise"], seen["echo"], seen["engine"], strict=True)
    )
    print(
        f"[1, 8]: headwise {p50['headwise']:.3f} ms, echo {p50['echo']:.3f} + engine"
        f" {p50['engine']:.3f} ms: ratio {ratio:.2f} (wanted <= 1.25)"
    )


def as_json() -> None:
    """One client, [1, 128]: JSON against binary."""
    seen: dict[str, list[float]] = {"json": [], "binary": []}
    with headwise(REPOSITORY) as ours:
        for _ in range(ROUNDS * 2):
            seen["json"].append(_p50(ours, attention_request(1, 128)))
            seen["binary"].append(_p50(ours, infer_request(1, 128)))
    p50 = {name: statistics.median(values) for name, values in seen.items()}
    ratio = statistics.median(a / b for a, b in zip(seen["json"], seen["binary"], strict=True))
    print(
        f"[1, 128]: JSON {p50['json']:.2f} ms, binary {p50['binary']:.2f} ms:"
        f" ratio {ratio:.2f} (wanted <= 4)"
    )


def codec() -> None:
    """JSON alone: writing against orjson's numpy path, reading against orjson and numpy."""
    keep_blocks()
    random = np.random.default_rng(0)
    weights = random.dirichlet(np.ones(128), (1, 12, 128)).astype(np.float32)
    output = random.standard_normal((1, 128, WIDTH)).astype(np.float32)
    answer = Answer(output, weights, None, None, Stages(0, 0, 0))
    ours, theirs = _in_turn(
        lambda: deque(gathered(attention_json.encode("mha", 1, answer, single=False)), maxlen=0),
        lambda: orjson.dumps(
            {"model": "mha", "version": 1, "output": output, "attention_weights": weights},
            option=orjson.OPT_SERIALIZE_NUMPY,
        ),
    )
    print(
        f"write [1, 12, 128, 128] and [1, 128, {WIDTH}]: {ours * 1e3:.2f} ms, orjson"
        f" {theirs * 1e3:.2f} ms: ratio {ours / theirs:.2f} (wanted <= 1)"
    )
    body = _attention_body(8, 128)
    limits = Limits(256, 4096, 131_072, 2**29)
    ours, theirs = _in_turn(
        lambda: attention_json.decode(body, {}, limits),
        lambda: np.array(orjson.loads(body)["embeddings"], np.float32),
    )
    print(
        f"read [8, 128, {WIDTH}] ({len(body) / 1e6:.0f} MB): {ours * 1e3:.1f} ms, orjson and numpy"
        f" {theirs * 1e3:.1f} ms: {theirs / ours:.1f} times as fast (wanted >= 2.5)"
    )


def shared() -> None:
    """One client, [8, 128] with weights: tensors in shared memory against binary over loopback."""
    rows, length = 8, 128
    block = np.random.default_rng(0).standard_normal((rows, length, WIDTH)).astype(np.float32)
    outputs = {"output": block.nbytes, "attention_weights": rows * 12 * length * length * 4}
    with (
        headwise(REPOSITORY, shared_memory=True) as ours,
        shared_request(ours.port, block, outputs, model="mha-weights") as lent,
    ):
        requests = {"shared": lent, "binary": infer_request(rows, length, model="mha-weights")}
        seen: dict[str, list[float]] = {name: [] for name in requests}
        for _ in range(ROUNDS * 2):
            for name, request in requests.items():
                seen[name].append(_p50(ours, request))
    p50 = {name: statistics.median(values) for name, values in seen.items()}
    ratio = statistics.median(a / b for a, b in zip(seen["shared"], seen["binary"], strict=True))
    print(
        f"[8, 128] with weights: shared memory {p50['shared']:.1f} ms, binary"
        f" {p50['binary']:.1f} ms: ratio {ratio:.2f}"
    )


def against_plain() -> None:
    """No path may be slower than the plain reference."""
    with headwise(REPOSITORY) as ours, plain(REPOSITORY) as theirs:
        for wire, make in (("binary", infer_request), ("JSON", attention_request)):
            for shape in SHAPES:
                for clients in (1, 16):
                    request = make(*shape)
                    pairs = [
                        (_p50(ours, request, clients), _p50(theirs, request, clients))
                        for _ in range(ROUNDS)
                    ]
                    a, b = (statistics.median(side) for side in zip(*pairs, strict=True))
                    print(
                        f"{wire} {list(shape)}, {clients} clients: p50 headwise {a:.2f} ms,"
                        f" plain {b:.2f} ms: {a / b:.2f}",
                        flush=True,
                    )


def attention_request(rows: int, length: int) -> bytes:
    """Return a request to `/v1/attention` in JSON."""
    return request_bytes(HOST, "/v1/attention", _attention_body(rows, length))


def _attention_body(rows: int, length: int) -> bytes:
    block = np.random.default_rng(0).standard_normal((rows, length, WIDTH)).astype(np.float32)
    return orjson.dumps({"embeddings": block}, option=orjson.OPT_SERIALIZE_NUMPY)


def _p50(peer: Peer, request: bytes, clients: int = 1) -> float:
    result = closed(peer, [request], clients=clients, seconds=1.5)
    if set(result.outcomes) != {200}:
        raise RuntimeError(f"{peer.name}: {outcomes(result)}")
    return percentile_ms(result, 50)


def _in_turn(*works: Callable[[], object]) -> list[float]:
    """Return the median seconds of each, taken in turn."""
    times = [[_time(work, 5) for work in works] for _ in range(ROUNDS * 3)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def _time(work: Callable[[], object], runs: int = 200) -> float:
    """Return the median seconds of some runs."""
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    main(sys.argv[1:])
