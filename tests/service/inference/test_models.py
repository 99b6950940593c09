"""The models of a server: found, loaded, warmed up, looked up."""

import asyncio
import gc
import shutil
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from service.errors import (
    ArtifactUnreadable,
    InferenceFailed,
    InvalidInput,
    NotReady,
    ProviderUnavailable,
    UnknownModel,
)
from service.inference.batcher import Batcher
from service.inference.batches import BatchLimits
from service.inference.calls import Call, Floats, Inputs, Outputs
from service.inference.engine import Engine, Provider, Stop
from service.inference.model import Model, loader
from service.inference.models import Models
from service.inference.schedule import QueueLimits
from service.layer_config import LayerConfig
from service.telemetry.metrics import Metrics
from tests.support.layers import Layers
from tests.support.models import batcher_of
from tests.support.server import until


def load(repository: Path, *, default: str | None = None, provider: Provider = "cpu") -> Models:
    """Load with one thread."""
    models = Models(
        loader(provider=provider, threads=2, concurrent_runs=2, batcher_of=batcher_of),
        repository,
        default=default,
    )
    models.load_all()
    return models


@pytest.fixture
def repository(layers: Layers, tmp_path: Path) -> Path:
    """Return a copy of the repository that a test may spoil."""
    return Path(shutil.copytree(layers.repository, tmp_path / "repository"))


def test_load_serves_every_artifact_in_its_highest_version(repository: Path) -> None:
    """Versions are numbers: 10 is above 9, and what is no version is passed over."""
    for name in ("notes", "0", "01", "latest"):
        (repository / "tiny" / name).mkdir()
    (repository / ".staging-x").mkdir()
    (repository / "Not A Name").mkdir()
    (repository / "empty").mkdir()
    for version in ("9", "10"):
        shutil.copytree(repository / "tiny" / "1", repository / "tiny" / version)
        manifest = repository / "tiny" / version / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"version": 1', f'"version": {version}'))

    models = load(repository)

    assert {model.name: model.version for model in models} == {"cross": 1, "mha": 1, "tiny": 10}


def test_get_without_a_name_prefers_setting_then_mha_then_the_only_one(repository: Path) -> None:
    """The rule of the default model, in its order."""
    assert load(repository, default="tiny").get().name == "tiny"
    assert load(repository).get().name == "mha"
    shutil.rmtree(repository / "mha")
    with pytest.raises(InvalidInput, match="model: expected one of cross, tiny, got none"):
        load(repository).get()
    shutil.rmtree(repository / "cross")
    assert load(repository).get().name == "tiny"


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("nope", None, "model: expected one of cross, mha, tiny, got 'nope'"),
        ("x" * 1000, None, f"got '{'x' * 64}'"),
        ("tiny", "2", "model tiny: version 1 is served, got '2'"),
        ("tiny", "1.0", "model tiny: version 1 is served, got '1.0'"),
    ],
)
def test_get_unknown_model_or_version_lists_what_there_is(
    layers: Layers, name: str, version: str | None, message: str
) -> None:
    """The caller learns what would have worked."""
    with pytest.raises(UnknownModel) as caught:
        load(layers.repository).get(name, version)

    assert message in str(caught.value)


def test_load_refuses_what_it_cannot_serve(repository: Path, tmp_path: Path) -> None:
    """A start that would serve less than it was told ends instead."""
    (tmp_path / "none").mkdir()
    for place, message in (
        (tmp_path / "nowhere", "no such repository directory"),
        (tmp_path / "none", "no artifact in it; publish one: python -m export"),
    ):
        with pytest.raises(ArtifactUnreadable, match=message):
            load(place)
    with pytest.raises(ArtifactUnreadable, match="default model: expected one of cross, mha, tiny"):
        load(repository, default="nope")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            "other/1",
            "expected a manifest of other version 1, as its directories are named, got one of tiny"
            ' version 1; if it is a copy, change "name" to "other" in its manifest.json',
        ),
        (
            "tiny/3",
            "expected a manifest of tiny version 3, as its directories are named, got one of tiny"
            ' version 1; if it is a copy, change "version" to 3 in its manifest.json; to go back to'
            " a version, take those above it away instead",
        ),
        (
            "other/3",
            "expected a manifest of other version 3, as its directories are named, got one of tiny"
            ' version 1; if it is a copy, change "name" to "other" and "version" to 3 in its'
            " manifest.json",
        ),
    ],
)
def test_load_refuses_a_manifest_of_another_place(
    repository: Path, place: str, message: str
) -> None:
    """What differs is named, and nothing else is to be changed."""
    target = repository / place
    shutil.copytree(repository / "tiny" / "1", target)

    with pytest.raises(ArtifactUnreadable) as caught:
        load(repository)

    assert str(caught.value) == f"{target}: {message}"


def test_load_for_cuda_without_cuda_refuses(layers: Layers) -> None:
    """No silent change of provider."""
    with pytest.raises(ProviderUnavailable, match="asked for cuda"):
        load(layers.repository, provider="cuda")


def test_warm_up_against_the_golden_answer_makes_ready(layers: Layers) -> None:
    """Ready means: this very engine has just answered right."""
    models = load(layers.repository)
    before = models.problem

    models.warm_up()

    assert before == "cross: warm-up has not run yet"
    assert models.problem is None
    assert models.require_ready(models.get("tiny")).name == "tiny"


