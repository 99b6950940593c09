"""The connection of a request under an ASGI server that says nothing of its connections."""

import asyncio
import contextlib
from collections.abc import Callable

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Send

from service.transport.coalescing import WHOLE, Delivery


class PlainConnection:
    """
    Learns that a caller has left by waiting for `http.disconnect`, once the body is there.

    The application receives and sends through this.  What becomes of what is sent is not
    known here: all of it counts as delivered.
    """

    has_whole_body = False
    """Not known before the body has been received."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self.on_left: list[Callable[[], None]] = []
        self.is_lost = False
        self._receive = receive
        self._send = send
        self._is_answered = False
        self._waiting: asyncio.Task[None] | None = None

    async def receive(self) -> Message:
        """Return the next message of the request."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            # The receiver learns it from the message; notifying would cancel it as well.
            self.is_lost = not self._is_answered
        elif not message.get("more_body", False) and self._waiting is None:
            self._waiting = asyncio.create_task(self._wait())
        return message

    async def send(self, message: Message) -> None:
        """
        Send a message of the answer.

        Raises:
            ClientDisconnect: the server says that the caller has left.
        """
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            # From here on, `http.disconnect` says only that the request is over; a server may
            # say so before this returns.
            self._is_answered = True
        try:
            await self._send(message)
        except OSError:  # as ASGI 2.4 has it
            self.is_lost = True
            raise ClientDisconnect from None

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
        if self._is_answered:
            return
        self.is_lost = True
        for notify in list(self.on_left):
            notify()
