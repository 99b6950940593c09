"""
The layer that every peer serves: one graph, one onnxruntime session a process.

It runs in the peers' own environments, so it needs numpy and onnxruntime alone.

Axes: B batch, S length, E embed_dim, H heads.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read by the runtime when it is loaded

import numpy as np
import numpy.typing as npt
import onnxruntime

Floats = npt.NDArray[np.float32]

MAX_BATCH = 64
"""How many calls are joined at most, wherever a peer asks for a limit: as many as clients."""

MAX_DELAY_S = 0.001
"""How long a call may wait for others, wherever a peer asks for a time: about one short run."""


@dataclass(frozen=True)
class Question:
    """Embeddings [B, S, E], and whether the attention weights are asked for, too."""

    embeddings: Floats
    weights: bool


class Layer:
    """The exported layer, run as its graph wants it."""

    def __init__(self, graph: str, threads: int, *, spinning: bool) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry(
            "session.intra_op.allow_spinning", "1" if spinning else "0"
        )
        self._session = onnxruntime.InferenceSession(
            graph, options, providers=["CPUExecutionProvider"]
        )
        (self._heads,) = (i.shape[1] for i in self._session.get_inputs() if i.name == "head_mask")

    @classmethod
    def from_environment(cls) -> Self:
        """Return the layer that whoever started this process named."""
        return cls(
            os.environ["PEER_GRAPH"],
            int(os.environ["PEER_THREADS"]),
            spinning=os.environ["PEER_SPINNING"] == "1",
        )

    def run(self, question: Question) -> list[Floats]:
        """Return the output [B, S, E], then [B, H, S, S] if weights are asked for."""
        rows, length = question.embeddings.shape[:2]
        names, mask = ["output"], np.ones((1, 1, 1, 1), np.bool_)
        if question.weights:
            names, mask = ["output", "attention_weights"], np.ones((1, 1, length, length), np.bool_)
        feed: dict[str, npt.NDArray[Any]] = {
            "embeddings": question.embeddings,
            "pair_mask": mask,
            "head_mask": np.ones((rows, self._heads), np.float32),
            "plain": np.array(not question.weights),
        }
        return list(self._session.run(names, feed))

    def run_together(self, questions: Sequence[Question]) -> list[list[Floats]]:
        """Return what `run` gives for each; those of one length and kind share a run."""
        alike: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for i, question in enumerate(questions):
            alike[question.embeddings.shape[1], question.weights].append(i)
        answers: list[list[Floats]] = [[] for _ in questions]
        for (_, weights), places in alike.items():
            blocks = [questions[i].embeddings for i in places]
            block = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
            ends = np.cumsum([len(b) for b in blocks])
            for tensor in self.run(Question(block, weights)):
                for i, end, own in zip(places, ends, blocks, strict=True):
                    answers[i].append(tensor[end - len(own) : end])
        return answers


def workers() -> int:
    """Return how many processes shall hold the layer."""
    return int(os.environ["PEER_WORKERS"])


def is_batching() -> bool:
    """Whether calls shall be joined."""
    return os.environ["PEER_BATCHING"] == "1"
