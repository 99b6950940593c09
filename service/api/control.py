"""
Requests without tensors: their body, a JSON object read raw, and whether they may change things.

Clients of the protocol send their JSON under a form's content type, or none.
"""

from typing import Any, Final

from starlette.requests import Request
from starlette.types import Message

from service.api.server import Server
from service.codecs.json_bounds import CONTROL, check, counts_of
from service.codecs.json_reader import ExactReader
from service.codecs.size import Size
from service.errors import Disabled
from service.transport.exchange import Exchange, read_body

MAX_CONTROL_BYTES: Final = 2**20
"""The largest body of a request without tensors, also after decompressing."""


async def json_object(
    request: Request,
    server: Server,
    *,
    is_optional: bool = True,
    limit_bytes: int = MAX_CONTROL_BYTES,
) -> dict[str, Any]:
    """
    Return the JSON object in a request's body; with `is_optional`, nothing is an empty one.

    Raises:
        InvalidInput: it is something else, or not of the encoding that it names.
        TooLarge: above `limit_bytes`, or what the settings allow any body; or it has more
            arrays or values than any of these requests.
        TooSlow: it did not arrive in time.
        UnsupportedMediaType: it is encoded in an unknown way.
        ClientDisconnect: the caller has left.
    """
    settings = server.settings
    limit = min(limit_bytes, settings.max_body_bytes)
    exchange = Exchange(request.scope, request.receive, _answered_by_the_framework)
    with server.bodies.held() as held:
        content = await exchange.while_there(
            read_body(
                exchange,
                server.offload,
                limit_bytes=limit,
                decompressed_limit_bytes=limit,
                timeout_s=settings.body_timeout_s,
                size_of=Size,
                hold=held.hold,
            )
        )
        if is_optional and not content.strip():
            return {}
        counts = counts_of(content)
        check(content, CONTROL, counts)
        return await server.offload.do(counts.size, _members, content)


def check_control(server: Server, what: str) -> None:
    """
    Return when clients may change the server.

    Raises:
        Disabled: the operator has not allowed it; `what` is what was tried.
    """
    if not server.settings.model_control:
        raise Disabled(f"{what}: switched off; HEADWISE_MODEL_CONTROL=true switches it on")


def _members(content: bytes) -> dict[str, Any]:
    reader = ExactReader(content)
    return {key: reader.plain(node) for key, node in reader.root().items()}


async def _answered_by_the_framework(message: Message) -> None:
    """Send nothing: only the body is read here."""
