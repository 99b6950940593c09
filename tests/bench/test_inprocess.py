"""Candidates of the benchmarks: the same work, each in its turn, none dropped in silence."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from bench.candidates import engine
from bench.growth import copy_artifact, peak_mb
from bench.inprocess import (
    PEAK,
    Plan,
    candidates,
    disagreement,
    flops,
    measure,
)
from bench.results import Work
from bench.turns import Candidate, Failed, Prepare, Run, embeddings_of, once
from service.inference.artifact import find_artifacts, read_artifact
from service.layer_config import LayerConfig
from tests.support.layers import CONFIGS, Layers
from tests.support.server import until

Array = npt.NDArray[Any]

TINY = CONFIGS["tiny"]
SHAPE = (2, 5)
EMBEDDINGS = embeddings_of(SHAPE, TINY.embed_dim)


@pytest.fixture(scope="module")
def graph(layers: Layers) -> Path:
    """Return the graph of the smallest layer."""
    return layers.artifact("tiny") / "layer.onnx"


def its_process() -> Prepare:
    """Answer with the number of the process that answers."""
    return lambda embeddings, weights: lambda: (np.array(os.getpid()),)


def broken() -> Prepare:
    """Cannot be made."""
    raise OSError("no compiler\nand much more")


def half_broken() -> Prepare:
    """Answer with weights only; without, fail."""

    def prepare(embeddings: Array, weights: bool) -> Run:
        if not weights:
            raise ValueError("only with weights")
        return lambda: (embeddings,)

    return prepare


def dying() -> Prepare:
    """End the process in the middle of a turn."""
    return lambda embeddings, weights: lambda: os._exit(3)


def slightly_off(graph: Path, config: LayerConfig) -> Prepare:
    """Answer as the engine does, but for a thousandth."""
    right = engine(graph, config, 1)

    def prepare(embeddings: Array, weights: bool) -> Run:
        return lambda: tuple(tensor + 1e-3 for tensor in right(embeddings, weights)())

    return prepare


def doubled(number: int) -> int:
    """Return twice the number, or fail at 0."""
    if number == 0:
        raise ValueError("twice nothing")
    return 2 * number


def _state(process: int) -> str:
    """Return the letter by which Linux tells what a process does: T = stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_engine_naive_export_and_torch_answer_the_same(graph: Path, tmp_path: Path) -> None:
    """Whoever is timed does the same work, without weights and with."""
    makes = candidates(graph, TINY, 1, tmp_path)
    assert set(makes) == {"headwise", "our graph, bare", "naive export", "torch", "torch.compile"}
    del makes["torch.compile"]  # needs a compiler, and a minute
    answers: dict[bool, dict[str, tuple[Array, ...]]] = {False: {}, True: {}}

    for who, make in makes.items():
        with Candidate(make) as candidate:
            for weights, found in answers.items():
                found[who] = candidate.answer(EMBEDDINGS, weights=weights)

    assert len(answers[False]) == 4
    for weights, found in answers.items():
        for answer in found.values():
            shapes = [(2, 5, 8), (2, 2, 5, 5)] if weights else [(2, 5, 8)]
            assert [tensor.shape for tensor in answer] == shapes
        assert disagreement(found, "headwise") == {}


def test_long_answers_are_compared_by_some_of_their_queries(graph: Path) -> None:
    """At length 2048 all weights of one candidate would be 200 MB."""
    embeddings = embeddings_of((1, 32), TINY.embed_dim)

    with Candidate(partial(engine, graph, TINY, 1)) as candidate:
        output, weights = candidate.answer(embeddings, weights=True)

    _, whole = engine(graph, TINY, 1)(embeddings, True)()
    assert output.shape == (1, 32, 8)
    assert weights.shape == (1, 2, 8, 32)
    assert np.array_equal(weights, whole[:, :, ::4])


@pytest.mark.parametrize(
    ("change", "is_named"),
    [
        (lambda x: x + 5e-5, False),
        (lambda x: x + 5e-4, True),
        (lambda x: np.where(x == x.max(), np.nan, x), True),
        (lambda x: x[:1], True),
    ],
    ids=["within", "beyond", "NaN", "shape"],
)
def test_disagreement_names_who_is_further_off_than_the_tolerance(
    change: Callable[[Array], Array], is_named: bool
) -> None:
    """Too far, not a number and another shape are all another answer."""
    right = np.linspace(-1, 1, 12).reshape(3, 4)

    found = disagreement({"us": (right,), "them": (change(right),)}, "us")

    assert ("them" in found) == is_named
    assert "us" not in found


def test_disagreement_misses_no_tensor() -> None:
    """Who gives no weights does not agree by what it gives."""
    right = np.ones((3, 4))

    assert disagreement({"us": (right, right), "them": (right,)}, "us") == {"them": np.inf}


def test_flops_are_those_of_four_projections_and_two_products() -> None:
    """By hand, at 2 rows of length 3 and width 4: 2*6*4*16 and 2*2*2*9*4."""
    assert flops((2, 3), 4) == 768 + 288


