"""
Ask the server of this container whether it is alive; the image's HEALTHCHECK.

`python -m service.probe` exits with 0 when `/v2/health/live` answers 200 within two
seconds, else with 1 and a line that says what happened.  It imports little, so that it
starts quickly on a machine that is busy serving.  It knows the port from `HEADWISE_PORT`
alone, and TLS from its variables: the flags of the server's command line it does not see.
"""

import os
import socket
import ssl
import sys

LIMIT_S = 2
"""How long connecting, and each part of the answer, may take."""
_LIVE = b"HTTP/1.1 200 "
_REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def main() -> int:
    """Return 0 for a live server, 1 for none."""
    try:
        status = _status_line(int(os.environ.get("HEADWISE_PORT") or 8000))
    except (OSError, ValueError) as error:
        print(f"not alive: {error}", file=sys.stderr)  # noqa: T201
        return 1
    if status.startswith(_LIVE):
        return 0
    print(f"not alive: {status!r}", file=sys.stderr)  # noqa: T201
    return 1


def _status_line(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as plain:
        if not os.environ.get("HEADWISE_TLS_CERT_FILE"):
            return _ask(plain)
        # The server's own container: there is nobody else whom the certificate could rule out.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with context.wrap_socket(plain) as wrapped:
            if os.environ.get("HEADWISE_TLS_CLIENT_CA_FILE"):
                return _LIVE  # it shook hands, and would hang up on who has no certificate
            return _ask(wrapped)


def _ask(connection: socket.socket) -> bytes:
    connection.sendall(_REQUEST)
    with connection.makefile("rb") as answer:
        return answer.readline(100)


if __name__ == "__main__":
    sys.exit(main())
