"""The protocol's endpoints without tensors, as its clients read them."""

import asyncio
import gzip
import itertools
import logging
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from service import __version__
from service.api.log_settings import changed, described
from service.errors import NotReady
from service.inference.models import Models
from tests.support.layers import CONFIGS, Layers
from tests.support.server import Server, until
from tests.system.test_reload import publish

FORM = {"Content-Type": "application/x-www-form-urlencoded"}
PARTS = ("queue", "compute_input", "compute_infer", "compute_output")


@pytest.fixture
def repository(layers: Layers, tmp_path: Path) -> Path:
    """Return a copy of the repository that a test may add to."""
    return Path(shutil.copytree(layers.repository, tmp_path / "repository"))


@pytest.fixture
def controlled(repository: Path) -> Iterator[Server]:
    """Return a server of its own for a test, whose clients may load, unload and set the log."""
    with Server(repository, model_control=True) as running:
        yield running


@pytest.fixture(scope="module")
def switched(layers: Layers) -> Iterator[Server]:
    """Return such a server for tests that change nothing."""
    with Server(layers.repository, model_control=True) as running:
        yield running


def check_problem(response: Any, status: int, code: str, *words: str) -> None:
    """Assert the one form of all errors."""
    assert response.status_code == status, response.text
    problem = response.json()
    assert sorted(problem) == ["code", "error"]
    assert problem["code"] == code
    for word in words:
        assert word in problem["error"]


def infer_body(rows: int, *, model: str = "tiny", length: int = 2) -> dict[str, Any]:
    """Return a right call of that many sequences."""
    layer = CONFIGS[model.removesuffix("-weights")]
    shape = [rows, length, layer.embed_dim]
    tensor = {"name": "embeddings", "shape": shape, "datatype": "FP32"}
    return {"inputs": [tensor | {"data": [0.5] * int(np.prod(shape))}]}


def infer(server: Server, rows: int, *, model: str = "tiny", length: int = 2) -> Any:
    """Return the answer to such a call."""
    body = infer_body(rows, model=model, length=length)
    return server.post(f"/v2/models/{model}/infer", json=body)


def stats(server: Server, model: str = "tiny") -> dict[str, Any]:
    """Return a model's statistics."""
    [one] = server.get(f"/v2/models/{model}/stats").json()["model_stats"]
    assert one["name"] == model
    return dict(one)


def counters(document: object, path: str = "") -> dict[str, int]:
    """Return every number in a model's statistics by where it stands."""
    if isinstance(document, dict):
        batch = document.get("batch_size", "")
        pairs = [(key, value) for key, value in document.items() if key != "batch_size"]
        parts = [counters(value, f"{path}/{batch}{key}") for key, value in pairs]
        return {name: number for part in parts for name, number in part.items()}
    if isinstance(document, list):
        return {k: v for part in document for k, v in counters(part, path).items()}
    return {path: document} if isinstance(document, int) else {}


# What is served


def test_server_metadata_names_the_extensions_that_work(server: Server, layers: Layers) -> None:
    """Clients ask for what is listed, and for nothing else."""
    document = server.get("/v2").json()
    with Server(layers.repository, shared_memory=True, model_control=True) as sharing:
        switched_on = sharing.get("/v2").json()["extensions"]

    extensions = ["binary_tensor_data", "parameters", "statistics", "model_configuration"]
    assert document == {"name": "headwise", "version": __version__, "extensions": extensions}
    assert switched_on == [*extensions, "model_repository", "logging", "system_shared_memory"]


METADATA = {
    "tiny": (
        [("embeddings", [-1, -1, 8])],
        [("output", [-1, -1, 8])],
    ),
    "tiny-weights": (
        [("embeddings", [-1, -1, 8])],
        [("output", [-1, -1, 8]), ("attention_weights", [-1, 2, -1, -1])],
    ),
    "cross-weights": (
        [("embeddings", [-1, -1, 12]), ("memory", [-1, -1, 6])],
        [("output", [-1, -1, 12]), ("attention_weights", [-1, 3, -1, -1])],
    ),
}
"""Name and shape of every input and output that a protocol model declares."""


