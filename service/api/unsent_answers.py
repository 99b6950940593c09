"""Answers under way: how many bytes of them there may be at once."""

from service.errors import QueueFull, TooLarge
from service.telemetry.metrics import Metrics

_RETRY_AFTER_S = 1


class UnsentAnswers:
    """
    A budget of bytes for answers, from the admission of a call to the delivery of its answer.

    An answer's size is known before it is computed, so that much is added first; it is taken
    back once the system has taken the last byte, or the caller has left.  Used on the event
    loop only.
    """

    def __init__(self, limit_bytes: int, metrics: Metrics) -> None:
        self._limit_bytes = limit_bytes
        self._metrics = metrics
        self._bytes = 0

    def check_room(self, size: int = 1) -> None:
        """
        Return when an answer of so many bytes may be begun.

        Raises:
            QueueFull: the budget has no room for it now.
            TooLarge: it never will have.
        """
        if size > self._limit_bytes:
            raise TooLarge(
                f"answer: at most {self._limit_bytes} bytes (max_unsent_bytes), got {size}"
            )
        if self._bytes + size > self._limit_bytes:
            raise QueueFull(
                f"answers: at most {self._limit_bytes} bytes may be computed or wait for their"
                f" callers to read them, {self._bytes} are and do",
                retry_after_s=_RETRY_AFTER_S,
            )

    def add(self, size: int) -> None:
        """Count an answer of so many bytes as under way; a negative size takes it back."""
        self._bytes += size
        self._metrics.unsent_answer_bytes = self._bytes
