"""Large bodies: decoded by processes with limits, within a budget of memory, wherever it runs."""

import concurrent.futures
import contextlib
import gzip
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from safetensors.numpy import save

from tests.support.layers import Layers
from tests.support.processes import children_of
from tests.support.server import Server, until
from tests.system.test_main import GOOD, connected, metric, serve

LARGE = orjson.dumps(GOOD) + b" " * (5 * 2**20)
"""A call that is decoded by a process of its own, and soon."""

MIB = 2**20

NO_MORE_THREADS = """
import os, sys, threading
import service.__main__ as process

start, started = threading.Thread.start, 0

def start_or_not(self):
    global started
    is_refused = self.name.startswith(os.environ["REFUSED"])
    is_late = started == int(os.environ["ALLOWED"]) or os.path.exists(os.environ["NO_MORE"])
    if is_refused or is_late:
        raise RuntimeError("can't start new thread")
    started += 1
    start(self)

threading.Thread.start = start_or_not
sys.exit(process.main(sys.argv[1:]))
"""


def head(body_bytes: int, path: str = "/v1/attention", **headers: str) -> bytes:
    """Return a request's head."""
    named = {"Host": "x", "Content-Length": str(body_bytes)}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def children(server: Server) -> list[int]:
    """Return the processes that the server has."""
    return children_of(server.process.pid)


def stopped_reader(server: Server) -> int:
    """Return the only process that waits for large bodies, which does nothing from now on."""
    until(lambda: bool(children(server)))
    while True:
        assert server.post("/v1/attention", content=LARGE).status_code == 200
        reader, *others = children(server)
        if not others:
            os.kill(reader, signal.SIGSTOP)
            return reader
        # The one of the start was not ready yet: begin again once both have rested long enough.
        until(lambda: not children(server))


def leave(caller: socket.socket) -> None:
    """End a connection without a word."""
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    caller.close()


@pytest.mark.fault("A3")
def test_body_whose_decoding_hangs_holds_up_no_other(layers: Layers) -> None:
    """Others are decoded meanwhile; the process ends with its caller, and another takes over."""
    with Server(layers.repository) as server:
        reader = stopped_reader(server)
        with connected(server) as caller:
            caller.sendall(head(len(LARGE)) + LARGE)
            until(lambda: metric(server, "headwise_body_memory_bytes") > 0)
            others = [server.post("/v1/attention", content=LARGE).status_code for _ in range(2)]
            was_there = reader in children(server)
            leave(caller)
        until(lambda: reader not in children(server))
        until(lambda: metric(server, "headwise_body_memory_bytes") == 0)
        after = server.post("/v1/attention", content=LARGE).status_code
        memory = metric(server, "headwise_reader_memory_bytes")
        log = server.whole_log()

    assert others == [200, 200]
    assert was_there
    assert after == 200
    assert memory > MIB
    assert log.count('"status":499') == 1
    assert "Traceback" not in log


@pytest.mark.fault("A3")
def test_body_whose_decoding_takes_too_long_is_413(layers: Layers) -> None:
    """By the server's clock, whatever the process does."""
    with Server(layers.repository, decode_timeout_s=8) as server:
        reader = stopped_reader(server)
        late = server.post("/v1/attention", content=LARGE)
        until(lambda: reader not in children(server))

    assert (late.status_code, late.json()["code"]) == (413, "too_large")
    assert "decoded within 8 s (decode_timeout_s)" in late.json()["error"]


