"""
The phases of a running server: serving, then a grace, then draining, then gone.

In the grace the server says that it is not ready, so that proxies notice, but
still serves; while draining it refuses new calls and finishes accepted ones.
"""

import asyncio
from typing import Literal

from service.errors import Draining

Phase = Literal["serving", "grace", "draining"]


class Lifecycle:
    """The server's phase and its requests in flight; used on the event loop only."""

    def __init__(self) -> None:
        self.phase: Phase = "serving"
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        """Count one request more as in flight."""
        self.in_flight += 1
        self._idle.clear()

    def end(self) -> None:
        """Count one request less."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()

    def check_takes_calls(self) -> None:
        """
        Return unless the server is draining.

        Raises:
            Draining: no new call is taken.
        """
        if self.phase == "draining":
            raise Draining("the server is stopping", retry_after_s=1)

    async def stop(self, *, grace_s: float, drain_s: float) -> bool:
        """Pass through grace and draining; return whether every request finished in time."""
        self.phase = "grace"
        await asyncio.sleep(grace_s)
        self.phase = "draining"
        try:
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
