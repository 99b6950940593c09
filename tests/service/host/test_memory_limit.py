"""The memory that a process may hold, as cgroup v1 and v2 tell it."""

import os
from pathlib import Path

import pytest

from service.host.memory_limit import memory_limit

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
GIB = 2**30
UNLIMITED_V1 = "9223372036854771712"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {"memory.max": f"{GIB}"}, GIB),
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "4096"}, 4096),
        ("0::/a/b", {"a/b/memory.max": "4096", "a/memory.max": f"{GIB}"}, 4096),
        ("0::/gone/from/here", {"memory.max": "4096"}, 4096),
        ("0::/a", {"a/memory.max": "max"}, MACHINE),
        ("0::/a", {"a/memory.max": f"{2 * MACHINE}"}, MACHINE),
        ("0::/a", {"b/memory.max": "4096"}, MACHINE),
        ("5:memory:/a\n3:cpu:/b", {"memory/a/memory.limit_in_bytes": "8192"}, 8192),
        ("5:cpu,memory:/a", {"memory/memory.limit_in_bytes": "8192"}, 8192),
        ("5:memory:/a", {"memory/a/memory.limit_in_bytes": UNLIMITED_V1}, MACHINE),
        ("5:cpu:/a", {"memory/a/memory.limit_in_bytes": "8192"}, MACHINE),
        ("", {}, MACHINE),
        ("nonsense", {"memory.max": "4096"}, 4096),
    ],
)
def test_memory_limit_is_the_tightest_over_the_process(
    tmp_path: Path, membership: str, files: dict[str, str], expected: int
) -> None:
    """A group's own limit, one above it, or the machine's memory: whichever is least."""
    told = tmp_path / "membership"
    told.write_text(membership)
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    assert memory_limit(root=tmp_path / "cgroup", membership=told) == expected


def test_memory_limit_of_this_process_is_no_more_than_the_machine_has() -> None:
    """What is really there can be read."""
    assert 0 < memory_limit() <= MACHINE


def test_memory_limit_without_any_group_is_the_machine_s(tmp_path: Path) -> None:
    """Nothing to read is no failure."""
    gone = tmp_path / "gone"

    assert memory_limit(root=gone, membership=gone) == MACHINE
