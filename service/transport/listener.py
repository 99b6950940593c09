"""The sockets that the server listens on, and their addresses as people write them."""

import errno
import os
import socket
from collections.abc import Sequence
from typing import Final

from service.errors import SettingsInvalid

_BACKLOG: Final = 2048

_ABSENT: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""The address, or its whole family, is not of this machine."""

_CURES: Final = {
    errno.EADDRINUSE: "; end the process that listens there, or choose another port",
    errno.EACCES: "; ports below 1024 need root or the capability NET_BIND_SERVICE",
    errno.EADDRNOTAVAIL: "; expected an address of this machine, or 0.0.0.0 or :: for all of them",
    errno.EAFNOSUPPORT: "; this system has no IPv6: 0.0.0.0 stands for all IPv4 addresses",
    errno.EINVAL: "; a link-local address needs its interface: fe80::1%eth0",
}
_NOT_IN_HOSTS: Final = frozenset("[]/ ")
_LOOPBACKS: Final = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}  # noqa: S104


def listen(host: str, port: int) -> list[socket.socket]:
    """
    Return sockets that listen on every address of `host`, all of them on the same port.

    `::` stands for all addresses, those of IPv4 included.  Of a name's addresses, those that
    this machine has not are passed over: many hosts files name ::1 where IPv6 is off.

    Raises:
        SettingsInvalid: the name does not resolve, no address of it is this machine's, or
            one that is cannot be listened on.
    """
    where = f"host, port: cannot listen on {_joined(host, port)}"
    if not _NOT_IN_HOSTS.isdisjoint(host):
        raise SettingsInvalid(f"{where}: expected an address alone: no brackets, no URL")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise SettingsInvalid(f"{where}: {error.strerror}") from None
    except UnicodeError:
        raise SettingsInvalid(f"{where}: expected an address or a host name") from None
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    for family, _, _, _, address in dict.fromkeys(found):
        try:
            # With port 0 the first socket chooses for all of them.
            chosen = sockets[0].getsockname()[1] if sockets else port
            sockets.append(_listening(family, (address[0], chosen, *address[2:])))
        except OSError as error:
            if error.errno not in _ABSENT:
                _refuse(where, error)
            absent = error
    if not sockets and absent is not None:
        _refuse(where, absent)
    return sockets


def _listening(family: int, address: tuple[object, ...]) -> socket.socket:
    is_ipv6 = family == socket.AF_INET6
    if is_ipv6 and not socket.has_dualstack_ipv6():
        raise OSError(errno.EAFNOSUPPORT, "")
    return socket.create_server(
        address,
        family=family,
        backlog=_BACKLOG,
        dualstack_ipv6=is_ipv6,
    )


def _refuse(where: str, error: OSError) -> None:
    number = error.errno or 0
    raise SettingsInvalid(f"{where}: {os.strerror(number)}{_CURES.get(number, '')}") from None


def addresses(sockets: Sequence[socket.socket]) -> list[str]:
    """Return where each socket listens: `127.0.0.1:8000`, `[::]:8000`, `[fe80::1%eth0]:8000`."""
    return [_joined(*_host_and_port(listener)) for listener in sockets]


def url(sockets: Sequence[socket.socket], *, is_tls: bool) -> str:
    """Return the address of the first socket as a URL; of all addresses, the loopback's."""
    host, port = _host_and_port(sockets[0])
    where = _joined(_LOOPBACKS.get(host, host).replace("%", "%25"), port)
    return f"{'https' if is_tls else 'http'}://{where}"


def _host_and_port(listener: socket.socket) -> tuple[str, int]:
    host, port, *rest = listener.getsockname()
    scope = rest[1] if rest else 0
    return f"{host}%{socket.if_indextoname(scope)}" if scope else host, port


def _joined(host: str, port: int) -> str:
    return f"{f'[{host}]' if ':' in host else host}:{port}"