@pytest.mark.fault("A6")
def test_bodies_beyond_their_memory_are_refused_before_they_are_sent(layers: Layers) -> None:
    """By their announced length, JSON by a multiple of it; small ones are served all the while."""
    json, raw = "application/json", "application/x-safetensors"
    with Server(layers.repository, max_bodies_bytes=64 * MIB) as server:
        with connected(server) as holder:
            holder.sendall(head(10 * MIB))
            until(lambda: metric(server, "headwise_body_memory_bytes") == 60 * MIB)
            answers = []
            for size, kind in ((MIB, json), (4 * MIB, raw), (11 * MIB, json), (22 * MIB, raw)):
                with connected(server) as late:
                    late.sendall(head(size, Content_Type=kind))
                    answers.append(late.recv(2**16))
            small = server.post("/v1/attention", json=GOOD).status_code
            leave(holder)
        until(lambda: metric(server, "headwise_body_memory_bytes") == 0)
        after = server.post("/v1/attention", content=LARGE).status_code

    assert [answer[9:12] for answer in answers] == [b"429", b"429", b"413", b"413"]
    assert all(b"\r\nretry-after: 1\r\n" in answer for answer in answers[:2])
    assert all(b'"code":"queue_full"' in answer for answer in answers[:2])
    assert b"(max_bodies_bytes)" in answers[2]
    assert (small, after) == (200, 200)


@pytest.mark.fault("A6")
def test_body_that_grows_beyond_the_memory_is_refused(layers: Layers) -> None:
    """In chunks, decompressed, or while it is decoded: what it has grown to counts."""
    numbers = b'{"model": "tiny", "embeddings": [[' + b"0," * (3 * MIB) + b"0]]}"
    chunk = b"%x\r\n" % MIB + b" " * MIB + b"\r\n"
    with Server(layers.repository, max_bodies_bytes=50 * MIB) as server:
        with connected(server) as caller:
            start = head(0, Transfer_Encoding="chunked").replace(b"Content-Length: 0\r\n", b"")
            with contextlib.suppress(ConnectionError):
                caller.sendall(start + 20 * chunk)
            chunked = caller.recv(2**16)
        packed = gzip.compress(bytes(40 * MIB))
        unpacked = server.post(
            "/v1/attention", content=packed, headers={"Content-Encoding": "gzip"}
        )
        decoded = server.post("/v1/attention", content=numbers)
        until(lambda: metric(server, "headwise_body_memory_bytes") == 0)

    assert chunked.startswith(b"HTTP/1.1 413 ")
    for answer in (unpacked, decoded):
        assert (answer.status_code, answer.json()["code"]) == (413, "too_large")
        assert "(max_bodies_bytes)" in answer.json()["error"]