class WrongEngine:
    """An engine that answers something else, or nothing."""

    layer = LayerConfig(8, 2)
    provider: Provider = "cpu"
    concurrent_runs = 1

    def __init__(self, answer: Outputs | None) -> None:
        self.answer = answer

    def run(
        self, inputs: Inputs, *, weights: bool, stop: Stop | None = None, concurrent: bool = False
    ) -> Outputs:
        """Answer what was planted."""
        if self.answer is None:
            raise InferenceFailed("the runtime refused a batch") from RuntimeError("boom")
        return self.answer


def wrong_answers(golden_output: Floats, golden_weights: Floats) -> dict[str, object]:
    """Return planted answers by what must be said of them."""
    return {
        "output without masks differs by": Outputs(
            golden_output + np.float32(1e-3), golden_weights
        ),
        "output without masks differs by inf": Outputs(
            golden_output * np.float32(np.nan), golden_weights
        ),
        "attention_weights differs by inf": Outputs(golden_output, None),
        "the runtime refused a batch: boom": None,
    }


@pytest.mark.parametrize("index", range(4))
def test_warm_up_of_a_wrong_engine_says_why(layers: Layers, index: int) -> None:
    """The model stays not ready and its problem is told to callers."""
    good = load(layers.repository).get("tiny")
    golden = good.golden
    # Without a mask in the golden input, one planted answer serves both runs.
    golden = replace(golden, output=golden.plain_output)
    said, answer = list(wrong_answers(golden.plain_output, golden.attention_weights).items())[index]
    engine = WrongEngine(answer)  # type: ignore[arg-type]
    model = Model(good.manifest, golden, engine, batcher_of("tiny", engine))
    models = Models(lambda path: model, layers.repository)
    models.load_all()

    models.warm_up()

    assert said in (model.problem or "")
    with pytest.raises(NotReady, match="model tiny: "):
        models.require_ready(model)


async def call(model: Model, rows: int) -> None:
    """Make a call of its own length, which is answered long before its deadline."""
    embeddings = np.ones((rows, 16, model.layer.embed_dim), np.float32)
    full = np.full(rows, 16)
    answer = await model.batcher.submit(
        Call(Inputs(embeddings), full, full, weights=True, timeout_s=3600)
    )
    assert answer.output.shape == embeddings.shape


def engine_threads() -> set[threading.Thread]:
    """Return the threads of queues."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("engine")}


@pytest.mark.fault("A9", "C4")
@pytest.mark.parametrize("versions_kept", [1, 2])
def test_replaced_model_is_freed_when_its_last_call_is_answered(
    repository: Path, versions_kept: int
) -> None:
    """Engine, queue and threads go at once: no deadline and no collector is waited for."""

    def roomy(name: str, engine: Engine) -> Batcher:
        queue, run = QueueLimits(99, 99999, 3600), BatchLimits(64, 99999, 0.25)
        return Batcher(engine, queue, run, Metrics().of_model(name).queue(), inline_s=0.0)

    async def reload_under_calls() -> list[weakref.ref[object]]:
        models = Models(
            loader(provider="cpu", threads=2, concurrent_runs=2, batcher_of=roomy),
            repository,
            versions_kept=versions_kept,
        )
        models.load_all()
        models.warm_up()
        freed: list[weakref.ref[object]] = []
        for version in range(2, 10):
            served = models.versions_of("tiny")
            freed += [
                weakref.ref(part)
                for old in served[versions_kept - 1 :]  # it is replaced
                for part in (old, old.engine, old.batcher)
            ]
            calls = [asyncio.create_task(call(old, rows)) for rows in range(1, 9) for old in served]
            del served
            copy_version(repository, version)
            await models.refresh(retry=False)
            assert [model.version for model in models.versions_of("tiny")][:2] == list(
                range(version, max(0, version - versions_kept), -1)
            )
            await asyncio.gather(*calls)
            del calls
            await asyncio.sleep(0)
        await models.unload("tiny")
        others = sum(model.engine.concurrent_runs for model in models)
        until(lambda: len(engine_threads() - before) == others)
        await models.close()
        return freed

    before = engine_threads()
    gc.collect()
    gc.disable()
    try:
        freed = asyncio.run(reload_under_calls())
    finally:
        gc.enable()

    assert [ref() for ref in freed] == [None] * 3 * (9 - versions_kept)


def copy_version(repository: Path, version: int) -> None:
    """Publish the layer tiny once more."""
    path = Path(shutil.copytree(repository / "tiny" / "1", repository / "tiny" / str(version)))
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', f'"version": {version}'))


def test_served_model_that_answers_wrong_gives_way_to_any_that_answers_right(
    repository: Path,
) -> None:
    """The highest version that was there at the start is not the best one if it is wrong."""
    copy_version(repository, 2)
    load_right = loader(provider="cpu", threads=1, concurrent_runs=1, batcher_of=batcher_of)

    def load_wrong(path: Path) -> Model:
        model = load_right(path)
        if path.name == "2":
            model.engine = WrongEngine(None)
        return model

    models = Models(load_wrong, repository)
    models.load_all()
    models.warm_up()
    before = models.problem

    asyncio.run(models.refresh(retry=False))

    assert before == "tiny: the runtime refused a batch: boom"
    assert (models.get("tiny").version, models.problem, models.broken) == (1, None, ["tiny/2"])
