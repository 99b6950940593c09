"""
Every way Headwise can say no, independent of HTTP.

    HeadwiseError
    ├── Refused                    the caller's input
    │   ├── InvalidInput           a value, shape, type or name is wrong
    │   ├── Unauthorized           no valid key was shown
    │   ├── Disabled               the endpoint is switched off
    │   ├── UnknownModel           no artifact of that name or version
    │   ├── NotFound               no such path, or no such region
    │   ├── MethodNotAllowed       the path exists, the verb does not
    │   ├── NotAcceptable          no answer format the caller accepts
    │   ├── TooSlow                the body did not arrive in time
    │   ├── TooLarge               above a set limit
    │   └── UnsupportedMediaType   a body format or encoding that is not read
    ├── NotNow                     right input, wrong moment
    │   ├── QueueFull              as much waits, or is under way, as may be
    │   ├── NotReady               warm-up has not passed
    │   ├── Draining               the server is stopping
    │   └── DeadlineExceeded       the call's own time limit passed
    ├── Failed                     our fault
    │   ├── InferenceFailed        the runtime refused the batch
    │   └── DecodingFailed         the process that reads large bodies ended
    └── StartRefused               ends the start of the process
        ├── SettingsInvalid        a setting is unknown or out of bounds
        ├── ArtifactUnreadable     a file is missing, altered or of an unknown format
        ├── ProviderUnavailable    the asked-for hardware is not there
        └── ThreadsUnavailable     the system starts no more threads

`code` is the stable word a program may rely on; the message is for people.
Messages say what was expected, what came and where, and never repeat payload,
paths of the host or stack traces.  (`StartRefused` speaks to the operator and
may name paths.)
"""

from typing import ClassVar


class HeadwiseError(Exception):
    """Anything that Headwise itself decided to raise."""

    code: ClassVar[str] = "internal"


class Refused(HeadwiseError):
    """The caller has to change the request."""

    code = "invalid_input"


class InvalidInput(Refused):
    """A value, shape, type or name in the request is wrong."""


class Unauthorized(Refused):
    """The server asks for a key, and no valid one was shown."""

    code = "unauthorized"


class Disabled(Refused):
    """The endpoint is switched off by a setting."""

    code = "disabled"


class UnknownModel(Refused):
    """No artifact of that name or version is served."""

    code = "unknown_model"


class NotFound(Refused):
    """No such path, or no region of shared memory of that name."""

    code = "not_found"


class MethodNotAllowed(Refused):
    """The path exists, but not for this verb; HEAD is allowed wherever GET is."""

    code = "method_not_allowed"

    def __init__(self, method: str, *, allowed: str) -> None:
        allowed = allowed.replace("GET", "GET, HEAD")
        super().__init__(f"method: expected {allowed}, got {method[:16]}")
        self.allowed = allowed


class NotAcceptable(Refused):
    """None of the answer formats the caller accepts exists."""

    code = "not_acceptable"


class TooSlow(Refused):
    """The request's body did not arrive in time."""

    code = "too_slow"


class TooLarge(Refused):
    """The request, or the answer it asks for, is above a set limit."""

    code = "too_large"


class UnsupportedMediaType(Refused):
    """The body is in a format or encoding that is not read here."""

    code = "unsupported_media_type"


class NotNow(HeadwiseError):
    """The request is right; the same request may succeed later."""

    code = "not_ready"

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(NotNow):
    """As much waits, or is under way, as may be."""

    code = "queue_full"


class NotReady(NotNow):
    """Warm-up has not passed, or failed."""


class Draining(NotNow):
    """The server is stopping and takes no new calls."""

    code = "draining"


class DeadlineExceeded(NotNow):
    """The call's own time limit passed before it could be answered."""

    code = "deadline_exceeded"


class Failed(HeadwiseError):
    """Something on our side went wrong."""


class InferenceFailed(Failed):
    """The runtime refused a batch that had passed every check; cause attached."""


class DecodingFailed(Failed):
    """The process that reads large bodies ended before it answered."""


class StartRefused(HeadwiseError):
    """The process must not start like this."""


class SettingsInvalid(StartRefused):
    """A setting is unknown, of the wrong type or out of bounds."""


class ArtifactUnreadable(StartRefused):
    """An artifact's file is missing, altered, unsafe or of an unknown format."""


class ProviderUnavailable(StartRefused):
    """The asked-for hardware or its libraries are not there."""


class ThreadsUnavailable(StartRefused):
    """The system starts no more threads."""