@pytest.mark.parametrize("model", METADATA)
@pytest.mark.parametrize("version", ["", "/versions/1"])
def test_model_metadata_declares_required_inputs_and_all_outputs(
    server: Server, model: str, version: str
) -> None:
    """A tool that sends every declared input must be able to."""
    document = server.get(f"/v2/models/{model}{version}").json()

    inputs, outputs = (
        [{"name": name, "datatype": "FP32", "shape": shape} for name, shape in tensors]
        for tensors in METADATA[model]
    )
    assert document == {
        "name": model,
        "versions": ["1"],
        "platform": "onnx_onnxv1",
        "inputs": inputs,
        "outputs": outputs,
    }


@pytest.mark.parametrize("model", METADATA)
@pytest.mark.parametrize("version", ["", "/versions/1"])
def test_model_config_is_that_of_the_metadata_without_the_batch(
    server: Server, model: str, version: str
) -> None:
    """Triton's tools take the batch from `max_batch_size`."""
    document = server.get(f"/v2/models/{model}{version}/config").json()

    inputs, outputs = (
        [{"name": name, "data_type": "TYPE_FP32", "dims": shape[1:]} for name, shape in tensors]
        for tensors in METADATA[model]
    )
    assert document == {
        "name": model,
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 256,
        "input": inputs,
        "output": outputs,
        "dynamic_batching": {},
    }


def test_model_ready_says_so_under_either_name(server: Server) -> None:
    """A client's `is_model_ready` reads the status, kserve's the body."""
    for model in ("tiny", "tiny-weights"):
        for path in (f"/v2/models/{model}/ready", f"/v2/models/{model}/versions/1/ready"):
            response = server.get(path)
            assert (response.status_code, response.json()) == (200, {"name": model, "ready": True})


def test_model_that_answers_wrong_is_described_and_never_ready(repository: Path) -> None:
    """What is not ready can still be looked at; its calls fail, and are counted so."""
    manifest = repository / "tiny" / "1" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(re.sub(r'"tolerance": [^,]*', '"tolerance": 1e-30', text))
    with Server(repository, wait="live") as server:
        server.wait_for_log(r'"message":"not ready"')
        check_problem(server.get("/v2/models/tiny-weights/ready"), 503, "not_ready", "golden")
        metadata, refused = server.get("/v2/models/tiny").status_code, infer(server, 1)
        index = server.post("/v2/repository/index").json()
        ready = server.post("/v2/repository/index", json={"ready": True}).json()
        fails = stats(server)["inference_stats"]["fail"]["count"]

    assert metadata == 200
    check_problem(refused, 503, "not_ready")
    assert fails == 1
    states = {one["name"]: (one["state"], one["reason"][:13]) for one in index}
    assert states["tiny"] == states["tiny-weights"] == ("UNAVAILABLE", "golden answer")
    assert states["mha"] == ("READY", "")
    assert [one["name"] for one in ready] == ["cross", "cross-weights", "mha", "mha-weights"]


def test_model_of_a_server_that_is_stopping_is_not_ready(layers: Layers) -> None:
    """A load balancer that asks a model learns it as soon as one that asks the server."""
    with Server(layers.repository, grace_s=60) as server:
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log('"message":"stopping"')
        check_problem(server.get("/v2/models/tiny/ready"), 503, "draining", "stopping")
        assert infer(server, 1).status_code == 200


def test_models_that_are_still_being_loaded_are_not_ready(layers: Layers) -> None:
    """Nothing is listed, loaded or unloaded before the first are there."""
    models = Models(lambda path: pytest.fail("nothing is loaded here"), layers.repository)

    for ask in (models.index(), models.load("tiny"), models.unload("tiny")):
        with pytest.raises(NotReady, match="the models are being loaded"):
            asyncio.run(ask)
    with pytest.raises(NotReady, match="the models are being loaded"):
        models.check_loaded()


