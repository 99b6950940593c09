"""
The protocol's system shared memory: tensors change hands without going through HTTP.

Nothing is mapped.  A client may shorten its segment at any time, and touching a
mapping beyond the end would kill the process; reading by file descriptor comes
back with less instead
(https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_shared_memory.md).
"""

import os
import re
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from service.codecs.checks import kind_of, shown
from service.errors import Disabled, InvalidInput, NotFound

MAX_REGIONS: Final = 64
MAX_NAME: Final = 256
DIRECTORY: Final = Path("/dev/shm")  # noqa: S108
"""Where shm_open(3) finds its names."""

_KEY: Final = re.compile(r"/[A-Za-z0-9._-]{1,254}")
_RESERVED: Final = ("/headwise", "/sem.", "/triton_python_backend")
"""What is no tensor: our own, the semaphores of the C library, Triton's talk with its backends."""

_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_MOST: Final = 2**30
"""Bytes of one system call; the kernel takes no more than 2 GiB."""


@dataclass(frozen=True)
class Slot:
    """Where a client says that a tensor lies, or shall lie: bytes of a region it has registered."""

    region: str
    offset: int
    byte_size: int


class Region:
    """
    A registered part of a segment.

    Its file is open as long as anybody holds the region: a call that has begun ends
    well although the region is unregistered.
    """

    def __init__(self, name: str, key: str, offset: int, byte_size: int, descriptor: int) -> None:
        self.name = name
        self.key = key
        self.offset = offset
        self.byte_size = byte_size
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False

    def read(self, offset: int, byte_size: int) -> npt.NDArray[np.uint8]:
        """
        Return a copy of so many bytes.

        Raises:
            InvalidInput: the segment has become too short.
        """
        content = np.empty(byte_size, np.uint8)
        rest, place = content.data, self.offset + offset
        while rest:
            count = os.preadv(self._descriptor, [rest[:_MOST]], place)
            if not count:
                self._refuse_short(offset + byte_size)
            rest, place = rest[count:], place + count
        return content

    def write(self, offset: int, content: memoryview) -> None:
        """
        Put the bytes there.

        Raises:
            InvalidInput: the segment has become too short, or the machine has no room for it.
        """
        rest, place = content, self.offset + offset
        # Writing beyond the end would lengthen what the client has shortened.
        if os.fstat(self._descriptor).st_size < place + len(rest):
            self._refuse_short(offset + len(rest))
        while rest:
            try:
                count = os.pwrite(self._descriptor, rest[:_MOST], place)
            except OSError as error:
                reason = os.strerror(error.errno or 0)
                raise InvalidInput(f"{_shown(self.name)}: cannot be written: {reason}") from None
            rest, place = rest[count:], place + count

    def _refuse_short(self, wanted: int) -> None:
        raise InvalidInput(
            f"{_shown(self.name)}: expected {wanted} bytes in it,"
            " but its segment has become shorter"
        )


@dataclass(frozen=True, eq=False)
class Place:
    """A slot that has been found: whoever holds it may read or write there, in any thread."""

    region: Region
    offset: int
    byte_size: int

    def read(self) -> npt.NDArray[np.uint8]:
        """Return a copy of what is there; raises as `Region.read`."""
        return self.region.read(self.offset, self.byte_size)

    def write(self, content: memoryview) -> None:
        """Put the bytes at its start; raises as `Region.write`."""
        self.region.write(self.offset, content)


