"""The peers of the benchmark: asked and read alike, started and ended whole, and never dropped."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import orjson
import pytest

from bench.peers import environment, messages
from bench.peers.__main__ import main
from bench.peers.catalogue import PEERS
from bench.peers.check import Wrong, check, modes
from bench.peers.environment import Progress
from bench.peers.errors import Unavailable
from bench.peers.messages import Floats, Format
from bench.peers.peer import InstalledPeer, Peer, Tensors, Tuning, embeddings
from bench.peers.plain import Plain
from bench.peers.processes import Running, started
from bench.peers.serving import codec
from bench.peers.serving.layer import Layer, Question
from bench.servers import HOST, free_port
from loadtest.drive import closed_load
from loadtest.endpoint import Endpoint
from loadtest.plan import Plan
from tests.support.layers import CONFIGS, Layers
from tests.support.server import until

SHAPE = (2, 3)
WIDTH = 4
HEADS = 2

MODES = [(peer, *mode) for peer in PEERS.values() for mode in modes(peer)]
INSTALLED = [peer for peer in PEERS.values() if isinstance(peer, InstalledPeer)]

PARENT = """
import subprocess, sys
from http.server import HTTPServer, SimpleHTTPRequestHandler
argv = [sys.executable, "-c", "import time; time.sleep(600)"]
orphan = "import subprocess; subprocess.Popen({!r}, start_new_session=True)".format(argv)
subprocess.run([sys.executable, "-c", orphan], check=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), SimpleHTTPRequestHandler).serve_forever()
"""
"""A server whose grandchild is an orphan in a session of its own, as some peers have."""

BENCH = """
import sys, time
from pathlib import Path
from bench.peers.processes import Running, started
port, folder = sys.argv[1:]
argv = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", port]
with started("x", argv, Path(folder), {}, ("127.0.0.1", int(port), "/")) as running:
    print(running.process.pid, flush=True)
    time.sleep(600)
"""
"""A benchmark with one peer."""

UNTOLD = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
    do_POST = do_GET
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""A server of HTTP/1.0."""


class Recorder:
    """A server on loopback that keeps each request, and answers with what it is told."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Mapping[str, str], bytes]] = []
        self.answer = b""
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                recorder.requests.append((self.path, dict(self.headers), body))
                self.send_response(200)
                self.send_header("Content-Length", str(len(recorder.answer)))
                self.end_headers()
                self.wfile.write(recorder.answer)

            def log_message(self, *args: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """Return a running recorder."""
    made = Recorder()
    yield made
    made.close()


class Scaled(Plain):
    """The plain reference, read a little wrong."""

    def read(self, wire: Format, body: bytes) -> Tensors:
        """Return tensors that are off by more than is allowed."""
        return {
            name: tensor * np.float32(1.01) for name, tensor in super().read(wire, body).items()
        }


class Missing(Plain):
    """A peer that no installer finds."""

    name = "missing"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "missing.txt").write_text("no-such-package==1\n")

    def install(self, progress: Progress) -> None:
        """Try."""
        environment.install("missing", progress, home=self._folder, requirements=self._folder)


class Broken(Plain):
    """A peer that says a word and ends."""

    def command(self, folder: Path, port: int, tuning: Tuning) -> list[str]:
        """Return what fails."""
        return [sys.executable, "-c", "import sys; sys.exit('Error: no layer today')"]


class Endless(Plain):
    """A peer whose answers end with the connection, their length untold."""

    def command(self, folder: Path, port: int, tuning: Tuning) -> list[str]:
        """Return such a server."""
        return [sys.executable, "-c", UNTOLD, str(port)]


class Open(Plain):
    """A peer that others than this machine could ask."""

    @contextlib.contextmanager
    def start(self, graph: Path, threads: int, tuning: Tuning | None = None) -> Iterator[Running]:
        """Give the plain reference, which says so."""
        with super().start(graph, threads, tuning) as running:
            yield Everywhere(running.name, running.port, running.process, running.start_s)


class Everywhere(Running):
    """A peer's processes that say that they listen on all addresses."""

    def addresses(self) -> set[str]:
        """Return loopback, written in three ways, and everything."""
        return {"127.0.0.1", "::1", "::ffff:127.0.0.1", "0.0.0.0"}  # noqa: S104 - nothing does


@pytest.mark.parametrize("peer", PEERS.values(), ids=lambda peer: peer.name)
def test_every_peer_says_what_it_is_and_how_it_is_run(peer: Peer) -> None:
    """Version, formats and tuning are told without installing anything."""
    assert peer.version.split()[1][0].isdigit()
    assert set(peer.formats) <= {"binary", "json"}
    assert peer.tuning in peer.candidates
    assert len(set(peer.candidates)) == len(peer.candidates)
    assert PEERS[peer.name] is peer