@pytest.mark.parametrize("end", ["", "/ready", "/config", "/stats"])
@pytest.mark.parametrize(
    "model", ["none", "none-weights", "tiny/versions/2", "tiny-weights/versions/x", "Tiny"]
)
def test_unknown_model_or_version_is_404_everywhere(server: Server, model: str, end: str) -> None:
    """One answer, whatever was asked of it."""
    check_problem(server.get(f"/v2/models/{model}{end}"), 404, "unknown_model", "model")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v2", "GET, HEAD"),
        ("POST", "/v2/models/tiny", "GET, HEAD"),
        ("DELETE", "/v2/models/tiny/versions/1/config", "GET, HEAD"),
        ("GET", "/v2/repository/index", "POST"),
        ("GET", "/v2/repository/models/tiny/load", "POST"),
        ("PUT", "/v2/logging", "GET, HEAD, POST"),
        ("DELETE", "/v2/trace/setting", "GET, HEAD, POST"),
        ("PATCH", "/v2/models/tiny/trace/setting", "GET, HEAD, POST"),
        ("GET", "/v2/cudasharedmemory/unregister", "POST"),
    ],
)
def test_wrong_verb_is_405_and_tells_the_right_ones(
    server: Server, method: str, path: str, allowed: str
) -> None:
    """A path that takes two verbs names both."""
    response = server.client.request(method, server.url + path)

    check_problem(response, 405, "method_not_allowed", f"expected {allowed}, got {method}")
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize("path", ["/v2/", "/v2/models", "/v2/models/tiny/x", "/v2/repository"])
def test_unknown_path_is_404(server: Server, path: str) -> None:
    """Triton's own body would break no client either; ours is the same everywhere."""
    check_problem(server.get(path), 404, "not_found")


# Statistics


def test_statistics_before_any_call_are_complete_zeros(controlled: Server) -> None:
    """perf_analyzer reads every field unguarded, before its first call."""
    everything = controlled.get("/v2/models/stats").json()
    one = controlled.get("/v2/models/tiny-weights/versions/1/stats").json()

    duration = {"count": 0, "ns": 0}
    names = ["cross", "cross-weights", "mha", "mha-weights", "tiny", "tiny-weights"]
    wanted = [
        {
            "name": name,
            "version": "1",
            "last_inference": 0,
            "inference_count": 0,
            "execution_count": 0,
            "inference_stats": {
                "success": duration,
                "fail": duration,
                "queue": duration,
                "compute_input": duration,
                "compute_infer": duration,
                "compute_output": duration,
                "cache_hit": duration,
                "cache_miss": duration,
            },
            "response_stats": {},
            "batch_stats": [],
            "memory_usage": [],
        }
        for name in names
    ]
    assert everything == {"model_stats": wanted}
    assert one == {"model_stats": [wanted[-1]]}


def test_statistics_of_single_calls_count_rows_and_agree_with_what_each_was_told(
    controlled: Server,
) -> None:
    """Every stage is within the call's own time, which is the time its answer told."""
    before, told_ms = stats(controlled), 0.0
    for rows in (1, 3, 3):
        answer = infer(controlled, rows)
        told_ms += float(re.findall(r"total;dur=([\d.]+)", answer.headers["server-timing"])[0])
        now = stats(controlled)
        added = {
            name: now["inference_stats"][name]["ns"] - before["inference_stats"][name]["ns"]
            for name in ("success", *PARTS)
        }
        assert 0 < sum(added[part] for part in PARTS) <= added["success"]
        assert now["last_inference"] >= before["last_inference"] > -1
        before = now

    counts = {name: one["count"] for name, one in before["inference_stats"].items()}
    assert counts == dict.fromkeys(("success", *PARTS), 3) | dict.fromkeys(
        ("fail", "cache_hit", "cache_miss"), 0
    )
    assert (before["inference_count"], before["execution_count"]) == (7, 3)
    batches = [(b["batch_size"], b["compute_infer"]["count"]) for b in before["batch_stats"]]
    assert batches == [(1, 1), (3, 2)]
    for part in PARTS[1:]:
        by_batch = sum(batch[part]["ns"] for batch in before["batch_stats"])
        assert abs(by_batch - before["inference_stats"][part]["ns"]) <= 3
    assert abs(before["inference_stats"]["success"]["ns"] / 1e6 - told_ms) <= 3 * 0.001
    assert counters(stats(controlled, "tiny-weights")) == counters(stats(controlled, "mha-weights"))


