"""One place for a connection of a load, and the call that is under way on it."""

from collections.abc import Sequence

from loadtest.connection import Connection


class Slot:
    """One place for a connection; the connection in it is replaced when it is lost."""

    def __init__(self, number: int, requests: Sequence[bytes]) -> None:
        self.number = number
        self.requests = requests
        self.connection: Connection
        self.is_listed = False
        """Whether an open load has it among those to be used next."""
        self.fd = -1
        self.events = 0
        self.due = 0.0
        self.sent = 0.0
        """When its call was sent; while it connects, when it began to."""
        self.read = 0.0
        """When its last answer was read."""
        self.index = 0