def test_a_candidate_is_stopped_but_for_its_turn_and_gone_at_the_end() -> None:
    """Its threads take no core from whoever's turn it is."""
    with Candidate(its_process) as candidate:
        [process] = candidate.answer(EMBEDDINGS, weights=False)
        until(lambda: _state(int(process)) == "T")
        [again] = candidate.answer(EMBEDDINGS, weights=False)
        until(lambda: _state(int(process)) == "T")

    assert process == again != os.getpid()
    assert not Path(f"/proc/{process}").exists()


def test_a_candidate_that_cannot_be_made_says_why() -> None:
    """By the first line of what it raised."""
    with pytest.raises(Failed, match=r"^OSError: no compiler$"), Candidate(broken):
        pass


def test_a_candidate_that_fails_in_a_turn_keeps_its_next_one() -> None:
    """One shape that it cannot do takes no other from it."""
    with Candidate(half_broken) as candidate:
        with pytest.raises(Failed, match=r"^ValueError: only with weights$"):
            candidate.answer(EMBEDDINGS, weights=False)
        [answer] = candidate.answer(EMBEDDINGS, weights=True)

    assert np.array_equal(answer, EMBEDDINGS)


def test_a_candidate_whose_process_ends_says_so() -> None:
    """Nobody waits for an answer that cannot come."""
    with Candidate(dying) as candidate, pytest.raises(Failed, match="its process ended with 3"):
        candidate.answer(EMBEDDINGS, weights=False)


def test_once_runs_in_a_process_of_its_own() -> None:
    """What it returns comes back, and so does the reason where it raises."""
    assert once(os.getpid) != os.getpid()
    assert once(doubled, 21) == 42
    with pytest.raises(Failed, match=r"^ValueError: twice nothing$"):
        once(doubled, 0)


def test_measure_leaves_out_who_fails_or_answers_otherwise_and_says_so(graph: Path) -> None:
    """Everybody else has a time and a share of the peak in every round of every shape."""
    makes: dict[str, Callable[[], Prepare]] = {
        "headwise": partial(engine, graph, TINY, 1),
        "twin": partial(engine, graph, TINY, 1),
        "absent": broken,
        "off": partial(slightly_off, graph, TINY),
    }

    results = measure(makes, TINY, Plan(((1, 1), SHAPE), rounds=2, seconds=0.0))

    assert results.missing["absent"] == "OSError: no compiler"
    assert results.missing["off"].startswith("at [1, 1]: its answer differs by ")
    assert set(results.missing) == {"absent", "off"}
    taken = [(s.work, s.who, s.round, s.what) for s in results.samples]
    assert len(taken) == len(set(taken))
    assert set(taken) == {
        (Work(shape=shape, weights=weights), who, turn, what)
        for shape in ((1, 1), SHAPE)
        for weights in (False, True)
        for turn in range(2)
        for who, what in (
            ("headwise", "time"),
            ("headwise", "share of peak"),
            ("twin", "time"),
            ("twin", "share of peak"),
            (PEAK, "rate"),
        )
    }
    assert all(sample.value > 0 for sample in results.samples)


def test_measure_goes_nowhere_without_the_engine(graph: Path) -> None:
    """All others are set against it."""
    with pytest.raises(Failed, match="no compiler"):
        measure({"headwise": broken}, TINY, Plan((SHAPE,), rounds=1, seconds=0.0))


def test_share_of_peak_is_the_layers_rate_over_the_products(graph: Path) -> None:
    """In one round: operations over time, over the rate of the same round."""
    makes = {"headwise": partial(engine, graph, TINY, 1)}

    results = measure(makes, TINY, Plan((SHAPE,), rounds=1, seconds=0.0))

    for weights in (False, True):
        found = {s.what: s.value for s in results.samples if s.work.weights == weights}
        rate = flops(SHAPE, TINY.embed_dim) / (found["time"] / 1e3)
        assert found["share of peak"] == pytest.approx(100 * rate / (found["rate"] * 1e9))


def test_peak_memory_holds_the_answer_that_it_is_made_of(graph: Path) -> None:
    """Weights of 2 heads at length 1024 are 8 MB; a hundred times as much would be a fault."""
    found = once(peak_mb, graph, TINY, (1, 1024), 1)

    assert 8 <= found < 800


def test_copies_of_an_artifact_are_artifacts(layers: Layers, tmp_path: Path) -> None:
    """Each is served under a name of its own, from files of its own."""
    copy_artifact(layers.artifact("tiny"), tmp_path, 3)

    found = {name: read_artifact(path) for name, path in find_artifacts(tmp_path).items()}
    assert sorted(found) == ["mha", "mha-2", "mha-3"]
    original = read_artifact(layers.artifact("tiny")).manifest
    for name, artifact in found.items():
        assert artifact.manifest == replace(original, name=name)
        assert artifact.graph.path.stat().st_nlink == 1