@pytest.mark.fault("A6")
def test_call_holds_the_memory_of_its_tensors_until_it_is_answered(layers: Layers) -> None:
    """On the fast path and on the other; afterwards nothing is held."""
    tensor = np.zeros((8, 4096, 24), np.float32)
    entry: dict[str, Any] = {"name": "embeddings", "shape": tensor.shape, "datatype": "FP32"}
    entry["parameters"] = {"binary_data_size": tensor.nbytes}
    inputs = orjson.dumps({"inputs": [entry]})
    binary = {"Inference-Header-Content-Length": str(len(inputs))}
    raw = {"Content-Type": "application/x-safetensors"}
    calls = {
        "/v1/attention?model=mha": (raw, save({"embeddings": tensor})),
        "/v2/models/mha/infer": (binary, inputs + tensor.tobytes()),
    }
    with Server(layers.repository) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        for path, (headers, content) in calls.items():
            call = pool.submit(
                httpx.post, server.url + path, content=content, headers=headers, timeout=60
            )
            until(lambda: metric(server, "headwise_body_memory_bytes") == tensor.nbytes)
            status = call.result().status_code
            until(lambda: metric(server, "headwise_body_memory_bytes") == 0)
            assert status == 200


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Give a control group whose processes may hold so much memory together."""
    root = Path("/sys/fs/cgroup")
    for group, file in (
        (root / "memory" / f"headwise-{os.getpid()}", "memory.limit_in_bytes"),
        (root / f"headwise-{os.getpid()}", "memory.max"),
    ):
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / file).write_text(str(limit_bytes))
                yield group
                return
            finally:
                until(lambda group=group: not (group / "cgroup.procs").read_text())  # type: ignore[misc]
                group.rmdir()
    pytest.skip("needs the right to make a control group with a memory limit")


@pytest.mark.fault("A6")
@pytest.mark.parametrize(("limit_mib", "statuses"), [(700, {400, 429}), (400, {413})])
def test_three_large_json_bodies_do_not_end_a_server_with_little_memory(
    layers: Layers, limit_mib: int, statuses: set[int]
) -> None:
    """One after the other where one fits, else none; the metrics know the limit."""
    row = b"[" + b",".join([b"0.1234567890123456"] * 768) + b"]"
    rows = b",".join([row] * (49_500_000 // len(row)))
    # Decoded to its end, and then of the wrong width.
    body = b'{"model": "tiny", "embeddings": [' + rows + b"]}"
    with memory_group(limit_mib * MIB) as group:
        server = Server(layers.repository, max_length=10**5)
        (group / "cgroup.procs").write_text(str(server.process.pid))
        with server, concurrent.futures.ThreadPoolExecutor() as pool:
            url = server.url + "/v1/attention"
            calls = [pool.submit(httpx.post, url, content=body, timeout=60) for _ in range(3)]
            answers = [call.result() for call in calls]
            after = server.post("/v1/attention", json=GOOD).status_code
            limit = metric(server, "headwise_memory_limit_bytes")
            code = server.process.poll()

    assert {answer.status_code for answer in answers} == statuses
    assert (after, code, limit) == (200, None, limit_mib * MIB)


@pytest.mark.fault("A7")
@pytest.mark.parametrize("mount", ["-o size=4k none /dev/shm", "-o ro none /dev/shm"])
def test_large_body_is_read_without_shared_memory(layers: Layers, mount: str) -> None:
    """Nothing of ours needs `/dev/shm`."""
    mounted = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs {mount} && exec "$@"', "sh")
    try:
        subprocess.run([*mounted, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a file system for one process")
    code = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
    command = ("-c", code, *mounted, sys.executable, "-m", "service")
    with Server(layers.repository, command=command) as server:
        answer = server.post("/v1/attention", content=LARGE)

    assert answer.status_code == 200


@pytest.mark.fault("A7")
@pytest.mark.parametrize("allowed", [0, 1, 3, 5])
def test_start_without_room_for_its_threads_exits_2_with_one_line(
    layers: Layers, allowed: int
) -> None:
    """Whichever thread it is that cannot be started."""
    defaults = {"HEADWISE_REPOSITORY": str(layers.repository), "HEADWISE_PORT": "0"}
    limit = {"ALLOWED": str(allowed), "REFUSED": "none", "NO_MORE": "/nonexistent"}

    ended = serve(**defaults, **limit, command=("-c", NO_MORE_THREADS))

    assert ended.returncode == 2
    [line] = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert line.startswith("error: threads: can't start new thread; see the limits on processes")


@pytest.mark.fault("A7")
def test_server_that_can_start_no_more_threads_serves_and_ends(
    layers: Layers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What needs one is refused by name; everything else goes on, and SIGTERM ends it."""
    no_more = tmp_path / "no-more"
    for name, value in {"ALLOWED": "1000", "REFUSED": "reader", "NO_MORE": str(no_more)}.items():
        monkeypatch.setenv(name, value)
    with Server(layers.repository, command=("-c", NO_MORE_THREADS), drain_s=0) as server:
        server.wait_for_log("large JSON bodies are refused")
        no_more.touch()
        refused = [server.post("/v1/attention", content=LARGE) for _ in range(6)]
        served = server.post("/v1/attention", json=GOOD).status_code
        log = server.whole_log()
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(60)

    assert {answer.status_code for answer in refused} == {503}
    assert "could not be started: can't start new thread; see the limits" in refused[0].text
    assert log.count("large JSON bodies are refused") == 1
    assert served == 200
    assert code == 0
    assert "Traceback" not in server.log()
