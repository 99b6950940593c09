"""What the C library keeps."""

import platform

import pytest

from service.heap import keep_small_blocks


def test_heap_settings_are_taken_by_this_c_library() -> None:
    """Glibc takes both; a value beyond its own maximum would be refused."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("not glibc")

    assert keep_small_blocks()
