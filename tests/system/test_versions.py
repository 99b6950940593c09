"""Several versions of a layer served at once: called by number, compared, pinned, withdrawn."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from tests.support.layers import Layers
from tests.support.server import Server, until
from tests.support.versions import publish_version

BODY: dict[str, Any] = {"model": "tiny", "embeddings": [[0.5] * 8, [-1.0] * 8]}
INFER: dict[str, Any] = {
    "inputs": [
        {
            "name": "embeddings",
            "shape": [1, 2, 8],
            "datatype": "FP32",
            "data": [0.5] * 8 + [-1.0] * 8,
        }
    ]
}
SAFETENSORS = {"Content-Type": "application/x-safetensors"}


@pytest.fixture
def repository(layers: Layers, tmp_path: Path) -> Path:
    """Return a repository with the versions 1 to 3 of tiny, each another layer."""
    repository = tmp_path / "repository"
    shutil.copytree(layers.artifact("tiny"), repository / "tiny" / "1")
    for version in (2, 3):
        publish_version(repository, "tiny", version)
    return repository


@pytest.fixture
def server(repository: Path) -> Iterator[Server]:
    """Return a server of the two highest of them."""
    with Server(repository, versions_kept=2, model_control=True) as running:
        yield running


def answers_of(server: Server, version: int | None) -> list[np.ndarray[Any, Any]]:
    """Return what a version answers on every wire; None = whichever answers without a number."""
    path = "" if version is None else f"/versions/{version}"
    option = {} if version is None else {"version": version}
    query = "" if version is None else f"&version={version}"
    block = np.array([BODY["embeddings"]], np.float32)
    json = server.post("/v1/attention", json=BODY | option)
    raw = server.post(
        f"/v1/attention?model=tiny{query}", content=save({"embeddings": block}), headers=SAFETENSORS
    )
    infer = server.post(f"/v2/models/tiny{path}/infer", json=INFER)
    weights = server.post(f"/v2/models/tiny-weights{path}/infer", json=INFER)
    assert {answer.status_code for answer in (json, raw, infer, weights)} == {200}
    named = {
        str(json.json()["version"]),
        infer.json()["model_version"],
        weights.json()["model_version"],
    }
    assert named == {str(version or 3)}
    flat = [answer.json()["outputs"][0]["data"] for answer in (infer, weights)]
    outputs = [np.array(json.json()["output"]), load(raw.content)["output"][0]]
    return [*outputs, *(np.array(data).reshape(2, 8) for data in flat)]


@pytest.mark.fault("C3")
def test_each_kept_version_answers_as_its_own_layer_on_every_wire(
    server: Server, layers: Layers
) -> None:
    """A canary is compared with what it shall replace; without a number the highest answers."""
    block = np.array([BODY["embeddings"]], np.float32)
    for version in (None, 3, 2):
        right = layers.formula("tiny", version or 3)(block).output[0]
        for output in answers_of(server, version):
            np.testing.assert_allclose(output, right, atol=1e-5)
    differing = np.abs(answers_of(server, 3)[0] - answers_of(server, 2)[0]).max()
    assert differing > 1e-3


@pytest.mark.fault("C3")
def test_versions_are_told_apart_wherever_a_model_is_described(server: Server) -> None:
    """Metadata, readiness, configuration, statistics, metrics, index and the list of models."""
    calls = {3: 2, 2: 3}
    for version, count in calls.items():
        for _ in range(count):
            server.post(f"/v2/models/tiny/versions/{version}/infer", json=INFER)

    for version, count in calls.items():
        path = f"/v2/models/tiny/versions/{version}"
        assert server.get(path).json()["versions"] == [str(version)]
        assert server.get(f"{path}/ready").json() == {"name": "tiny", "ready": True}
        config = server.get(f"{path}/config").json()
        assert config["version_policy"] == {"latest": {"num_versions": 2}}
        [entry] = server.get(f"{path}/stats").json()["model_stats"]
        assert (entry["version"], entry["inference_count"]) == (str(version), count)
        described = server.get(f"/v1/models/tiny?version={version}").json()
        assert described["version"] == version
        assert described["served_versions"] == [
            {"version": 3, "default": True, "ready": True},
            {"version": 2, "default": False, "ready": True},
        ]
    assert server.get("/v2/models/tiny").json()["versions"] == ["2", "3"]
    assert server.get("/v1/models/tiny").json()["version"] == 3
    assert [model["version"] for model in server.get("/v1/models").json()["models"]] == [3]
    for path in ("/v2/models/tiny/stats", "/v2/models/stats"):
        entries = server.get(path).json()["model_stats"]
        counted = {e["version"]: e["inference_count"] for e in entries if e["name"] == "tiny"}
        assert counted == {"3": 2, "2": 3}
    metrics = server.get("/metrics").text
    for version in calls:
        assert (
            f'headwise_model_info{{model="tiny",precision="fp32",provider="cpu",version="{version}"}}'
            in metrics
        )
    assert 'headwise_queue_calls{model="tiny"} 0.0' in metrics
    rows = server.post("/v2/repository/index").json()
    assert [(r["version"], r["state"], r["reason"]) for r in rows if r["name"] == "tiny"] == [
        ("1", "UNAVAILABLE", "not served: higher versions are"),
        ("2", "READY", ""),
        ("3", "READY", ""),
    ]
    log = server.whole_log()
    for version, count in calls.items():
        assert log.count(f'"model":"tiny","version":{version},"rows":1') == count


@pytest.mark.fault("C3")
@pytest.mark.parametrize("version", ["1", "4", "03", "x", "latest", "-1", "9999999999"])
def test_version_that_is_not_kept_is_refused_with_those_that_are(
    server: Server, version: str
) -> None:
    """On every path of the protocol."""
    for end in ("/infer", "", "/ready", "/config", "/stats"):
        path = f"/v2/models/tiny/versions/{version}{end}"
        answer = server.post(path, json=INFER) if end == "/infer" else server.get(path)
        assert (answer.status_code, answer.json()["code"]) == (404, "unknown_model")
        assert answer.json()["error"] == f"model tiny: versions 3, 2 are served, got '{version}'"


@pytest.mark.fault("C3")
@pytest.mark.parametrize(
    ("value", "status", "message"),
    [
        (1, 404, "model tiny: versions 3, 2 are served, got '1'"),
        (0, 400, "version: expected a whole number from 1 to 999999999, got 0"),
        (10**9, 400, "version: expected a whole number from 1 to 999999999, got 1000000000"),
        (10**400, 400, "version: expected a whole number from 1 to 999999999, got a number"),
        (2.0, 400, "version: expected a whole number from 1 to 999999999, got a number"),
        ("2", 400, "version: expected a whole number from 1 to 999999999, got a string"),
        (True, 400, "version: expected a whole number from 1 to 999999999, got a boolean"),
        ([2], 400, "version: expected"),
    ],
)
def test_version_in_a_body_that_is_wrong_is_refused_by_name(
    server: Server, value: object, status: int, message: str
) -> None:
    """And nothing is answered by another version."""
    answer = server.post("/v1/attention", json=BODY | {"version": value})
    assert answer.status_code == status
    assert answer.json()["error"].startswith(message)


@pytest.mark.fault("C3")
def test_version_in_a_query_is_read_and_the_body_must_not_contradict_it(server: Server) -> None:
    """As every other option."""
    for option in ({}, {"version": 2}, {"version": None}):
        answer = server.post("/v1/attention?version=2", json=BODY | option)
        assert answer.json()["version"] == 2
    answer = server.post("/v1/attention?version=2", json=BODY | {"version": 3})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("version: expected the same in body and query")
    for wrong in ("02", "1.0", "x", "", "-1"):
        answer = server.post(f"/v1/attention?version={wrong}", json=BODY)
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("query: version: expected a whole number")


@pytest.mark.fault("C3", "C4", "A9")
def test_pinned_version_is_served_until_it_is_withdrawn_and_comes_back(
    server: Server, repository: Path
) -> None:
    """Update, canary, roll back and unload, as the README tells them."""

    def look() -> None:
        server.process.send_signal(signal.SIGHUP)

    def served() -> list[str]:
        answer = server.get("/v2/models/tiny")
        return list(answer.json()["versions"]) if answer.status_code == 200 else []

    publish_version(repository, "tiny", 4)
    look()
    until(lambda: served() == ["3", "4"])
    refused = server.post("/v2/models/tiny/versions/2/infer", json=INFER)
    assert refused.json()["error"] == "model tiny: versions 4, 3 are served, got '2'"
    assert server.post("/v2/models/tiny/versions/3/infer", json=INFER).status_code == 200
    away = (repository / "tiny" / "4").rename(repository / ".tiny-4")
    look()
    until(lambda: served() == ["2", "3"])
    away.rename(repository / "tiny" / "4")
    assert server.post("/v2/repository/models/tiny/load").status_code == 200
    assert served() == ["3", "4"]
    assert server.post("/v2/repository/models/tiny/unload").status_code == 200
    assert served() == []
    for version in (3, 4):
        answer = server.post(f"/v2/models/tiny/versions/{version}/infer", json=INFER)
        assert (answer.status_code, answer.json()["code"]) == (404, "unknown_model")
    assert server.post("/v2/repository/models/tiny/load").status_code == 200
    assert served() == ["3", "4"]
    log = server.log()
    assert '"message":"reloaded","model":"tiny","version":4,"served":[4,3]' in log
    assert '"message":"gone from the repository","model":"tiny","version":4,"served":3' in log
    assert log.count('"message":"withdrawn","model":"tiny"') == 2


@pytest.mark.fault("C3")
def test_default_keeps_one_version_and_refuses_the_others(repository: Path) -> None:
    """A second version takes memory: it is served where the operator asks for it."""
    with Server(repository) as server:
        answer = server.post("/v2/models/tiny/versions/2/infer", json=INFER)
        versions = server.get("/v2/models/tiny").json()["versions"]

    assert answer.json()["error"] == "model tiny: version 3 is served, got '2'"
    assert versions == ["3"]


@pytest.mark.fault("C6")
@pytest.mark.parametrize("kept", [1, 2])
def test_start_without_skipping_ends_if_any_version_to_be_kept_is_broken(
    repository: Path, kept: int
) -> None:
    """A version that the operator wants to be served is not left out in silence."""
    (repository / "tiny" / "2" / "layer.weights").write_bytes(b"")
    with Server(repository, versions_kept=kept, wait="nothing") as server:
        if kept == 1:
            until(lambda: server.get("/v2/health/ready").status_code == 200)
        else:
            assert server.process.wait(60) == 2
            assert "tiny/2/layer.weights: expected 1184 bytes, found 0" in server.log()
