"""
The steps of a call with tensors that both paths and all formats share.

The ASGI path calls `model_of`, `start`, `computed`, `finish` and `record_answer`, inside
`released` from its admission on.  The fast path checks the call itself and enters the queue
with a callback; it calls `admit`, `finish`, `record_answer` and `release`.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from service.api.server import Server
from service.codecs.chunks import Chunk
from service.codecs.size import Size
from service.errors import InvalidInput
from service.inference.calls import Answer, Call, Options
from service.inference.model import Model
from service.inference.tensors import Tensors
from service.inference.validation import answer_bytes, to_call
from service.telemetry.request_record import RequestRecord
from service.telemetry.statistics import ModelStatistics
from service.transport.body_memory import FREE_BYTES
from service.transport.standard_headers import Headers, server_timing


@dataclass(eq=False, slots=True)
class AdmittedCall:
    """A checked call that has its share of the memory for bodies and of that for answers."""

    record: RequestRecord
    model: Model
    call: Call
    statistics: ModelStatistics | None
    """The protocol's statistics of the model; None = a call of `/v1/attention`, which has none."""
    input_bytes: int
    """What its tensors hold of the memory for bodies; a small call holds nothing."""
    answer_bytes: int


@dataclass(frozen=True)
class Reply:
    """An answer as a codec wrote it."""

    headers: Headers
    length: int | None
    """Bytes of all chunks; None = not known before they are made."""
    chunks: Iterator[Chunk]
    size: Size
    """How much work the chunks are."""


def model_of(
    server: Server, record: RequestRecord, name: str | None, version: str | None = None
) -> Model:
    """
    Return the model that a call is for; its record says so from then on.

    Raises:
        UnknownModel: no such name or version.
        InvalidInput: no name was given and there is no default.
        NotReady: the models are still being loaded.
    """
    model = server.models.get(name, version)
    record.model, record.version = model.name, model.version
    return model


async def start(
    server: Server,
    record: RequestRecord,
    model: Model,
    tensors: Tensors,
    options: Options,
    statistics: ModelStatistics | None = None,
) -> AdmittedCall:
    """
    Check a call and reserve memory for it and its answer, which `release` gives back.

    Raises:
        InvalidInput: a tensor is missing, unwanted or of the wrong shape.
        TooLarge: above a limit.
        NotReady: the model's warm-up has not passed.
        QueueFull: bodies or answers under way take all the memory that they may.
    """
    server.models.require_ready(model)
    limits = server.limits
    # Without a look at their values, large tensors are checked as fast as small ones.
    size = Size(raw_bytes=tensors.float_bytes if limits.refuse_nonfinite else 0)
    try:
        call = await server.offload.do(size, to_call, tensors, options, model.layer, limits)
    except InvalidInput as error:
        if statistics is not None or options.model is not None:
            raise
        # Whoever names no model may not know which layer it is that the tensors do not fit.
        raise InvalidInput(f"model {model.name} (the default): {error}") from None
    return admit(server, record, model, call, statistics)


def admit(
    server: Server,
    record: RequestRecord,
    model: Model,
    call: Call,
    statistics: ModelStatistics | None,
) -> AdmittedCall:
    """
    Reserve memory for a call that has been checked, and for its answer: see `start`.

    Raises:
        QueueFull: bodies or answers under way take all the memory that they may.
        TooLarge: the call alone takes more than that.
    """
    record.rows, record.tokens = call.rows, call.tokens
    size = answer_bytes(call, model.layer)
    server.unsent.check_room(size)
    input_bytes = call.inputs.nbytes
    if input_bytes > FREE_BYTES:
        server.bodies.add(input_bytes)
    else:
        input_bytes = 0
    server.unsent.add(size)
    return AdmittedCall(record, model, call, statistics, input_bytes, size)


def release(server: Server, admitted: AdmittedCall) -> None:
    """Give back the memory that was reserved: the answer was delivered, or never will be."""
    if admitted.input_bytes:
        server.bodies.remove(admitted.input_bytes)
    server.unsent.add(-admitted.answer_bytes)


@contextlib.contextmanager
def released(server: Server, admitted: AdmittedCall) -> Iterator[AdmittedCall]:
    """Release the call at the end of the block."""
    try:
        yield admitted
    finally:
        release(server, admitted)


async def computed(admitted: AdmittedCall) -> Answer:
    """
    Return the answer of the model's engine; cancelling the task takes the call out of the queue.

    Raises:
        QueueFull: as much waits as may wait.
        DeadlineExceeded: the call's time limit passed.
        Draining: the server is stopping.
        InferenceFailed: the runtime refused the batch.
    """
    statistics = admitted.statistics
    on_run = None if statistics is None else statistics.run
    return await admitted.model.batcher.submit(admitted.call, on_run=on_run)


def finish(
    admitted: AdmittedCall, answer: Answer, encode_started: float
) -> tuple[dict[str, float], tuple[bytes, bytes]]:
    """Return the stages of a call whose answer is encoded, in seconds, and their header."""
    now = time.monotonic()
    stages = answer.stages.by_name()
    stages["encode"], stages["total"] = now - encode_started, now - admitted.record.started
    return stages, server_timing(stages)


def record_answer(
    server: Server,
    admitted: AdmittedCall,
    answer: Answer,
    stages: Mapping[str, float],
    headers: Mapping[str, str],
) -> None:
    """Count a call whose answer was delivered; `headers` may have the trace that it belongs to."""
    server.recorder.call(admitted.model.name, answer, stages, headers, admitted.statistics)
