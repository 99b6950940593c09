"""The processes that decode large bodies: what they give, their limits, and their ends."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.codecs import attention_json
from service.codecs.reader_process import CannotStart, ReaderProcess
from service.codecs.readers import PROCESSES, Readers
from service.errors import DecodingFailed, InvalidInput, NotReady, QueueFull, TooLarge
from service.inference.validation import Limits
from tests.support.processes import children_of, command_of
from tests.support.server import until

LIMITS = Limits(max_rows=256, max_length=4096, max_tokens=131072, max_answer_bytes=2**29)
FOR_EVER = b"import time; time.sleep(3600)"


def nothing(size: int) -> None:
    """Hold any amount."""


def with_readers(
    scenario: Callable[[Readers], Awaitable[None]], *, timeout_s: float = 3600
) -> None:
    """Run a scenario with processes that are gone afterwards."""

    async def run() -> None:
        readers = Readers(timeout_s)
        try:
            await scenario(readers)
        finally:
            readers.close()

    asyncio.run(run())
    until(lambda: not children())


def children() -> list[int]:
    """Return this process's decoding processes, those included that have ended unnoticed."""
    return [child for child in children_of(os.getpid()) if is_reader(child)]


def is_reader(child: int) -> bool:
    """Say so unless it is of another test; what has ended unnoticed has no command line."""
    command = command_of(child)
    return command is not None and (not command or b"reader_process" in command)


async def is_true(condition: Callable[[], bool]) -> None:
    """Return once that is so."""
    await asyncio.to_thread(until, condition)


@pytest.mark.parametrize(
    "body",
    [
        b'{"embeddings": [[[1, 2], [3, 4]], [[5, NaN]]], "attend_mask": [[true, false], [true]]}',
        b'{"embeddings": [[0.5, -1e-3]], "head_mask": [1, 0], "timeout_s": 2}',
    ],
)
def test_readers_give_what_is_decoded_here(body: bytes) -> None:
    """Tensors to the bit, which may be written to, and options; one process serves many bodies."""

    async def scenario(readers: Readers) -> None:
        expected, options, is_single = attention_json.decode(body, {}, LIMITS)
        for _ in range(2):
            found = await readers.decode(attention_json.decode, body, {}, LIMITS, hold=nothing)
            for name in ("embeddings", "attend_mask", "head_mask", "lengths"):
                np.testing.assert_array_equal(getattr(found[0], name), getattr(expected, name))
            assert found[0].embeddings.flags.writeable
            assert found[1:] == (options, is_single)
        assert len(children()) == 1

    with_readers(scenario)


def test_readers_raise_what_decoding_raises() -> None:
    """A refusal as it is worded; anything else with its trace, for the log."""

    async def scenario(readers: Readers) -> None:
        with pytest.raises(InvalidInput, match=r"^embeddings: expected \[B\]\[S\]\[E\]"):
            await readers.decode(attention_json.decode, b"{}", {}, LIMITS, hold=nothing)
        with pytest.raises(DecodingFailed, match="ZeroDivisionError: division by zero") as failed:
            await readers.decode(exec, b"1 / 0", hold=nothing)
        assert "Traceback" in failed.value.__notes__[0]
        with pytest.raises(TooLarge, match="more memory than the system gives"):
            await readers.decode(exec, b"raise MemoryError", hold=nothing)
        await readers.decode(exec, b"print('between the messages')", hold=nothing)

    with_readers(scenario)


@pytest.mark.fault("A3")
def test_readers_end_a_process_whose_caller_leaves() -> None:
    """And the next body has a new one."""

    async def scenario(readers: Readers) -> None:
        task = asyncio.create_task(readers.decode(exec, FOR_EVER, hold=nothing))
        await is_true(lambda: bool(children()))
        [left] = children()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await is_true(lambda: left not in children())
        assert await readers.decode(len, b"next", hold=nothing) == 4

    with_readers(scenario)


@pytest.mark.fault("A3")
def test_readers_end_a_process_that_takes_too_long() -> None:
    """The refusal names the limit."""

    async def scenario(readers: Readers) -> None:
        with pytest.raises(TooLarge, match=r"decoded within 0\.5 s \(decode_timeout_s\), these"):
            await readers.decode(exec, FOR_EVER, hold=nothing)

    with_readers(scenario, timeout_s=0.5)


