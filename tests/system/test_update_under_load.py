"""Twenty updates and twenty roll-backs while eight callers call: none of them notices."""

import dataclasses
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load, save

from service.contract import FP32_TOLERANCE, GRAPH_FILE
from service.inference.artifact import read_artifact, read_graph
from service.inference.parity import relative_error
from service.layer_config import LayerConfig
from tests.support.layers import Layers
from tests.support.server import Server, until
from tests.support.versions import factor_of, publish_unproven, publish_version

NAME = "big"
LAYER = LayerConfig(embed_dim=384, num_heads=6)
VERSIONS = 22
CALLERS = 8
MARGIN_BYTES = 16 * 2**20
"""What the process may have grown by: three of the versions, of which forty are loaded."""

Floats = npt.NDArray[np.float32]
Answers = dict[int, npt.NDArray[np.float64]]


@dataclass(frozen=True)
class Staged:
    """The versions that will be published, and what each answers to the callers' inputs."""

    repository: Path
    aside: Path
    inputs: list[Floats]
    answers: list[Answers]
    """By input, then by version."""

    def publish(self, version: int) -> None:
        """Move a version into the repository."""
        (self.aside / str(version)).rename(self.repository / NAME / str(version))

    def take_away(self, version: int) -> None:
        """Move it out again."""
        (self.repository / NAME / str(version)).rename(self.aside / str(version))


@pytest.fixture(scope="module")
def prepared(layers: Layers, tmp_path_factory: pytest.TempPathFactory) -> Staged:
    """Return the versions 1 to 22 of a layer, none published; made once, as they take a while."""
    from export.formula import Formula
    from export.graph import write_graph
    from export.sources import random_layer

    root = tmp_path_factory.mktemp("versions")
    source = random_layer(LAYER.embed_dim, LAYER.num_heads, seed=1)
    (root / "graph").mkdir()
    write_graph(source.spec, root / "graph" / GRAPH_FILE)
    random = np.random.default_rng(0)
    template = read_artifact(layers.artifact("tiny"))
    golden = dataclasses.replace(
        template.golden,
        embeddings=random.standard_normal((2, 5, LAYER.embed_dim)).astype(np.float32),
    )
    manifest = dataclasses.replace(template.manifest, name=NAME, version=1, layer=LAYER)
    base = publish_unproven(
        root / "base", manifest, read_graph(root / "graph" / GRAPH_FILE), golden
    )
    for version in range(1, VERSIONS + 1):
        publish_version(root / "aside", NAME, version, base=base)
    tensors = {key: tensor.numpy() for key, tensor in source.spec.tensors.items()}
    formulas = {
        version: Formula(
            LAYER, {key: tensor * factor_of(version) for key, tensor in tensors.items()}
        )
        for version in range(1, VERSIONS + 1)
    }
    shapes = [(1, 1), (1, 8), (2, 24), (1, 40)]
    inputs = [
        random.standard_normal((*shape, LAYER.embed_dim)).astype(np.float32) for shape in shapes
    ]
    answers = [{v: formula(block).output for v, formula in formulas.items()} for block in inputs]
    for of_input in answers:  # each answer belongs to one version only
        for version in range(2, VERSIONS + 1):
            assert np.abs(of_input[version] - of_input[version - 1]).max() > 1e-3
    return Staged(root / "repository", root / "aside" / NAME, inputs, answers)


@pytest.fixture
def staged(prepared: Staged) -> Iterator[Staged]:
    """Give them with version 1 published, and put all of them aside again."""
    (prepared.repository / NAME).mkdir(parents=True)
    prepared.publish(1)
    yield prepared
    for path in (prepared.repository / NAME).iterdir():
        path.rename(prepared.aside / path.name)
    (prepared.repository / NAME).rmdir()


