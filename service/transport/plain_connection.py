"""The connection of a request under an ASGI server that says nothing of its connections."""

import asyncio
import contextlib
from collections.abc import Callable

from starlette.types import Message, Receive

from service.transport.coalescing import WHOLE, Delivery


class PlainConnection:
    """
    Learns that a caller has left by waiting for `http.disconnect`, once the body is there.

    What becomes of what is sent is not known here: all of it counts as delivered.
    """

    def __init__(self, receive: Receive) -> None:
        self.on_left: list[Callable[[], None]] = []
        self.is_lost = False
        self.has_whole_body = False
        self._receive = receive
        self._waiting: asyncio.Task[None] | None = None

    async def receive(self) -> Message:
        """Return the next message of the request; the application receives through this."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._leave()
        elif not message.get("more_body", False) and self._waiting is None:
            self._waiting = asyncio.create_task(self._wait())
        return message

    def delivery(self) -> Delivery:
        """Return that everything that was written was delivered."""
        return WHOLE

    def when_delivered(self, tell: Callable[[Delivery], None]) -> None:
        """Call `tell` at once."""
        tell(WHOLE)

    async def close(self) -> None:
        """Wait no more: the request is over."""
        if self._waiting is not None:
            self._waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._waiting

    async def _wait(self) -> None:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._leave()

    def _leave(self) -> None:
        self.is_lost = True
        for notify in list(self.on_left):
            notify()
