"""`POST /v2/models/{name}/infer`: the Open Inference Protocol, in JSON, binary tensors or both."""

from collections.abc import Mapping
from typing import Final

from service.api.infer import AdmittedCall, Reply, start
from service.api.server import Server
from service.codecs import attention_json, oip_request, oip_response
from service.codecs.json_bounds import bounds_of
from service.codecs.names import check_parameters
from service.codecs.oip_inputs import Places
from service.codecs.oip_outputs import offered_outputs
from service.codecs.oip_request import InferRequest
from service.codecs.options import header_timeout
from service.codecs.readers import Hold
from service.codecs.size import Size
from service.inference.calls import Answer
from service.inference.model import Model
from service.layer_config import LayerConfig
from service.telemetry.statistics import ModelStatistics
from service.transport.body_memory import HeldBody
from service.transport.exchange import Exchange

_JSON: Final = (b"content-type", attention_json.MEDIA_TYPE.encode())
_BINARY: Final = (b"content-type", oip_request.BINARY_MEDIA_TYPE.encode())
_HEADER_LENGTH: Final = oip_request.HEADER_LENGTH.encode()


def size_of(exchange: Exchange, body_bytes: int) -> Size:
    """Return what a body of so many bytes is, as far as its head says: JSON before raw tensors."""
    header_length = exchange.headers.get(oip_request.HEADER_LENGTH, "")
    is_number = header_length.isascii() and header_length.isdigit()
    json_bytes = min(int(header_length[:20]), body_bytes) if is_number else body_bytes
    return Size(json_bytes, body_bytes - json_bytes)


async def read_call(
    server: Server,
    exchange: Exchange,
    name: str,
    model: Model,
    statistics: ModelStatistics,
    content: bytes,
    held: HeldBody,
) -> tuple[AdmittedCall, InferRequest, Places]:
    """
    Return the call in a body, the request that it is, and where in shared memory tensors belong.

    What `held` holds is released: the call holds what it takes itself.

    Raises:
        HeadwiseError: the body is wrong, or the call is refused: see `infer.start`.
    """
    check_parameters((key for key, _ in exchange.query()), (), "query")
    request, places = await read_request(
        server, exchange.headers, name, model.layer, content, held.hold
    )
    held.release()
    record = exchange.record
    admitted = await start(server, record, model, request.tensors, request.options, statistics)
    return admitted, request, places


async def read_request(
    server: Server,
    headers: Mapping[str, str],
    name: str,
    layer: LayerConfig,
    content: bytes,
    hold: Hold,
) -> tuple[InferRequest, Places]:
    """
    Return what is in a body and in shared memory, read where that holds up nobody else.

    `hold` is told how much memory that takes.

    Raises:
        HeadwiseError: the body is wrong.
    """
    _, with_weights = oip_request.split_model_name(name)
    timeout_s = header_timeout(headers)
    json_bytes = oip_request.json_size(headers.get(oip_request.HEADER_LENGTH), len(content))
    offered = offered_outputs(with_weights, layer)
    bounds = bounds_of(server.limits, layer.token_width)
    counting = Size(raw_bytes=json_bytes)
    size, counts = await server.offload.do(
        counting, oip_request.work_of, content, json_bytes, bounds
    )
    request = await server.offload.decode(
        size,
        oip_request.decode,
        content,
        json_bytes,
        offered,
        timeout_s,
        bounds,
        counts,
        hold=hold,
    )
    places = {tensor: server.shared_memory.place(slot) for tensor, slot in request.slots.items()}
    if request.borrowed:
        size = Size(raw_bytes=sum(places[tensor].byte_size for tensor in request.borrowed))
        hold(len(content) + size.memory_bytes)
        limit = server.settings.max_body_bytes
        request = await server.offload.do(size, oip_request.borrow, request, places, limit)
    return request, places


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
