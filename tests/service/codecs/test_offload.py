"""Work that is handed to a thread ends for who waits for it, however it ends."""

import asyncio

import pytest

from service.codecs.offload import Offload
from service.errors import InvalidInput


@pytest.mark.fault("C5")
@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration, MemoryError, InvalidInput])
def test_exception_of_any_class_reaches_who_waits(kind: type[Exception]) -> None:
    """No future may raise StopIteration: a task that waits for one would wait for ever."""

    def work() -> None:
        raise kind("planted")

    async def scenario() -> None:
        offload = Offload(decode_timeout_s=60)
        try:
            await asyncio.wait_for(offload.in_thread(work), 60)
        finally:
            offload.close()

    with pytest.raises(RuntimeError if kind is StopIteration else kind) as caught:
        asyncio.run(scenario())

    assert "planted" in str(caught.value.__cause__ if kind is StopIteration else caught.value)
