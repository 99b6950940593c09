"""
Compressed bodies: gzip (RFC 1952) and what HTTP calls deflate, the zlib format (RFC 1950).

Nobody knows how large a compressed body is before it is read, so reading stops at a limit.
"""

import zlib
from collections.abc import Iterator
from typing import Final

from service.errors import InvalidInput, TooLarge, UnsupportedMediaType
from service.pieces import Chunk

_WINDOW_BITS: Final = {"gzip": 31, "deflate": 15}
"""What zlib calls the two formats."""

_LEVEL: Final = 1
"""Tensors hardly compress; more effort saves a per cent and takes five times as long."""

_STEP_BYTES: Final = 256 * 1024


def encoding_of(header: str) -> str | None:
    """
    Return the encoding that a `Content-Encoding` names; None = none.

    Raises:
        UnsupportedMediaType: any other, or several.
    """
    name = header.strip().lower()
    if name in ("", "identity"):
        return None
    if name not in _WINDOW_BITS:
        raise UnsupportedMediaType(
            f"header Content-Encoding: expected gzip, deflate or none, got {name[:64]!r}"
        )
    return name


def decompress(content: bytes, encoding: str, limit_bytes: int) -> bytes:
    """
    Return what was compressed; gzip may consist of several members.

    Raises:
        InvalidInput: the content is not of that format, or ends too early.
        TooLarge: it is larger than the limit; no more than that was made of it.
    """
    parts: list[bytes] = []
    size = 0
    rest = content
    while True:
        reader = zlib.decompressobj(_WINDOW_BITS[encoding])
        while not reader.eof:
            try:
                part = reader.decompress(rest, _STEP_BYTES)
            except zlib.error:
                raise InvalidInput(f"body: expected {encoding} data, got other bytes") from None
            size += len(part)
            if size > limit_bytes:
                raise TooLarge(f"body: at most {limit_bytes} bytes decompressed, got more")
            parts.append(part)
            rest = reader.unconsumed_tail
            if not part and not rest and not reader.eof:
                raise InvalidInput(f"body: expected whole {encoding} data, got its beginning")
        rest = reader.unused_data
        if not rest:
            return b"".join(parts)
        if encoding != "gzip":
            raise InvalidInput(f"body: expected nothing after the {encoding} data, got more")


def accepted(header: str) -> str | None:
    """Return the encoding that an `Accept-Encoding` likes best and that is offered, if any."""
    best, best_quality = None, 0.0
    for part in header.lower().split(","):
        name, _, parameter = part.strip().partition(";")
        name = name.strip()
        try:
            quality = float(parameter.strip().removeprefix("q=")) if parameter else 1.0
        except ValueError:
            continue
        if name in _WINDOW_BITS and quality > best_quality:
            best, best_quality = name, quality
    return best


def compress(pieces: Iterator[Chunk], encoding: str) -> Iterator[bytes]:
    """Give the pieces compressed."""
    writer = zlib.compressobj(_LEVEL, wbits=_WINDOW_BITS[encoding])
    for piece in pieces:
        if part := writer.compress(piece):
            yield part
    yield writer.flush()
