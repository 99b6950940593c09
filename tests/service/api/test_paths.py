"""What a caller names never becomes a path of the host, and an artifact stays in its directory."""

import base64
import json
import re
import shutil
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from service.errors import ArtifactUnreadable
from service.inference.artifact import read_artifact
from service.inference.engine import OnnxEngine
from tests.support.layers import CONFIGS, Layers, sha256_of
from tests.support.server import ROOT, Server
from tests.system.test_main import serve

MARK = "a-secret-of-the-host"
EMBEDDINGS = {"name": "embeddings", "shape": [1, 1, 8], "datatype": "FP32", "data": [0.5] * 8}


@pytest.fixture(scope="module")
def host(layers: Layers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a repository, and a secret and an artifact beside it."""
    directory = tmp_path_factory.mktemp("host")
    shutil.copytree(layers.repository, directory / "repository")
    shutil.copytree(layers.artifact("tiny"), directory / "elsewhere" / "1")
    (directory / "secret").write_text(MARK)
    return directory


@pytest.fixture(scope="module")
def open_server(host: Path) -> Iterator[Server]:
    """Return a server on which everything is allowed that a setting can allow."""
    settings: dict[str, Any] = {"model_control": True, "shared_memory": True}
    with Server(host / "repository", **settings) as running:
        yield running


def names(host: Path) -> list[str]:
    """Return names that would be paths, if anything made paths of them; as they stand in a URL."""
    paths = [
        *("../secret", "../elsewhere", "../elsewhere/1", "tiny/../../secret", "../secret\0"),
        *("../../../../../../../../etc/passwd", "/etc/passwd", f"{host}/secret", "."),
        *("..", "tiny/1", "tiny/1/manifest.json", "..\\secret", "tiny\0", "tiny\n", "\0"),
        *("~/.profile", "%s%n", "*", "file:///etc/passwd", "C:\\secret", "/proc/self/environ"),
        *("\udcff", "x" * 5000),
    ]
    encoded = [quote(path, safe="", errors="surrogateescape") for path in paths]
    twice = [quote(path, safe="") for path in encoded]
    dotted = [path.replace(".", "%2e") for path in encoded]
    raw = [p for p in paths if p.isascii() and p.isprintable() and "\\" not in p and "%" not in p]
    return [*encoded, *twice, *dotted, *raw]


GETS = [
    "/{}",
    "/docs/{}",
    "/docs/assets/{}",
    "/v1/models/{}",
    "/v2/models/{}",
    "/v2/models/{}/ready",
    "/v2/models/{}/config",
    "/v2/models/{}/stats",
    "/v2/models/{}/trace/setting",
    "/v2/models/{}/versions/1",
    "/v2/models/tiny/versions/{}",
    "/v2/models/tiny/versions/{}/ready",
    "/v2/models/tiny/versions/{}/config",
    "/v2/models/tiny/versions/{}/stats",
    "/v2/systemsharedmemory/region/{}/status",
    "/v2/cudasharedmemory/region/{}/status",
]
POSTS: list[tuple[str, Any]] = [
    ("/v1/attention?model={}", {"embeddings": [[0.5] * 8]}),
    ("/v2/models/{}/infer", {"inputs": [EMBEDDINGS]}),
    ("/v2/models/{}/versions/1/infer", {"inputs": [EMBEDDINGS]}),
    ("/v2/models/tiny/versions/{}/infer", {"inputs": [EMBEDDINGS]}),
    ("/v2/models/{}/trace/setting", {}),
    ("/v2/repository/models/{}/load", {}),
    ("/v2/repository/models/{}/unload", {}),
    ("/v2/cudasharedmemory/region/{}/register", {}),
]


@pytest.mark.parametrize(
    ("verb", "path", "body"),
    [*(("GET", path, None) for path in GETS), *(("POST", *post) for post in POSTS)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_name_in_a_url_opens_no_file(
    open_server: Server, host: Path, verb: str, path: str, body: Any
) -> None:
    """Whatever is asked for, it is not there; neither file nor directory of the host is told."""
    content = None if body is None else json.dumps(body).encode()
    connection = HTTPConnection(urlsplit(open_server.url).netloc, timeout=30)
    for name in names(host):
        connection.putrequest(verb, path.format(name), skip_accept_encoding=True)
        connection.putheader("Content-Length", str(len(content or b"")))
        connection.endheaders(content)
        answer = connection.getresponse()
        text = answer.read().decode()

        assert 400 <= answer.status < 500, name
        check_tells_nothing(text, host, name)
    connection.close()


def check_tells_nothing(text: str, host: Path, asked: str) -> None:
    """Check an answer for what is on the host, apart from what the caller said himself."""
    assert MARK not in text, asked
    assert "root:" not in text, asked
    assert "PATH=" not in text, asked
    assert '"sha256"' not in text, asked
    for directory in (str(host), str(Path.cwd()), "site-packages"):
        assert directory not in text or directory in asked.replace("%2F", "/"), asked


@pytest.mark.parametrize(
    "key",
    [
        *("/../../etc/passwd", "/../etc/passwd", "/etc/passwd", "../../etc/passwd", "/..", "/."),
        *("", "/", "//etc/passwd", "/a/../../etc/passwd", "/x\0", "/\0/etc/passwd", "/x\n"),
        *("/%2e%2e%2fetc%2fpasswd", "\\..\\etc\\passwd", "/" + "x" * 255, "file:///etc/passwd"),
    ],
)
def test_key_of_shared_memory_opens_nothing_outside(
    open_server: Server, host: Path, key: str
) -> None:
    """A key is a name in one directory, and no path."""
    path = "/v2/systemsharedmemory/region/r/register"

    answer = open_server.post(path, json={"key": key, "offset": 0, "byte_size": 1})

    assert answer.status_code == 400
    assert answer.json()["error"].startswith("key: expected / and a name of letters")
    check_tells_nothing(answer.text, host, key)
    assert open_server.get("/v2/systemsharedmemory/status").json() == []


@pytest.mark.parametrize("name", ["tiny", "new"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"config": '{"backend": "python"}'},
        {"config": "{}", "file:1/layer.onnx": base64.b64encode(b"x").decode()},
        {"file:../../secret": base64.b64encode(b"x").decode()},
        {"file:/etc/headwise": "eA=="},
    ],
    ids=["config", "file", "file outside", "file at the root"],
)
def test_load_takes_no_files_and_no_configuration_from_callers(
    open_server: Server, host: Path, name: str, parameters: dict[str, str]
) -> None:
    """What Triton would write into the repository is refused, and nothing is written."""
    before = snapshot(host)

    answer = open_server.post(f"/v2/repository/models/{name}/load", json={"parameters": parameters})

    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_input")
    assert "is not offered: an artifact is served as published" in answer.json()["error"]
    assert snapshot(host) == before


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("/v2/logging", {"log_file": "{}/new"}),
        ("/v2/trace/setting", {"trace_file": "{}/new"}),
        ("/v2/trace/setting", {"trace_level": ["TIMESTAMPS"], "trace_file": "{}/new"}),
        ("/v2/models/tiny/trace/setting", {"trace_file": "{}/new"}),
    ],
)
def test_no_caller_says_where_anything_is_written(
    open_server: Server, host: Path, path: str, settings: dict[str, Any]
) -> None:
    """Neither a log nor a trace."""
    asked = {k: v.format(host) if isinstance(v, str) else v for k, v in settings.items()}
    before = snapshot(host)

    answer = open_server.post(path, json=asked)

    assert answer.status_code == 400
    assert snapshot(host) == before


def snapshot(directory: Path) -> dict[str, int]:
    """Return every file in a directory but the servers' logs, with its time."""
    return {
        str(path): path.stat().st_mtime_ns
        for path in directory.rglob("*")
        if path.is_file() and path.suffix != ".log"
    }


def test_artifact_that_cannot_be_loaded_is_told_without_its_path(
    open_server: Server, host: Path
) -> None:
    """The log is the operator's; the caller learns that it failed."""
    spoilt = host / "repository" / "spoilt" / "1"
    shutil.copytree(host / "elsewhere" / "1", spoilt)
    try:
        answer = open_server.post("/v2/repository/models/spoilt/load")
        index = open_server.post("/v2/repository/index")
    finally:
        shutil.rmtree(spoilt.parent)

    assert answer.status_code == 503
    assert answer.json()["error"] == ("model spoilt: version 1 cannot be served; the log says why")
    check_tells_nothing(answer.text + index.text, host, "")
    assert f"{spoilt}: expected a manifest of spoilt version 1" in open_server.log()


@pytest.fixture
def artifact(layers: Layers, tmp_path: Path) -> Path:
    """Return an artifact of the test's own, with a secret of the weights' size outside it."""
    path = tmp_path / "repository" / "tiny" / "1"
    shutil.copytree(layers.artifact("tiny"), path)
    shutil.copy(path / "layer.weights", tmp_path / "repository" / "secret")
    shutil.copy(path / "layer.weights", tmp_path / "secret")
    return path


def point_graph_at(artifact: Path, location: bytes) -> None:
    """Make the graph read its weights there, under a right checksum."""
    graph, manifest = artifact / "layer.onnx", artifact / "manifest.json"
    content, before = graph.read_bytes(), sha256_of(graph)
    assert len(location) == len(b"layer.weights")  # so that every length in the file stays right
    assert content.count(b"layer.weights") == 4
    graph.write_bytes(content.replace(b"layer.weights", location))
    manifest.write_text(manifest.read_text().replace(before, sha256_of(graph)))


@pytest.mark.parametrize(
    "location",
    [b"../..//secret", b"/etc/hostname", b"extra.weights", b"direct/secret"],
    ids=["outside", "absolute", "link", "linked directory"],
)
def test_graph_that_reads_outside_its_artifact_is_not_loaded(
    artifact: Path, location: bytes
) -> None:
    """Though its checksums are right: by whoever may write artifacts, but not read the host."""
    secret = artifact.parent.parent / "secret"
    (artifact / "extra.weights").symlink_to(secret)
    (artifact / "direct").symlink_to(secret.parent)
    point_graph_at(artifact, location)
    graph = read_artifact(artifact).graph

    with pytest.raises(ArtifactUnreadable, match="the runtime cannot read it: ") as caught:
        OnnxEngine(graph, CONFIGS["tiny"])

    assert f"External file: {location.decode()} not found" in str(caught.value)


def test_graph_that_reads_another_file_beside_itself_is_not_loaded(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even from the working directory: no checksum stands for that file."""
    shutil.copy(artifact / "layer.weights", artifact / "extra.weights")
    point_graph_at(artifact, b"extra.weights")
    monkeypatch.chdir(artifact)

    with pytest.raises(ArtifactUnreadable, match=r"External file: extra\.weights not found"):
        OnnxEngine(read_artifact(artifact).graph, CONFIGS["tiny"])


def test_graph_as_published_is_loaded(artifact: Path) -> None:
    """What the tests above do to a graph without changing its weights' place is nothing."""
    point_graph_at(artifact, b"layer.weights")

    OnnxEngine(read_artifact(artifact).graph, CONFIGS["tiny"])


def test_start_with_an_artifact_that_reads_outside_exits_2(artifact: Path) -> None:
    """With one line, which has the artifact's path and nothing of what lies elsewhere."""
    point_graph_at(artifact, b"../..//secret")

    ended = serve("--repository", str(artifact.parent.parent), "--port", "0")

    assert ended.returncode == 2
    [line] = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert line.startswith(f"error: {artifact}/layer.onnx: the runtime cannot read it: ")


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..", ".", "a/b", "", "x\0y"])
def test_manifest_that_names_a_file_elsewhere_is_refused(artifact: Path, name: str) -> None:
    """It is not even looked at: the message is the same whether it is there or not."""
    file = artifact / "manifest.json"
    manifest = json.loads(file.read_text())
    entry = manifest["files"]["layer.weights"]
    file.write_text(json.dumps({**manifest, "files": {**manifest["files"], name: entry}}))

    with pytest.raises(ArtifactUnreadable) as caught:
        read_artifact(artifact)

    assert "no file name" in str(caught.value) or "expected a plain file" in str(caught.value)
    assert "SHA-256" not in str(caught.value)


@pytest.mark.fault("E8d")
@pytest.mark.parametrize(
    "name", ["layer.weights", "layer.onnx", "golden.safetensors", "manifest.json"]
)
def test_link_in_the_place_of_an_artifacts_file_is_refused(artifact: Path, name: str) -> None:
    """Though what it leads to has the right content."""
    target = artifact.parent.parent / f"moved-{name}"
    (artifact / name).rename(target)
    (artifact / name).symlink_to(target)

    with pytest.raises(ArtifactUnreadable, match="found a link out of its directory"):
        read_artifact(artifact)


def test_threat_page_names_tests_that_exist() -> None:
    """A defence without its test is only a claim."""
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "deploy" / "SECURITY.md").read_text()))
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))

    there = set(re.findall(r"^def (test_\w+)\(", tests, re.MULTILINE))

    assert len(named) > 30
    assert named <= there
