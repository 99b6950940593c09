"""`POST /v1/attention`: JSON or safetensors in, either out."""

from dataclasses import dataclass
from typing import Final

from service.api.infer import AdmittedCall, Reply, model_of, start
from service.api.server import Server
from service.codecs import attention_json, attention_safetensors
from service.codecs.json_bounds import UNCOUNTED_BYTES, bounds_of, weighed
from service.codecs.options import from_texts, header_timeout
from service.codecs.readers import Hold
from service.codecs.size import JSON_PER_RAW_BYTE, Size
from service.errors import NotAcceptable, UnsupportedMediaType
from service.inference.calls import Answer, Options
from service.inference.tensors import Tensors
from service.transport.body_memory import HeldBody
from service.transport.exchange import Exchange
from service.transport.negotiation import best_offer

_FORMATS: Final = (attention_json.MEDIA_TYPE, attention_safetensors.MEDIA_TYPE)
_JSON_TYPES: Final = ("", attention_json.MEDIA_TYPE, "application/x-www-form-urlencoded")
"""What is read as JSON: no content type, JSON's own, or the one that curl sends by default."""
_WILDCARDS: Final = ("application/*", "*/*")


@dataclass(frozen=True)
class AttentionFormat:
    """What a request's head says of its body and its answer."""

    request: str
    answer: str
    options: dict[str, object]
    """Those of the query, not yet checked."""
    timeout_s: float | None
    """That of the header, for a call that names none."""

    def size_of(self, body_bytes: int) -> Size:
        """Return what a body of so many bytes is."""
        is_json = self.request == attention_json.MEDIA_TYPE
        return Size(json_bytes=body_bytes) if is_json else Size(raw_bytes=body_bytes)


def format_of(exchange: Exchange) -> AttentionFormat:
    """
    Return the formats that a request names; it is answered in its own unless it says otherwise.

    Raises:
        UnsupportedMediaType: `Content-Type` names neither JSON nor safetensors.
        NotAcceptable: `Accept` allows neither.
        InvalidInput: an option in the query is unknown or wrong.
    """
    headers = exchange.headers
    request = _request_format(headers.get("content-type", ""))
    answer = _answer_format(headers.get("accept", ""), request)
    options = from_texts(exchange.query(), "query")
    return AttentionFormat(request, answer, options, header_timeout(headers))


async def read_call(
    server: Server, exchange: Exchange, formats: AttentionFormat, content: bytes, held: HeldBody
) -> tuple[AdmittedCall, bool]:
    """
    Return the call in a body, and whether it was one sequence without a batch axis.

    What `held` holds is released: the call holds what it takes itself.

    Raises:
        HeadwiseError: the body is wrong, or the call is refused: see `infer.start`.
    """
    tensors, options, is_single = await read_tensors(server, formats, content, held.hold)
    held.release()
    model = model_of(server, exchange.record, options.model, options.version)
    return await start(server, exchange.record, model, tensors, options), is_single


async def read_tensors(
    server: Server, formats: AttentionFormat, content: bytes, hold: Hold
) -> tuple[Tensors, Options, bool]:
    """
    Return what is in a body, read where that holds up nobody else.

    `hold` is told how much memory that takes.

    Raises:
        HeadwiseError: the body is wrong.
    """
    offload, limits = server.offload, server.limits
    if formats.request == attention_json.MEDIA_TYPE:
        is_counted = len(content) > UNCOUNTED_BYTES
        bounds = bounds_of(limits, server.models.widest_token if is_counted else None)
        counting = Size(raw_bytes=len(content))
        size, counts = await offload.do(counting, weighed, content, bounds)
        outer = formats.options, limits, formats.timeout_s
        return await offload.decode(
            size, attention_json.decode, content, *outer, bounds, counts, hold=hold
        )
    size = formats.size_of(len(content))
    file = await offload.do(size, attention_safetensors.load_file, content, limits)
    options = attention_safetensors.options_of(file, formats.options, formats.timeout_s)
    size = attention_safetensors.size_of(file)
    tensors = await offload.do(size, attention_safetensors.tensors_of, file, limits)
    return tensors, options, False


def reply_of(
    admitted: AdmittedCall, answer: Answer, formats: AttentionFormat, *, is_single: bool
) -> Reply:
    """Return the answer in the format that its caller accepts."""
    model = admitted.model
    headers = [(b"content-type", formats.answer.encode())]
    if formats.answer == attention_json.MEDIA_TYPE:
        chunks = attention_json.encode(model.name, model.version, answer, single=is_single)
        return Reply(headers, None, chunks, Size(json_bytes=JSON_PER_RAW_BYTE * answer.nbytes))
    length, chunks = attention_safetensors.encode(model.name, model.version, answer)
    return Reply(headers, length, chunks, Size(raw_bytes=answer.nbytes))


def _request_format(content_type: str) -> str:
    media_type = content_type.split(";")[0].strip().lower()
    if media_type in _JSON_TYPES:
        return attention_json.MEDIA_TYPE
    if media_type == attention_safetensors.MEDIA_TYPE:
        return media_type
    raise UnsupportedMediaType(
        f"header Content-Type: expected {attention_json.MEDIA_TYPE} for JSON or"
        f" {attention_safetensors.MEDIA_TYPE} for safetensors, got {media_type[:64]!r}"
    )


def _answer_format(accept: str, request_format: str) -> str:
    """Return the format that the caller prefers; without `Accept`, that of the request."""
    accept = accept.strip() or "*/*"
    best = best_offer(accept, (request_format, *_FORMATS), _WILDCARDS)
    if best is None:
        raise NotAcceptable(f"header Accept: expected {' or '.join(_FORMATS)}, got {accept[:64]!r}")
    return best
