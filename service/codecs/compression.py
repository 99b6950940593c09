"""
Compressed bodies: gzip (RFC 1952) and what HTTP calls deflate, the zlib format (RFC 1950).

The size of a compressed body's content is unknown until it is read, so reading stops at a
limit.  The work is linear in what comes in and goes out, and is done in small steps,
between which it can be ended.
"""

import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Final

from service.codecs.chunks import Chunk
from service.errors import Draining, InvalidInput, TooLarge, UnsupportedMediaType

ENCODINGS: Final = ("gzip", "deflate")

_WINDOW_BITS: Final = {"gzip": 31, "deflate": 15}
"""What zlib calls the two formats."""

_LEVEL: Final = 1
"""Tensors hardly compress; more effort saves a per cent and takes five times as long."""

_STEP_BYTES: Final = 256 * 1024
"""The most that one step produces: 2 to 4 ms of work, without the interpreter's lock."""

_FIRST_INPUT_BYTES: Final = 64
_MAX_INPUT_BYTES: Final = 64 * 1024
"""
What the first step of a gzip member is given, and the most that any step is; each step gets
twice as much as the one before.  zlib copies what it leaves of a step's input, so the copies
of a member stay in proportion to that member, however small it is and however much follows.
"""

MAX_MEMBERS: Final = 4096
"""
How many gzip members a body may consist of.  Each costs a decompressor of its own, also where
it is empty; tools that write blocks of 64 KiB, such as bgzip, fill 256 MiB with so many.
"""


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


def decompress(
    content: bytes,
    encoding: str,
    limit_bytes: int,
    hold: Callable[[int], None] | None = None,
    stop: threading.Event | None = None,
) -> bytes:
    """
    Return what was compressed; gzip may consist of several members.

    `hold` is told after every step how much there is, and may raise.

    Raises:
        InvalidInput: the content is not of that format, ends too early, or has more than
            `MAX_MEMBERS` gzip members.
        TooLarge: it is larger than the limit; at most one step more was made of it.
        Draining: `stop` was set, which is looked at before every step.
    """
    parts: list[bytes] = []
    size = offset = members = 0
    while True:
        members += 1
        if members > MAX_MEMBERS:
            raise InvalidInput(f"body: expected at most {MAX_MEMBERS} gzip members, got more")
        reader = _Reader(content, offset, encoding)
        for part in reader.steps():
            size += len(part)
            if size > limit_bytes:
                raise TooLarge(f"body: at most {limit_bytes} bytes decompressed, got more")
            if stop is not None and stop.is_set():
                raise Draining("body: decompressing it was ended")
            if hold is not None:
                hold(size)
            parts.append(part)
        offset = reader.offset
        if offset == len(content):
            return b"".join(parts)
        if encoding != "gzip":
            raise InvalidInput(f"body: expected nothing after the {encoding} data, got more")


class _Reader:
    """Reads one gzip member or deflate stream that begins at an offset of the content."""

    def __init__(self, content: bytes, offset: int, encoding: str) -> None:
        self.offset = offset
        """Where the input begins that no step has used yet."""
        self._content = memoryview(content)
        self._encoding = encoding

    def steps(self) -> Iterator[bytes]:
        """
        Give what each step makes of the input; afterwards `offset` is where the member ends.

        Raises:
            InvalidInput: the input is not of the format, or ends before the member does.
        """
        reader = zlib.decompressobj(_WINDOW_BITS[self._encoding])
        input_bytes = _FIRST_INPUT_BYTES
        while not reader.eof:
            given = self._content[self.offset : self.offset + input_bytes]
            try:
                part = reader.decompress(given, _STEP_BYTES)
            except zlib.error:
                raise InvalidInput(
                    f"body: expected {self._encoding} data, got other bytes"
                ) from None
            if not part and not given and not reader.eof:
                raise InvalidInput(f"body: expected whole {self._encoding} data, got its beginning")
            self.offset += len(given) - len(reader.unconsumed_tail) - len(reader.unused_data)
            input_bytes = min(2 * input_bytes, _MAX_INPUT_BYTES)
            yield part


def compress(pieces: Iterator[Chunk], encoding: str) -> Iterator[bytes]:
    """Give the pieces compressed."""
    writer = zlib.compressobj(_LEVEL, wbits=_WINDOW_BITS[encoding])
    for piece in pieces:
        if part := writer.compress(piece):
            yield part
    yield writer.flush()
