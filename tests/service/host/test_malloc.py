"""What the C library keeps."""

import itertools
import platform
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from service.host.malloc import give_back, keep_blocks
from tests.support.layers import Layers
from tests.support.server import Server, until


def test_heap_settings_are_taken_by_this_c_library() -> None:
    """Glibc takes both; a value beyond its own maximum would be refused."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("not glibc")

    assert keep_blocks()


def test_freed_memory_is_given_back_by_this_c_library() -> None:
    """Something always is: the test process has freed much."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("not glibc")
    assert keep_blocks()
    blocks = [bytearray(1024 * 1024) for _ in range(64)]
    del blocks

    assert give_back()


def test_server_that_rests_gives_memory_back(layers: Layers) -> None:
    """What large calls took is the system's again some seconds after the last of them."""
    with Server(layers.repository) as server:
        status = Path(f"/proc/{server.process.pid}/statm")

        def resident_mb() -> float:
            return int(status.read_text().split()[1]) * 4096 / 2**20

        before = resident_mb()
        content = save({"embeddings": np.ones((64, 256, 24), np.float32)})
        for _ in range(5):
            answer = server.post(
                "/v1/attention?model=mha&weights=true",
                content=content,
                headers={"Content-Type": "application/x-safetensors"},
            )
            assert answer.status_code == 200
        worked = resident_mb()
        assert worked > before + 40
        until(lambda: resident_mb() < before + (worked - before) / 2)


HEAP_BYTES = 64 * 2**20
"""What glibc reserves for the arena of a thread, at a multiple of it."""


@pytest.mark.fault("A9")
def test_server_has_one_arena_for_all_its_threads(layers: Layers) -> None:
    """What one thread freed is there for all, and is given back: other arenas keep their top."""
    with Server(layers.repository) as server:
        server.get("/v1/models")
        maps = Path(f"/proc/{server.process.pid}/maps").read_text().splitlines()

    regions = [re.match(r"(\w+)-(\w+) (\S+) \S+ \S+ 0\s*$", line) for line in maps]
    arenas = [
        (used[0], rest[0])
        for used, rest in itertools.pairwise(regions)
        if used is not None and rest is not None and (used[3], rest[3]) == ("rw-p", "---p")
        if used[2] == rest[1] and int(rest[2], 16) - int(used[1], 16) == HEAP_BYTES
        if int(used[1], 16) % HEAP_BYTES == 0
    ]
    assert arenas == []
