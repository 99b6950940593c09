"""What the port needs to speak TLS: certificate, private key, and whose certificates to trust."""

import asyncio
import ssl
from pathlib import Path
from typing import Any, Final

from service.errors import SettingsInvalid
from service.settings import Settings

_MAX_PASSWORD_BYTES: Final = 1024
"""OpenSSL reads no longer one."""

_CLEANSE_PLAINTEXT: Final = 0x2
"""SSL_OP_CLEANSE_PLAINTEXT, which `ssl` does not name: OpenSSL keeps no copy of a request."""

_NO_TLS: Final = ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "WRONG_VERSION_NUMBER")
"""How OpenSSL names a first record that is none of TLS: some verbs of HTTP, and all else."""

_MISMATCHES: Final = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH")


class _TlsContext(ssl.SSLContext):
    """Gives each connection the buffer of what is sent: see `_TlsObject`."""

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Return what encrypts one connection; called by the event loop."""
        made = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        if isinstance(made, _TlsObject):
            made.outgoing = outgoing
        return made


class _TlsObject(ssl.SSLObject):
    """
    One connection's TLS, which can answer a caller that speaks plain HTTP, but never hear it.

    A handshake that does not begin with a record of TLS counts as done.  Nothing is read of
    such a connection, and what is written to it is sent as it is: see `speaks_no_tls`.
    """

    outgoing: ssl.MemoryBIO
    """What is sent to the caller."""
    is_plain = False

    def do_handshake(self) -> None:
        """Go on with the handshake; as in the base class."""
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if error.reason not in _NO_TLS:
                raise
            self.is_plain = True

    def getpeercert(self, binary_form: bool = False) -> Any:
        """Return the caller's certificate; as in the base class."""
        return None if self.is_plain else super().getpeercert(binary_form)

    def read(self, len: int = 1024, buffer: Any = None) -> Any:  # noqa: A002 (as in the base class)
        """Return what the caller sent, decrypted; as in the base class."""
        if self.is_plain:
            raise ssl.SSLWantReadError
        return super().read(len, buffer)

    def write(self, data: Any) -> int:
        """Encrypt what is sent to the caller; as in the base class."""
        return self.outgoing.write(data) if self.is_plain else super().write(data)

    def unwrap(self) -> None:
        """End TLS; as in the base class."""
        if not self.is_plain:
            super().unwrap()


def speaks_no_tls(transport: asyncio.BaseTransport) -> bool:
    """Return whether this is a connection to the TLS port on which no TLS is spoken."""
    tls = transport.get_extra_info("ssl_object")
    return isinstance(tls, _TlsObject) and tls.is_plain


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """
    Return what the settings say of TLS 1.2 and later; None = plain HTTP.

    With `tls_client_ca_file` a caller without a certificate that it vouches for does
    not get past the handshake; the system's own authorities vouch for nobody.

    Raises:
        SettingsInvalid: a file cannot be read, is not what it should be or does not go
            with another; the message names the setting.
    """
    cert = settings.tls_cert_file
    if cert is None:
        for name in ("tls_key_file", "tls_key_password_file", "tls_client_ca_file"):
            if getattr(settings, name) is not None:
                raise SettingsInvalid(f"{name}: expected tls_cert_file beside it, got none")
        return None
    context = _TlsContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslobject_class = _TlsObject
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= _CLEANSE_PLAINTEXT
    _check_certificates("tls_cert_file", cert)
    _load(context, cert, settings.tls_key_file, settings.tls_key_password_file)
    if settings.tls_client_ca_file is not None:
        _check_certificates("tls_client_ca_file", settings.tls_client_ca_file)
        context.load_verify_locations(settings.tls_client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load(context: ssl.SSLContext, cert: Path, key: Path | None, password: Path | None) -> None:
    """Give the context its certificate and private key."""
    where = f"tls_key_file: {key}" if key is not None else f"tls_cert_file: {cert}"
    if key is not None:
        _read("tls_key_file", key)
    word = None if password is None else _password(password)
    was_asked = False

    def ask() -> bytes:
        # OpenSSL would ask at the terminal, where perhaps nobody is.
        nonlocal was_asked
        was_asked = True
        return word or b""

    try:
        context.load_cert_chain(cert, key, ask)
    except ssl.SSLError as error:
        if error.reason in _MISMATCHES:
            raise SettingsInvalid(
                f"{where}: expected the private key of the certificate in {cert}, got another"
            ) from error
        if was_asked and word is None:
            raise SettingsInvalid(
                f"{where}: the private key is encrypted: expected tls_key_password_file, got none"
            ) from error
        if was_asked:
            raise SettingsInvalid(
                f"tls_key_password_file: {password}: does not open the private key"
            ) from error
        raise SettingsInvalid(
            f"{where}: expected a private key in PEM that goes with {cert}: {_reason(error)}"
        ) from error


def _check_certificates(setting: str, path: Path) -> None:
    """Return when the file holds certificates."""
    _read(setting, path)
    try:
        # A context of its own: what one vouches for is not what one shows.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError as error:
        raise SettingsInvalid(
            f"{setting}: {path}: expected certificates in PEM: {_reason(error)}"
        ) from error


def _password(path: Path) -> bytes:
    lines = _read("tls_key_password_file", path).splitlines()
    password = lines[0] if lines else b""
    if not 1 <= len(password) <= _MAX_PASSWORD_BYTES:
        raise SettingsInvalid(
            f"tls_key_password_file: {path}: expected a first line of 1 to"
            f" {_MAX_PASSWORD_BYTES} bytes, got {len(password)}"
        )
    return password


def _read(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsInvalid(f"{setting}: {path}: {error.strerror}") from error


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "it cannot be read").replace("_", " ").lower()
