"""The headers that every answer has: whose request it answers, and how long it took."""

import random
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

Headers = list[tuple[bytes, bytes]]

REQUEST_ID: Final = b"x-request-id"
TIMING: Final = b"server-timing"

_VALID_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_TRACEPARENT: Final = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def caller_request_id(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the caller's `X-Request-ID`, else the trace id of its `traceparent`, else None."""
    request_id = headers.get(REQUEST_ID)
    if request_id is not None and _VALID_ID.fullmatch(request_id):
        return request_id.decode()
    trace = _TRACEPARENT.fullmatch(headers.get(b"traceparent", b""))
    return trace[1].decode() if trace else None


def new_request_id() -> str:
    """Return an id of 32 digits: no secret, and so not worth asking the system for randomness."""
    return f"{random.getrandbits(128):032x}"


def server_timing(stages: Mapping[str, float]) -> tuple[bytes, bytes]:
    """Return the header `Server-Timing` of stages in seconds (https://www.w3.org/TR/server-timing)."""
    template = _timing_template(tuple(stages))
    return TIMING, template % tuple([seconds * 1e3 for seconds in stages.values()])


@lru_cache
def _timing_template(stages: tuple[str, ...]) -> bytes:
    return ", ".join(f"{stage};dur=%.3f" for stage in stages).encode()
