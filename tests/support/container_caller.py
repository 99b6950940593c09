"""
Call the server in this network namespace: `call MODEL WIDTH` or `load CLIENTS SECONDS`.

Runs in a container of its own beside the served one, from the same image, and so needs
nothing but the standard library.  Prints one line of JSON.
"""

import array
import collections
import http.client
import json
import random
import statistics
import sys
import threading
import time

ROWS, LENGTH, WIDTH = 8, 128, 768


def call(model: str, width: int) -> None:
    """Print the answer to one JSON call of two unit vectors."""
    body = {"model": model, "embeddings": [[1.0] + [0.0] * (width - 1)] * 2, "weights": True}
    connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=60)
    connection.request("POST", "/v1/attention", json.dumps(body))
    answer = connection.getresponse()
    print(json.dumps({"status": answer.status, "body": json.loads(answer.read())}))  # noqa: T201


def load(clients: int, seconds: float) -> None:
    """Call from many clients at once until the time is over or the server says that it ends."""
    head = {
        "inputs": [
            {
                "name": "embeddings",
                "datatype": "FP32",
                "shape": [ROWS, LENGTH, WIDTH],
                "parameters": {"binary_data_size": ROWS * LENGTH * WIDTH * 4},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
    prefix = json.dumps(head).encode()
    draw = random.Random(0)  # noqa: S311 (embeddings, no secrets)
    floats = array.array("f", (draw.gauss(0, 1) for _ in range(ROWS * LENGTH * WIDTH)))
    headers = {"Inference-Header-Content-Length": str(len(prefix))}
    seen = _Seen()
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=_client, args=(prefix + floats.tobytes(), headers, until, seen))
        for _ in range(clients)
    ]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(seen.report(time.monotonic() - started))  # noqa: T201


class _Seen:
    """What the clients saw; appending is atomic."""

    def __init__(self) -> None:
        self.statuses: collections.Counter[int] = collections.Counter()
        self.lost: list[str] = []
        self.ms: list[float] = []
        self.lock = threading.Lock()

    def report(self, seconds: float) -> str:
        return json.dumps(
            {
                "statuses": {str(status): n for status, n in self.statuses.items()},
                "lost": self.lost,
                "calls_per_s": round(len(self.ms) / seconds, 1),
                "p50_ms": round(statistics.median(self.ms), 1) if self.ms else None,
            }
        )


def _client(body: bytes, headers: dict[str, str], until: float, seen: _Seen) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=120)
    while time.monotonic() < until:
        started = time.monotonic()
        try:
            connection.request("POST", "/v2/models/mha/infer", body, headers)
            answer = connection.getresponse()
            complete = len(answer.read()) > 0
        except (OSError, http.client.HTTPException) as error:
            with seen.lock:
                seen.lost.append(repr(error))
            return
        with seen.lock:
            seen.statuses[answer.status] += 1
            seen.ms.append((time.monotonic() - started) * 1e3)
        if answer.getheader("Connection") == "close" or not complete:
            return


if __name__ == "__main__":
    if sys.argv[1] == "call":
        call(sys.argv[2], int(sys.argv[3]))
    else:
        load(int(sys.argv[2]), float(sys.argv[3]))
