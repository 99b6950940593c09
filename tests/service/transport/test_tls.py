"""TLS: a real certificate, clients that verify it, and what does not get past the handshake."""

import concurrent.futures
import contextlib
import re
import shutil
import signal
import socket
import ssl
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPSConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import orjson
import pytest
from safetensors.numpy import load, save

from service.errors import SettingsInvalid
from service.settings import Settings
from service.transport.tls import tls_context
from tests.service.test_probe import probe
from tests.support.layers import Layers
from tests.support.server import Server, until
from tests.system.test_main import metric, serve

GOOD: dict[str, Any] = {"model": "tiny", "embeddings": [[0.5] * 8]}
KEY = "a-key-that-is-long-enough-for-the-server"
WORD = "open sesame"
EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


@dataclass(frozen=True)
class Files:
    """Certificates and keys, made by OpenSSL's own command."""

    directory: Path

    def __getitem__(self, name: str) -> Path:
        return self.directory / f"{name}.pem"

    def make_authority(self, name: str) -> None:
        """Make who vouches for others."""
        self._openssl(
            *(*EC, "-noenc", "-x509"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
            *("-keyout", self[f"{name}-key"], "-out", self[name]),
        )

    def make(self, name: str, authority: str, *more: str) -> None:
        """Make a certificate that the authority signed, and its key."""
        self._openssl(
            *(*EC, *(more or ("-noenc",))),
            *("-x509", "-CA", self[authority], "-CAkey", self[f"{authority}-key"]),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-addext", "authorityKeyIdentifier=keyid:always"),
            *("-keyout", self[f"{name}-key"], "-out", self[name]),
        )

    def _openssl(self, *argv: object) -> None:
        openssl = shutil.which("openssl")
        assert openssl is not None, "missing: apt install openssl"
        subprocess.run(
            [openssl, "req", "-days", "2", "-subj", "/CN=headwise-test", *map(str, argv)],
            check=True,
            capture_output=True,
        )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return certificates of a server and of callers, and what is wrong in one way each."""
    files = Files(tmp_path_factory.mktemp("tls"))
    files.make_authority("ca")
    files.make_authority("client-ca")
    files.make("server", "ca")
    files.make("other", "ca")
    files.make("locked", "ca", "-passout", f"pass:{WORD}")
    files.make("client", "client-ca")
    both = files["server"].read_bytes() + files["server-key"].read_bytes()
    files["both"].write_bytes(both)
    files["text"].write_text("no certificate, only text\n")
    files["empty"].write_text("")
    files["word"].write_text(f"{WORD}\nnot this line\n")
    files["wrong-word"].write_text("open says me\n")
    files["long-word"].write_text("x" * 1025)
    files["keys"].write_text(f"caller:{KEY}\n")
    return files


def trusting(files: Files, client: str | None = None) -> ssl.SSLContext:
    """Return what a careful caller uses: it trusts our authority alone, and checks the name."""
    context = ssl.create_default_context(cafile=files["ca"])
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 does by itself
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname
    if client is not None:
        context.load_cert_chain(files[client], files[f"{client}-key"])
    return context


def tls_server(layers: Layers, files: Files, client: str | None = None, **settings: Any) -> Server:
    """Return a server that speaks TLS, and its careful client."""
    named: dict[str, Any] = {"tls_cert_file": files["server"], "tls_key_file": files["server-key"]}
    server = Server(layers.repository, **(named | settings))
    server.client.close()
    server.client = httpx.Client(
        verify=trusting(files, client), headers={"X-API-Key": KEY}, timeout=60
    )
    return server


@pytest.fixture(scope="module")
def secure(layers: Layers, files: Files) -> Iterator[Server]:
    """Return a server with a certificate and a key for callers."""
    with tls_server(layers, files, api_keys_file=files["keys"]) as running:
        yield running


def address(server: Server) -> tuple[str, int]:
    """Return where a server listens."""
    parts = urlsplit(server.url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def test_caller_that_verifies_the_certificate_is_served(secure: Server, files: Files) -> None:
    """The start tells an https address; who does not know our authority does not talk to us."""
    answer = secure.post("/v1/attention", json=GOOD)
    keyless = httpx.post(secure.url + "/v1/attention", json=GOOD, verify=trusting(files))
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(secure.url, verify=ssl.create_default_context())

    assert secure.url.startswith("https://127.0.0.1:")
    assert (answer.status_code, answer.json()["model"]) == (200, "tiny")
    assert (keyless.status_code, keyless.json()["code"]) == (401, "unauthorized")


def test_large_bodies_come_and_go_whole(secure: Server) -> None:
    """Both beyond what is buffered anywhere on the way, many times the size of a TLS record."""
    random = np.random.default_rng(0)
    x = random.standard_normal((200, 256, 24)).astype(np.float32)
    headers = {"Content-Type": "application/x-safetensors"}

    answer = secure.post(
        "/v1/attention?model=mha&weights=true", content=save({"embeddings": x}), headers=headers
    )
    alone = secure.post(
        "/v1/attention?model=mha", content=save({"embeddings": x[-1:]}), headers=headers
    )

    tensors = load(answer.content)
    assert tensors["attention_weights"].shape == (200, 3, 256, 256)
    np.testing.assert_allclose(tensors["output"][-1:], load(alone.content)["output"], atol=1e-5)


def test_connection_is_kept_over_refusals_and_unread_bodies(secure: Server, files: Files) -> None:
    """As without TLS."""
    connection = HTTPSConnection(*address(secure), context=trusting(files), timeout=30)
    statuses, sockets = [], set()
    for headers in ({}, {"X-API-Key": KEY}, {"X-API-Key": "x"}, {"X-API-Key": KEY}):
        body = orjson.dumps(GOOD) if headers.get("X-API-Key") == KEY else bytes(2**21)
        connection.request("POST", "/v1/attention", body=body, headers=headers)
        answer = connection.getresponse()
        answer.read()
        statuses.append(answer.status)
        sockets.add(connection.sock)

    connection.close()
    assert statuses == [401, 200, 401, 200]
    assert len(sockets) == 1


def connected(server: Server, files: Files) -> ssl.SSLSocket:
    """Return a bare connection to the server."""
    plain = socket.create_connection(address(server), timeout=60)
    return trusting(files).wrap_socket(plain, server_hostname="127.0.0.1")


def request(verb: str, path: str, content: bytes) -> bytes:
    """Return a request with our key."""
    head = f"{verb} {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def test_caller_that_leaves_is_noticed(layers: Layers, files: Files) -> None:
    """A closed connection frees the engine, though it was TLS."""
    x = np.zeros((200, 256, 24), np.float32)
    limits: dict[str, Any] = {
        "max_batch_tokens": 10**6,
        "max_batch_cells": 10**9,
        "concurrent_runs": 1,
    }
    with tls_server(layers, files, **limits) as server:
        head = "POST /v1/attention?model=mha HTTP/1.1\r\nHost: x\r\n"
        content = save({"embeddings": x})
        head += f"Content-Type: application/x-safetensors\r\nContent-Length: {len(content)}\r\n\r\n"
        with connected(server, files) as leaving:
            leaving.sendall(head.encode() + content)
            until(lambda: metric(server, 'headwise_queue_calls{model="mha"}') == 1)
        until(lambda: metric(server, 'headwise_queue_calls{model="mha"}') == 0)
        server.wait_for_log('"status":499')
        log = server.log()

    assert log.count('"status":499') == 1
    assert "Traceback" not in log


def test_answer_is_read_whole_or_cut_off(layers: Layers, files: Files) -> None:
    """Who reads gets all of it; who does not is noticed, though TLS buffers on its own."""
    content = save({"embeddings": np.zeros((1, 2048, 8), np.float32)})
    head = "POST /v1/attention?model=tiny&weights=true HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: application/x-safetensors\r\nContent-Length: {len(content)}\r\n\r\n"
    with tls_server(layers, files, answer_timeout_s=1) as server:
        with connected(server, files) as reading:
            reading.sendall(head.encode() + content)
            answer = reading.makefile("rb").read()
        with connected(server, files) as silent:
            silent.sendall(head.encode() + content)
            until(lambda: '"code":"client_stalled"' in server.log())
            until(lambda: metric(server, "headwise_unsent_answer_bytes") == 0)
        log = server.log()

    assert len(answer) > 4 * 2 * 2048 * 2048
    lines = re.findall(r'"route":"/v1/attention".*"status":(\d+),"code":(\S+?),', log)
    assert lines == [("200", "null"), ("499", '"client_stalled"')]
    assert "Traceback" not in log


def test_slow_head_is_answered_408(layers: Layers, files: Files) -> None:
    """The time limit of a request's head runs from the end of the handshake."""
    with (
        tls_server(layers, files, head_timeout_s=0.2) as server,
        connected(server, files) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\n")
        answer = connection.makefile("rb").read()

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"too_slow"' in answer


def test_handshakes_that_stall_or_fail_hold_up_nobody_and_do_not_flood_the_log(
    layers: Layers, files: Files
) -> None:
    """Others are served meanwhile, the end is clean, and there is no traceback for each."""
    with tls_server(layers, files) as server:
        silent = [socket.create_connection(address(server), timeout=60) for _ in range(50)]
        half = socket.create_connection(address(server), timeout=60)
        half.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a hello
        plain = socket.create_connection(address(server), timeout=60)
        plain.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        refused = plain.makefile("rb").read()
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url, verify=ssl.create_default_context())
        answer = server.post("/v1/attention", json=GOOD)
        for connection in silent[:25]:
            connection.close()
        again = server.post("/v1/attention", json=GOOD)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
        for connection in (*silent, half, plain):
            connection.close()
        log = server.log()

    assert (answer.status_code, again.status_code) == (200, 200)
    assert refused.startswith(b"HTTP/1.1 400 ")
    assert server.process.returncode == 0
    assert "Traceback" not in log
    assert all(line.startswith("{") for line in log.splitlines()), log


@pytest.mark.fault("E8b")
@pytest.mark.parametrize("verb", ["GET", "HEAD", "POST", "DELETE", "OPTIONS"])
def test_plain_http_on_the_tls_port_is_answered_in_plain_http(secure: Server, verb: str) -> None:
    """Who forgot the s of https reads what to do, and the operator has a line in the log."""
    before = metric(secure, 'headwise_requests_total{route="unmatched",status="400"}')
    plain = HTTPConnection(*address(secure), timeout=30)

    plain.request(verb, "/v1/attention", body=b"{}" if verb == "POST" else None)
    answer = plain.getresponse()
    body = answer.read()

    assert (answer.status, answer.headers["connection"]) == (400, "close")
    if verb != "HEAD":
        assert orjson.loads(body) == {
            "error": "address: this port speaks HTTPS only; expected https://, got no TLS",
            "code": "invalid_input",
        }
    after = metric(secure, 'headwise_requests_total{route="unmatched",status="400"}')
    assert after == before + 1
    assert secure.get("/v2/health/ready").status_code == 200


@pytest.mark.parametrize(
    ("version", "is_spoken"),
    [("TLSv1", False), ("TLSv1_1", False), ("TLSv1_2", True), ("TLSv1_3", True)],
)
def test_tls_below_1_2_is_not_spoken(
    secure: Server, files: Files, version: str, is_spoken: bool
) -> None:
    """A caller that could speak an older one only is turned away."""
    context = trusting(files)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what we want not to work
        context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    plain = socket.create_connection(address(secure), timeout=60)
    spoken: str | None = None
    with (
        contextlib.suppress(ssl.SSLError),
        context.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
    ):
        spoken = wrapped.version()

    assert spoken == (version.replace("_", ".") if is_spoken else None)


def test_callers_need_a_certificate_where_an_authority_for_them_is_set(
    layers: Layers, files: Files
) -> None:
    """None, and one of another authority (the server's own), do not get past the handshake."""
    with tls_server(layers, files, "client", tls_client_ca_file=files["client-ca"]) as server:
        answer = server.post("/v1/attention", json=GOOD)
        for client in (None, "other"):
            with pytest.raises(httpx.TransportError):
                httpx.get(server.url + "/v2/health/live", verify=trusting(files, client))
        log = server.log()

    assert answer.status_code == 200
    assert "Traceback" not in log


@pytest.mark.parametrize("with_client_ca", [False, True])
def test_health_check_of_the_container_speaks_tls(
    layers: Layers, files: Files, with_client_ca: bool
) -> None:
    """Also where it has no certificate to show: then the handshake is the sign of life."""
    client_ca = {"tls_client_ca_file": files["client-ca"]} if with_client_ca else {}
    environ = {f"HEADWISE_{name.upper()}": str(path) for name, path in client_ca.items()}
    with tls_server(layers, files, "client", **client_ca) as server:
        _, port = address(server)
        ended = probe(port, HEADWISE_TLS_CERT_FILE=str(files["server"]), **environ)

    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    "settings",
    [
        {"tls_cert_file": "both", "tls_key_file": None},
        {"tls_cert_file": "locked", "tls_key_file": "locked-key", "tls_key_password_file": "word"},
        {"tls_key_password_file": "word"},
    ],
    ids=["one file", "encrypted", "password not needed"],
)
def test_private_key_may_lie_with_its_certificate_or_be_encrypted(
    layers: Layers, files: Files, settings: dict[str, str | None]
) -> None:
    """Of the password's file the first line counts."""
    paths: dict[str, Any] = {
        name: "" if file is None else files[file] for name, file in settings.items()
    }
    with tls_server(layers, files, **paths) as server:
        answer = server.post("/v1/attention", json=GOOD)

    assert answer.status_code == 200


