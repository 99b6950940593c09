"""The collaborators of every request, in one value."""

from dataclasses import dataclass

from service.api.api_keys import ApiKeys
from service.api.unsent_answers import UnsentAnswers
from service.codecs.offload import Offload
from service.codecs.shared_memory import SharedMemory
from service.inference.lifecycle import Lifecycle
from service.inference.models import Models
from service.inference.validation import Limits
from service.settings import Settings
from service.telemetry.metrics import Metrics
from service.telemetry.recorder import Recorder
from service.telemetry.statistics import Statistics
from service.transport.body_memory import BodyMemory


@dataclass(frozen=True)
class Server:
    """
    What the endpoints of one server work with, on the fast path and on the ASGI path.

    Made once, by `app.make_server`.
    """

    settings: Settings
    limits: Limits
    models: Models
    lifecycle: Lifecycle
    keys: ApiKeys | None
    """None = callers need no key."""
    offload: Offload
    shared_memory: SharedMemory
    bodies: BodyMemory
    unsent: UnsentAnswers
    metrics: Metrics
    statistics: Statistics
    recorder: Recorder