@dataclass
class Caller:
    """One caller: what it sends, and what has come of it."""

    server: Server
    staged: Staged
    number: int
    stop: threading.Event
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    latest: int = 0
    """The version that answered its last call that named none."""

    def run(self) -> None:
        """Call again and again, every other time the version that answered last by its number."""
        with httpx.Client(timeout=60) as client:
            while not self.stop.is_set():
                self._call(client, pinned=None)
                self._call(client, pinned=self.latest)

    def _call(self, client: httpx.Client, *, pinned: int | None) -> None:
        index = self.number % len(self.staged.inputs)
        block = self.staged.inputs[index]
        way = (self._attention, self._json, self._infer)[self.number % 3]
        response, found = way(client, block, pinned)
        kind = "pinned" if pinned else "default"
        self.counts[f"{kind} {response.status_code}"] += 1
        if response.status_code != 200 or found is None:
            # A version that was withdrawn meanwhile is refused by name, by no other answer.
            if pinned is None or response.status_code != 404:
                self.wrong.append(f"{kind} {pinned}: {response.status_code} {response.text[:200]}")
            return
        version, output = found
        expected = self.staged.answers[index].get(version)
        error = np.inf if expected is None else relative_error(output, expected)
        if not error <= FP32_TOLERANCE or pinned not in (None, version):
            self.wrong.append(f"{kind} {pinned}: version {version} is off by {error:.3g}")
        if pinned is None:
            self.latest = version

    def _attention(self, client: httpx.Client, block: Floats, pinned: int | None) -> Any:
        """Call `/v1/attention` in safetensors."""
        query = "" if pinned is None else f"&version={pinned}"
        response = client.post(
            f"{self.server.url}/v1/attention?model={NAME}{query}",
            content=save({"embeddings": block}),
            headers={"Content-Type": "application/x-safetensors"},
        )
        if response.status_code != 200:
            return response, None
        [version] = re.findall(rb'"version": ?"(\d+)"', response.content[:400])
        return response, (int(version), load(response.content)["output"])

    def _json(self, client: httpx.Client, block: Floats, pinned: int | None) -> Any:
        """Call `/v1/attention` in JSON."""
        option = {} if pinned is None else {"version": pinned}
        body = {"model": NAME, "embeddings": block.tolist()} | option
        response = client.post(f"{self.server.url}/v1/attention", json=body)
        if response.status_code != 200:
            return response, None
        answer = response.json()
        return response, (answer["version"], np.array(answer["output"], np.float32))

    def _infer(self, client: httpx.Client, block: Floats, pinned: int | None) -> Any:
        """Call the protocol's infer, which the fast path takes where it is small."""
        path = "" if pinned is None else f"/versions/{pinned}"
        tensor = {
            "name": "embeddings",
            "shape": block.shape,
            "datatype": "FP32",
            "data": block.ravel().tolist(),
        }
        response = client.post(
            f"{self.server.url}/v2/models/{NAME}{path}/infer", json={"inputs": [tensor]}
        )
        if response.status_code != 200:
            return response, None
        answer = response.json()
        data = np.array(answer["outputs"][0]["data"], np.float32).reshape(block.shape)
        return response, (int(answer["model_version"]), data)


@contextmanager
def calling(server: Server, staged: Staged) -> Iterator[list[Caller]]:
    """Have callers call until the block is left."""
    stop = threading.Event()
    callers = [Caller(server, staged, number, stop) for number in range(CALLERS)]
    threads = [threading.Thread(target=caller.run) for caller in callers]
    for thread in threads:
        thread.start()
    try:
        yield callers
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def status_of(server: Server, field_name: str) -> int:
    """Return a number of the process's status: `VmRSS` in KiB, `Threads`."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.findall(rf"^{field_name}:\s+(\d+)", status, re.MULTILINE)[0])


def rested_rss(server: Server) -> int:
    """Return the resident memory in KiB once it has come to rest: freed memory is given back."""
    samples = [0, 2**40]
    while max(samples) - min(samples) > 1024:
        samples = []
        for _ in range(24):  # longer than the server waits for calls before it gives back
            samples.append(status_of(server, "VmRSS"))
            time.sleep(0.5)
    return samples[-1]


@pytest.mark.slow
@pytest.mark.fault("C3", "C4", "A9")
@pytest.mark.parametrize("versions_kept", [1, 2])
def test_update_and_roll_back_under_load(staged: Staged, versions_kept: int) -> None:
    """No wrong answer, no error, each is of the version that it names; the memory comes back."""
    with Server(
        staged.repository, versions_kept=versions_kept, threads=2, concurrent_runs=2, timeout_s=600
    ) as server:
        staged.publish(2)  # so that as many are served before as afterwards
        server.process.send_signal(signal.SIGHUP)
        with calling(server, staged) as callers:
            until(lambda: all(c.latest == 2 and c.counts.total() > 20 for c in callers))
        rss_before, threads_before = rested_rss(server), status_of(server, "Threads")

        with calling(server, staged) as callers:
            way = [*range(3, VERSIONS + 1), *range(VERSIONS - 1, 1, -1)]
            for step, version in enumerate(way):
                if step < VERSIONS - 2:
                    staged.publish(version)
                else:
                    staged.take_away(version + 1)
                server.process.send_signal(signal.SIGHUP)
                until(lambda wanted=version: all(c.latest == wanted for c in callers))  # type: ignore[misc]
        log = server.whole_log()
        until(lambda: status_of(server, "Threads") <= threads_before + 4)
        rss_after, threads_after = rested_rss(server), status_of(server, "Threads")

    counts: Counter[str] = sum((caller.counts for caller in callers), Counter())
    report = (
        f"{len(way)} changes of version, {counts.total()} calls: {dict(sorted(counts.items()))};"
        f" RSS {rss_before // 1024} -> {rss_after // 1024} MB,"
        f" threads {threads_before} -> {threads_after}"
    )
    print(report)  # noqa: T201 (what `pytest -rP` shows)
    assert [line for caller in callers for line in caller.wrong] == []
    assert set(counts) <= {"default 200", "pinned 200", "pinned 404"}, report
    assert (rss_after - rss_before) * 1024 < MARGIN_BYTES, report
    assert counts["default 200"] > len(way) * CALLERS, report
    assert counts["pinned 200"] > 0, report
    assert log.count('"message":"gone from the repository"') == VERSIONS - 2