CERT, PRIVATE, PASSWORD, CLIENTS = (
    "tls_cert_file",
    "tls_key_file",
    "tls_key_password_file",
    "tls_client_ca_file",
)
SERVER = {CERT: "server", PRIVATE: "server-key"}
LOCKED = {CERT: "locked", PRIVATE: "locked-key"}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({**SERVER, CERT: "none"}, "tls_cert_file: {none}: No such file or directory"),
        ({**SERVER, PRIVATE: "none"}, "tls_key_file: {none}: No such file or directory"),
        ({**SERVER, CLIENTS: "none"}, "tls_client_ca_file: {none}: No such file or directory"),
        ({**SERVER, PASSWORD: "none"}, "tls_key_password_file: {none}: No such file or directory"),
        ({**SERVER, CERT: "text"}, "tls_cert_file: {text}: expected certificates in PEM: no cer"),
        ({**SERVER, CERT: "empty"}, "tls_cert_file: {empty}: expected certificates in PEM"),
        ({**SERVER, CERT: "server-key"}, "tls_cert_file: {server-key}: expected certificates in"),
        ({**SERVER, PRIVATE: "text"}, "tls_key_file: {text}: expected a private key in PEM"),
        ({**SERVER, PRIVATE: "server"}, "tls_key_file: {server}: expected a private key in PEM"),
        ({CERT: "server"}, "tls_cert_file: {server}: expected a private key in PEM"),
        ({**SERVER, CLIENTS: "text"}, "tls_client_ca_file: {text}: expected certificates in PEM"),
        (
            {**SERVER, PRIVATE: "other-key"},
            "tls_key_file: {other-key}: expected the private key of the certificate in {server}",
        ),
        (LOCKED, "tls_key_file: {locked-key}: the private key is encrypted: expected tls_key_pas"),
        (
            {**LOCKED, PASSWORD: "wrong-word"},
            "tls_key_password_file: {wrong-word}: does not open the private key",
        ),
        ({**LOCKED, PASSWORD: "empty"}, "tls_key_password_file: {empty}: expected a first line"),
        ({**LOCKED, PASSWORD: "long-word"}, "of 1 to 1024 bytes, got 1025"),
        ({PRIVATE: "server-key"}, "tls_key_file: expected tls_cert_file beside it, got none"),
        ({CLIENTS: "ca"}, "tls_client_ca_file: expected tls_cert_file beside it, got none"),
        ({PASSWORD: "word"}, "tls_key_password_file: expected tls_cert_file beside it, got none"),
    ],
    ids=range(19),
)
def test_files_that_do_not_fit_are_told_by_their_setting(
    files: Files, settings: dict[str, str], problem: str
) -> None:
    """The message has the setting and the file, and no secret; nobody is asked at the terminal."""
    for file in {*settings.values(), "server"}:
        problem = problem.replace(f"{{{file}}}", str(files[file]))

    with pytest.raises(SettingsInvalid) as caught:
        tls_context(Settings.model_validate({n: files[f] for n, f in settings.items()}))

    assert problem in str(caught.value)
    assert "open says me" not in str(caught.value)


