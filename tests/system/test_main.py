"""The process: what refuses its start, what it logs, and how it ends."""

import concurrent.futures
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from safetensors.numpy import load_file, save, save_file

from service import __version__
from tests.support.layers import Layers, sha256_of
from tests.support.processes import children_of
from tests.support.server import ROOT, Server, until

# A call of a good part of a second: the longest there is, in the format that is read fastest.
# Its rows are run one by one, each behind those of other calls, so none of many is over early.
SLOW: dict[str, Any] = {
    "content": save({"embeddings": np.zeros((4, 4096, 24), np.float32)}, {"causal": "true"}),
    "headers": {"Content-Type": "application/x-safetensors"},
}
GOOD: dict[str, Any] = {"model": "tiny", "embeddings": [[0.5] * 8]}


def serve(
    *argv: str, command: Sequence[str] = ("-m", "service"), **environ: str
) -> "subprocess.CompletedProcess[str]":
    """Return a server process that ended by itself; `command` is what the interpreter is told."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HEADWISE_")}
    return subprocess.run(
        [sys.executable, *command, *argv],
        env={**clean, **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def repository(layers: Layers, tmp_path: Path) -> Path:
    """Return a copy of the repository that a test may spoil."""
    return Path(shutil.copytree(layers.repository, tmp_path / "repository"))


def spoil_golden(repository: Path) -> None:
    """Plant a wrong golden answer under a right checksum."""
    artifact = repository / "tiny" / "1"
    golden, manifest = artifact / "golden.safetensors", artifact / "manifest.json"
    before = sha256_of(golden)
    tensors = load_file(golden)
    save_file({**tensors, "output": tensors["output"] + 1e-3}, golden)
    manifest.write_text(manifest.read_text().replace(before, sha256_of(golden)))


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--repository", "/nonexistent"], {}, "/nonexistent: no such repository directory"),
        ([], {"HEADWISE_PROT": "1"}, "HEADWISE_PROT: no such setting; did you mean HEADWISE_PORT?"),
        (["--port", "x"], {}, "--port: Input should be a valid integer"),
        (["--provider", "cuda"], {}, "provider: asked for cuda, but this onnxruntime"),
        (["--default-model", "nope"], {}, "default model: expected one of cross, mha, tiny"),
        (["--host", "203.0.113.1"], {}, "host, port: cannot listen on 203.0.113.1:0"),
    ],
)
def test_start_that_cannot_succeed_exits_2_with_one_line(
    layers: Layers, argv: list[str], environ: dict[str, str], message: str
) -> None:
    """The operator reads why, not a traceback."""
    defaults = {"HEADWISE_REPOSITORY": str(layers.repository), "HEADWISE_PORT": "0"}

    ended = serve(*argv, **defaults, **environ)

    assert ended.returncode == 2
    [line] = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert line.startswith("error: ")
    assert message in line
    assert "Traceback" not in ended.stderr


def test_start_with_a_tampered_artifact_exits_2(repository: Path) -> None:
    """One altered byte is enough."""
    weights = repository / "tiny" / "1" / "layer.weights"
    content = bytearray(weights.read_bytes())
    content[5] ^= 1
    weights.write_bytes(content)

    ended = serve("--repository", str(repository), "--port", "0")

    assert ended.returncode == 2
    assert "layer.weights: its SHA-256 is not the one in manifest.json" in ended.stderr


def test_start_on_a_taken_port_exits_2(layers: Layers) -> None:
    """Told at once, with the address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = serve("--repository", str(layers.repository), "--port", str(port))

    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in ended.stderr


def test_start_with_a_wrong_golden_answer_lives_but_is_never_ready(repository: Path) -> None:
    """Alive for the operator, closed for callers, and both are told why."""
    spoil_golden(repository)

    with Server(repository, wait="live") as server:
        record = server.wait_for_log(r'.*"message":"not ready".*')[0]
        ready, call = server.get("/v2/health/ready"), server.post("/v1/attention", json=GOOD)
        other = server.post("/v1/attention", json={"embeddings": [[0.5] * 24]})
        live, listing = server.get("/v2/health/live"), server.get("/v1/models").json()
        metrics = server.get("/metrics").text

    assert "tiny: golden answer: output differs by 0.00" in orjson.loads(record)["problem"]
    assert live.status_code == 200
    assert (ready.status_code, ready.json()["code"]) == (503, "not_ready")
    assert "golden answer: output differs" in ready.json()["error"]
    assert (call.status_code, call.json()["code"]) == (503, "not_ready")
    assert call.headers["retry-after"] == "1"
    assert other.status_code == 200
    assert [m["ready"] for m in listing["models"]] == [True, True, False]
    assert "headwise_ready 0" in metrics


