"""`POST /v1/attention`: JSON or safetensors in, either out."""

from dataclasses import dataclass
from typing import Final

from service.api.infer import AdmittedCall, Reply, model_of, start
from service.api.server import Server
from service.codecs import attention_json, attention_safetensors
from service.codecs.offload import JSON_PER_RAW_BYTE, Size
from service.codecs.options import from_query
from service.errors import NotAcceptable, UnsupportedMediaType
from service.inference.calls import Answer
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
    """Those of the query and the headers, not yet checked; the body's win."""


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
    return AttentionFormat(request, answer, from_query(exchange.query(), headers))


async def read_call(
    server: Server, exchange: Exchange, formats: AttentionFormat, content: bytes
) -> tuple[AdmittedCall, bool]:
    """
    Return the call in a body, and whether it was one sequence without a batch axis.

    Raises:
        HeadwiseError: the body is wrong, or the call is refused: see `infer.start`.
    """
    is_single = False
    if formats.request == attention_json.MEDIA_TYPE:
        size = Size(json_bytes=len(content))
        tensors, options, is_single = await server.offload.decode(
            size, attention_json.decode, content, formats.options, server.limits
        )
    else:
        size = Size(raw_bytes=len(content))
        tensors, options = await server.offload.decode(
            size, attention_safetensors.decode, content, formats.options, server.limits
        )
    model = model_of(server, exchange.record, options.model, options.version)
    return start(server, exchange.record, model, tensors, options), is_single


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
        f"header Content-Type: expected {' or '.join(_FORMATS)}, got {media_type[:64]!r}"
    )


def _answer_format(accept: str, request_format: str) -> str:
    """Return the format that the caller prefers; without `Accept`, that of the request."""
    accept = accept.strip() or "*/*"
    best = best_offer(accept, (request_format, *_FORMATS), _WILDCARDS)
    if best is None:
        raise NotAcceptable(f"header Accept: expected {' or '.join(_FORMATS)}, got {accept[:64]!r}")
    return best
