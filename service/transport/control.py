"""
The bodies of requests without tensors, read raw.

Clients of the protocol send their JSON under a form's content type, or none.
"""

from typing import Final

from starlette.requests import Request
from starlette.types import Message

from service.codecs.compression import decompress, encoding_of
from service.codecs.offload import Offload
from service.settings import Settings
from service.transport.exchange import Exchange

MAX_CONTROL_BYTES: Final = 2**20
"""The largest body of a request without tensors, also after unpacking."""


async def control_body(
    request: Request,
    settings: Settings,
    offload: Offload,
    *,
    limit_bytes: int = MAX_CONTROL_BYTES,
) -> bytes:
    """
    Return the whole body, decompressed; never on the event loop, and no longer than the
    caller waits.

    Raises:
        InvalidInput: it is not of the encoding that it names.
        TooLarge: above `limit_bytes`, or what the settings allow any body.
        TooSlow: it did not arrive in time.
        UnsupportedMediaType: it is encoded in an unknown way.
        ClientDisconnect: the caller has left.
    """
    exchange = Exchange(request.scope, request.receive, _answered_by_the_framework)
    encoding = encoding_of(exchange.headers.get("content-encoding", ""))
    limit = min(limit_bytes, settings.max_body_bytes)
    content = await exchange.body(limit_bytes=limit, timeout_s=settings.body_timeout_s)
    if encoding is None:
        return content
    work = offload.interruptible(decompress, content, encoding, limit)
    return await exchange.while_there(work)


async def _answered_by_the_framework(message: Message) -> None:
    """Send nothing: only the body is read here."""
