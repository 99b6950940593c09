"""Where the server listens: each kind of address, and those that cannot be."""

import errno
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from service.errors import SettingsInvalid
from service.transport import listener
from tests.service.test_probe import probe
from tests.support.layers import Layers
from tests.support.server import Server
from tests.system.test_main import serve

pytestmark = pytest.mark.fault("B8")

ALL_IPV4 = "0.0.0.0"  # noqa: S104


@contextmanager
def listening(host: str, port: int = 0) -> Iterator[list[socket.socket]]:
    """Give the sockets of a host; closed when left."""
    sockets = listener.listen(host, port)
    try:
        yield sockets
    finally:
        for sock in sockets:
            sock.close()


def outer_address() -> str:
    """Return an address of this machine that is not the loopback's, if it has one."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return "127.0.0.2"
        return str(sock.getsockname()[0])


@pytest.mark.parametrize(
    ("host", "reached_at"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        (ALL_IPV4, ["127.0.0.1", outer_address()]),
        ("::1", ["[::1]"]),
        ("::", ["[::1]", "127.0.0.1", outer_address()]),
        (outer_address(), [outer_address()]),
        ("localhost", ["localhost"]),
    ],
)
def test_server_is_reached_and_probed_wherever_it_listens(
    layers: Layers, host: str, reached_at: list[str]
) -> None:
    """Callers, health check and log agree; `::` is every address of both families."""
    with Server(layers.repository, host=host) as server:
        port = urlsplit(server.url).port
        answers = [
            httpx.get(f"http://{at}:{port}/v2/health/ready").status_code for at in reached_at
        ]
        probed = probe(port or 0, HEADWISE_HOST=host)
        said = server.log()

    assert answers == [200] * len(reached_at)
    assert (probed.returncode, probed.stderr) == (0, "")
    shown = f"[{host}]" if ":" in host else host
    assert f'"{shown}:{port}"' in said or host == "localhost"


def test_probe_asks_nowhere_else(layers: Layers) -> None:
    """A server on one address is not found by what asks at another."""
    with Server(layers.repository, host="::1") as server:
        probed = probe(urlsplit(server.url).port or 0, HEADWISE_HOST="127.0.0.1")

    assert probed.returncode == 1
    assert "Connection refused" in probed.stderr


def test_every_address_of_a_name_is_listened_on_with_one_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever of them a caller tries first; those that are not this machine's are passed over."""
    resolve = socket.getaddrinfo

    def both(host: str, *args: object, **kwargs: object) -> list[object]:
        found = [resolve(name, *args, **kwargs) for name in ("127.0.0.1", "203.0.113.1", "::1")]  # type: ignore[arg-type]
        return [entry for entries in found for entry in entries]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with listening("a-name") as sockets:
        ports = {sock.getsockname()[1] for sock in sockets}
        shown = listener.addresses(sockets)

    assert len(ports) == 1
    port = ports.pop()
    assert shown == [f"127.0.0.1:{port}", f"[::1]:{port}"]


def test_url_of_all_addresses_is_one_that_can_be_opened() -> None:
    """The loopback's, with the scheme of the port."""
    with listening("::") as everywhere, listening("::1") as one:
        port, other = everywhere[0].getsockname()[1], one[0].getsockname()[1]
        assert listener.url(everywhere, is_tls=False) == f"http://127.0.0.1:{port}"
        assert listener.url(one, is_tls=True) == f"https://[::1]:{other}"
        assert listener.addresses(everywhere) == [f"[::]:{port}"]


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("203.0.113.1", "Cannot assign requested address; expected an address of this machine"),
        ("2001:db8::1", "Cannot assign requested address; expected an address of this machine"),
        ("x" * 70, "expected an address or a host name"),
        ("a..b", "expected an address or a host name"),
        ("[::1]", "expected an address alone: no brackets, no URL"),
        ("http://127.0.0.1", "expected an address alone: no brackets, no URL"),
        ("fe80::1", "Invalid argument; a link-local address needs its interface: fe80::1%eth0"),
    ],
)
def test_address_that_cannot_be_is_refused_in_one_line(host: str, reason: str) -> None:
    """What was asked for, why not, and what may help."""
    with pytest.raises(SettingsInvalid) as refused:
        listener.listen(host, 8000)

    shown = f"[{host}]" if ":" in host else host
    assert str(refused.value).startswith(f"host, port: cannot listen on {shown}:8000: {reason}")
    assert "\n" not in str(refused.value)


def test_name_that_does_not_resolve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the resolver's own words."""

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(SettingsInvalid, match="a-name:8000: Name or service not known"):
        listener.listen("a-name", 8000)


@pytest.mark.parametrize("taken", [ALL_IPV4, "::1"])
def test_port_that_is_taken_in_one_family_is_refused_for_both(taken: str) -> None:
    """A server that half of its callers reach is worse than none."""
    family = socket.AF_INET6 if ":" in taken else socket.AF_INET
    with (
        socket.create_server((taken, 0), family=family) as other,
        pytest.raises(SettingsInvalid, match="Address already in use; end the process"),
    ):
        listener.listen("::", other.getsockname()[1])


def test_port_that_needs_a_privilege_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system refuses it; who runs the tests may have the privilege."""

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "")

    monkeypatch.setattr(socket, "create_server", denied)
    with pytest.raises(SettingsInvalid, match="Permission denied; ports below 1024 need root"):
        listener.listen("127.0.0.1", 80)


def test_system_without_ipv6_refuses_it_and_passes_it_over_for_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`::` cannot be had there; a name that has an IPv4 address, too, can."""
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)

    with pytest.raises(SettingsInvalid, match=r"\[::\]:0: .*no IPv6: 0\.0\.0\.0 stands for"):
        listener.listen("::", 0)


def test_start_that_cannot_listen_exits_2_with_one_line(layers: Layers) -> None:
    """For the process as for the function: no traceback, whatever was asked for."""
    for host in ("::2", "x" * 70):
        ended = serve("--repository", str(layers.repository), "--port", "0", "--host", host)
        assert ended.returncode == 2
        assert ended.stderr.startswith("error: host, port: cannot listen on ")
        assert ended.stderr.count("\n") == 1
