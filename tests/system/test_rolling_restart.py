"""Two replicas behind the proxies of deploy/proxy/: their restarts cost no call."""

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest
from safetensors.numpy import save

from service.settings import Settings
from tests.support.layers import CONFIGS, Layers
from tests.support.server import END_LIMIT_S, ROOT, Server, until
from tests.system.test_proxies import free_port, running

pytestmark = [pytest.mark.slow, pytest.mark.fault("E7")]

CALLERS = 6
CALLS = 2_000
"""At least so many are made while the replicas are restarted."""

GRACE_S = Settings.model_fields["grace_s"].default

_FILES = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg"}
_COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    # Its process id and log go to the directory of the test.
    "nginx": lambda file: [
        *("nginx", "-e", "stderr", "-c", str(file), "-g"),
        f"daemon off; pid {file.parent}/pid; error_log stderr;",
    ],
    "haproxy": lambda file: ["haproxy", "-db", "-f", str(file)],
}


@contextmanager
def behind(name: str, directory: Path, replicas: list[int]) -> Iterator[str]:
    """Run a proxy with its shipped file, only the ports replaced, and give its URL."""
    port = free_port()
    text = (ROOT / "deploy" / "proxy" / _FILES[name]).read_text()
    ports = {"8080": port, "127.0.0.1:8001": replicas[0], "127.0.0.1:8002": replicas[1]}
    for shipped, ours in ports.items():
        shipped_port = shipped.rpartition(":")[2]
        lines = text.splitlines(keepends=True)
        told = [line for line in lines if shipped in line and not line.lstrip().startswith("#")]
        assert len(told) == 1, shipped
        text = text.replace(told[0], told[0].replace(shipped_port, str(ours)))
    file = directory / _FILES[name]
    file.write_text(text)
    with running(_COMMANDS[name](file), directory, port):
        yield f"http://127.0.0.1:{port}"


class Replica:
    """A server on a port of its own that can be started again, as by a rolling restart."""

    def __init__(self, repository: Path) -> None:
        self.port = free_port()
        self._repository = repository
        self._server = self._start()

    def _start(self) -> Server:
        settings = {"port": self.port, "grace_s": GRACE_S, "max_queue_tokens": 10**6}
        return Server(self._repository, **settings).__enter__()

    def restart(self) -> int:
        """Stop as an orchestrator does, start anew and return when it is ready: the exit code."""
        self._server.process.send_signal(signal.SIGTERM)
        code = self._server.process.wait(END_LIMIT_S)
        self.close()
        self._server = self._start()
        return code

    def close(self) -> None:
        """End the server."""
        self._server.__exit__(None, None, None)


class Callers:
    """Callers that keep their connections and call one after the other until told to stop."""

    def __init__(self, url: str, calls: list[dict[str, object]]) -> None:
        self.outcomes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._call, args=(url, calls[place % len(calls)]))
            for place in range(CALLERS)
        ]

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    @property
    def total(self) -> int:
        """How many calls have ended, well or not."""
        with self._lock:
            return self.outcomes.total()

    def _call(self, url: str, call: dict[str, object]) -> None:
        # Its pool makes a new connection where the old one was closed, and repeats no call.
        with httpx.Client(base_url=url, timeout=60) as client:
            while not self._stop.is_set():
                try:
                    answer = client.post(**call)  # type: ignore[arg-type]
                    outcome = str(answer.status_code)
                except httpx.TransportError as error:
                    outcome = type(error).__name__
                with self._lock:
                    self.outcomes[outcome] += 1


def infer() -> dict[str, object]:
    """Return a small call of the protocol, which takes the fast path."""
    entry = {"name": "embeddings", "shape": [1, 2, 8], "datatype": "FP32", "data": [0.5] * 16}
    return {"url": "/v2/models/tiny/infer", "content": orjson.dumps({"inputs": [entry]})}


def attention() -> dict[str, object]:
    """Return a small call of our own, which takes the ASGI path."""
    body = {"model": "tiny", "embeddings": [[0.5] * 8]}
    return {"url": "/v1/attention", "content": orjson.dumps(body)}


def large() -> dict[str, object]:
    """Return a call of 3 MB, as [8, 128, 768] has: three times what nginx takes by itself."""
    rows, width = 256, CONFIGS["mha"].embed_dim
    return {
        "url": "/v1/attention?model=mha",
        "content": save({"embeddings": np.zeros((rows, 128, width), np.float32)}),
        "headers": {"Content-Type": "application/x-safetensors"},
    }


@pytest.fixture
def replicas(layers: Layers) -> Iterator[list[Replica]]:
    """Return two ready replicas."""
    with ExitStack() as stack:
        started = []
        for _ in range(2):
            started.append(Replica(layers.repository))
            stack.callback(started[-1].close)
        yield started


@pytest.mark.parametrize("name", _FILES)
def test_rolling_restart_behind_the_shipped_proxy_loses_no_call(
    replicas: list[Replica], tmp_path: Path, name: str
) -> None:
    """Each of thousands of calls over kept connections is answered 200."""
    with (
        behind(name, tmp_path, [replica.port for replica in replicas]) as url,
        Callers(url, [infer(), attention()]) as callers,
    ):
        until(lambda: callers.total > CALLS // 10)
        codes = [replica.restart() for replica in replicas]
        until(lambda: callers.total >= CALLS)

    assert codes == [0, 0]
    assert callers.outcomes == {"200": callers.total}


@pytest.mark.parametrize("name", _FILES)
def test_large_calls_pass_the_shipped_proxy_while_replicas_restart(
    replicas: list[Replica], tmp_path: Path, name: str
) -> None:
    """Bodies of 3 MB pass, and are sent again where nginx finds that a replica stops."""
    with (
        behind(name, tmp_path, [replica.port for replica in replicas]) as url,
        Callers(url, [large()]) as callers,
    ):
        until(lambda: callers.total > 10)
        codes = [replica.restart() for replica in replicas]

    assert codes == [0, 0]
    assert set(callers.outcomes) == {"200"}
