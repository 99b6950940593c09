"""One kept HTTP/1.1 connection that never waits: it takes and gives what the kernel has now."""

import contextlib
import os
import socket
import ssl
import time
from typing import Any, Final, Literal

import httptools

from loadtest.endpoint import Endpoint
from loadtest.oip import HEADER_LENGTH
from loadtest.timestamps import ROOM, SO_TIMESTAMPNS, moment_in

Address = tuple[socket.AddressFamily, Any]
State = Literal["connecting", "handshaking", "free", "busy", "closed"]
Wish = Literal["read", "write"]

_PART: Final = 256 * 1024
_KNOWN: Final = {13: b"server-timing", 31: HEADER_LENGTH.lower().encode()}
"""Headers that are kept, by the length of their names: most are passed over by that alone."""


class ConnectionLost(Exception):
    """The connection ended, or what came over it was no HTTP."""


class Connection:
    """
    A socket, at most one request under way on it, and the answer as far as it has come.

    Nothing here waits: call `advance` until `state` is `free`; `send` one request; call
    `receive` whenever there is something to read, until it tells that the answer is whole.
    What the kernel does not take at once is sent by `flush`; `wish` tells what to wait for.
    """

    def __init__(self, address: Address, tls: ssl.SSLContext | None, host: str) -> None:
        family, self._address = address
        plain = socket.socket(family, socket.SOCK_STREAM)
        plain.setblocking(False)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is None:
            # Where it cannot be had, an answer has come when it is read.
            with contextlib.suppress(OSError):
                plain.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._tls, self._host = tls, host
        self.socket: socket.socket = plain
        self.state: State = "connecting"
        self.wish: Wish = "write"
        self.keep = False
        """Whether the body of the answer under way is kept."""
        self._started = False
        self._rest: memoryview | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._whole = False
        self._keeps_alive = True
        self._keeps_sending = True
        self._parts: list[bytes] = []
        self._clear()

    def advance(self) -> None:
        """
        Go on with connecting, as far as can be without waiting.

        Raises:
            OSError: it failed.
        """
        if self.state == "connecting":
            if not self._started:
                self._started = True
                with contextlib.suppress(BlockingIOError):
                    self.socket.connect(self._address)
                return
            if code := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
            if self._tls is None:
                self._be_free()
                return
            self.socket = self._tls.wrap_socket(
                self.socket, server_hostname=self._host, do_handshake_on_connect=False
            )
            self.state = "handshaking"
        if self.state == "handshaking":
            assert isinstance(self.socket, ssl.SSLSocket)  # noqa: S101 - for the type alone
            try:
                self.socket.do_handshake()
            except ssl.SSLWantReadError:
                self.wish = "read"
            except ssl.SSLWantWriteError:
                self.wish = "write"
            else:
                self._be_free()

    def send(self, request: bytes, *, keep: bool) -> None:
        """
        Begin a request on a free connection; with `keep`, the body of its answer is kept.

        Raises:
            ConnectionLost: the connection is gone.
        """
        self._clear()
        self.keep = keep
        self.state = "busy"
        self._rest, self.wish = memoryview(request), "write"
        self.flush()

    def flush(self) -> None:
        """
        Send more of the request.

        Raises:
            ConnectionLost: the connection is gone.
        """
        if self._rest is None:
            return
        try:
            sent = self.socket.send(self._rest)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return
        except (BrokenPipeError, ConnectionResetError):
            # The server reads no more; what it answered before, a refusal, may still be read.
            self._keeps_sending = False
            sent = len(self._rest)
        except OSError as error:
            raise ConnectionLost from error
        self._rest = self._rest[sent:]
        if not self._rest:
            self._rest = None
            self.wish = "read"

    def receive(self) -> bool:
        """
        Take what has come; return whether the answer is whole.

        Raises:
            ConnectionLost: the connection ended, or what came is no HTTP.
        """
        while True:
            try:
                data, moment = self._read()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            except OSError as error:
                raise ConnectionLost from error
            if not data:
                raise ConnectionLost
            if self.state != "busy":
                raise ConnectionLost  # bytes that answer nothing
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError as error:
                raise ConnectionLost from error
            if self._whole:
                if moment is not None:
                    self.lay_s = time.time() - moment
                if self._keeps_alive and self._keeps_sending and self._rest is None:
                    self.state = "free"
                else:
                    self.close()
                return True
            if self._tls is None and len(data) < _PART:
                return False

    def _read(self) -> tuple[bytes, float | None]:
        """Return what has come, and when by the wall clock its last byte came to this machine."""
        if self._tls is not None:
            return self.socket.recv(_PART), None
        data, told, _, _ = self.socket.recvmsg(_PART, ROOM)
        return data, moment_in(told)

    def close(self) -> None:
        """End it, whatever is under way."""
        self.state = "closed"
        self.socket.close()
        # It refers to this connection, and while a load runs nothing collects such circles.
        self._parser = None

    @property
    def is_connecting(self) -> bool:
        """True until the first request may be sent."""
        return self.state in ("connecting", "handshaking")

    @property
    def is_free(self) -> bool:
        """True when a request may be sent."""
        return self.state == "free"

    @property
    def body(self) -> bytes:
        """The kept body of the last answer."""
        return b"".join(self._parts)

    def _be_free(self) -> None:
        self.state, self.wish = "free", "read"

    def _clear(self) -> None:
        self._rest = None
        self._whole = False
        self._parts = []
        self.status = 0
        self.lay_s = 0.0
        """How long the last byte of the answer lay in the kernel until all was read."""
        self.timing: bytes | None = None
        """`Server-Timing` of the last answer."""
        self.header_length: int | None = None
        """How many bytes of the last answer's body are its JSON, when it has binary tensors."""

    # What httptools calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep what is wanted of the head."""
        known = _KNOWN.get(len(name))
        if known is None or name.lower() != known:
            return
        if known == b"server-timing":
            self.timing = value
        elif value.isdigit():
            self.header_length = int(value)

    def on_headers_complete(self) -> None:
        """Know the status; the body of an answer other than 200 is always kept, for its code."""
        self.status = self._parser.get_status_code()
        self.keep = self.keep or self.status != 200

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body, or let it go."""
        if self.keep:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        """Know that the answer is whole."""
        self._keeps_alive = self._parser.should_keep_alive()
        self._whole = True


def resolve(endpoint: Endpoint, *, limit_s: float) -> Address:
    """
    Return the address of an endpoint; of several, the first that takes a connection.

    A name may have several, `localhost` those of IPv6 and IPv4, and a server may listen on one
    of them alone.  Each may take `limit_s`; all connections of a load use what is returned.

    Raises:
        OSError: the name has no address, or why the first one took no connection.
    """
    found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    if len(found) == 1:  # whoever listens there sees no connection but those of the load
        return found[0][0], found[0][4]
    refusals: list[OSError] = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.settimeout(limit_s)
                probe.connect(address)
            return family, address
        except OSError as error:  # also where this machine has no such family
            refusals.append(error)
    raise refusals[0]
