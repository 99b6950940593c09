"""`POST /v2/models/{name}/infer`: the Open Inference Protocol, in JSON, binary tensors or both."""

from typing import Final

from service.api.infer import AdmittedCall, Reply, start
from service.api.server import Server
from service.codecs import attention_json, oip_request, oip_response
from service.codecs.offload import Size
from service.codecs.oip_inputs import Places
from service.codecs.oip_request import InferRequest
from service.codecs.options import from_query
from service.inference.calls import Answer
from service.inference.model import Model
from service.telemetry.statistics import ModelStatistics
from service.transport.exchange import Exchange

_JSON: Final = (b"content-type", attention_json.MEDIA_TYPE.encode())
_BINARY: Final = (b"content-type", oip_request.BINARY_MEDIA_TYPE.encode())
_HEADER_LENGTH: Final = oip_request.HEADER_LENGTH.encode()


async def read_call(
    server: Server,
    exchange: Exchange,
    name: str,
    model: Model,
    statistics: ModelStatistics,
    content: bytes,
) -> tuple[AdmittedCall, InferRequest, Places]:
    """
    Return the call in a body, the request that it is, and where in shared memory tensors belong.

    Raises:
        HeadwiseError: the body is wrong, or the call is refused: see `infer.start`.
    """
    _, with_weights = oip_request.split_model_name(name)
    timeout_s = from_query([], exchange.headers).get("timeout_s")
    json_bytes = oip_request.json_size(
        exchange.headers.get(oip_request.HEADER_LENGTH), len(content)
    )
    request = await server.offload.decode(
        Size(json_bytes=json_bytes, raw_bytes=len(content) - json_bytes),
        oip_request.decode,
        content,
        json_bytes,
        with_weights,
        timeout_s if isinstance(timeout_s, float) else None,
    )
    places = {tensor: server.shared_memory.place(slot) for tensor, slot in request.slots.items()}
    if request.borrowed:
        size = Size(raw_bytes=sum(places[tensor].byte_size for tensor in request.borrowed))
        limit = server.settings.max_body_bytes
        request = await server.offload.do(size, oip_request.borrow, request, places, limit)
    record = exchange.record
    admitted = start(server, record, model, request.tensors, request.options, statistics)
    return admitted, request, places


def reply_of(
    name: str,
    admitted: AdmittedCall,
    request: InferRequest,
    answer: Answer,
    places: Places,
    size: Size,
) -> Reply:
    """
    Return the answer as the request asks for it.

    `size` is how much work its chunks are.  What belongs in shared memory is there afterwards.

    Raises:
        InvalidInput: a tensor has no room in shared memory any more.
    """
    version = admitted.model.version
    length, header_size, chunks = oip_response.encode(name, version, request, answer, places)
    headers = [_JSON]
    if header_size is not None:
        headers = [_BINARY, (_HEADER_LENGTH, b"%d" % header_size)]
    return Reply(headers, length, chunks, size)
