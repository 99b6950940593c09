"""Takes note of calls as they end, and has them counted a few times a second."""

import re
from array import array
from math import nan
from typing import Final

from loadtest.calls import GOOD, Calls
from loadtest.histogram import Floats
from loadtest.plan import Observer
from loadtest.records import Records
from loadtest.slot import Slot

_CODE = re.compile(rb'"code"\s*:\s*"(\w{1,64})"')
_MOST_KEPT_BYTES: Final = 64 * 2**20
"""Of answers that are kept to be read afterwards."""


class Recorder:
    """
    The calls of a load on their way into its records.

    A call is measured when it ends after the warm-up, whenever it began: one that is never
    answered would be seen nowhere else.
    """

    def __init__(self, records: Records, observer: Observer) -> None:
        self.is_measuring = False
        """True from the end of the warm-up on."""
        self._records = records
        self._observer = observer
        self._ended = Calls()
        self._lags = array("d")
        self._kept_bytes = 0

    @property
    def wants_body(self) -> bool:
        """Whether the body of the next good answer is examined or kept."""
        return self._observer.every or self._has_room()

    def add(self, slot: Slot, outcome: int) -> None:
        """Take note of the call that has ended on a slot, when it was read."""
        if not self.is_measuring:
            return
        connection, total_s = slot.connection, nan
        # An answer is there when it has come, however late this process is woken for it.
        done = slot.read - connection.lay_s if outcome > 0 else slot.read
        if outcome == GOOD:
            if connection.timing is not None:
                total_s = self._records.add_timing(connection.timing)
            if connection.keep:
                self._keep(slot)
        elif outcome > 0 and (found := _CODE.search(connection.body)):
            self._records.add_code(found[1].decode())
        self._ended.add(slot.due, slot.sent, done, slot.read, total_s, outcome)

    def add_unsent(self, due: float, now: float, outcome: int) -> None:
        """Take note of a call that was due and is given up."""
        if self.is_measuring:
            self._ended.add(due, nan, now, now, nan, outcome)

    def add_lag(self, late_s: float) -> None:
        """Take note of how late a call was sent that could have been sent at once."""
        if self.is_measuring:
            self._lags.append(late_s)

    def latencies_s(self) -> Floats:
        """Return the latencies of good calls that have ended since they were last counted."""
        return self._ended.latencies_s()

    def count(self) -> None:
        """Count the calls that have ended, and let them go."""
        self._records.fold(self._ended, self._lags)
        self._ended, self._lags = Calls(), array("d")

    def _keep(self, slot: Slot) -> None:
        connection = slot.connection
        body: bytes | None = connection.body
        if self._observer.examine is not None:
            body = self._observer.examine(
                slot.index, slot.number, connection.body, connection.header_length
            )
        if body is not None and self._has_room():
            self._kept_bytes += len(body)
            self._records.bodies.append((slot.index, body, connection.header_length))

    def _has_room(self) -> bool:
        kept = len(self._records.bodies)
        return kept < self._observer.keep and (not kept or self._kept_bytes < _MOST_KEPT_BYTES)
