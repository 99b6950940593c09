"""Every peer, by name."""

from collections.abc import Mapping

from bench.peers.bentoml import BentoML
from bench.peers.litserve import LitServe
from bench.peers.mlserver import MLServer
from bench.peers.peer import Peer
from bench.peers.plain import Plain
from bench.peers.ray import RayServe
from bench.peers.triton import Triton

PEERS: Mapping[str, Peer] = {
    peer.name: peer for peer in (Plain(), Triton(), LitServe(), MLServer(), BentoML(), RayServe())
}
