"""Whether a peer answers right: each format, with and without weights, against the engine."""

import http.client
import ipaddress
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.peers.messages import Format
from bench.peers.peer import Peer, Tensors, embeddings
from bench.servers import HOST
from service.contract import FP32_TOLERANCE
from service.inference.artifact import read_graph
from service.inference.calls import Inputs
from service.inference.engine import OnnxEngine
from service.inference.parity import relative_error
from service.layer_config import LayerConfig

SHAPES = ((1, 1), (1, 8), (2, 5))
_ALIKE = 4
_LIMIT_S = 60


class Wrong(Exception):
    """A peer answered, and not what the engine answers."""


def check(peer: Peer, graph: Path, layer: LayerConfig, *, threads: int) -> str:
    """
    Return a line about a peer that was started, asked and ended.

    Raises:
        Unavailable: it cannot be started.
        Wrong: an answer has another status, tensor, shape or value than it should, or
            somebody else than this machine could ask.
    """
    engine = OnnxEngine(read_graph(graph), layer, threads=threads)
    questions = [(wire, weights, shape) for wire, weights in modes(peer) for shape in SHAPES]
    with peer.start(graph, threads) as running, ThreadPoolExecutor(len(questions)) as callers:

        def difference(question: tuple[Format, bool, tuple[int, int]]) -> float:
            wire, weights, shape = question
            found = ask(peer, running.port, wire, shape, weights=weights, layer=layer)
            wanted = _wanted(engine, shape, layer, weights=weights)
            return _difference(found, wanted, f"{peer.name}, {wire}, {list(shape)}")

        # First one after the other, then at once: who joins calls has calls to join.
        at_once = [question for question in questions for _ in range(_ALIKE)]
        worst = max([*map(difference, questions), *callers.map(difference, at_once)])
        processes, memory = len(running.pids), running.resident_mb()
        if beyond := sorted(a for a in running.addresses() if not _is_loopback(a)):
            raise Wrong(f"{peer.name}: expected loopback alone, it listens on {', '.join(beyond)}")
    lacking = [f"no {wire}" for wire in ("binary", "json") if wire not in peer.formats]
    if not peer.can_weights:
        lacking.append("no weights")
    words = [
        f"{peer.name} ({peer.version}): {len(questions) + len(at_once)} answers within"
        f" {worst:.1e} of the engine",
        f"ready after {running.start_s:.1f} s",
        f"{memory:.0f} MB in {processes} process" + ("es" if processes > 1 else ""),
        str(peer.tuning),
        *([peer.note] if peer.note else []),
        *lacking,
    ]
    return "; ".join(words)


def modes(peer: Peer) -> Iterator[tuple[Format, bool]]:
    """Give every format that a peer has, without weights and with."""
    for wire in peer.formats:
        yield wire, False
        if peer.can_weights:
            yield wire, True


def ask(
    peer: Peer,
    port: int,
    wire: Format,
    shape: tuple[int, int],
    *,
    weights: bool,
    layer: LayerConfig,
) -> Tensors:
    """
    Return what a running peer answers to one request, sent as a load would send it.

    Raises:
        Wrong: the status is not 200, or the answer's length is not told.
    """
    request = peer.request(wire, *shape, weights=weights, width=layer.embed_dim)
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    connection = http.client.HTTPConnection(HOST, port, timeout=_LIMIT_S)
    try:
        headers = dict(line.split(": ", 1) for line in lines)
        connection.request("POST", first.split()[1], body, headers)
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise Wrong(
            f"{peer.name}, {wire}: expected status 200, got {answer.status}: {content[:300]!r}"
        )
    if answer.getheader("Content-Length") is None:
        raise Wrong(f"{peer.name}, {wire}: expected a Content-Length, which the load reads by")
    return peer.read(wire, content)


def _is_loopback(address: str) -> bool:
    """Whether it is; an IPv4 address may be written as one of IPv6."""
    found = ipaddress.ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def _wanted(
    engine: OnnxEngine, shape: tuple[int, int], layer: LayerConfig, *, weights: bool
) -> Tensors:
    outputs = engine.run(Inputs(embeddings(*shape, layer.embed_dim)), weights=weights)
    wanted = {"output": outputs.output}
    if outputs.attention_weights is not None:
        wanted["attention_weights"] = outputs.attention_weights
    return wanted


def _difference(found: Tensors, wanted: Tensors, where: str) -> float:
    if found.keys() != wanted.keys():
        raise Wrong(f"{where}: expected {sorted(wanted)}, got {sorted(found)}")
    worst = 0.0
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            raise Wrong(f"{where}: {name}: expected {tensor.shape}, got {found[name].shape}")
        difference = relative_error(found[name], tensor)
        if not difference <= FP32_TOLERANCE:
            raise Wrong(f"{where}: {name}: off by {difference:.1e}, allowed {FP32_TOLERANCE:.0e}")
        worst = max(worst, difference)
    return worst
