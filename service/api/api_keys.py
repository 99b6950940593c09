"""
The keys that callers show, read from a file that may change while the server runs.

Only a key's SHA-256 is kept.  The file is read into a buffer that is overwritten as soon
as it has been parsed, and parsing copies no key out of it.  Keys are long and random, so
a slow hash would protect nothing more.
"""

import contextlib
import hashlib
import hmac
import logging
import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from service.errors import SettingsInvalid, Unauthorized
from service.logs import event

MAX_FILE_BYTES: Final = 64 * 1024
MAX_KEYS: Final = 100
"""Each is compared for every call, so that the time reveals nothing: 1 takes 3 µs, 100 take 15."""

MIN_LENGTH: Final = 32
"""128 bits in hexadecimal."""
MAX_LENGTH: Final = 256

_NAME: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_KEY: Final = re.compile(rb"[A-Za-z0-9._~+/-]+=*")
"""What RFC 6750 lets stand after `Bearer`."""

_LINE: Final = re.compile(rb"([^\r\n]*)(?:\r\n|\r|\n|\Z)")
_STRIPPED: Final = re.compile(rb"\S(?:.*\S)?", re.DOTALL)
_COLON: Final = re.compile(rb":")

_BEARER: Final = b"authorization"
_HEADER: Final = b"x-api-key"
_EXPECTED: Final = "expected one in the header Authorization (as Bearer KEY) or X-API-Key"


@dataclass(frozen=True)
class _Key:
    """A valid key, and whose it is."""

    name: str
    digest: bytes


class ApiKeys:
    """
    The keys that are valid now; looked up on the event loop, read again in any thread.

    The file has one `name:key` a line; empty lines and lines that begin with # are
    passed over.  A name may have several keys, so that one can be replaced by another
    while both are valid.

    Raises:
        SettingsInvalid: the file cannot be read, holds no key, or a line is wrong; the
            message names the line and never what is in it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reading = threading.Lock()
        self._buffer = bytearray(MAX_FILE_BYTES + 1)
        with _content(path, self._buffer) as content:
            self._keys = _parsed(path, content)
            self._seen = hashlib.sha256(content).digest()
        self._problem: str | None = None

    def name_of(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """
        Return whose key a request's headers hold.

        Raises:
            Unauthorized: see `digest_of` and `name_of_digest`.
        """
        return self.name_of_digest(self.digest_of(headers))

    def digest_of(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """
        Return the SHA-256 of the key in a request's headers, whether it is valid or not.

        The same key may be there more than once, and an `Authorization` of another
        scheme than Bearer beside it.

        Raises:
            Unauthorized: there is no key, or more than one.
        """
        keys = set(_shown(headers))
        if len(keys) != 1:
            raise Unauthorized(f"key: {_EXPECTED}, got {'several' if keys else 'none'}")
        # What is longer is no key, and need not be hashed.
        return hashlib.sha256(keys.pop()[: MAX_LENGTH + 1]).digest()

    def name_of_digest(self, digest: bytes) -> str:
        """
        Return whose key has this SHA-256; the time that takes reveals nothing about the keys.

        Raises:
            Unauthorized: no key that is valid now has it.
        """
        found = None
        for known in self._keys:
            if hmac.compare_digest(known.digest, digest):
                found = known.name
        if found is None:
            raise Unauthorized(f"key: {_EXPECTED}, got one that is not valid")
        return found

    def refresh(self, *, retry: bool) -> None:
        """
        Take up what the file holds now; one that is wrong is logged and changes nothing.

        Without `retry`, what was taken up or logged before is not logged again.

        The content is compared, not the file's time: what is written twice within one tick
        of the clock has one time, and what a link comes to lead to may be older.
        """
        with self._reading:
            try:
                with _content(self._path, self._buffer) as content:
                    seen = hashlib.sha256(content).digest()
                    if seen == self._seen and self._problem is None and not retry:
                        return
                    keys = _parsed(self._path, content)
            except SettingsInvalid as error:
                if str(error) != self._problem or retry:
                    self._problem = str(error)
                    event("keys not reloaded", level=logging.ERROR, problem=self._problem)
                return
            self._keys, self._seen, self._problem = keys, seen, None
            event("keys reloaded", keys=len(keys))


def without_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return a request's headers without those in which a key, valid or not, may stand."""
    return [header for header in headers if header[0] not in (_BEARER, _HEADER)]


def _shown(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """Give every key that the headers hold, whatever it is worth."""
    for name, value in headers:
        if name == _HEADER:
            yield value.strip()
        elif name == _BEARER:
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip()


@contextlib.contextmanager
def _content(path: Path, buffer: bytearray) -> Iterator[memoryview]:
    """
    Give what the file holds, which lies in the buffer and is overwritten afterwards.

    Raises:
        SettingsInvalid: the file cannot be read, is no plain file or is too long.
    """
    view, size = memoryview(buffer), 0
    try:
        try:
            # Unbuffered: a buffer of Python's own would keep a copy.
            with open(path, "rb", buffering=0, opener=_open) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise SettingsInvalid(f"api_keys_file: {path}: expected a plain file")
                while count := file.readinto(view[size:]):
                    size += count
        except OSError as error:
            raise SettingsInvalid(f"api_keys_file: {path}: {error.strerror}") from error
        if size > MAX_FILE_BYTES:
            raise SettingsInvalid(
                f"api_keys_file: {path}: expected at most {MAX_FILE_BYTES} bytes, got more"
            )
        yield view[:size]
    finally:
        view[:size] = bytes(size)


def _open(path: str, flags: int) -> int:
    # A pipe would hold up whoever opens it, until somebody writes.
    return os.open(path, flags | os.O_NONBLOCK)


def _parsed(path: Path, content: memoryview) -> tuple[_Key, ...]:
    """Return the keys in the file's content, of which nothing but the names is copied."""
    keys: dict[bytes, _Key] = {}
    for number, line in enumerate(_LINE.finditer(content), start=1):
        stripped = _STRIPPED.search(content, *line.span(1))
        if stripped is None or content[stripped.start()] == ord("#"):
            continue
        text = content[slice(*stripped.span())]
        colon = _COLON.search(text)
        end = len(text) if colon is None else colon.start()
        name, key = text[:end], text[end + 1 :]
        problem = "expected name:key" if colon is None else _problem_of(name, key)
        digest = hashlib.sha256(key).digest()
        if problem is None and digest in keys:
            problem = "expected a key of its own, got that of an earlier line"
        if problem is not None:
            raise SettingsInvalid(f"api_keys_file: {path} line {number}: {problem}")
        keys[digest] = _Key(bytes(name).decode(), digest)
    if not 1 <= len(keys) <= MAX_KEYS:
        raise SettingsInvalid(
            f"api_keys_file: {path}: expected 1 to {MAX_KEYS} keys, got {len(keys)}"
        )
    return tuple(keys.values())


def _problem_of(name: memoryview, key: memoryview) -> str | None:
    """Say what is wrong with a line, or None; what stands in it is a secret."""
    if not _NAME.fullmatch(name):
        return "before the colon, expected 1 to 64 letters, digits, dots, underscores or hyphens"
    if not MIN_LENGTH <= len(key) <= MAX_LENGTH:
        return (
            f"after the colon, expected a key of {MIN_LENGTH} to {MAX_LENGTH} characters,"
            f" got {len(key)}"
        )
    if not _KEY.fullmatch(key):
        return "after the colon, expected letters, digits and . _ ~ + / - with = at the end only"
    return None
