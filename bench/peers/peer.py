"""What a peer is: a server that is installed, started with the layer, asked and read alike."""

import contextlib
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from bench.peers import environment
from bench.peers.environment import Progress
from bench.peers.messages import Format
from bench.peers.processes import Running, started
from bench.servers import HOST, ROOT, free_port

Tensors = Mapping[str, npt.NDArray[np.float32]]

WIDTH = 768
"""Of the layer that is compared, in every request unless told otherwise."""


@dataclass(frozen=True)
class Tuning:
    """How a peer is run; what its documentation leaves open was tried (`tune`)."""

    batching: bool = False
    """Whether its own joining of calls is on."""
    workers: int = 1
    """Processes or instances that hold the layer and share the threads out."""
    spinning: bool = False
    """Whether the runtime's threads look out for work before they sleep."""

    def __str__(self) -> str:
        parts = [
            "batching" if self.batching else "no batching",
            f"{self.workers} worker" + ("s" if self.workers > 1 else ""),
            "spinning" if self.spinning else "no spinning",
        ]
        return ", ".join(parts)


class Peer(ABC):
    """
    A server to compare with.

    A format that a peer lacks is not in `formats`; the file of the peer says why.
    """

    name: ClassVar[str]
    formats: ClassVar[tuple[Format, ...]] = ("binary", "json")
    can_weights: ClassVar[bool] = True
    tuning: ClassVar[Tuning] = Tuning()
    candidates: ClassVar[tuple[Tuning, ...]] = ()
    """What `tune` tries against each other; `tuning` is the winner."""
    ready_path: ClassVar[str]
    note: ClassVar[str] = ""
    """What has to be said beside its figures."""

    @property
    @abstractmethod
    def version(self) -> str:
        """The product and its version, as the pins name it."""

    @property
    @abstractmethod
    def python(self) -> Path:
        """The interpreter that runs it."""

    @abstractmethod
    def install(self, progress: Progress) -> None:
        """
        Return once it can be started; the first time takes minutes and the network.

        Raises:
            Unavailable: it cannot be had here; the message says why.
        """

    @abstractmethod
    def request(
        self, wire: Format, rows: int, length: int, *, weights: bool, width: int = WIDTH
    ) -> bytes:
        """Return a whole HTTP/1.1 request about `embeddings(rows, length)`."""

    @abstractmethod
    def read(self, wire: Format, body: bytes) -> Tensors:
        """Return the tensors of an answer's body by their names in the graph."""

    @abstractmethod
    def command(self, folder: Path, port: int, tuning: Tuning) -> list[str]:
        """Return what starts it; what it needs on disk is written into `folder`."""

    def environ(self, folder: Path) -> Mapping[str, str]:
        """Return variables of its own."""
        return {}

    @contextlib.contextmanager
    def start(self, graph: Path, threads: int, tuning: Tuning | None = None) -> Iterator[Running]:
        """
        Give it running on loopback and ready; it and all its children are gone when left.

        Raises:
            Unavailable: it ended or did not get ready; the message has its last words.
        """
        tuning = tuning or self.tuning
        told = {
            "PEER_GRAPH": str(graph.resolve()),
            "PEER_THREADS": str(max(1, threads // tuning.workers)),
            "PEER_SPINNING": str(int(tuning.spinning)),
            "PEER_WORKERS": str(tuning.workers),
            "PEER_BATCHING": str(int(tuning.batching)),
            "PYTHONPATH": str(ROOT),
        }
        folder = Path(tempfile.mkdtemp(prefix=f"peer-{self.name}-"))
        try:
            port = free_port()
            with started(
                self.name,
                self.command(folder, port, tuning),
                folder,
                {**told, **self.environ(folder)},
                (HOST, port, self.ready_path),
            ) as running:
                yield running
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class InstalledPeer(Peer):
    """A peer that comes from the package registry, into an environment of its own."""

    package: ClassVar[str]
    """The package that the version is read from."""

    @property
    def version(self) -> str:
        """See `Peer.version`."""
        return f"{self.package} {environment.pins(self.name)[self.package]}"

    @property
    def python(self) -> Path:
        """See `Peer.python`."""
        return environment.python_of(self.name)

    def install(self, progress: Progress) -> None:
        """See `Peer.install`."""
        environment.install(self.name, progress)


def embeddings(rows: int, length: int, width: int = WIDTH) -> npt.NDArray[np.float32]:
    """Return what every request of that shape holds."""
    return np.random.default_rng(length).standard_normal((rows, length, width)).astype(np.float32)
