"""Where a server is, and what every request to it carries."""

import contextlib
import http.client
import json
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from loadtest.errors import Unreachable, UsageWrong

_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_OURS: Final = ("host", "content-length", "connection", "transfer-encoding")


@dataclass(frozen=True)
class Reply:
    """A whole answer to a call that nobody times."""

    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON, None where it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


@dataclass(frozen=True)
class Endpoint:
    """An address with the headers that go there; it can be sent to another process."""

    scheme: str
    host: str
    port: int
    base: str = ""
    """What stands before every path."""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    ca_file: Path | None = None
    cert_file: Path | None = None
    """Our own certificate and its key."""
    insecure: bool = False

    @classmethod
    def parse(
        cls,
        url: str,
        headers: tuple[str, ...] = (),
        *,
        ca_file: Path | None = None,
        cert_file: Path | None = None,
        insecure: bool = False,
    ) -> "Endpoint":
        """
        Return the endpoint of `http://host:port`, headers written as `Name: value`.

        Raises:
            UsageWrong: URL, header or file is none.
        """
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise UsageWrong(f"URL: {error}, got {url!r}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageWrong(f"URL: expected http://host:port or https://host:port, got {url!r}")
        if parts.query or parts.fragment or parts.username:
            raise UsageWrong(f"URL: expected no user, query or fragment, got {url!r}")
        for option, file in (("--ca-file", ca_file), ("--cert-file", cert_file)):
            if file is not None and not file.is_file():
                raise UsageWrong(f"{option}: {file}: no such file")
        return cls(
            parts.scheme,
            parts.hostname,
            port or (443 if parts.scheme == "https" else 80),
            parts.path.rstrip("/"),
            tuple(_header(text) for text in headers),
            ca_file,
            cert_file,
            insecure,
        )

    @property
    def url(self) -> str:
        """The address as text."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.base}"

    def tls(self) -> ssl.SSLContext | None:
        """
        Return how to speak TLS with it; None = in plain.

        Raises:
            UsageWrong: a file does not hold what it should.
        """
        if self.scheme == "http":
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except (ssl.SSLError, OSError):
            raise UsageWrong(f"--ca-file: {self.ca_file}: no certificate in it") from None
        if self.cert_file is not None:
            try:
                context.load_cert_chain(self.cert_file)
            except (ssl.SSLError, OSError):
                raise UsageWrong(
                    f"--cert-file: {self.cert_file}: expected a certificate and its key, PEM"
                ) from None
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def post_bytes(self, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        """Return a whole POST request, ready to be sent."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        own = (*headers.items(), *self.headers)
        return request_bytes(f"{host}:{self.port}", self.base + path, body, *own)

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        *,
        timeout_s: float = 30.0,
    ) -> Reply:
        """
        Return the answer to one call on a connection of its own.

        Raises:
            Unreachable: there is none.
        """
        context = self.tls()
        connection = (
            http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
            if context is None
            else http.client.HTTPSConnection(
                self.host, self.port, timeout=timeout_s, context=context
            )
        )
        try:
            named = dict(self.headers) | (headers or {})
            # A server may refuse a body and close before it has come: its answer counts.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, self.base + path, body, named)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, response.read())
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.url}: {reason_of(error)}") from None
        finally:
            connection.close()


def request_bytes(host: str, path: str, body: bytes, *headers: tuple[str, str]) -> bytes:
    """Return a whole POST request, for whichever port of that host."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def reason_of(error: Exception) -> str:
    """Return in a few words why a connection failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate does not verify: {error.verify_message}"
    if isinstance(error, ConnectionRefusedError):
        return "Connection refused: no server listens there"
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS: try http:// instead of https://"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _header(text: str) -> tuple[str, str]:
    name, colon, value = (part.strip() for part in text.partition(":"))
    # The value may be a secret, so no message repeats it.
    if not colon or not _HEADER.fullmatch(name) or not value.isprintable():
        raise UsageWrong('--header: expected "Name: value" of printable characters')
    if name.lower() in _OURS:
        raise UsageWrong(f"--header: {name} is set by the tester itself")
    try:
        value.encode("ascii")
    except UnicodeEncodeError:
        raise UsageWrong(f"--header: {name}: expected ASCII characters") from None
    return name, value
