"""CUDA that cannot be had: what is missing is named."""

import ctypes
from pathlib import Path
from typing import Any

import pytest

from service.errors import ProviderUnavailable
from service.inference.cuda import check_cuda

NO_DEVICE = 100
"""The driver's CUDA_ERROR_NO_DEVICE."""


class Driver:
    """A stand-in for libcuda.so.1 with so many GPUs."""

    def __init__(self, gpus: int, status: int = 0) -> None:
        self._gpus, self._status = gpus, status

    def cuInit(self, flags: int) -> int:  # noqa: N802 (the driver's own name)
        """Return the status."""
        return self._status

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        """Fill in how many there are."""
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = self._gpus
        return 0


def loader(driver: Driver, missing: str = "") -> Any:
    """Return what opens every library but one."""

    def load(name: str) -> Any:
        if missing and name.endswith(missing):
            raise OSError("libcudnn.so.9: cannot open shared object file: No such file")
        return driver

    return load


def test_driver_that_is_not_here_is_named() -> None:
    """As the system's own loader says it, on a machine without the driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(ProviderUnavailable, match=r"libcuda\.so\.1: .*docker run --gpus all"):
            check_cuda(Path("/nonexistent"))
    else:
        with pytest.raises(ProviderUnavailable, match=r"a GPU|/nonexistent/libonnxruntime"):
            check_cuda(Path("/nonexistent"))


@pytest.mark.parametrize(
    ("driver", "told"),
    [
        (Driver(0), r"a GPU: the driver counts 0 \(CUDA error 0\)"),
        (Driver(0, NO_DEVICE), r"a GPU: the driver counts 0 \(CUDA error 100\)"),
    ],
)
def test_gpu_that_is_not_here_is_told(driver: Driver, told: str) -> None:
    """A driver without a device is no use."""
    with pytest.raises(ProviderUnavailable, match=told):
        check_cuda(Path("/runtime"), loader(driver))


def test_library_that_is_not_here_is_named() -> None:
    """The one that the provider misses, not the provider."""
    load = loader(Driver(1), missing="libonnxruntime_providers_cuda.so")

    with pytest.raises(ProviderUnavailable, match=r"lacks a library .* libcudnn\.so\.9"):
        check_cuda(Path("/runtime"), load)


def test_all_that_is_needed_passes() -> None:
    """Nothing is said about nothing missing."""
    check_cuda(Path("/runtime"), loader(Driver(1)))
