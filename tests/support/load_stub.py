"""
A server of the Open Inference Protocol whose latency is known, for tests of the load tester.

`python -m tests.support.load_stub SPEC`, a JSON object, listens on a free port of 127.0.0.1
and prints it; it ends when its input does.  It has one model, `stub`, of one input
`[-1, -1, 8]`, and answers what it got.  Of the specification all are optional:

    delays_ms    how long each call takes, in turn and around again; calls run side by side
    ceiling      calls a second it can do at most: one after the other
    refuse       every n-th call of the load is answered 429 with the code `queue_full`
    corrupt      every n-th answer to the load is wrong
    drop         every n-th call of the load ends the connection without an answer
    reset        every n-th call of the load resets the connection
    silent       true = calls are never answered
    deaf         every second connection is never answered, from this one on
    timing       what `Server-Timing` says
    chunked      true = bodies come in chunks, without a length
    closes       true = every answer ends its connection
    most_bytes   a longer body is answered 413 at once, and the connection closed unread

`GET /kept` tells how many milliseconds each delayed call really took here, and `GET /calls` how
many calls of the load it has got; those that the load tester makes to look whether all is well,
by Python's own client, do not count.

It is one loop, and stays awake before an answer is due.  A delay counts from when the kernel
had the call, however late this process was woken for it, to when the answer is written.  Where
it may, it goes ahead of all other processes: it keeps time to some tens of microseconds.
"""

import contextlib
import heapq
import itertools
import json
import os
import re
import select
import selectors
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from tests.support.server import ROOT

WIDTH = 8
SPIN_S = 0.001
"""So long before an answer is due, the stub no longer sleeps: it would wake too late."""
TIMESTAMPS = 35
"""SO_TIMESTAMPNS of Linux."""
_MOMENT = struct.Struct("@ll")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_JSON_LENGTH = re.compile(rb"inference-header-content-length: *(\d+)", re.IGNORECASE)


