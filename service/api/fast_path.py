"""
The fast path: a small call that came whole, from bytes to bytes without a stop.

Most calls of the protocol are small, and like the one before.  Of such a call a task,
ASGI's messages and the layers between would take the greater part (bench/NOTES.md, "the
fast path").  So the connection offers here what it received; what is of the usual kind
goes straight into the queue, and its answer straight to the socket.  Whatever else it is,
and whatever is wrong with it, goes the ASGI path, which tells: see `inference`.
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from service.api.api_keys import ApiKeys, without_keys
from service.api.openapi import INFER, INFER_VERSION
from service.api.unsent_answers import UnsentAnswers
from service.codecs import attention_json, oip_request, oip_response
from service.codecs.chunks import Chunk
from service.codecs.compression import accepted, encoding_of
from service.codecs.offload import JSON_PER_RAW_BYTE, Size
from service.codecs.options import from_query
from service.contract import LayerConfig
from service.errors import Failed, HeadwiseError
from service.inference.batcher import QueuedCall
from service.inference.calls import Answer, Call
from service.inference.lifecycle import Lifecycle
from service.inference.models import Model, Models
from service.inference.validation import Limits, Tensors, answer_bytes, to_call, unchecked_call
from service.settings import Settings
from service.telemetry.recorder import (
    CLIENT_LEFT,
    CLIENT_STALLED,
    REQUEST_ID,
    Recorder,
    new_request_id,
    own_request_id,
    stages_of,
    timing,
)
from service.telemetry.request_record import RequestRecord
from service.telemetry.statistics import ModelStatistics, Statistics
from service.telemetry.tracing import CONTEXT_HEADERS
from service.transport.coalescing import Delivery
from service.transport.problems import CLOSE, INTERNAL, answer_of
from service.transport.request_head import END, by_name, plain_head

_START: Final = b"POST /v2/models/"
"""How the head of every call that may be taken begins."""
_HEAD_BYTES: Final = 8 * 1024
"""Of a head that is remembered."""
_HEADS: Final = 256
"""How many are; a client's heads differ in the body's length at most."""

_SALT_BYTES: Final = 64
"""One block of SHA-256, which then is hashed only once."""

_JSON: Final = (b"content-type", attention_json.MEDIA_TYPE.encode())
_BINARY: Final = (b"content-type", oip_request.BINARY_MEDIA_TYPE.encode())
_HEADER_LENGTH: Final = oip_request.HEADER_LENGTH.encode()

Headers = list[tuple[bytes, bytes]]


class Connection(Protocol):
    """Where a call came from; see `protocol`."""

    def answer(self, status: int, headers: Headers, pieces: Iterable[Chunk]) -> None:
        """Send an answer; its headers tell the length, and whether the connection ends."""
        ...

    def when_delivered(self, tell: Callable[[Delivery], None]) -> None:
        """Call `tell` once the system has taken all that was written, or never will."""
        ...


@dataclass(eq=False, slots=True)
class _Route:
    """
    What a head says of its call, as far as it is the same each time.

    It holds neither the head nor the key in it.
    """

    path: str
    """That of the documentation."""
    name: str
    plain_name: str
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
    """What the last call said beside its numbers, and for which layer its shapes were right."""


class InferFastPath:
    """Takes calls of the usual kind."""

    def __init__(
        self,
        settings: Settings,
        limits: Limits,
        models: Models,
        lifecycle: Lifecycle,
        keys: ApiKeys | None,
        recorder: Recorder,
        statistics: Statistics,
        unsent: UnsentAnswers,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._models = models
        self._lifecycle = lifecycle
        self._keys = keys
        self._recorder = recorder
        self._statistics = statistics
        self._unsent = unsent
        self._routes: dict[bytes, _Route] = {}
        """By the digest of the head: a head holds a key."""
        # Salted: the digests in a memory dump confirm no guess at a head.
        self._salted = hashlib.sha256(secrets.token_bytes(_SALT_BYTES))

    def lacks(self, data: bytes) -> int:
        """Return how many bytes are missing of a request that may be taken once it is whole."""
        end = data.find(END) + len(END)
        found = self._route(data, end)
        return 0 if found is None else max(0, end + found[0].body_bytes - len(data))

    def take(self, data: bytes, connection: Connection) -> "PendingCall | None":
        """
        Take the request, which `connection.answer` will be called for once; None = it is not taken.

        `data` is all that has come since the last request.  Nothing has happened to a
        request that is not taken.
        """
        end = data.find(END) + len(END)
        found = self._route(data, end) if self._lifecycle.phase == "serving" else None
        if found is None or len(data) != end + found[0].body_bytes:
            return None
        route, key = found
        started = time.monotonic()
        try:
            model = self._models.require_ready(self._models.get(route.plain_name, route.version))
            body = memoryview(data)[end:]
            asked = oip_request.outline(body, route.json_bytes, route.with_weights, route.timeout_s)
            if asked.slots:
                return None
            arrays = oip_request.arrays_of(asked, body[route.json_bytes :])
            if self._keys is not None:
                # A view would keep all of `data`, and the key in it, while the call waits.
                arrays = {name: a if a.base is None else a.copy() for name, a in arrays.items()}
            call = self._call(route, asked, Tensors(**arrays), model.layer)
            if call is None:
                return None
            counted = self._statistics.of(route.name, model.version)
            size = answer_bytes(call, model.layer)
            self._unsent.check_room(size)
            record = RequestRecord(
                "POST",
                route.path,
                route.request_id or new_request_id(),
                started,
                key,
                route.body_bytes,
                model.name,
                model.version,
                call.rows,
                call.tokens,
            )
            pending = PendingCall(route, connection, model, asked, counted, record, size)
            deliver = partial(self._arrive, pending)
            pending.entry = model.batcher.enter(call, deliver, on_run=counted.run)
        except HeadwiseError:
            return None
        self._unsent.add(size)
        self._lifecycle.begin()
        return pending

    def leave(self, pending: "PendingCall") -> None:
        """Forget a call whose caller has left."""
        entry, pending.entry = pending.entry, None
        if entry is not None:
            pending.model.batcher.leave(entry)
        pending.counted.failed(time.monotonic() - pending.record.started)
        self._end(pending, CLIENT_LEFT, None, 0)

    def _route(self, data: bytes, end: int) -> tuple[_Route, str | None] | None:
        """
        Return what the head says that ends there, and the name of its key, if one is needed.

        None = it is not of the usual kind, or shows no valid key; it is not remembered then.
        The key is checked each time: it may have been withdrawn.
        """
        if not (len(END) <= end <= _HEAD_BYTES and data.startswith(_START)):
            return None
        salted = self._salted.copy()
        salted.update(memoryview(data)[:end])
        digest = salted.digest()
        remembered = self._routes.get(digest)
        try:
            route = self._read(memoryview(data)[:end]) if remembered is None else remembered
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
        self, route: _Route, asked: oip_request.InferRequest, tensors: Tensors, layer: LayerConfig
    ) -> Call | None:
        """
        Return the call; None = its answer would not be small.

        Raises:
            HeadwiseError: see `to_call`; shapes that have passed are not checked again.
        """
        if route.passed is not None and route.passed[0] is asked and route.passed[1] is layer:
            return unchecked_call(tensors, asked.options)
        call = to_call(tensors, asked.options, layer, self._limits)
        if not _answer_size(asked, call, layer).is_small:
            return None
        if not asked.arrays and not self._limits.refuse_nonfinite:
            route.passed = asked, layer
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
        settings, accepts = self._settings, named.get("accept-encoding", "")
        timeout_s = from_query([], named).get("timeout_s")
        json_bytes = oip_request.json_size(named.get(oip_request.HEADER_LENGTH), head.body_bytes)
        is_compressed = encoding_of(named.get("content-encoding", "")) is not None
        is_compressed |= settings.compress_answers and accepted(accepts) is not None
        is_small = Size(json_bytes, head.body_bytes - json_bytes).is_small
        if is_compressed or not is_small or head.body_bytes > settings.max_body_bytes:
            return None
        name, version = target
        plain_name, with_weights = oip_request.split_model_name(name)
        self._models.get(plain_name, version)
        return _Route(
            path=INFER if version is None else INFER_VERSION,
            name=name,
            plain_name=plain_name,
            version=version,
            with_weights=with_weights,
            body_bytes=head.body_bytes,
            json_bytes=json_bytes,
            timeout_s=timeout_s if isinstance(timeout_s, float) else None,
            request_id=own_request_id(dict(headers)),
            key_digest=key_digest,
            trace_context={name: named[name] for name in CONTEXT_HEADERS if name in named},
        )

    def _arrive(self, pending: "PendingCall", outcome: Answer | Exception) -> None:
        """Answer, whatever became of the call."""
        pending.entry = None  # the entry leads here: a ring would keep the answer's memory
        try:
            if isinstance(outcome, Answer):
                self._answer(pending, outcome)
            elif isinstance(outcome, HeadwiseError):
                self._refuse(pending, outcome)
            else:
                raise outcome
        except Exception as error:
            pending.record.failure = error
            if pending.is_answered:
                self._recorder.failure(pending.record)
            else:
                self._refuse(pending, Failed(INTERNAL))

    def _answer(self, pending: "PendingCall", answer: Answer) -> None:
        """Send the answer, then write down what became of it: its caller may go on meanwhile."""
        route, model = pending.route, pending.model
        encode_started = time.monotonic()
        length, header_size, chunks = oip_response.encode(
            route.name, model.version, pending.asked, answer, {}
        )
        pieces = list(chunks)
        length = sum(map(len, pieces)) if length is None else length
        headers = [_JSON]
        if header_size is not None:
            headers = [_BINARY, (_HEADER_LENGTH, b"%d" % header_size)]
        now = time.monotonic()
        stages = stages_of(answer)
        stages["encode"], stages["total"] = now - encode_started, now - pending.record.started
        headers += [(b"content-length", b"%d" % length), timing(stages)]
        self._send(pending, 200, headers, pieces)

        def note(delivery: Delivery) -> None:
            if self._end_sent(pending, 200, None, length, delivery):
                self._recorder.call(
                    model.name, answer, stages, route.trace_context, pending.counted
                )
            else:
                pending.counted.failed(time.monotonic() - pending.record.started)

        pending.connection.when_delivered(note)

    def _refuse(self, pending: "PendingCall", error: HeadwiseError) -> None:
        """Send what went wrong, then write down what became of it."""
        seconds = time.monotonic() - pending.record.started
        status, headers, body = answer_of(error)
        if status == 500 and pending.record.failure is None:
            pending.record.failure = error
        headers.append(timing({"total": seconds}))
        self._send(pending, status, headers, [body])
        pending.counted.failed(seconds)

        def note(delivery: Delivery) -> None:
            self._end_sent(pending, status, error.code, len(body), delivery)

        pending.connection.when_delivered(note)

    def _send(
        self, pending: "PendingCall", status: int, headers: Headers, pieces: list[Chunk]
    ) -> None:
        headers.append((REQUEST_ID, pending.record.request_id.encode()))
        if self._lifecycle.phase != "serving":
            headers.append(CLOSE)
        pending.is_answered = True
        pending.connection.answer(status, headers, pieces)

    def _end_sent(
        self, pending: "PendingCall", status: int, code: str | None, size: int, delivery: Delivery
    ) -> bool:
        """Write a request down whose answer was written; return whether all of it was sent."""
        if delivery.is_whole:
            self._end(pending, status, code, size)
        else:
            code = CLIENT_STALLED if delivery.is_stalled else None
            self._end(pending, CLIENT_LEFT, code, max(0, size - delivery.unsent_bytes))
        return delivery.is_whole

    def _end(self, pending: "PendingCall", status: int, code: str | None, size: int) -> None:
        """Write a request down of whose answer so many bytes were sent."""
        self._unsent.add(-pending.reserved_bytes)
        self._lifecycle.end()
        record = pending.record
        record.status, record.code, record.answer_bytes = status, code, size
        self._recorder.request(record)


@dataclass(eq=False, slots=True)
class PendingCall:
    """A call on its way."""

    route: _Route
    connection: Connection
    model: Model
    asked: oip_request.InferRequest
    counted: ModelStatistics
    record: RequestRecord
    reserved_bytes: int
    entry: QueuedCall | None = None
    is_answered: bool = False


def _answer_size(asked: oip_request.InferRequest, call: Call, layer: LayerConfig) -> Size:
    """Return how much work writing the answer will be."""
    rows, length, embed_dim = call.inputs.embeddings.shape
    numbers = rows * length * embed_dim
    if call.weights:
        numbers += rows * layer.num_heads * length * call.inputs.key_length
    if all(asked.outputs.values()):
        return Size(raw_bytes=4 * numbers)
    return Size(json_bytes=4 * numbers * JSON_PER_RAW_BYTE)