def test_statistics_of_a_call_that_runs_in_parts_count_each_run(repository: Path) -> None:
    """Five rows, two a run: three executions, and no longer than the call in all."""
    with Server(repository, max_batch_tokens=4) as server:
        infer(server, 5)
        found = stats(server)

    times = found["inference_stats"]
    assert (found["inference_count"], found["execution_count"]) == (5, 3)
    batches = [(b["batch_size"], b["compute_infer"]["count"]) for b in found["batch_stats"]]
    assert batches == [(1, 1), (2, 2)]
    assert sum(times[part]["ns"] for part in PARTS) <= times["success"]["ns"]


def test_statistics_of_calls_at_once_are_monotonic_and_agree_with_the_metrics(
    controlled: Server,
) -> None:
    """Joined or not, the engine's runs are what the engine's own counters say."""
    stop, seen = threading.Event(), []

    def look_on_and_on() -> None:
        while not stop.is_set():
            seen.append(stats(controlled))

    looking = threading.Thread(target=look_on_and_on)
    looking.start()
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: infer(controlled, 1 + i % 3), range(240)))
    stop.set()
    looking.join()
    seen.append(stats(controlled))

    assert {answer.status_code for answer in answers} == {200}
    for one in seen:
        times = one["inference_stats"]
        assert {times[part]["count"] for part in PARTS} == {times["success"]["count"]}
        assert sum(times[part]["ns"] for part in PARTS) <= times["success"]["ns"]
    for earlier, later in itertools.pairwise(seen):
        then, now = counters(earlier), counters(later)
        assert all(now[name] >= number for name, number in then.items())
    last, metrics = seen[-1], controlled.get("/metrics").text
    assert last["inference_count"] == 240 * 2
    assert last["execution_count"] == metric(metrics, "headwise_run_rows_count")
    assert last["inference_count"] == metric(metrics, "headwise_run_rows_sum")
    sizes = [(b["batch_size"], b["compute_infer"]["count"]) for b in last["batch_stats"]]
    assert sum(count for _, count in sizes) == last["execution_count"]
    assert sum(size * count for size, count in sizes) == last["inference_count"]


def metric(text: str, name: str) -> float:
    """Return a number that `tiny` has in the metrics."""
    [value] = re.findall(rf'^{name}{{model="tiny"}} (\S+)$', text, re.MULTILINE)
    return float(value)


def test_statistics_of_the_two_models_of_an_artifact_are_apart(controlled: Server) -> None:
    """A run that both took part in is an execution of each."""
    with ThreadPoolExecutor(16) as pool:
        models = ["tiny", "tiny-weights"] * 40
        answers = list(pool.map(lambda model: infer(controlled, 1, model=model), models))
    plain, weights = stats(controlled), stats(controlled, "tiny-weights")

    assert {answer.status_code for answer in answers} == {200}
    assert plain["inference_count"] == weights["inference_count"] == 40
    assert 1 <= plain["execution_count"] <= 40
    assert 1 <= weights["execution_count"] <= 40


def test_statistics_count_what_failed_and_only_the_protocols_calls(controlled: Server) -> None:
    """A refused shape, a passed deadline, an unread body: each is a failure of its model."""
    path = "/v2/models/tiny/infer"
    wrong = infer_body(1)
    wrong["inputs"][0]["shape"] = [1, 1, 9]
    statuses = [
        controlled.post(path, json=wrong).status_code,
        controlled.post(path, content=b"{").status_code,
        controlled.post(
            path, json=infer_body(1), headers={"X-Request-Timeout-S": "1e-9"}
        ).status_code,
        controlled.post("/v2/models/none/infer", json=infer_body(1)).status_code,
        controlled.post("/v2/models/tiny/versions/9/infer", json=infer_body(1)).status_code,
        controlled.post(
            "/v1/attention", json={"model": "tiny", "embeddings": [[0.5] * 8]}
        ).status_code,
    ]
    found = stats(controlled)

    assert statuses == [400, 400, 504, 404, 404, 200]
    times = found["inference_stats"]
    assert times["fail"]["count"] == 3
    assert times["fail"]["ns"] > 0
    assert times["success"] == times["queue"] == {"count": 0, "ns": 0}
    assert (found["inference_count"], found["last_inference"]) == (0, 0)