def go_ahead() -> None:
    """Have this thread run before all that is not as urgent, where the system lets it."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


class Stub:
    """A running one, from entering to leaving."""

    def __init__(self, **spec: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.load_stub", json.dumps(spec)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.url = ""

    def __enter__(self) -> Self:
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        return self

    def kept_ms(self, calls: int) -> dict[str, float]:
        """Return how long the last calls really took here: percentiles, over all of them."""
        with urllib.request.urlopen(f"{self.url}/kept") as answer:  # noqa: S310 - our own
            took = sorted(json.load(answer)[-calls:])
        return {f"p{at}": round(took[len(took) * at // 100], 3) for at in (50, 90, 99)}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@dataclass(eq=False)
class _Caller:
    socket: socket.socket
    is_deaf: bool = False
    received: bytearray = field(default_factory=bytearray)


class _Server:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.delays_s = itertools.cycle([ms / 1e3 for ms in spec.get("delays_ms", [0])])
        self.free_at = 0.0
        self.calls = 0
        self.connections = 0
        self.order = itertools.count()
        self.owed: list[tuple[float, int, float, _Caller, bytes]] = []
        self.kept_ms: list[float] = []
        self.selector = selectors.DefaultSelector()

    def serve(self) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            print(listener.getsockname()[1], flush=True)  # noqa: T201
            self.selector.register(listener, selectors.EVENT_READ, None)
            self.selector.register(sys.stdin, selectors.EVENT_READ, "end")
            while True:
                ahead = self.owed[0][0] - time.perf_counter() if self.owed else 1.0
                if ahead > SPIN_S:
                    # select() counts in microseconds, epoll in milliseconds.
                    select.select([self.selector.fileno()], [], [], ahead - SPIN_S)
                for key, _ in self.selector.select(0):
                    if key.data == "end":
                        return
                    if key.data is None:
                        self.accept(listener)
                    else:
                        self.read(key.data)
                while self.owed and self.owed[0][0] <= time.perf_counter():
                    _, _, since, caller, answer = heapq.heappop(self.owed)
                    self.kept_ms.append((time.perf_counter() - since) * 1e3)
                    self.write(caller, answer)

    def accept(self, listener: socket.socket) -> None:
        new, _ = listener.accept()
        new.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        new.setsockopt(socket.SOL_SOCKET, TIMESTAMPS, 1)
        self.connections += 1
        deaf = int(self.spec.get("deaf", 0))
        is_deaf = 0 < deaf <= self.connections and (self.connections - deaf) % 2 == 0
        self.selector.register(new, selectors.EVENT_READ, _Caller(new, is_deaf))

    def read(self, caller: _Caller) -> None:
        now = time.perf_counter()
        try:
            data, told, _, _ = caller.socket.recvmsg(2**20, socket.CMSG_SPACE(_MOMENT.size))
        except ConnectionError:
            data, told = b"", []
        for _, _, value in told:
            seconds, nanoseconds = _MOMENT.unpack(value)
            now = time.perf_counter() - max(0.0, time.time() - seconds - nanoseconds / 1e9)
        if not data:
            self.drop(caller)
            return
        if caller.is_deaf:
            return
        caller.received += data
        end = caller.received.find(b"\r\n\r\n")
        if end < 0:
            return
        found = _LENGTH.search(caller.received, 0, end)
        length = int(found[1]) if found else 0
        if length > self.spec.get("most_bytes", length):
            refusal = b'{"error": "body: at most so many", "code": "large"}'
            self.write(caller, _answer(413, refusal, "Connection: close"))
            self.drop(caller)
            return
        whole = end + 4 + length
        if len(caller.received) < whole:
            return
        head, body = bytes(caller.received[:end]), bytes(caller.received[end + 4 : whole])
        del caller.received[:whole]
        if head.startswith(b"POST") and b"/infer " in head.partition(b"\r\n")[0]:
            self.infer(caller, head, body, now)
        else:
            self.write(caller, self.tell(head))

    def tell(self, head: bytes) -> bytes:
        tensor = {"datatype": "FP32", "shape": [-1, -1, WIDTH]}
        known: dict[bytes, object] = {
            b"/calls": self.calls,
            b"/kept": self.kept_ms,
            b"/v2": {"name": "stub", "version": "1", "extensions": []},
            b"/v2/models/stub": {
                "name": "stub",
                "inputs": [{"name": "x", **tensor}],
                "outputs": [{"name": "y", **tensor}],
            },
            b"/v2/repository/index": [{"name": "stub", "state": "READY"}],
        }
        found = known.get(head.split(b" ", 2)[1])
        if found is None:
            return _answer(404, b'{"error": "no such path", "code": "not_found"}')
        return _answer(200, json.dumps(found).encode())

    def infer(self, caller: _Caller, head: bytes, body: bytes, now: float) -> None:
        is_load = b"Accept-Encoding: identity" not in head
        self.calls += is_load
        if self.spec.get("silent"):
            return
        if is_load and self.is_nth("drop"):
            self.drop(caller)
            return
        if is_load and self.is_nth("reset"):
            caller.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.drop(caller)
            return
        if is_load and self.is_nth("refuse"):
            self.write(caller, _answer(429, b'{"error": "full", "code": "queue_full"}'))
            return
        due = now + next(self.delays_s)
        if ceiling := self.spec.get("ceiling"):
            self.free_at = max(self.free_at, now) + 1 / ceiling
            due = self.free_at
        answer = _echo(
            head, body, corrupt=is_load and self.is_nth("corrupt"), timing=self.spec.get("timing")
        )
        if self.spec.get("chunked"):
            answer = _in_chunks(answer)
        if self.spec.get("closes"):
            answer = answer.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        if due <= now:
            self.write(caller, answer)
        else:
            heapq.heappush(self.owed, (due, next(self.order), now, caller, answer))

    def is_nth(self, what: str) -> bool:
        n = int(self.spec.get(what, 0))
        return n > 0 and self.calls % n == 0

    def write(self, caller: _Caller, answer: bytes) -> None:
        try:
            caller.socket.sendall(answer)
        except OSError:
            self.drop(caller)
            return
        if self.spec.get("closes"):
            self.drop(caller)

    def drop(self, caller: _Caller) -> None:
        if caller.socket.fileno() >= 0:
            self.selector.unregister(caller.socket)
            caller.socket.close()


def _echo(head: bytes, body: bytes, *, corrupt: bool, timing: str | None) -> bytes:
    length = _JSON_LENGTH.search(head)
    told = json.loads(body[: int(length[1])] if length else body)
    output = {**told["inputs"][0], "name": "y"}
    headers = [f"Server-Timing: {timing}"] if timing else []
    if length is None:
        if corrupt:
            output["data"] = [value + 1 for value in output["data"]]
        return _answer(200, json.dumps({"outputs": [output]}).encode(), *headers)
    values = body[int(length[1]) :]
    if corrupt:
        values = values[:-1] + bytes([values[-1] ^ 0x40])  # half of the last one's exponent
    described = json.dumps({"outputs": [output]}).encode()
    headers.append(f"Inference-Header-Content-Length: {len(described)}")
    return _answer(200, described + values, *headers)


def _in_chunks(answer: bytes) -> bytes:
    head, _, body = answer.partition(b"\r\n\r\n")
    head = re.sub(rb"\r\nContent-Length: \d+", b"\r\nTransfer-Encoding: chunked", head)
    half = len(body) // 2
    parts = [b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:half], body[half:])]
    return b"".join([head, b"\r\n\r\n", *parts, b"0\r\n\r\n"])


def _answer(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


if __name__ == "__main__":
    go_ahead()
    _Server(json.loads(sys.argv[1])).serve()
