"""
Ask the server of this container whether it is alive; the image's HEALTHCHECK.

`python -m service.probe` exits with 0 when `/v2/health/live` answers 200, else with 1 and a
line that says what happened.  It asks where the server listens: as the flags of the
container's first process say, then the environment, then the defaults.  It imports little,
because it shares the container's CPU limit with a server that may need all of it.
"""

import os
import socket
import sys

LIMIT_S = 5
"""How long connecting, and each part of the answer, may take."""
DEFAULTS = {"host": "127.0.0.1", "port": "8000"}
"""Of the settings that are read here, those with a default."""
_LIVE = b"HTTP/1.1 200 "
_REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_RUN = ["-m", "service"]
_LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}  # noqa: S104


def main() -> int:
    """Return 0 for a live server, 1 for none."""
    flags = flags_of(_first_process())

    def setting(name: str) -> str:
        return (
            flags.get(name) or os.environ.get(f"HEADWISE_{name.upper()}") or DEFAULTS.get(name, "")
        )

    host, port = setting("host"), setting("port")
    where = f"{f'[{host}]' if ':' in host else host}:{port}"
    if port == "0":
        return _fail(where, "expected a port that is known beforehand")
    try:
        with _connected(_LOOPBACKS.get(host, host), int(port)) as plain:
            if setting("tls_cert_file"):
                status = _ask_over_tls(plain, is_mutual=bool(setting("tls_client_ca_file")))
            else:
                status = _ask(plain)
    except (OSError, ValueError) as error:
        return _fail(where, getattr(error, "strerror", None) or str(error))
    return 0 if status.startswith(_LIVE) else _fail(where, repr(status))


def _fail(where: str, reason: str) -> int:
    print(f"not alive: {where}: {reason}", file=sys.stderr)  # noqa: T201
    return 1


def flags_of(command: list[str]) -> dict[str, str]:
    """Return the flags of a command line, by setting; none if it does not run the server."""
    starts = [
        place + 1
        for place, word in enumerate(command)
        if word.endswith("/headwise-serve") or command[max(place - 1, 0) : place + 1] == _RUN
    ]
    words = command[starts[0] :] if starts else []
    flags = {}
    for place, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name.startswith("--"):
            following = "".join(words[place + 1 : place + 2])
            flags[name[2:].replace("-", "_")] = value if has_value else following
    return flags


def _first_process() -> list[str]:
    """Return the command line of process 1: the server, or what starts and reaps it."""
    try:
        with open("/proc/1/cmdline", encoding="utf-8", errors="replace") as file:
            return file.read().split("\0")[:-1]
    except OSError:
        return []


def _connected(host: str, port: int) -> socket.socket:
    """
    Return a connection to the first address of the host that takes one.

    Raises:
        OSError: none does.
    """
    last: OSError | None = None
    # As bytes: a name as text would import all that international names need.
    found = socket.getaddrinfo(host.encode(), port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in found:
        connection = socket.socket(family, kind, protocol)
        connection.settimeout(LIMIT_S)
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            last = error
        else:
            return connection
    raise last or OSError("no address")


def _ask_over_tls(plain: socket.socket, *, is_mutual: bool) -> bytes:
    import ssl  # takes longer than all the rest

    # The server's own container: there is nobody else whom the certificate could rule out.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(plain) as wrapped:
        # It shook hands, and would hang up on who has no certificate.
        return _LIVE if is_mutual else _ask(wrapped)


def _ask(connection: socket.socket) -> bytes:
    connection.sendall(_REQUEST)
    with connection.makefile("rb") as answer:
        return answer.readline(100)


if __name__ == "__main__":
    sys.exit(main())
