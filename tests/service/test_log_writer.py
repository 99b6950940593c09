"""The writer of the log: nothing lost, nothing out of order, and nobody held up."""

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.log_writer import LogWriter
from tests.support.server import ROOT

LIMIT_S = 60
"""After this a test fails; nothing here takes as long."""


def notice(lines: int) -> bytes:
    """Return the line that tells of lost ones."""
    return b"lost %d\n" % lines


@dataclass
class Pipe:
    """A pipe, and a writer on its one end."""

    read_end: int
    write_end: int
    writer: LogWriter

    def read(self, is_all: Callable[[bytes], bool]) -> bytes:
        """Return what comes, once it is all."""
        content = b""
        while not is_all(content):
            ready, _, _ = select.select([self.read_end], [], [], LIMIT_S)
            assert ready, f"nothing came after {content[-80:]!r}"
            content += os.read(self.read_end, 2**20)
        return content

    def read_bytes(self, count: int) -> bytes:
        """Return what comes, once it is so many bytes."""
        return self.read(lambda content: len(content) >= count)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """Return a pipe whose writer's buffer holds 200 000 bytes."""
    made = _pipe()
    yield made
    os.close(made.read_end)  # a writer that is held up gets a broken pipe, and ends
    made.writer.close(LIMIT_S)
    os.close(made.write_end)


def _pipe() -> Pipe:
    read_end, write_end = os.pipe()
    return Pipe(read_end, write_end, LogWriter(write_end, notice=notice, max_bytes=200_000))


def test_line_that_stays_alone_is_written_by_the_timer(pipe: Pipe) -> None:
    """No later line is needed, and nobody flushes."""
    pipe.writer.write(b"a\n")

    assert pipe.read_bytes(2) == b"a\n"


def test_line_for_at_once_comes_after_those_that_were_before_it(pipe: Pipe) -> None:
    """An error stands where it happened among the requests."""
    expected = b""
    for i in range(300):
        line = b"%d\n" % i
        expected += line
        pipe.writer.write(line, at_once=i % 7 == 0)

    assert pipe.read_bytes(len(expected)) == expected


def test_lines_of_many_threads_are_whole_and_each_in_its_order(pipe: Pipe) -> None:
    """A line is never mixed with another, and none is missing."""

    def work(name: int) -> None:
        for i in range(500):
            pipe.writer.write(b"%d %03d %s\n" % (name, i, b"x" * 20), at_once=i % 50 == 0)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    content = pipe.read_bytes(4 * 500 * 27)
    for thread in threads:
        thread.join()

    by_name: dict[bytes, list[int]] = {b"%d" % name: [] for name in range(4)}
    for line in content.splitlines():
        name, number, rest = line.split(b" ")
        assert rest == b"x" * 20
        by_name[name].append(int(number))
    assert list(by_name.values()) == [list(range(500))] * 4


def test_pipe_that_nobody_reads_holds_up_nobody_and_the_loss_is_counted(pipe: Pipe) -> None:
    """Writing returns at once; what was kept comes in order, then how many lines are lost."""
    lines = [b"%06d %s\n" % (i, b"x" * 92) for i in range(10_000)]
    for line in lines:
        pipe.writer.write(line)
    assert not pipe.writer.flush(0.01)

    content = pipe.read(lambda content: b"lost" in content and content.endswith(b"\n"))
    *kept, last = content.splitlines(keepends=True)

    # 200 000 bytes in the buffer, and what the pipe took of the first chunk.
    assert 2000 <= len(kept) < 10_000
    assert kept == lines[: len(kept)]
    assert last == notice(len(lines) - len(kept))
    pipe.writer.write(b"again\n")
    assert pipe.read_bytes(6) == b"again\n"


def test_full_buffer_still_takes_what_is_for_at_once(pipe: Pipe) -> None:
    """Requests that nobody reads of do not crowd out the error that says why."""
    for _ in range(10_000):
        pipe.writer.write(b"x" * 99 + b"\n")
    pipe.writer.write(b"error\n", at_once=True)

    assert pipe.read(lambda content: b"error\n" in content)


def test_broken_pipe_loses_the_log_and_nothing_else() -> None:
    """Nothing is raised, and nothing stays in memory."""
    pipe = _pipe()
    os.close(pipe.read_end)
    for _ in range(5000):
        pipe.writer.write(b"x" * 99 + b"\n", at_once=True)

    assert pipe.writer.flush(LIMIT_S)
    pipe.writer.close(LIMIT_S)
    os.close(pipe.write_end)


def test_descriptor_that_does_not_block_gets_everything(pipe: Pipe) -> None:
    """Who shares a terminal may have made it so; each write then takes a part, or nothing."""
    os.set_blocking(pipe.write_end, False)
    lines = [b"%06d %s\n" % (i, b"x" * 92) for i in range(1900)]
    for line in lines:
        pipe.writer.write(line)

    assert pipe.read_bytes(190_000) == b"".join(lines)


def test_line_that_a_full_disk_cut_off_does_not_spoil_the_next() -> None:
    """It begins on a line of its own, and both cut and missing lines are counted."""
    code = (
        "import os, resource, sys, tempfile\n"
        "from service.log_writer import LogWriter\n"
        "file = tempfile.TemporaryFile()\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "writer = LogWriter(file.fileno(), notice=lambda lines: b'lost %d\\n' % lines)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))\n"
        "writer.write(b'first\\nsecond\\nthird\\n', at_once=True)\n"
        "writer.flush(60)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
        "writer.write(b'fourth\\n', at_once=True)\n"
        "writer.close(60)\n"
        "file.seek(0)\n"
        "sys.stdout.buffer.write(file.read())\n"
    )

    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60, check=True
    )

    assert ended.stdout == b"first\nseco\nfourth\nlost 2\n"


def test_end_of_the_process_writes_what_is_left() -> None:
    """Whoever ends it, and though nobody flushed; an end is not held up by a full pipe."""
    code = (
        "from service.log_writer import LogWriter\n"
        "writer = LogWriter(2, notice=lambda lines: b'')\n"
        "for i in range(10):\n"
        "    writer.write(b'%d\\n' % i)\n"
        "raise SystemExit(3)\n"
    )

    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60, check=False
    )

    assert ended.returncode == 3
    assert ended.stderr == b"".join(b"%d\n" % i for i in range(10))


def test_end_of_the_process_does_not_wait_for_a_reader_that_has_stopped() -> None:
    """A pipe that is full stays full; the process ends with its own code."""
    code = (
        "from service.log_writer import LogWriter\n"
        "writer = LogWriter(2, notice=lambda lines: b'')\n"
        "writer.write(b'x' * 999_999 + b'\\n', at_once=True)\n"
        "raise SystemExit(3)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE)
    with process:
        assert process.wait(60) == 3


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.binary(max_size=300).map(lambda b: b.replace(b"\n", b"")), st.booleans()),
        max_size=60,
    )
)
def test_any_lines_come_out_as_they_went_in(lines: list[tuple[bytes, bool]]) -> None:
    """Whichever are to be written at once, the bytes are those that were logged, in order."""
    pipe = _pipe()
    for line, at_once in lines:
        pipe.writer.write(line + b"\n", at_once=at_once)
    pipe.writer.close(LIMIT_S)
    os.close(pipe.write_end)
    with open(pipe.read_end, "rb") as reader:
        assert reader.read() == b"".join(line + b"\n" for line, _ in lines)
