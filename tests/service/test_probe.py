"""The container's health check, asked beside real servers and where there is none."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.probe import DEFAULTS, LIMIT_S, flags_of
from service.settings import Settings
from tests.support.server import ROOT, Server

VALUES = {
    "host": st.sampled_from(["::", "0.0.0.0", "localhost", "fe80::1%eth0"]),  # noqa: S104
    "port": st.integers(0, 65535).map(str),
    "tls_cert_file": st.sampled_from(["/run/cert.pem", "a=b", "a file"]),
    "log_level": st.sampled_from(["debug", "error"]),
}


def probe(port: int, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Return the ended probe of a port."""
    return subprocess.run(
        [sys.executable, "-m", "service.probe"],
        env={**os.environ, "HEADWISE_PORT": str(port), **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_live_server_passes(server: Server) -> None:
    """Exit code 0, and nothing to read."""
    ended = probe(urlsplit(server.url).port or 0)

    assert (ended.returncode, ended.stderr) == (0, "")


def test_port_without_a_server_fails() -> None:
    """Exit code 1, and the reason in one line."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    ended = probe(port)

    assert ended.returncode == 1
    assert ended.stderr == f"not alive: 127.0.0.1:{port}: Connection refused\n"


def test_port_that_is_chosen_by_the_system_is_told() -> None:
    """Nobody but the server knows it."""
    ended = probe(0)

    assert ended.returncode == 1
    assert ended.stderr == "not alive: 127.0.0.1:0: expected a port that is known beforehand\n"


def test_server_that_hangs_fails() -> None:
    """Who accepts and never answers is not alive."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        ended = probe(port)

    assert ended.returncode == 1
    assert ended.stderr == f"not alive: 127.0.0.1:{port}: timed out\n"


@pytest.mark.parametrize("answer", [b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"SSH-2.0\r\n"])
def test_another_answer_fails(answer: bytes) -> None:
    """What is not a 200 is told as it came."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "service.probe"],
            env={**os.environ, "HEADWISE_PORT": str(port)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        connection, _ = listener.accept()
        with connection:
            connection.recv(1024)
            connection.sendall(answer)
            _, told = process.communicate(timeout=60)

    line = answer.splitlines(keepends=True)[0]
    assert process.returncode == 1
    assert told.decode() == f"not alive: 127.0.0.1:{port}: {line!r}\n"


@pytest.mark.fault("B8")
@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("python -m service --host :: --port=9000", {"host": "::", "port": "9000"}),
        ("tini -- python -m service --tls-cert-file /c", {"tls_cert_file": "/c"}),
        ("python /opt/venv/bin/headwise-serve --port 9000", {"port": "9000"}),
        ("python -m service", {}),
        ("python -m other --port 9000", {}),
        ("/sbin/init --port 9000", {}),
        ("", {}),
    ],
)
def test_flags_of_the_first_process_are_those_of_the_server(
    command: str, flags: dict[str, str]
) -> None:
    """Whoever starts and reaps it, and however a value is written; others' flags mean nothing."""
    assert flags_of(command.split()) == flags


@pytest.mark.fault("B8")
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["host", "port", "tls_cert_file", "log_level"]), st.booleans()
        ).flatmap(lambda flag: st.tuples(st.just(flag), VALUES[flag[0]])),
        max_size=5,
    ),
    st.sampled_from(["python -m service", "tini -- python3.13 -m service", "/bin/headwise-serve"]),
)
def test_probe_reads_flags_as_the_server_does(
    given_flags: list[tuple[tuple[str, bool], str]], command: str
) -> None:
    """The last one of a name wins, however it is written."""
    argv = []
    for (name, is_joined), value in given_flags:
        flag = Settings.flag(name)
        argv += [f"{flag}={value}"] if is_joined else [flag, value]
    settings = Settings.load(argv, {})

    flags = flags_of([*command.split(), *argv])

    assert {name: str(getattr(settings, name)) for name in flags} == flags
    assert flags.keys() == {name for (name, _), _ in given_flags}


@pytest.mark.fault("B8")
def test_probe_has_the_defaults_of_the_settings() -> None:
    """It does not import them: that would take longer than the probe."""
    names = Settings.model_fields
    assert {name: str(names[name].default) for name in DEFAULTS} == DEFAULTS
    assert {"tls_cert_file", "tls_client_ca_file"} < names.keys()


@pytest.mark.fault("E8d")
def test_probe_imports_neither_the_server_nor_tls() -> None:
    """It has to fit in what CPU a busy server leaves."""
    code = "import sys, service.probe; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[0:0] = [{str(ROOT)!r}]; {code}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()

    assert {name for name in modules if name.startswith("service")} == {"service", "service.probe"}
    assert not {"ssl", "argparse", "asyncio", "pydantic", "encodings.idna"} & set(modules)


@pytest.mark.fault("E8d")
def test_image_gives_the_probe_longer_than_it_takes() -> None:
    """The engine ends it later than it ends itself, so that the reason is told."""
    [line] = [
        line
        for line in Path(ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("HEALTHCHECK")
    ]

    assert f"--timeout={2 * LIMIT_S}s" in line