def test_start_logs_models_provider_threads_and_where(server: Server) -> None:
    """Two records tell how this server runs, and with what."""
    starting = orjson.loads(server.wait_for_log(r'.*"message":"starting".*')[0])
    loaded = orjson.loads(server.wait_for_log(r'.*"message":"loaded".*')[0])

    assert starting["url"] == server.url
    assert starting["provider"] == "cpu"
    assert "affinity" in starting["threads"]
    assert loaded["models"] == ["cross/1", "mha/1", "tiny/1"]


def test_version_is_told() -> None:
    """By both commands."""
    assert serve("--version").stdout.strip() == f"headwise {__version__}"


def test_sigterm_answers_every_accepted_call_and_exits_0(layers: Layers) -> None:
    """Nothing that was let in is lost; the exit is clean also outside a container."""
    with (
        Server(layers.repository, max_queue_tokens=10**6) as server,
        concurrent.futures.ThreadPoolExecutor(20) as pool,
        httpx.Client() as idle,
    ):
        idle.get(server.url + "/v2/health/live")  # a kept connection that nobody uses any more
        calls = [pool.submit(server.post, "/v1/attention?model=mha", **SLOW) for _ in range(20)]
        until(lambda: "headwise_requests_in_flight 21" in server.get("/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        answers = [call.result() for call in calls]
        server.process.wait(60)

    assert [answer.status_code for answer in answers] == [200] * 20
    assert server.process.returncode == 0
    assert '"every_call_answered":true' in server.log()
    assert "Traceback" not in server.log()


def test_sigterm_grace_serves_but_is_not_ready_then_drains(layers: Layers) -> None:
    """A proxy has time to notice; afterwards new calls are told to go elsewhere."""
    content = orjson.dumps(GOOD)
    with Server(layers.repository, grace_s=1) as server, connected(server) as accepted:
        send_head(accepted, content)
        until(lambda: "headwise_requests_in_flight 2" in server.get("/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log('"message":"stopping"')
        ready, during = server.get("/v2/health/ready"), server.post("/v1/attention", json=GOOD)
        late: list[httpx.Response] = []

        def is_refused() -> bool:
            late.append(server.post("/v1/attention", json=GOOD))
            return late[-1].status_code == 503

        until(is_refused)
        accepted.sendall(content)
        answer = accepted.makefile("rb").read()
        server.process.wait(60)

    assert (ready.status_code, ready.json()["code"]) == (503, "draining")
    assert during.status_code == 200
    assert during.headers["connection"] == "close"
    assert {response.status_code for response in late} <= {200, 503}
    assert late[-1].json()["code"] == "draining"
    assert late[-1].headers["retry-after"] == "1"
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert server.process.returncode == 0


def connected(server: Server) -> socket.socket:
    """Return a bare connection to the server."""
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def send_head(connection: socket.socket, content: bytes) -> None:
    """Send a call up to its body, so that it is accepted and stays in flight."""
    head = f"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode())


def test_second_sigterm_exits_at_once(layers: Layers) -> None:
    """Who insists is obeyed: the grace is cut short."""
    with Server(layers.repository, grace_s=300) as server:
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log('"message":"stopping"')
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(60)

    assert code == 128 + signal.SIGTERM


def test_sigint_skips_the_grace(layers: Layers) -> None:
    """A person at a terminal waits for no load balancer."""
    with Server(layers.repository, grace_s=300) as server:
        server.process.send_signal(signal.SIGINT)
        code = server.process.wait(60)

    assert code == 0


def test_drain_limit_ends_a_call_that_takes_too_long(layers: Layers) -> None:
    """A stop has an end, and the log says what it cost."""
    with Server(layers.repository, drain_s=0) as server, connected(server) as held:
        send_head(held, b"never sent")
        until(lambda: "headwise_requests_in_flight 2" in server.get("/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)

    assert server.process.returncode == 0
    assert '"every_call_answered":false' in server.log()


@pytest.mark.fault("E2")
def test_end_of_draining_cuts_off_in_one_line_of_our_own(layers: Layers) -> None:
    """A call without an answer gets 503; one whose answer its caller does not read is reset."""
    wide = {"model": "tiny", "embeddings": [[[0.5] * 8] * 2048], "weights": True}
    with (
        Server(layers.repository, drain_s=0) as server,
        connected(server) as held,
        socket.socket() as stuck,
    ):
        send_head(held, b"never sent")
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.settimeout(60)
        stuck.connect(held.getpeername())
        content = orjson.dumps(wide)
        send_head(stuck, content)
        stuck.sendall(content)
        first = stuck.recv(16)
        server.process.send_signal(signal.SIGTERM)
        answer = held.makefile("rb").read()
        server.process.wait(60)
        log = server.log()

    assert first.startswith(b"HTTP/1.1 200 ")
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert log.count('"message":"cut off","requests":2,"connections":2') == 1
    assert log.count('"status":499') == log.count('"status":503') == 1
    assert "ASGI" not in log
    assert "Cancel" not in log
    assert server.process.returncode == 0


def test_queue_beyond_its_limit_answers_429_and_recovers(layers: Layers) -> None:
    """Overload is told at once; nothing accepted is lost."""
    with (
        Server(layers.repository, max_queue_calls=2) as server,
        concurrent.futures.ThreadPoolExecutor(12) as pool,
    ):
        calls = [pool.submit(server.post, "/v1/attention?model=mha", **SLOW) for _ in range(12)]
        answers = [call.result() for call in calls]
        after = server.post("/v1/attention", json=GOOD)

    statuses = [answer.status_code for answer in answers]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert set(statuses) == {200, 429}
    assert refused.json()["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    assert after.status_code == 200


def test_call_past_its_own_limit_answers_504(layers: Layers) -> None:
    """The caller's patience is obeyed, wherever it is said."""
    with (
        Server(layers.repository) as server,
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
        slow = [pool.submit(server.post, "/v1/attention?model=mha", **SLOW) for _ in range(4)]
        waiting = re.compile(r'headwise_queue_calls{model="mha"} [2-4]')
        until(lambda: waiting.search(server.get("/metrics").text) is not None)
        fast = {"embeddings": [[0.5] * 24]}
        by_body = server.post("/v1/attention", json={**fast, "timeout_s": 0.001})
        header = {"X-Request-Timeout-S": "0.001"}
        by_header = server.post("/v1/attention", json=fast, headers=header)
        answers = [call.result() for call in slow]

    for late in (by_body, by_header):
        assert (late.status_code, late.json()["code"]) == (504, "deadline_exceeded")
    assert {answer.status_code for answer in answers} == {200}


def test_service_runs_where_torch_cannot_be_imported(layers: Layers) -> None:
    """The serving image holds no torch, no onnx and no exporter."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'onnx', 'onnxscript', 'export']));"
        "from service.__main__ import main;"
        "sys.exit(main(['--repository', '/nonexistent', '--port', '0']))"
    )

    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert ended.returncode == 2
    assert "no such repository directory" in ended.stderr


def test_caller_that_leaves_frees_the_engine_and_is_counted(layers: Layers) -> None:
    """Neither a queued call nor a running one goes on for nobody; the log has no traceback."""
    content = save({"embeddings": np.zeros((60, 1024, 24), np.float32)})
    head = (
        "POST /v1/attention?model=mha HTTP/1.1\r\nHost: x\r\n"
        f"Content-Type: application/x-safetensors\r\nContent-Length: {len(content)}\r\n\r\n"
    ).encode()
    limits: dict[str, Any] = {
        "max_batch_tokens": 10**6,
        "max_batch_cells": 10**9,
        "concurrent_runs": 1,
    }
    with Server(layers.repository, **limits) as server:
        with connected(server) as running, connected(server) as queued:
            running.sendall(head + content)
            until(lambda: metric(server, 'headwise_queue_calls{model="mha"}') == 1)
            queued.sendall(head + content)
            until(lambda: metric(server, 'headwise_queue_calls{model="mha"}') == 2)
        until(lambda: metric(server, 'headwise_queue_calls{model="mha"}') == 0)
        dropped = [
            metric(server, f'headwise_cancelled_total{{model="mha",where="{where}"}}')
            for where in ("queued", "running")
        ]
        log, after = server.whole_log(), server.post("/v1/attention", json=GOOD)

    assert dropped == [1, 1]
    assert log.count('"status":499') == 2
    assert "Traceback" not in log
    assert "Error" not in log
    assert after.status_code == 200


def metric(server: Server, name: str) -> float:
    """Return the value of one metric; none yet = 0."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", server.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_sigterm_ends_a_server_whose_reader_process_is_busy(layers: Layers) -> None:
    """Work that nobody waits for any more holds up no ending, and no process is left behind."""
    large = orjson.dumps(GOOD) + b" " * 5 * 2**20
    with Server(layers.repository, drain_s=1) as server, connected(server) as caller:
        server.post("/v1/attention", content=large)  # by a process that is kept for the next one
        readers = children_of(server.process.pid)
        for reader in readers:
            os.kill(reader, signal.SIGSTOP)
        send_head(caller, large)
        caller.sendall(large)
        until(lambda: metric(server, "headwise_body_memory_bytes") > 0)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(30)

        until(lambda: not any(Path(f"/proc/{reader}").exists() for reader in readers))

    assert readers
    assert server.process.returncode == 0


@pytest.mark.fault("A1")
def test_sigterm_ends_a_server_that_decompresses(layers: Layers) -> None:
    """Threads that are amid a large body end with the server."""
    blocks = zlib.compressobj(0, wbits=31).flush()[:10] + b"\0\0\0\xff\xff" * 12_000_000
    head = (
        "POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\n"
        f"Content-Length: {len(blocks)}\r\n\r\n"
    ).encode()
    with Server(layers.repository, drain_s=0) as server, contextlib.ExitStack() as stack:
        callers = [stack.enter_context(connected(server)) for _ in range(3)]
        for caller in callers:
            caller.sendall(head + blocks)
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(60)

    assert code == 0
    assert "by force" not in server.log()


@pytest.mark.fault("A4")
def test_sigterm_ends_a_server_whose_answers_nobody_reads(layers: Layers) -> None:
    """Nor does an answer hold up the ending whose caller takes nothing of it."""
    content = save({"embeddings": np.zeros((1, 2048, 8), np.float32)})
    head = (
        "POST /v1/attention?model=tiny&weights=true HTTP/1.1\r\nHost: x\r\n"
        f"Content-Type: application/x-safetensors\r\nContent-Length: {len(content)}\r\n\r\n"
    ).encode()
    with Server(layers.repository, drain_s=0) as server, connected(server) as caller:
        caller.sendall(head + content)
        until(lambda: metric(server, 'headwise_run_calls_count{model="tiny"}') >= 1)
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(60)

    assert code == 0
    assert '"every_call_answered":false' in server.log()
    assert "by force" not in server.log()


def ended_by_sigterm(repository: Path, patch: str, sign: str) -> tuple[int, str]:
    """Return how a server with a fault in it ends by a SIGTERM after its sign, and its log."""
    code = (
        "import os, sys, time\nimport service.__main__ as process\n"
        f"{patch}\nsys.exit(process.main(sys.argv[1:]))"
    )
    flags = ["--port", "0", "--grace-s", "0", "--drain-s", "0", "--log-format", "json"]
    with subprocess.Popen(
        [sys.executable, "-c", code, "--repository", str(repository), *flags],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stderr is not None
        try:
            log = ""
            while sign not in log:
                line = server.stderr.readline()
                assert line, log
                log += line
            server.send_signal(signal.SIGTERM)
            code_of_end = server.wait(60)
            return code_of_end, log + server.stderr.read()
        finally:
            server.kill()


def test_sigterm_ends_a_server_that_loads_for_ever(layers: Layers) -> None:
    """What happens in a library and can't be interrupted is left behind."""
    patch = (
        "import service.inference.engine\n"
        "def hang(*_, **__):\n"
        "    print('loading', file=sys.stderr, flush=True)\n"
        "    time.sleep(3600)\n"
        "service.inference.engine.OnnxEngine.__init__ = hang"
    )

    code, log = ended_by_sigterm(layers.repository, patch, "loading")

    assert code == 0
    assert "ended by force" in log


def test_sigterm_ends_a_server_whose_clean_up_hangs(layers: Layers) -> None:
    """Whatever waits for whatever: the process has a last limit."""
    patch = (
        "process._CONNECTION_END_S = process._CLEAN_UP_S = 0.2\n"
        "process.NoTracing.close = lambda self: time.sleep(3600)"
    )

    code, log = ended_by_sigterm(layers.repository, patch, '"ready"')

    assert code == 0
    assert "ended by force" in log


def test_repository_that_may_not_be_read_exits_2(repository: Path) -> None:
    """One line, as for any other artifact that cannot be read."""
    if os.geteuid() == 0:
        (repository / "tiny").rename(repository / "gone")
        (repository / "tiny").symlink_to(repository / "tiny")  # a loop: nobody may read it
    else:
        (repository / "tiny").chmod(0)

    ended = serve("--repository", str(repository), "--port", "0")

    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