@pytest.mark.parametrize("peer", INSTALLED, ids=lambda peer: peer.name)
def test_pins_of_a_peer_are_exact_and_hold_the_same_runtime_and_no_torch(
    peer: InstalledPeer,
) -> None:
    """All peers run the layer by one runtime, which is Headwise's."""
    pins = environment.pins(peer.name)
    lines = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()

    assert all(version[0].isdigit() for version in pins.values())
    assert f"onnxruntime=={pins['onnxruntime']}" in lines
    assert peer.package in pins
    assert "torch" not in pins


@pytest.mark.parametrize(
    ("peer", "wire", "weights"), MODES, ids=lambda value: getattr(value, "name", str(value))
)
def test_request_arrives_whole_and_its_answer_is_read(
    peer: Peer, wire: Format, weights: bool, recorder: Recorder
) -> None:
    """What a load would send holds the tensors that it is about; what comes back is read."""
    random = np.random.default_rng(0)
    wanted: dict[str, Floats] = {"output": random.random((*SHAPE, WIDTH), np.float32)}
    if weights:
        wanted["attention_weights"] = random.random((2, HEADS, 3, 3), np.float32)
    recorder.answer = answer_of(peer, wire, wanted)
    request = peer.request(wire, *SHAPE, weights=weights, width=WIDTH)

    plan = Plan(count=2, warmup_s=0)
    records = closed_load(Endpoint("http", HOST, recorder.port), [request], clients=1, plan=plan)

    assert records.outcomes == {200: 2}

    first, second = recorder.requests
    assert first == second
    found, asks_for_weights = question_of(peer, wire, *first)
    np.testing.assert_array_equal(found, embeddings(*SHAPE, WIDTH))
    assert asks_for_weights == weights
    tensors = peer.read(wire, recorder.answer)
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(tensors[name], tensor)


def question_of(
    peer: Peer, wire: Format, path: str, headers: Mapping[str, str], body: bytes
) -> tuple[Floats, bool]:
    """Return the embeddings of a request and whether it asks for weights, as its peer reads it."""
    if peer.name == "bentoml" and wire == "binary":
        [found] = messages.read_saved(body).values()
        return found, path.endswith("weights")
    if wire == "json" and path.endswith("/infer"):
        asked = orjson.loads(body)
        [tensor] = asked["inputs"]
        names = {output["name"] for output in asked["outputs"]}
        data = np.array(tensor["data"], np.float32).reshape(tensor["shape"])
        return data, "attention_weights" in names
    size = headers.get("Inference-Header-Content-Length")
    assert (size is not None) == (wire == "binary")
    question = codec.read(body, size)
    return question.embeddings, question.weights