def test_statistics_of_a_newer_version_begin_at_zero(controlled: Server, repository: Path) -> None:
    """Versions are counted apart, and the one that is served is listed."""
    infer(controlled, 2)
    publish(repository, 2)
    controlled.post("/v2/repository/models/tiny/load")

    found = stats(controlled)

    assert (found["version"], found["inference_count"]) == ("2", 0)
    check_problem(controlled.get("/v2/models/tiny/versions/1/stats"), 404, "unknown_model")


# The repository


def names_and_states(server: Server, **body: Any) -> dict[str, tuple[str, str, str]]:
    """Return the repository's index by name."""
    response = server.post("/v2/repository/index", headers=FORM, **body)
    assert response.status_code == 200, response.text
    return {one["name"]: (one["version"], one["state"], one["reason"]) for one in response.json()}


@pytest.mark.parametrize("content", [b"", b"{}", b'{"ready": true}', b' {"ready":false}\n'])
def test_index_lists_both_models_of_each_artifact(server: Server, content: bytes) -> None:
    """The Triton client sends an empty body; a form's content type says nothing of it."""
    found = names_and_states(server, content=content)

    names = [name for artifact in sorted(CONFIGS) for name in (artifact, f"{artifact}-weights")]
    assert found == dict.fromkeys(names, ("1", "READY", ""))


def test_load_and_unload_are_switched_off_unless_the_operator_says_otherwise(
    server: Server,
) -> None:
    """A client may not take a model from the others by default."""
    for path in ("repository/models/tiny/load", "repository/models/tiny/unload", "logging"):
        check_problem(server.post(f"/v2/{path}"), 403, "disabled", "HEADWISE_MODEL_CONTROL=true")
    assert infer(server, 1).status_code == 200


def test_unload_then_load_takes_a_model_away_and_brings_it_back(
    controlled: Server, repository: Path
) -> None:
    """Both its names are gone everywhere, and a re-scan does not bring them back."""
    unloaded = controlled.post("/v2/repository/models/tiny-weights/unload", headers=FORM)
    statuses = {
        path: controlled.get(path).status_code
        for model in ("tiny", "tiny-weights")
        for path in (f"/v2/models/{model}{end}" for end in ("", "/ready", "/config", "/stats"))
    }
    calls = [infer(controlled, 1), infer(controlled, 1, model="tiny-weights")]
    default = controlled.post("/v1/attention", json={"model": "tiny", "embeddings": [[0.5] * 8]})
    index = names_and_states(controlled)
    again = controlled.post("/v2/repository/models/tiny/unload")
    publish(repository, 2)
    publish(repository, 2, name="fresh")
    controlled.process.send_signal(signal.SIGHUP)
    controlled.wait_for_log(r'"message":"reloaded","model":"fresh","version":2')
    still = infer(controlled, 1).status_code
    loaded = controlled.post("/v2/repository/models/tiny/load", headers=FORM, content=b"{}")
    version = infer(controlled, 1).json()["model_version"]

    assert (unloaded.status_code, unloaded.content) == (200, b"")
    assert set(statuses.values()) == {404}
    for response in (*calls, default):
        check_problem(response, 404, "unknown_model", "expected one of cross, mha, got 'tiny'")
    for name in ("tiny", "tiny-weights"):
        assert index[name] == ("1", "UNAVAILABLE", "unloaded")
    check_problem(again, 404, "unknown_model")
    assert still == 404
    assert (loaded.status_code, loaded.content) == (200, b"")
    assert version == "2"


def test_unload_of_the_default_and_of_all_leaves_a_server_that_can_load(
    controlled: Server,
) -> None:
    """Calls that name no model do not silently get another layer."""
    nameless = {"embeddings": [[0.5] * 8]}
    controlled.post("/v2/repository/models/mha/unload")
    controlled.post("/v2/repository/models/cross/unload")
    check_problem(
        controlled.post("/v1/attention", json=nameless),
        404,
        "unknown_model",
        "model: expected one of tiny, got 'mha'",
    )
    controlled.post("/v2/repository/models/tiny/unload")
    check_problem(
        controlled.post("/v1/attention", json=nameless),
        404,
        "unknown_model",
        "model: expected one to be loaded first, got 'mha'",
    )
    assert controlled.get("/v2/health/ready").status_code == 200
    assert controlled.get("/v2/models/stats").json() == {"model_stats": []}

    controlled.post("/v2/repository/models/mha/load")

    assert infer(controlled, 1, model="mha").status_code == 200


