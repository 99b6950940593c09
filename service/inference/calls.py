"""
What a call is made of, from the codec that reads it to the codec that answers it.

Nobody changes these once they are made; they are not frozen, because that would take
a microsecond each time (bench/NOTES.md, "the fast path").

Axes: B batch, S query length, T key length (= S for self-attention), n extra keys,
E embed_dim, M memory width, M_v value memory width, H heads.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Lengths = npt.NDArray[np.int64]


@dataclass(eq=False, slots=True)
class Inputs:
    """
    One batch, every shape and dtype already checked.

    Shapes:
        embeddings   [B, S, E]
        memory       [B, T, M], cross-attention only
        attend_mask  [B, T], true = this key takes part
        pair_mask    [B or 1, H or 1, S, T], true = this query may attend to this key
        head_mask    [H] or [B, H], multiplies each head's output
        value_memory [B, T, M_v], only for layers whose values come from another source than keys
        positions    [B, S], only for layers that take them; None = 0, 1, 2, …
    """

    embeddings: Floats
    memory: Floats | None = None
    attend_mask: Bools | None = None
    pair_mask: Bools | None = None
    head_mask: Floats | None = None
    causal: bool = False
    """True = query s may attend to key t iff t <= s; the layer's own default is resolved."""
    value_memory: Floats | None = None
    positions: Lengths | None = None

    @property
    def key_length(self) -> int:
        """T."""
        keys = self.embeddings if self.memory is None else self.memory
        return int(keys.shape[1])

    @property
    def nbytes(self) -> int:
        """How much memory the tensors take, without their smaller masks."""
        size = self.embeddings.nbytes
        if self.memory is not None:
            size += self.memory.nbytes
        if self.value_memory is not None:
            size += self.value_memory.nbytes
        if self.pair_mask is not None:
            size += self.pair_mask.nbytes
        if self.positions is not None:
            size += self.positions.nbytes
        # The other masks are small beside these.
        return size


@dataclass(frozen=True)
class Options:
    """What a caller says beside the tensors."""

    model: str | None = None
    version: str | None = None
    """None = the highest that is served."""
    weights: bool = False
    heads: tuple[int, ...] | None = None
    """Whose weights are asked for, not yet checked against the layer; None = every head's."""
    causal: bool | None = None
    """None = the layer's default."""
    timeout_s: float | None = None
    priority: int = 0


@dataclass(eq=False, slots=True)
class Outputs:
    """
    The answer to one batch, in memory of its own.

    Shapes:
        output             [B, S, E]
        attention_weights  [B, H, S, T]; None = not asked for
        extra_weights      [B, H, S, n]; None = not asked for, or the layer has no extra keys
    """

    output: Floats
    attention_weights: Floats | None
    extra_weights: Floats | None = None


@dataclass(eq=False, slots=True)
class Call:
    """
    One caller's batch.

    Shapes:
        lengths         [B], each sequence's true query length; None = all are S
        memory_lengths  [B], each sequence's true key length; None = all are T

    What lies beyond a true length is padding: zeros, never seen by a query.
    For self-attention `lengths` counts queries and keys alike.
    """

    inputs: Inputs
    lengths: Lengths | None = None
    memory_lengths: Lengths | None = None
    weights: bool = False
    heads: tuple[int, ...] | None = None
    """Whose weights are in the answer, in this order; None = every head's."""
    priority: int = 0
    """1 = highest; 0 = default, after all others."""
    timeout_s: float | None = None
    """None = the batcher's own default."""

    @property
    def rows(self) -> int:
        """B."""
        return len(self.inputs.embeddings)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences, without their padding; those of a memory do not count."""
        rows, length, _ = self.inputs.embeddings.shape
        return rows * length if self.lengths is None else int(self.lengths.sum())

    @property
    def key_lengths(self) -> Lengths | None:
        """[B], each sequence's true key length; None = all are T."""
        return self.lengths if self.inputs.memory is None else self.memory_lengths


@dataclass(slots=True)
class Stages:
    """Where a call's time went, in seconds; a call of several runs counts from first to last."""

    queue_s: float
    """From being let in to the start of its first run."""
    assembly_s: float
    """Putting calls together and taking their answers apart."""
    compute_s: float
    """In the runtime."""
    splitting_s: float = 0.0
    """Of the assembly: taking answers apart."""

    def by_name(self) -> dict[str, float]:
        """Return the stages of a call that is not encoded yet, in seconds."""
        return {"queue": self.queue_s, "assembly": self.assembly_s, "compute": self.compute_s}


@dataclass(slots=True)
class Run:
    """One run of the engine: whose calls, how much of it was padding, how long it took."""

    calls: int
    rows: int
    tokens: int
    """True queries and keys."""
    padded_tokens: int
    """Queries and keys with padding."""
    started_at: float
    """On the monotonic clock."""
    assembly_s: float
    """Putting calls together and taking their answers apart."""
    compute_s: float
    """In the runtime."""
    splitting_s: float = 0.0
    """Of the assembly: taking answers apart."""


@dataclass(eq=False, slots=True)
class Answer:
    """
    The answer to one call; rows beyond a true length are padding of no meaning.

    Shapes: as `Outputs`, both kinds of weights of the call's heads alone; `lengths` and
    `key_lengths` as in the call.
    """

    output: Floats
    attention_weights: Floats | None
    lengths: Lengths | None
    key_lengths: Lengths | None
    stages: Stages
    heads: tuple[int, ...] | None = None
    """Whose weights they are, in their order; None = every head's, or none at all."""
    extra_weights: Floats | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding included."""
        weights, extra = self.attention_weights, self.extra_weights
        size = self.output.nbytes + (0 if weights is None else weights.nbytes)
        return size if extra is None else size + extra.nbytes

    def outputs(self) -> list[Floats]:
        """Return each sequence's output [S_i, E]."""
        return [
            output if self.lengths is None else output[: self.lengths[i]]
            for i, output in enumerate(self.output)
        ]

    def weights(self) -> list[Floats]:
        """Return each sequence's weights [H, S_i, T_i]; none when they were not asked for."""
        if self.attention_weights is None:
            return []
        return [
            weights[
                :,
                slice(None if self.lengths is None else self.lengths[i]),
                slice(None if self.key_lengths is None else self.key_lengths[i]),
            ]
            for i, weights in enumerate(self.attention_weights)
        ]

    def weights_of_extra_keys(self) -> list[Floats]:
        """Return each sequence's weights [H, S_i, n] of extra keys; none where there are none."""
        if self.extra_weights is None:
            return []
        return [
            weights if self.lengths is None else weights[:, : self.lengths[i]]
            for i, weights in enumerate(self.extra_weights)
        ]
