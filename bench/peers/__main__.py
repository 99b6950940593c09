"""
The peers, at hand.

    python -m bench.peers list
    python -m bench.peers install [NAME...]   # each in an environment of its own, once
    python -m bench.peers check [NAME...]     # start, ask, compare with the engine, end
    python -m bench.peers tune [NAME...]      # what was tried for `Peer.tuning`, once more
"""

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence

from bench.many_callers import GRAPH, publish
from bench.peers.catalogue import PEERS
from bench.peers.check import Wrong, check
from bench.peers.errors import Unavailable
from bench.peers.peer import WIDTH, Peer
from bench.peers.tune import tune
from service.host.cpu import cpu_budget
from service.layer_config import LayerConfig


def main(argv: Sequence[str], peers: Mapping[str, Peer] = PEERS) -> int:
    """Return 0 if every named peer did what was asked; what did not is printed, too."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers")
    parser.add_argument("verb", choices=["list", "install", "check", "tune"])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    asked = parser.parse_args(argv)
    unknown = [name for name in asked.names if name not in peers]
    if unknown:
        parser.error(f"NAME: expected some of {', '.join(peers)}, got {', '.join(unknown)}")
    verbs = {"list": _list, "install": _install, "check": _check, "tune": _tune}
    failed = 0
    for name in asked.names or peers:
        try:
            verbs[asked.verb](peers[name])
        except (Unavailable, Wrong) as reason:
            failed += 1
            _say(f"{name}: FAILED: {reason}")
    return int(failed > 0)


def _say(line: str) -> None:
    print(line, flush=True)


def _list(peer: Peer) -> None:
    weights = "weights" if peer.can_weights else "no weights"
    words = [peer.version, ", ".join(peer.formats), weights, str(peer.tuning), peer.note]
    _say(f"{peer.name}: {'; '.join(word for word in words if word)}")


def _install(peer: Peer) -> None:
    peer.install(_say)
    _say(f"{peer.name}: {peer.version} is installed")


def _check(peer: Peer) -> None:
    peer.install(_say)
    publish()
    _say(check(peer, GRAPH, LayerConfig(WIDTH, 12), threads=cpu_budget().threads))


def _tune(peer: Peer) -> None:
    peer.install(_say)
    publish()
    for line in tune(peer, GRAPH, threads=cpu_budget().threads):
        _say(line)


if __name__ == "__main__":
    # Told to end, it still ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
