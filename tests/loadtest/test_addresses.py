"""A name may have several addresses, and a server may listen on one of them alone."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from loadtest.cli import main
from loadtest.connection import resolve
from loadtest.drive import closed_load
from loadtest.endpoint import Endpoint
from loadtest.plan import Plan
from tests.support.load_stub import Stub

BOTH = [
    (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("::1", 0, 0, 0)),
    (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 0)),
]


def both_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every name resolve as `localhost` does where its line of IPv6 comes first."""

    def found(host: str, port: int, *more: Any, **named: Any) -> list[Any]:
        return [(*start, (address[0], port, *address[2:])) for *start, address in BOTH]

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.mark.fault("F6")
def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The one that took the connection is used by all, and is in the raw file."""
    raw = tmp_path / "raw.json"
    with Stub() as stub:
        port = int(stub.url.rpartition(":")[2])
        endpoint = Endpoint("http", "localhost", port)
        both_families(monkeypatch)
        family, address = resolve(endpoint, limit_s=5)
        request = endpoint.post_bytes("/calls", b"", {})
        records = closed_load(endpoint, [request], clients=2, plan=Plan(count=4, warmup_s=0))
        monkeypatch.undo()
        code = main(
            [*(f"http://localhost:{port}", "-n", "5", "-c", "1", "--raw", str(raw)),
             *("--null-time", "0", "--warmup", "0", "--max-lag", "1h", "--max-spread", "9999%")]
        )  # fmt: skip

    assert (family, address) == (socket.AF_INET, ("127.0.0.1", port))
    assert records.address == "127.0.0.1"
    assert records.offered == 4
    assert code == 0
    assert json.loads(raw.read_text())["points"][0]["address"] == "127.0.0.1"


def test_name_none_of_whose_addresses_listens_is_told_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for a name with one address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    both_families(monkeypatch)

    with pytest.raises(OSError, match=r"refused|Cannot assign|not supported|unreachable"):
        resolve(Endpoint("http", "localhost", port), limit_s=5)
