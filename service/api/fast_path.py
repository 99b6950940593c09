"""
The fast path: a small infer call that arrived whole, from bytes to bytes.

Most calls of the protocol are small, and like the one before.  Tasks, ASGI messages and the
layers between would take the greater part of such a call (bench/NOTES.md, "The fast path").
The connection therefore offers what it received to `InferFastPath.take`, which puts a call of
the usual kind into the queue; its answer is written to the connection.  Everything else, and
every request that is wrong, takes the ASGI path: see `tensor_calls`.  Only what goes wrong
after a call entered the queue is answered here.
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from service.api.api_keys import without_keys
from service.api.infer import AdmittedCall, admit, finish, record_answer, release
from service.api.oip_infer import reply_of
from service.api.openapi import INFER, INFER_VERSION
from service.api.requests import begin, end
from service.api.server import Server
from service.codecs import oip_request
from service.codecs.chunks import Chunk
from service.codecs.compression import ENCODINGS, encoding_of
from service.codecs.json_bounds import UNCOUNTED_BYTES, bounds_of
from service.codecs.oip_outputs import offered_outputs
from service.codecs.options import header_timeout
from service.codecs.size import JSON_PER_RAW_BYTE, Size
from service.errors import Failed, HeadwiseError
from service.inference.calls import Answer, Call
from service.inference.queued_call import QueuedCall
from service.inference.tensors import Tensors
from service.inference.validation import to_call, unchecked_call
from service.layer_config import LayerConfig
from service.telemetry.request_record import CLIENT_LEFT, RequestRecord
from service.telemetry.tracing import CONTEXT_HEADERS
from service.transport.coalescing import WHOLE, Delivery
from service.transport.negotiation import best_offer
from service.transport.problems import CLOSE, INTERNAL, answer_of
from service.transport.request_head import END, by_name, plain_head
from service.transport.standard_headers import (
    REQUEST_ID,
    Headers,
    caller_request_id,
    new_request_id,
    server_timing,
)

_START: Final = b"POST /v2/models/"
"""How the head of every call that may be taken begins."""
_HEAD_BYTES: Final = 8 * 1024
"""Of a head that is remembered."""
_HEADS: Final = 256
"""How many are; a client's heads differ in the body's length at most."""

_SMALL: Final = Size()

_SALT_BYTES: Final = 64
"""One block of SHA-256, which then is hashed only once."""


class Connection(Protocol):
    """Where a call came from: see `transport.connection`."""

    def answer(self, status: int, headers: Headers, pieces: Iterable[Chunk]) -> None:
        """Send an answer; its headers have the length, and say whether the connection ends."""
        ...

    def when_delivered(self, tell: Callable[[Delivery], None]) -> None:
        """Call `tell` once the system has taken all that was written, or never will."""
        ...


@dataclass(eq=False, slots=True)
class _Route:
    """
    What a request head says of its call, as far as it is the same each time.

    It holds neither the head nor the key in it.
    """

    path: str
    """That of the documentation."""
    name: str
    artifact: str
    version: str | None
    with_weights: bool
    body_bytes: int
    json_bytes: int
    timeout_s: float | None
    request_id: str | None
    key_digest: bytes
    """The SHA-256 of the key that it shows; empty where none is needed."""
    trace_context: dict[str, str]
    passed: tuple[oip_request.InferRequest, LayerConfig] | None = None
    """The last call without its numbers, and the layer for which its shapes were right."""


@dataclass(eq=False, slots=True)
class PendingCall:
    """A call that is in the queue, or whose answer is being sent."""

    route: _Route
    connection: Connection
    request: oip_request.InferRequest
    admitted: AdmittedCall
    queued: QueuedCall | None = None
    is_over: bool = False
    """Whether it has been counted and logged."""


class InferFastPath:
    """Takes infer calls of the usual kind; everything else is left to the ASGI path."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._keys = server.keys
        self._routes: dict[bytes, _Route] = {}
        """By the digest of the head: a head holds a key."""
        # Salted: the digests in a memory dump confirm no guess at a head.
        self._salted = hashlib.sha256(secrets.token_bytes(_SALT_BYTES))

    def lacks(self, data: bytes) -> int:
        """Return how many bytes are missing of a request that may be taken once it is whole."""
        end_of_head = data.find(END) + len(END)
        found = self._route(data, end_of_head)
        return 0 if found is None else max(0, end_of_head + found[0].body_bytes - len(data))

    def take(self, data: bytes, connection: Connection) -> PendingCall | None:
        """
        Take the request, for which `connection.answer` will be called once; None = not taken.

        `data` is all that has come since the last request.  Nothing has happened to a
        request that is not taken.
        """
        server = self._server
        end_of_head = data.find(END) + len(END)
        is_serving = server.lifecycle.phase == "serving"
        found = self._route(data, end_of_head) if is_serving else None
        if found is None or len(data) != end_of_head + found[0].body_bytes:
            return None
        route, key = found
        started = time.monotonic()
        try:
            model = server.models.require_ready(server.models.get(route.artifact, route.version))
            body = memoryview(data)[end_of_head:]
            bounds = counts = None
            if route.body_bytes > UNCOUNTED_BYTES:
                bounds = bounds_of(server.limits, model.layer.token_width)
                size, counts = oip_request.work_of(body, route.json_bytes, bounds)
                if not size.is_small:
                    return None
            offered = offered_outputs(route.with_weights, model.layer)
            request = oip_request.outline(
                body, route.json_bytes, offered, route.timeout_s, bounds, counts
            )
            if request.slots:
                return None
            arrays = oip_request.arrays_of(request, body[route.json_bytes :])
            if self._keys is not None:
                # A view would keep all of `data`, and the key in it, while the call waits.
                arrays = {name: a if a.base is None else a.copy() for name, a in arrays.items()}
            call = self._call(route, request, Tensors(**arrays), model.layer)
            if call is None:
                return None
            statistics = server.statistics.of(route.name, model.version)
            record = RequestRecord(
                "POST",
                route.path,
                route.request_id or new_request_id(),
                started,
                key,
                route.body_bytes,
                model.name,
                model.version,
            )
            admitted = admit(server, record, model, call, statistics)
            pending = PendingCall(route, connection, request, admitted)
            deliver = partial(self._deliver, pending)
            try:
                pending.queued = model.batcher.enter(call, deliver, on_run=statistics.run)
            except Exception:
                release(server, admitted)
                raise
        except HeadwiseError:
            return None
        begin(server)
        return pending

    def leave(self, pending: PendingCall) -> None:
        """Drop a call whose caller has left."""
        queued, pending.queued = pending.queued, None
        admitted = pending.admitted
        if queued is not None:
            admitted.model.batcher.leave(queued)
        self._count_failure(pending)
        admitted.record.status = CLIENT_LEFT
        self._end(pending)

    def _route(self, data: bytes, end_of_head: int) -> tuple[_Route, str | None] | None:
        """
        Return what the request head that ends there says, and the name of its key, if needed.

        None = it is not of the usual kind, or shows no valid key; it is not remembered then.
        The key is checked each time: it may have been withdrawn.
        """
        if not (len(END) <= end_of_head <= _HEAD_BYTES and data.startswith(_START)):
            return None
        salted = self._salted.copy()
        head = memoryview(data)[:end_of_head]
        salted.update(head)
        digest = salted.digest()
        remembered = self._routes.get(digest)
        try:
            route = self._read(head) if remembered is None else remembered
            if route is None:
                return None
            key = None if self._keys is None else self._keys.name_of_digest(route.key_digest)
        except HeadwiseError:
            return None
        if remembered is None:
            if len(self._routes) >= _HEADS:
                self._routes.clear()
            self._routes[digest] = route
        return route, key

    def _call(
        self,
        route: _Route,
        request: oip_request.InferRequest,
        tensors: Tensors,
        layer: LayerConfig,
    ) -> Call | None:
        """
        Return the call; None = its answer would not be small.

        Raises:
            HeadwiseError: see `to_call`; shapes that have passed are not checked again, positions
                are.
        """
        if route.passed is not None and route.passed[0] is request and route.passed[1] is layer:
            return unchecked_call(tensors, request.options, layer)
        limits = self._server.limits
        call = to_call(tensors, request.options, layer, limits)
        if not _answer_size(request, call, layer).is_small:
            return None
        if not request.arrays and not limits.refuse_nonfinite:
            route.passed = request, layer
        return call

    def _read(self, content: memoryview) -> _Route | None:
        """
        Return what the head says; None = it is not of the usual kind.

        Raises:
            HeadwiseError: it shows no key where one is needed, or is wrong.
        """
        head = plain_head(content)
        target = None if head is None else oip_request.infer_target(head.path)
        if head is None or target is None or head.method != "POST":
            return None
        key_digest = b"" if self._keys is None else self._keys.digest_of(head.headers)
        headers = without_keys(head.headers)
        named = by_name(headers)
        settings = self._server.settings
        json_bytes = oip_request.json_size(named.get(oip_request.HEADER_LENGTH), head.body_bytes)
        is_compressed = encoding_of(named.get("content-encoding", "")) is not None
        if settings.compress_answers:
            is_compressed |= best_offer(named.get("accept-encoding", ""), ENCODINGS) is not None
        is_small = Size(json_bytes, head.body_bytes - json_bytes).is_small
        if is_compressed or not is_small or head.body_bytes > settings.max_body_bytes:
            return None
        name, version = target
        artifact, with_weights = oip_request.split_model_name(name)
        self._server.models.get(artifact, version)
        return _Route(
            path=INFER if version is None else INFER_VERSION,
            name=name,
            artifact=artifact,
            version=version,
            with_weights=with_weights,
            body_bytes=head.body_bytes,
            json_bytes=json_bytes,
            timeout_s=header_timeout(named),
            request_id=caller_request_id(dict(headers)),
            key_digest=key_digest,
            trace_context={name: named[name] for name in CONTEXT_HEADERS if name in named},
        )

    def _deliver(self, pending: PendingCall, outcome: Answer | Exception) -> None:
        """Answer a call with its outcome; it is counted and logged, once, whatever happens here."""
        pending.queued = None  # it leads here: a cycle would keep the answer's memory
        record = pending.admitted.record
        try:
            if isinstance(outcome, Answer):
                self._answer(pending, outcome)
            elif isinstance(outcome, HeadwiseError):
                self._refuse(pending, outcome)
            else:
                raise outcome
        except Exception as error:
            record.failure = error
            if record.status is None:
                self._refuse(pending, Failed(INTERNAL))
            elif pending.is_over:
                self._server.recorder.failure(record)
            else:
                self._count_failure(pending)
                self._end(pending)

    def _answer(self, pending: PendingCall, answer: Answer) -> None:
        """Send the answer; count the call once it is known whether the answer was delivered."""
        route, admitted = pending.route, pending.admitted
        encode_started = time.monotonic()
        reply = reply_of(route.name, admitted, pending.request, answer, {}, _SMALL)
        chunks = list(reply.chunks)
        length = sum(map(len, chunks)) if reply.length is None else reply.length
        stages, timing = finish(admitted, answer, encode_started)
        headers = [*reply.headers, (b"content-length", b"%d" % length), timing]
        admitted.record.answer_bytes = length
        self._send(pending, 200, headers, chunks)

        def count(delivery: Delivery) -> None:
            if self._end(pending, delivery):
                record_answer(self._server, admitted, answer, stages, route.trace_context)
            else:
                self._count_failure(pending)

        pending.connection.when_delivered(count)

    def _refuse(self, pending: PendingCall, error: HeadwiseError) -> None:
        """Answer with an error; count the call once it is known whether that was delivered."""
        record = pending.admitted.record
        status, headers, body = answer_of(error)
        if status == 500 and record.failure is None:
            record.failure = error
        headers.append(server_timing({"total": time.monotonic() - record.started}))
        record.code, record.answer_bytes = error.code, len(body)
        self._send(pending, status, headers, [body])
        self._count_failure(pending)

        def count(delivery: Delivery) -> None:
            self._end(pending, delivery)

        pending.connection.when_delivered(count)

    def _send(
        self, pending: PendingCall, status: int, headers: Headers, chunks: list[Chunk]
    ) -> None:
        record = pending.admitted.record
        record.status = status
        headers.append((REQUEST_ID, record.request_id.encode()))
        if self._server.lifecycle.phase != "serving":
            headers.append(CLOSE)
        pending.connection.answer(status, headers, chunks)

    def _count_failure(self, pending: PendingCall) -> None:
        admitted = pending.admitted
        if admitted.statistics is not None:
            admitted.statistics.failed(time.monotonic() - admitted.record.started)

    def _end(self, pending: PendingCall, delivery: Delivery = WHOLE) -> bool:
        """End the request; return whether all of its answer was sent."""
        pending.is_over = True
        release(self._server, pending.admitted)
        return end(self._server, pending.admitted.record, delivery)


def _answer_size(request: oip_request.InferRequest, call: Call, layer: LayerConfig) -> Size:
    """Return how much work writing the answer will be."""
    rows, length, embed_dim = call.inputs.embeddings.shape
    numbers = rows * length * embed_dim
    if call.weights:
        width = call.inputs.key_length + len(layer.extra_keys)
        numbers += rows * layer.num_heads * length * width
    if all(request.outputs.values()):
        return Size(raw_bytes=4 * numbers)
    return Size(json_bytes=4 * numbers * JSON_PER_RAW_BYTE)
