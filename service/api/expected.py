"""What is counted of requests, named before the first one: see `Metrics.expect`."""

from collections.abc import Iterator
from typing import Final

from service.api import documentation
from service.api.openapi import ATTENTION, CALL_ERRORS, INFER, INFER_VERSION
from service.api.schemas import Json
from service.api.server import Server
from service.errors import Disabled, HeadwiseError, NotFound, UnknownModel
from service.telemetry.request_record import CLIENT_LEFT, CLIENT_STALLED, UNMATCHED
from service.transport.problems import STATUSES

CODES: Final = sorted({kind.code for kind in STATUSES} | {CLIENT_STALLED})
"""Every code that a request can end with."""

_OF_CALLS: Final[set[type[HeadwiseError]]] = {*CALL_ERRORS, Disabled, NotFound} - {UnknownModel}

CALL_CODES: Final = sorted({kind.code for kind in _OF_CALLS} | {CLIENT_STALLED})
"""Those of a call whose model is known."""

_WITH_TENSORS: Final = (ATTENTION, INFER, INFER_VERSION)


def expected_requests(server: Server, document: Json) -> Iterator[tuple[str, str]]:
    """
    Give every route with the statuses that it may be answered with, by OpenAPI's document.

    Left out are requests without tensors that were broken off.
    """
    for path, operations in document["paths"].items():
        for operation in operations.values():
            # A request without a valid key reaches no route.
            yield from ((path, status) for status in operation["responses"] if status != "401")
        yield from ((path, status) for status in ("405", "500"))
        if path in _WITH_TENSORS:
            yield path, str(CLIENT_LEFT)
    for path in documentation.ROUTES:
        yield from ((path, status) for status in ("200", "405", "500"))
    yield from ((documentation.ASSETS, status) for status in ("304", "404"))
    unmatched = ["400", "404", "405", "408", "413", "500"]
    unmatched += ["401"] if server.keys is not None else []
    unmatched += ["200"] if server.settings.origins else []  # a preflight request
    yield from ((UNMATCHED, status) for status in unmatched)