def test_load_takes_up_new_names_and_newer_versions(controlled: Server, repository: Path) -> None:
    """The highest version counts; loading what is served already changes nothing."""
    publish(repository, 4, name="fresh")
    listed = names_and_states(controlled)["fresh-weights"]
    publish(repository, 7, name="fresh")

    statuses = [
        controlled.post(f"/v2/repository/models/{name}/load").status_code
        for name in ("fresh", "fresh", "mha")
    ]

    versions = [controlled.get(f"/v2/models/{m}").json()["versions"] for m in ("fresh", "mha")]
    assert listed == ("4", "UNAVAILABLE", "not loaded")
    assert statuses == [200, 200, 200]
    assert versions == [["7"], ["1"]]
    assert names_and_states(controlled)["fresh"] == ("7", "READY", "")
    assert controlled.log().count('"message":"reloaded"') == 1


def test_load_of_a_newer_version_loses_no_call(controlled: Server, repository: Path) -> None:
    """Calls are answered by the old version or the new one, each of them."""
    stop, seen = threading.Event(), []

    def call_on_and_on() -> None:
        while not stop.is_set():
            response = infer(controlled, 1)
            seen.append((response.status_code, response.json().get("model_version")))

    callers = [threading.Thread(target=call_on_and_on) for _ in range(8)]
    for caller in callers:
        caller.start()
    for version in (2, 3):
        publish(repository, version)
        controlled.post("/v2/repository/models/tiny/load")
        until(lambda wanted=str(version): (200, wanted) in seen)  # type: ignore[misc]
    stop.set()
    for caller in callers:
        caller.join()

    assert {status for status, _ in seen} == {200}
    assert {version for _, version in seen} == {"1", "2", "3"}


def test_unload_lets_calls_finish_that_are_in(controlled: Server) -> None:
    """Whoever was let in is answered; whoever comes later is told that nothing is there."""
    seen, first = [], threading.Event()

    def call_until_refused() -> None:
        while True:
            response = infer(controlled, 4, model="mha", length=32)
            seen.append((response.status_code, response.json().get("code")))
            first.set()
            if response.status_code != 200:
                return

    callers = [threading.Thread(target=call_until_refused) for _ in range(8)]
    for caller in callers:
        caller.start()
    first.wait(60)
    controlled.post("/v2/repository/models/mha/unload")
    for caller in callers:
        caller.join()

    assert set(seen) == {(200, None), (404, "unknown_model")}
    assert seen.count((404, "unknown_model")) == 8


def test_load_of_what_cannot_be_served_leaves_the_old_version(
    controlled: Server, repository: Path
) -> None:
    """The caller learns that it did not work, the operator's log why; no path is told."""
    publish(repository, 2, broken=True)

    response = controlled.post("/v2/repository/models/tiny/load")

    check_problem(response, 503, "not_ready", "model tiny: version 2 cannot be served")
    assert str(repository) not in response.text
    problem = controlled.wait_for_log(r'"message":"not reloaded","problem":"([^"]*)"')[1]
    assert re.search(r"tiny/2/layer\.weights: expected \d+ bytes, found 0$", problem)
    assert infer(controlled, 1).json()["model_version"] == "1"


