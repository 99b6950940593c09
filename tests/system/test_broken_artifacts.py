"""A start with artifacts that cannot be served: it ends, or goes on without them and names them."""

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from service.contract import GOLDEN_FILE, MANIFEST_FILE, OUTPUT, WEIGHTS_FILE, FileEntry
from service.inference.artifact import read_artifact
from tests.support.layers import Layers, sha256_of
from tests.support.server import Server
from tests.system.test_main import serve

CALL = {"model": "tiny", "embeddings": [[0.5] * 8]}


def grow(path: Path) -> None:
    """Add two bytes to the weights."""
    with (path / WEIGHTS_FILE).open("ab") as file:
        file.write(b"xx")


def hide(path: Path) -> None:
    """Put a link that leads nowhere in the place of a file."""
    (path / WEIGHTS_FILE).unlink()
    (path / WEIGHTS_FILE).symlink_to("/nowhere")


def renumber(path: Path) -> None:
    """Let it be a copy of another version, as `cp -r 1 3` makes it."""
    manifest = path / MANIFEST_FILE
    text = manifest.read_text()
    manifest.write_text(re.sub(r'"version": \d+', '"version": 77', text))


def mislead(path: Path) -> None:
    """Publish another golden answer, with the right checksum: the warm-up must notice."""
    file = path / GOLDEN_FILE
    golden = load_file(file)
    file.write_bytes(save(golden | {OUTPUT: golden[OUTPUT] + np.float32(1e-3)}))
    manifest = read_artifact(path.with_name("1")).manifest
    entry = FileEntry(sha256_of(file), file.stat().st_size)
    files = manifest.files | {GOLDEN_FILE: entry}
    changed = dataclasses.replace(manifest, version=int(path.name), files=files)
    (path / MANIFEST_FILE).write_text(changed.to_json())


def scribble(path: Path) -> None:
    """Leave a manifest that is no JSON."""
    (path / MANIFEST_FILE).write_text("{")


BREAKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "two bytes too many": (grow, "layer.weights: expected 1184 bytes, found 1186"),
    "link that leads nowhere": (hide, "layer.weights: expected a plain file"),
    "manifest of another version": (
        renumber,
        "got one of tiny version 77; if it is a copy, change",
    ),
    "golden answer that differs": (mislead, "golden answer: output differs by"),
    "manifest that is no JSON": (scribble, "manifest.json: "),
}


@pytest.fixture
def repository(layers: Layers, tmp_path: Path) -> Path:
    """Return the test layers, tiny with a second version."""
    repository = Path(shutil.copytree(layers.repository, tmp_path / "repository"))
    copy = Path(shutil.copytree(repository / "tiny" / "1", repository / "tiny" / "2"))
    manifest = copy / MANIFEST_FILE
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    return repository


@pytest.mark.fault("C6")
@pytest.mark.parametrize(("spoil", "reason"), BREAKS.values(), ids=BREAKS)
def test_start_that_skips_serves_the_rest_and_names_what_is_broken(
    repository: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    """In the log, in the index and in the answer of ready; a lower version takes its place."""
    spoil(repository / "tiny" / "2")

    with Server(repository, skip_broken=True) as server:
        ready = server.get("/v2/health/ready")
        answer = server.post("/v1/attention", json=CALL)
        index = server.post("/v2/repository/index").json()
        log = server.log()

    assert (ready.status_code, ready.json()) == (200, {"ready": True, "broken": ["tiny/2"]})
    assert (answer.status_code, answer.json()["version"]) == (200, 1)
    rows = {r["version"]: (r["state"], r["reason"]) for r in index if r["name"] == "tiny"}
    assert rows["1"] == ("READY", "")
    assert rows["2"][0] == "UNAVAILABLE"
    assert reason in rows["2"][1]
    assert str(repository) not in rows["2"][1]
    assert re.search(f'"message":"not reloaded","problem":"[^"]*{re.escape(reason)}', log)
    assert '"message":"started without","broken":["tiny/2"]' in log
    assert "Traceback" not in log


@pytest.mark.fault("C6")
def test_start_that_skips_a_name_of_which_nothing_is_good_refuses_its_calls(
    repository: Path,
) -> None:
    """503 with the reason, not another layer's answer; a look takes it up once it is mended."""
    weights = (repository / "mha" / "1" / WEIGHTS_FILE).read_bytes()
    grow(repository / "mha" / "1")

    with Server(repository, skip_broken=True, model_control=True) as server:
        answers = [
            server.post("/v1/attention", json={"embeddings": [[0.5] * 8]}),
            server.post("/v2/models/mha/infer", json={}),
            server.get("/v2/models/mha/ready"),
        ]
        ready = server.get("/v2/health/ready").json()
        (repository / "mha" / "1" / WEIGHTS_FILE).write_bytes(weights)
        loaded = server.post("/v2/repository/models/mha/load")
        mended = server.get("/v2/models/mha/ready")

    for answer in answers:
        assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
        assert answer.json()["error"].startswith("model mha: no version of it can be served")
    assert ready == {"ready": True, "broken": ["mha/1"]}
    assert (loaded.status_code, mended.status_code) == (200, 200)


@pytest.mark.fault("C6")
def test_start_with_nothing_good_left_ends_also_where_it_skips(repository: Path) -> None:
    """With exit code 2 and one line that names a cause."""
    for path in repository.glob("*/*"):
        grow(path)

    ended = serve("--repository", str(repository), "--port", "0", "--skip-broken", "true")

    assert ended.returncode == 2
    [line] = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert line.startswith(
        f"error: {repository}: nothing in it can be served: {repository}/cross/1"
    )
    assert ended.stderr.count('"message":"not reloaded"') == 4
