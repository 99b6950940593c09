"""What one request was, for the access log and the counters, whichever way it is answered."""

from dataclasses import dataclass
from typing import Final

RECORD: Final = "headwise.record"
"""The key of the ASGI scope that holds the request's record."""


CLIENT_LEFT: Final = 499
"""The status that is counted and logged when the caller left before the answer."""

CLIENT_STALLED: Final = "client_stalled"
"""The code beside it when the caller did not read its answer, and was cut off."""

UNMATCHED: Final = "unmatched"
"""The route of a request for which there is none."""


@dataclass(eq=False, slots=True)
class RequestRecord:
    """
    One request: its method, route and id at the beginning, its status at the end.

    What is known in between is filled in where it becomes known, so that a refused
    request has all that was known when it was refused.
    """

    method: str | None
    """None = the request head could not be read."""
    route: str
    """The path of the documentation, such as `/v2/models/{name}/infer`."""
    request_id: str
    started: float
    """On the monotonic clock, in seconds."""
    key: str | None = None
    """The name of the key that the caller showed; never the key."""
    request_bytes: int = 0
    """Of the body, as far as it was read, as it came over the wire."""
    model: str | None = None
    version: int | None = None
    rows: int | None = None
    """Sequences."""
    tokens: int | None = None
    """Tokens of all sequences, without their padding."""
    status: int | None = None
    """None = no answer was begun."""
    code: str | None = None
    """Of the error that was answered."""
    answer_bytes: int = 0
    """Of the answer's body, as it went over the wire."""
    failure: Exception | None = None
    """What went wrong on our side; None = nothing did."""