@pytest.mark.parametrize(
    ("path", "content", "status", "code", "words"),
    [
        ("none/load", b"", 404, "unknown_model", "nothing in the repository is named 'none'"),
        ("none/unload", b"", 404, "unknown_model", "got 'none'"),
        ("..%2Fmha/load", b"", 404, "not_found", "path"),
        ("%2e%2e/load", b"", 404, "unknown_model", "named '..'"),
        ("mha/load", b"[1]", 400, "invalid_input", "body: expected a JSON object, got an array"),
        (
            "mha/load",
            b"{",
            400,
            "invalid_input",
            "body: expected JSON, got a mistake at",
        ),
        ("mha/load", b'{"x": 1}', 400, "invalid_input", "body: unknown key 'x'"),
        ("mha/load", b'{"parameters": 1}', 400, "invalid_input", "parameters: expected an object"),
        (
            "mha/load",
            b'{"parameters": {"config": "{}"}}',
            400,
            "invalid_input",
            "parameters: 'config' is not offered",
        ),
        (
            "mha/load",
            b'{"parameters": {"file:1/model.onnx": "AAAA"}}',
            400,
            "invalid_input",
            "parameters: 'file:1/model.onnx' is not offered",
        ),
        (
            "mha/unload",
            b'{"parameters": {"x": 1}}',
            400,
            "invalid_input",
            "parameters: unknown key 'x'; expected unload_dependents",
        ),
        ("mha/load", b" " * (2**20 + 1), 413, "too_large", "body: at most 1048576 bytes"),
        ("mha/load", b" " * 2**20, 200, "", ""),
    ],
)
def test_control_requests_that_are_wrong_say_what_is(
    switched: Server, path: str, content: bytes, status: int, code: str, words: str
) -> None:
    """A control request is never a 5xx, and a wrong one changes nothing."""
    url = f"/v2/repository/models/{path}"

    response = switched.post(url, headers=FORM, content=content)

    if status == 200:
        assert (response.status_code, response.content) == (200, b"")
    else:
        check_problem(response, status, code, words)
    assert infer(switched, 1, model="mha").status_code == 200


def test_control_body_may_be_compressed_and_is_bounded_all_the_same(server: Server) -> None:
    """What a body unpacks to counts."""
    headers = {"Content-Encoding": "gzip"}
    path = "/v2/repository/index"

    good = server.post(path, headers=headers, content=gzip.compress(b'{"ready": true}'))
    bomb = server.post(path, headers=headers, content=gzip.compress(b" " * 2**24))

    assert len(good.json()) == 2 * len(CONFIGS)
    check_problem(bomb, 413, "too_large", "1048576 bytes")
    check_problem(
        server.post(path, json={"ready": 1}), 400, "invalid_input", "ready: expected true or false"
    )
    check_problem(
        server.post(path, content=b"x", headers={"Content-Encoding": "br"}),
        415,
        "unsupported_media_type",
    )


# The log's level, and traces


def log_settings(verbose: int, info: bool, warning: bool) -> dict[str, Any]:
    """Return the settings as the extension writes them."""
    return {
        "log_file": "",
        "log_info": info,
        "log_warning": warning,
        "log_error": True,
        "log_verbose_level": verbose,
        "log_format": "default",
    }


LEVELS = {
    "debug": log_settings(1, True, True),
    "info": log_settings(0, True, True),
    "warning": log_settings(0, False, True),
    "error": log_settings(0, False, False),
}


@pytest.mark.parametrize(
    ("before", "asked", "after"),
    [
        ("info", {}, "info"),
        ("info", {"log_verbose_level": 1}, "debug"),
        ("error", {"log_verbose_level": 3}, "debug"),
        ("debug", {"log_verbose_level": 0}, "info"),
        ("warning", {"log_verbose_level": 0}, "warning"),
        ("info", {"log_info": False}, "warning"),
        ("debug", {"log_info": False}, "warning"),
        ("error", {"log_info": False}, "error"),
        ("error", {"log_info": True}, "info"),
        ("debug", {"log_info": True}, "debug"),
        ("info", {"log_warning": False}, "error"),
        ("error", {"log_warning": True}, "warning"),
        ("error", {"log_warning": True, "log_info": False}, "warning"),
        ("info", {"log_error": True, "log_file": "", "log_format": "default"}, "info"),
        *((before, after_all, after) for before in LEVELS for after, after_all in LEVELS.items()),
    ],
)
def test_changed_log_level_is_the_nearest_that_does_what_is_asked(
    before: str, asked: dict[str, Any], after: str
) -> None:
    """What is told of a level, sent back, gives that level from any other."""
    threshold = changed(getattr(logging, before.upper()), asked)

    assert logging.getLevelName(threshold).lower() == after
    assert described(threshold) == LEVELS[after]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"log_file": "x.log"}, "log_file: expected ''"),
        ({"log_file": None}, "log_file: expected ''"),
        ({"log_format": "ISO8601"}, "log_format: expected 'default'"),
        ({"log_error": False}, "log_error: expected true"),
        ({"log_info": "true"}, "log_info: expected true or false, got a string"),
        ({"log_info": 1}, "log_info: expected true or false, got a number"),
        ({"log_verbose_level": True}, "log_verbose_level: expected a whole number"),
        ({"log_verbose_level": -1}, "log_verbose_level: expected 0 or more, got -1"),
        ({"log_verbose_level": 1, "log_info": False}, "log_verbose_level contains log_info"),
        ({"log_info": True, "log_warning": False}, "log_info, which contains log_warning"),
        ({"log_level": 1}, "logging: unknown key 'log_level'"),
    ],
)
def test_log_settings_without_effect_are_refused(
    switched: Server, asked: dict[str, Any], words: str
) -> None:
    """What is answered 200 has happened."""
    check_problem(switched.post("/v2/logging", json=asked), 400, "invalid_input", words)
    assert switched.get("/v2/logging").json() == LEVELS["info"]