class SharedMemory:
    """
    The regions that clients have registered with one server; used on its event loop.

    While it is not offered there never is any.
    """

    def __init__(self, *, is_offered: bool, directory: Path = DIRECTORY) -> None:
        self._is_offered = is_offered
        self._directory = directory
        self._regions: dict[str, Region] = {}

    def check_offered(self) -> None:
        """
        Return when clients may use shared memory.

        Raises:
            Disabled: the setting says otherwise.
        """
        if not self._is_offered:
            raise Disabled(
                "system shared memory: switched off; HEADWISE_SHARED_MEMORY=true switches it on"
            )

    def register(self, name: str, key: object, offset: object, byte_size: object) -> None:
        """
        Give a part of the segment `key` a name.

        Raises:
            Disabled: shared memory is not offered.
            InvalidInput: a value is wrong, the name is taken, the segment is not there or
                too short, or there are too many regions.
        """
        self.check_offered()
        if len(name) > MAX_NAME:
            raise InvalidInput(
                f"{_shown(name)}: expected a name of at most {MAX_NAME} characters, got {len(name)}"
            )
        if name in self._regions:
            raise InvalidInput(f"{_shown(name)}: already in manager; unregister it first")
        if len(self._regions) >= MAX_REGIONS:
            raise InvalidInput(
                f"{_shown(name)}: at most {MAX_REGIONS} regions may be registered; unregister"
                " one first"
            )
        key = _checked_key(key)
        offset = checked_size("offset", offset, least=0)
        byte_size = checked_size("byte_size", byte_size, least=1)
        descriptor = _open(self._directory / key[1:])
        region = Region(name, key, offset, byte_size, descriptor)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidInput("key: expected a shared memory segment, got something else")
        if offset + byte_size > status.st_size:
            raise InvalidInput(
                f"byte_size: expected offset and byte_size within the segment's {status.st_size}"
                f" bytes, got {offset} and {byte_size}"
            )
        self._regions[name] = region

    def unregister(self, name: str | None = None) -> None:
        """Forget a region, or all of them; what was never registered is forgotten, too."""
        if name is None:
            self._regions.clear()
        else:
            self._regions.pop(name, None)

    def status(self, name: str | None = None) -> list[dict[str, str | int]]:
        """
        Return what is registered: one region, or all.

        Raises:
            NotFound: no region has that name.
        """
        if not self._is_offered:
            return []
        regions = self._regions.values() if name is None else [self._region(name)]
        return [
            {
                "name": region.name,
                "key": region.key,
                "offset": region.offset,
                "byte_size": region.byte_size,
            }
            for region in regions
        ]

    def place(self, slot: Slot) -> Place:
        """
        Return where a slot is.

        Raises:
            Disabled: shared memory is not offered.
            NotFound: no region has that name.
            InvalidInput: the slot reaches out of its region.
        """
        self.check_offered()
        region = self._region(slot.region)
        if slot.offset + slot.byte_size > region.byte_size:
            raise InvalidInput(
                f"{_shown(slot.region)}: expected shared_memory_offset and"
                f" shared_memory_byte_size within its {region.byte_size} bytes,"
                f" got {slot.offset} and {slot.byte_size}"
            )
        return Place(region, slot.offset, slot.byte_size)

    def _region(self, name: str) -> Region:
        region = self._regions.get(name)
        if region is None:
            raise NotFound(
                f"{_shown(name)}: no region of that name is registered; register it first"
            )
        return region


def checked_size(name: str, value: object, *, least: int) -> int:
    """
    Return a number of bytes that a client gave.

    Raises:
        InvalidInput: not a whole number, too small, or beyond what a file may hold.
    """
    if type(value) is not int or not least <= value < 2**62:
        raise InvalidInput(
            f"{name}: expected a whole number of bytes from {least}, got {shown(value)}"
        )
    return value


def _checked_key(key: object) -> str:
    if not isinstance(key, str) or not _KEY.fullmatch(key) or key in ("/.", "/.."):
        raise InvalidInput(
            "key: expected / and a name of letters, digits, dots, underscores and hyphens, got"
            f" {repr(key[:64]) if isinstance(key, str) else kind_of(key)}"
        )
    if key.startswith(_RESERVED):
        raise InvalidInput(
            f"key: names from {', '.join(_RESERVED)} on are reserved, got {key[:64]!r}"
        )
    return key


def _open(path: Path) -> int:
    try:
        return os.open(path, _FLAGS)
    except FileNotFoundError:
        raise InvalidInput("key: expected that of a shared memory segment; none has it") from None
    except OSError as error:
        cure = _same_user(path) if isinstance(error, PermissionError) else ""
        raise InvalidInput(
            f"key: that segment cannot be opened for reading and writing:"
            f" {os.strerror(error.errno or 0)}{cure}"
        ) from None


def _same_user(path: Path) -> str:
    """Say whose the segment is, and who would have to be."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:  # it went meanwhile
        return ""
    return (
        f"; it belongs to uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}, and the"
        f" server runs as uid {os.geteuid()}: run both as the same user"
    )


def _shown(name: str) -> str:
    return f"shared memory region {name[:64]!r}"