def answer_of(peer: Peer, wire: Format, tensors: Tensors) -> bytes:
    """Return an answer as a peer writes it."""
    if peer.name == "bentoml" and wire == "binary":
        return b"".join(messages.saved(tensor) for tensor in tensors.values())
    if wire == "json" and peer.name in ("triton", "mlserver"):
        outputs = [
            {"name": name, "shape": tensor.shape, "datatype": "FP32", "data": tensor.ravel()}
            for name, tensor in tensors.items()
        ]
        return orjson.dumps({"outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
    content, _ = codec.write(list(tensors.values()), binary=wire == "binary")
    return content


def test_binary_answer_with_a_byte_too_many_is_refused() -> None:
    """No byte of an answer goes unread."""
    content, _ = codec.write([np.ones((1, 1, WIDTH), np.float32)], binary=True)

    with pytest.raises(ValueError, match=f"expected {len(content)} bytes, got {len(content) + 1}"):
        messages.read_oip_binary(content + b"\0")


def test_calls_that_share_a_run_get_what_each_gets_alone(layers: Layers) -> None:
    """Lengths, rows and wishes mixed: the layer inside the peers mixes no answers up."""
    layer = Layer(str(layers.artifact("mha") / "layer.onnx"), 1, spinning=False)
    width = CONFIGS["mha"].embed_dim
    shapes = [(1, 3), (2, 5), (2, 3), (1, 5), (1, 3)]
    questions = [
        Question(embeddings(*shape, width) + i, weights=i % 2 == 0)
        for i, shape in enumerate(shapes)
    ]

    together = layer.run_together(questions)

    for question, tensors in zip(questions, together, strict=True):
        alone = layer.run(question)
        assert len(tensors) == 1 + question.weights
        for found, wanted in zip(tensors, alone, strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_plain_peer_answers_what_the_engine_answers(layers: Layers) -> None:
    """Started, asked in every mode, compared, and ended."""
    graph = layers.artifact("mha") / "layer.onnx"

    line = check(Plain(), graph, CONFIGS["mha"], threads=1)

    assert line.startswith("plain (fastapi ")
    assert "60 answers within" in line
    assert "in 1 process" in line


def test_wrong_answer_is_told_with_its_place(layers: Layers) -> None:
    """A peer that is fast and wrong is no peer."""
    graph = layers.artifact("tiny") / "layer.onnx"

    with pytest.raises(Wrong, match=r"plain, binary, \[1, 1\]: output: off by .*, allowed 1e-05"):
        check(Scaled(), graph, CONFIGS["tiny"], threads=1)


def test_answer_of_untold_length_is_wrong(layers: Layers) -> None:
    """The load counts an answer as whole by its Content-Length."""
    graph = layers.artifact("tiny") / "layer.onnx"

    with pytest.raises(Wrong, match="plain, binary: expected a Content-Length"):
        check(Endless(), graph, CONFIGS["tiny"], threads=1)


def test_peer_beyond_loopback_is_wrong(layers: Layers) -> None:
    """What is only measured here is offered to nobody else."""
    graph = layers.artifact("tiny") / "layer.onnx"

    with pytest.raises(Wrong, match=r"expected loopback alone, it listens on 0\.0\.0\.0$"):
        check(Open(), graph, CONFIGS["tiny"], threads=1)


def test_peer_that_cannot_be_installed_is_reported_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its reason is the installer's, nothing half made is left, and the exit code tells."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    code = main(["install"], {"missing": Missing(tmp_path), "plain": Plain()})

    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert any("missing: installing 1 packages" in line for line in lines)
    [failure] = [line for line in lines if "FAILED" in line]
    assert failure.startswith("missing: FAILED: missing: not installed: ERROR: ")
    assert "no-such-package==1" in failure
    assert lines[-1].startswith("plain: fastapi ")
    assert [path.name for path in tmp_path.iterdir()] == ["missing.txt"]


def test_environment_is_made_once_and_again_for_other_pins(tmp_path: Path) -> None:
    """The stamp stands for an installation that went through, and for its pins."""
    lines: list[str] = []
    pins = tmp_path / "none.txt"
    pins.write_text("# nothing\n")

    for comment in ("# nothing\n", "# nothing\n", "# nothing else\n"):
        pins.write_text(comment)
        environment.install("none", lines.append, home=tmp_path, requirements=tmp_path)

    assert sum("installing 0 packages" in line for line in lines) == 2
    assert (tmp_path / "none" / "bin" / "python").exists()


def test_peer_that_ends_is_unavailable_with_its_last_words(layers: Layers) -> None:
    """What it said is the reason."""
    graph = layers.artifact("tiny") / "layer.onnx"

    with pytest.raises(Unavailable, match="plain: ended with 1: Error: no layer today"):
        check(Broken(), graph, CONFIGS["tiny"], threads=1)


def test_peer_that_is_no_program_is_unavailable(tmp_path: Path) -> None:
    """A command that is not there is a reason, too."""
    gone = str(tmp_path / "gone")

    with (
        pytest.raises(Unavailable, match=f"x: {gone}: No such file or directory"),
        started("x", [gone], tmp_path, {}, (HOST, free_port(), "/")),
    ):
        pass


def test_nothing_of_a_peer_is_left(tmp_path: Path) -> None:
    """Even a grandchild without parents, in a session of its own, counts and ends."""
    port = free_port()
    command = [sys.executable, "-c", PARENT, str(port)]

    with started("x", command, tmp_path, {}, (HOST, port, "/")) as running:
        pids = running.pids
        assert len(pids) == 2
        assert running.addresses() == {HOST}
        assert running.resident_mb() > 1

    assert not any(_runs(pid) for pid in pids)


def test_peer_ends_with_whoever_started_it(tmp_path: Path) -> None:
    """A benchmark that is killed leaves no server behind."""
    argv = [sys.executable, "-c", BENCH, str(free_port()), str(tmp_path)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=root) as bench:
        assert bench.stdout is not None
        peer = int(bench.stdout.readline())
        bench.kill()

    until(lambda: not _runs(peer))


def test_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The message lists the names that there are."""
    with pytest.raises(SystemExit):
        main(["check", "tomcat"])

    assert "NAME: expected some of plain, triton" in capsys.readouterr().err


def test_every_peer_that_has_pins_is_in_the_catalogue() -> None:
    """None is dropped, and none lacks its pins."""
    pinned = {path.stem for path in environment.REQUIREMENTS.glob("*.txt")}

    assert pinned == {peer.name for peer in INSTALLED}
    assert PEERS.keys() - pinned == {"plain"}


def test_list_names_every_peer(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is installed for it."""
    assert main(["list"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == list(PEERS)


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