def test_logging_changes_what_is_really_logged(controlled: Server) -> None:
    """Requests are told at info, probes at debug."""
    listing, probe = "/v1/models", "/v2/health/live"
    expected: list[tuple[dict[str, Any], list[str]]] = [
        ({}, [listing]),
        ({"log_verbose_level": 1}, [probe, listing, probe]),
        ({"log_info": False}, []),
        ({"log_info": True}, [listing]),
    ]

    for step, (settings, _) in enumerate(expected):
        answer = controlled.post("/v2/logging", headers=FORM, content=orjson.dumps(settings))
        for path in (probe, listing, probe):
            controlled.client.get(controlled.url + path, headers={"X-Request-Id": f"step-{step}"})
        assert controlled.get("/v2/logging").json() == answer.json()
    log = controlled.whole_log()

    for step, (_, routes) in enumerate(expected):
        assert re.findall(rf'"route":"([^"]*)".*"request_id":"step-{step}"', log) == routes


TRACE = {
    "trace_file": "",
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
}


@pytest.mark.parametrize("path", ["/v2/trace/setting", "/v2/models/tiny-weights/trace/setting"])
def test_trace_settings_are_off_and_stay_so(server: Server, path: str) -> None:
    """perf_analyzer needs a 200 for what changes nothing, and nobody is told a lie."""
    off: list[dict[str, Any]] = [
        {},
        TRACE,
        {"trace_level": "OFF"},
        {"trace_level": ["OFF"], "trace_rate": "5"},
        {"trace_level": None, "trace_count": None},
        {"trace_count": "-1"},
    ]
    on: list[dict[str, Any]] = [
        {"trace_level": ["TIMESTAMPS"]},
        {"trace_level": ["OFF", "TENSORS"], "trace_rate": "1000"},
        {"trace_rate": "5"},
        {"trace_file": "x.log"},
    ]

    assert server.get(path).json() == TRACE
    for settings in off:
        response = server.post(path, headers=FORM, content=orjson.dumps(settings))
        assert (response.status_code, response.json()) == (200, TRACE)
    for settings in on:
        check_problem(server.post(path, json=settings), 400, "invalid_input", "OpenTelemetry")
    check_problem(server.post(path, json={"x": 1}), 400, "invalid_input", "trace: unknown key 'x'")


def test_trace_settings_of_an_unknown_model_are_404(server: Server) -> None:
    """As everywhere."""
    path = "/v2/models/none/trace/setting"

    check_problem(server.get(path), 404, "unknown_model")
    check_problem(server.post(path, json=TRACE), 404, "unknown_model")


# CUDA memory


def test_cuda_memory_has_no_regions_and_takes_none(server: Server) -> None:
    """perf_analyzer unregisters every kind, whether or not it is offered."""
    path = "/v2/cudasharedmemory"
    unregistered = [
        server.post(f"{path}{region}/unregister", headers=FORM) for region in ("", "/region/r")
    ]

    assert [(one.status_code, one.content) for one in unregistered] == [(200, b"")] * 2
    assert server.get(f"{path}/status").json() == []
    check_problem(server.get(f"{path}/region/r/status"), 404, "not_found", "got 'r'")
    check_problem(
        server.post(f"{path}/region/r/register", json={"raw_handle": {"b64": ""}, "byte_size": 1}),
        400,
        "invalid_input",
        "cudasharedmemory: not offered",
    )