@pytest.mark.parametrize("locked", [True, False])
def test_start_with_files_that_do_not_fit_exits_2_with_one_line(
    layers: Layers, files: Files, locked: bool
) -> None:
    """Nothing is served in the clear that was meant to be closed."""
    key = "locked-key" if locked else "other-key"
    environ = {
        "HEADWISE_TLS_CERT_FILE": str(files["locked" if locked else "server"]),
        "HEADWISE_TLS_KEY_FILE": str(files[key]),
    }

    ended = serve("--repository", str(layers.repository), "--port", "0", **environ)

    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"error: tls_key_file: {files[key]}: ")


@pytest.mark.skipif(find_spec("tritonclient") is None, reason="torch is not installed here")
@pytest.mark.parametrize("header", [{"Authorization": f"Bearer {KEY}"}, {"X-API-Key": KEY}])
def test_tritonclient_calls_over_tls_with_a_key(
    secure: Server, files: Files, header: dict[str, str]
) -> None:
    """As published: it verifies our certificate, and adds the header to every call."""
    import tritonclient.http as triton
    from tritonclient.utils import InferenceServerException

    netloc = urlsplit(secure.url).netloc
    options = {"ca_certs": str(files["ca"]), "cert_reqs": ssl.CERT_REQUIRED}
    x = np.full((1, 2, 8), 0.5, np.float32)
    tensor = triton.InferInput("embeddings", [1, 2, 8], "FP32")
    tensor.set_data_from_numpy(x)

    with triton.InferenceServerClient(netloc, ssl=True, ssl_options=options) as client:
        live = client.is_server_live()
        answer = client.infer("tiny", [tensor], headers=header).as_numpy("output")
        metadata = client.get_model_metadata("tiny", headers=header)
        with pytest.raises(InferenceServerException, match="expected one in the header") as caught:
            client.infer("tiny", [tensor])
    elsewhere = {**options, "ca_certs": str(files["client-ca"])}
    with (
        triton.InferenceServerClient(netloc, ssl=True, ssl_options=elsewhere) as stranger,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        stranger.is_server_live()

    assert live
    assert answer is not None
    assert answer.shape == (1, 2, 8)
    assert metadata["name"] == "tiny"
    assert caught.value.status() == "401"


def test_many_callers_at_once_each_get_their_own_answer(secure: Server, files: Files) -> None:
    """Connections of their own, each with a handshake."""

    def ask(number: int) -> float:
        body = {"model": "tiny", "embeddings": [[float(number)] * 8]}
        headers = {"X-API-Key": KEY}
        url = secure.url + "/v1/attention"
        answer = httpx.post(url, json=body, headers=headers, verify=trusting(files), timeout=60)
        return float(answer.json()["output"][0][0])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, [0, 1, 2, 3] * 6))

    for number in range(4):
        np.testing.assert_allclose(found[number::4], found[number], atol=1e-5)
    assert len({round(value, 3) for value in found}) == 4


def test_caller_that_rests_does_not_hold_up_the_end(layers: Layers, files: Files) -> None:
    """It never ends TLS by itself, and nothing of it is cut off."""
    with tls_server(layers, files) as server:
        assert server.get("/v2/health/live").status_code == 200  # its connection is kept
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
        log = server.log()

    assert server.process.returncode == 0
    assert '"message":"stopped"' in log
    assert "cut off" not in log
