"""
Whether CUDA can be had here: driver, GPU and libraries, each missed by its name.

onnxruntime itself only warns when one of them is missing, and uses the CPU.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from service.errors import ProviderUnavailable

_DRIVER: Final = "libcuda.so.1"
_PROVIDER: Final = ("libonnxruntime_providers_shared.so", "libonnxruntime_providers_cuda.so")


def check_cuda(runtime: Path, load: Callable[[str], Any] = ctypes.CDLL) -> None:
    """
    Return when a GPU answers and all that onnxruntime's provider links to can be loaded.

    Args:
        runtime: the directory of onnxruntime's own libraries.
        load: opens a shared library, or raises OSError with its name.

    Raises:
        ProviderUnavailable: the first that is missing.
    """
    try:
        driver = load(_DRIVER)
    except OSError as error:
        raise _missing(
            f"the NVIDIA driver's library: {error}; is a GPU given to this machine or container"
            " (docker run --gpus all)?"
        ) from None
    count = ctypes.c_int(0)
    # https://docs.nvidia.com/cuda/cuda-driver-api: cuInit, cuDeviceGetCount; 0 = success
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status != 0 or count.value == 0:
        raise _missing(f"a GPU: the driver counts {count.value} (CUDA error {status})")
    try:
        for name in _PROVIDER:
            load(str(runtime / name))
    except OSError as error:
        raise _missing(f"a library of CUDA or cuDNN (extra serve-cuda): {error}") from None


def _missing(what: str) -> ProviderUnavailable:
    return ProviderUnavailable(f"provider: asked for cuda, but this lacks {what}")
