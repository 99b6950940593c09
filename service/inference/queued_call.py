"""An admitted call while it waits and runs, and the answer that its runs fill."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from service.inference.batches import Slice
from service.inference.calls import Answer, Call, Floats, Outputs, Run, Stages

_ALLOCATION: Final = threading.Lock()
"""Held while an answer is allocated: concurrent runs may hold slices of the same call."""

Deliver = Callable[[Answer | Exception], None]
"""Receives the outcome of a call, on the event loop; it must not raise."""


@dataclass(eq=False, slots=True)
class QueuedCall:
    """An admitted call and what is there of its answer; to others a handle for `leave`."""

    call: Call
    deliver: Deliver
    tokens: int
    """Queries and keys."""
    queued_at: float
    """On the monotonic clock, in seconds."""
    deadline: float
    """The engine must have begun before it; on the monotonic clock, in seconds."""
    slices_left: int
    on_run: Callable[[Run], None] | None
    is_over: bool = False
    """True once no answer is expected any more."""
    output: Floats | None = None
    weights: Floats | None = None
    extra_weights: Floats | None = None
    started_at: float = 0.0
    assembly_s: float = 0.0
    compute_s: float = 0.0
    splitting_s: float = 0.0

    def answer(self) -> Answer:
        """Return the answer, once it holds the outputs of every slice."""
        if self.output is None:
            raise ValueError("no slice of the call has been run")
        queue_s = self.started_at - self.queued_at
        stages = Stages(queue_s, self.assembly_s, self.compute_s, self.splitting_s)
        call = self.call
        heads = None if self.weights is None else call.heads
        return Answer(
            self.output,
            self.weights,
            call.lengths,
            call.key_lengths,
            stages,
            heads,
            self.extra_weights,
        )


def copy_outputs(queued: QueuedCall, slice_: Slice, outputs: Outputs, *, is_alone: bool) -> None:
    """Put one slice's outputs into its call's answer, keeping no other call's memory alive."""
    weights, extra = outputs.attention_weights, outputs.extra_weights
    if weights is not None and queued.call.heads is not None:
        weights = weights[:, queued.call.heads]
        extra = None if extra is None else extra[:, queued.call.heads]
    if slice_.is_whole:
        queued.output = outputs.output if is_alone else outputs.output.copy()
        queued.weights = weights if is_alone or weights is None else weights.copy()
        if extra is not None:
            queued.extra_weights = extra if is_alone else extra.copy()
        return
    inputs = slice_.call.inputs
    with _ALLOCATION:
        if queued.output is None:
            queued.output = np.zeros(inputs.embeddings.shape, np.float32)
        if weights is not None and queued.weights is None:
            rows, length = inputs.embeddings.shape[:2]
            shape = (rows, weights.shape[1], length, inputs.key_length)
            queued.weights = np.zeros(shape, np.float32)
        if extra is not None and queued.extra_weights is None:
            rows, length = inputs.embeddings.shape[:2]
            shape = (rows, extra.shape[1], length, extra.shape[3])
            queued.extra_weights = np.zeros(shape, np.float32)
    queued.output[slice_.rows, : slice_.length] = outputs.output
    if weights is not None and queued.weights is not None:
        queued.weights[slice_.rows, :, : slice_.length, : slice_.key_length] = weights
    if extra is not None and queued.extra_weights is not None:
        queued.extra_weights[slice_.rows, :, : slice_.length] = extra