@pytest.mark.fault("A3", "A6")
def test_readers_end_a_process_for_whose_memory_there_is_no_room() -> None:
    """What it really takes counts, whatever the body's length; others are decoded meanwhile."""
    limit = 200 * 2**20
    held: list[int] = []

    def hold(size: int) -> None:
        held.append(size)
        if size > limit:
            raise QueueFull("no room")

    async def scenario(readers: Readers) -> None:
        other = asyncio.create_task(readers.decode(exec, FOR_EVER, hold=nothing))
        with pytest.raises(QueueFull, match="no room"):
            await readers.decode(
                exec, b"kept = b'x' * 2**28\nimport time; time.sleep(3600)", hold=hold
            )
        assert not other.done()
        other.cancel()

    with_readers(scenario)

    assert held[0] < limit < held[-1]


@pytest.mark.fault("A3")
def test_readers_decode_bodies_at_once_and_small_ones_first() -> None:
    """A body waits only while as many others are decoded, and behind smaller ones at most."""

    async def scenario(readers: Readers) -> None:
        busy = [
            asyncio.create_task(readers.decode(exec, FOR_EVER, hold=nothing))
            for _ in range(PROCESSES)
        ]
        await is_true(lambda: len(children()) == PROCESSES)
        done: list[str] = []

        async def decode(name: str, content: bytes) -> None:
            await readers.decode(len, content, hold=nothing)
            done.append(name)

        large = asyncio.create_task(decode("large", bytes(100 * 2**20)))
        await asyncio.sleep(0)
        left = asyncio.create_task(decode("left", bytes(10)))
        small = asyncio.create_task(decode("small", bytes(1000)))
        await asyncio.sleep(0)
        left.cancel()
        busy[0].cancel()
        await asyncio.gather(large, small)
        assert done == ["small", "large"]
        for task in busy:
            task.cancel()

    with_readers(scenario)


def test_readers_outlive_a_process_that_is_ended_from_outside(tmp_path: Path) -> None:
    """Its body may be sent again later; the next one is decoded."""
    began = tmp_path / "began"

    async def scenario(readers: Readers) -> None:
        content = f"open({str(began)!r}, 'w').close()\n".encode() + FOR_EVER
        task = asyncio.create_task(readers.decode(exec, content, hold=nothing))
        await is_true(began.exists)
        os.kill(children()[0], signal.SIGKILL)
        with pytest.raises(NotReady, match="ended from outside, most often because memory"):
            await task
        with pytest.raises(DecodingFailed, match="ended: exit code 3"):
            await readers.decode(exec, b"import os; os._exit(3)", hold=nothing)
        assert await readers.decode(len, b"next", hold=nothing) == 4
        [idle] = children()
        os.kill(idle, signal.SIGKILL)
        await is_true(lambda: "Z" in Path(f"/proc/{idle}/stat").read_text().rsplit(")")[1])
        assert await readers.decode(len, b"next", hold=nothing) == 4

    with_readers(scenario)


@pytest.mark.fault("A7")
@pytest.mark.parametrize(
    ("owner", "attribute", "error", "reason"),
    [
        (subprocess, "Popen", BlockingIOError(11, "Resource temporarily unavailable"), "Resource"),
        (subprocess, "Popen", OSError(24, "Too many open files"), "Too many open files"),
        (threading.Thread, "start", RuntimeError("can't start new thread"), "can't start new"),
    ],
)
def test_readers_that_cannot_start_refuse_by_name_and_are_reported_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    attribute: str,
    error: Exception,
    reason: str,
) -> None:
    """At the check of the start already; as soon as it is possible again, bodies are decoded."""

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    async def scenario(readers: Readers) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, fail)
            await readers.check()
            for _ in range(2 * PROCESSES):
                with pytest.raises(NotReady, match=f"could not be started: {reason}"):
                    await readers.decode(len, b"body", hold=nothing)
        assert await readers.decode(len, b"body", hold=nothing) == 4

    with_readers(scenario)

    [record] = [r for r in caplog.records if "large JSON bodies are refused" in r.message]
    assert reason in record.fields["problem"]  # type: ignore[attr-defined]


@pytest.mark.fault("A7")
def test_reader_process_that_ends_at_its_start_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the last line that it wrote."""
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "__init__.py").write_text("raise OSError('planted')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    with pytest.raises(CannotStart, match=r"it ended at its start: .*OSError: planted"):
        ReaderProcess().start()
