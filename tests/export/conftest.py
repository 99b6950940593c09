"""What holds for all tests of the exporter."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Keep PyTorch off the other cores: on a busy machine its threads wait for each other."""
    import torch  # here, since this file is also read where there is none

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
