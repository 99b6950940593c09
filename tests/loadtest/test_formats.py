"""What the load tester sends and reads, against a real server and a stub."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from loadtest.answers import agree
from loadtest.draws import Draw
from loadtest.endpoint import Endpoint
from loadtest.errors import TargetRefused, UsageWrong
from loadtest.plan import Plan
from loadtest.point import Point, measure
from loadtest.target import Input, discover
from loadtest.work import Format, Mask, Work, draw_tensors
from service.codecs.shared_memory import DIRECTORY
from tests.support.layers import Layers
from tests.support.load_stub import Stub
from tests.support.server import Server

PLAN = Plan(count=24, warmup_s=0.0)
FORMATS = get_args(Format)
MASKS = get_args(Mask)


@pytest.fixture(scope="module")
def shared(layers: Layers) -> Iterator[Server]:
    """Return a server that takes shared memory."""
    with Server(layers.repository, shared_memory=True, max_length=64) as running:
        yield running


def point(server_url: str, model: str, work: Work, **options: Any) -> dict[str, Any]:
    """Return what came of a short load."""
    target = discover(Endpoint.parse(server_url), model=model, api=options.pop("api", "auto"))
    options.setdefault("bodies", 3)
    return measure(target, Point(work, clients=2, plan=PLAN, **options))


@pytest.mark.parametrize("weights", ["off", "on", "heads:0,2"])
@pytest.mark.parametrize("form", FORMATS)
def test_every_answer_is_what_the_artifact_gives(
    shared: Server, layers: Layers, form: Format, weights: str
) -> None:
    """In every format, with every kind of mask, of the server's many callers."""
    if form == "safetensors" and weights.startswith("heads"):
        with pytest.raises(UsageWrong, match=r"^--weights: heads by number cannot be asked for"):
            point(shared.url, "mha", Work(weights=weights, format=form))
        return
    for mask in MASKS:
        work = Work("2", "uniform:1:9", weights, mask, form)

        found = point(shared.url, "mha", work, check=True, repository=layers.repository)

        assert found["statuses"] == {"200": 24}
        assert (found["checked"], found["wrong"]) == (24, 0)
        assert found["decode_ms"]["count"] == 24
        assert found["stages_ms"]["compute"]["p50"] > 0


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("model", ["rotary", "sinks", "values"])
def test_layer_with_defaults_of_its_own_is_loaded_as_it_was_published(
    wide_server: Server, layers: Layers, model: str, form: Format
) -> None:
    """Causal unless it is told otherwise, which it is not; its extra weights are checked too."""
    work = Work("2", "uniform:1:9", "on", "none", form)

    found = point(wide_server.url, model, work, check=True, repository=layers.wide)

    assert found["statuses"] == {"200": 24}
    assert (found["checked"], found["wrong"]) == (24, 0)


@pytest.mark.parametrize("form", FORMATS)
def test_layer_with_a_memory_of_its_own_gets_one(shared: Server, form: Format) -> None:
    """Every input that the model declares is sent."""
    found = point(shared.url, "cross", Work("2", "5", "on", "padding", form), check=True)

    assert found["statuses"] == {"200": 24}
    assert (found["checked"], found["wrong"]) == (24, 0)


@pytest.mark.parametrize("form", ["json", "binary", "shared-memory"])
def test_headwise_can_be_asked_by_the_protocol_alone(shared: Server, form: Format) -> None:
    """As any other server."""
    found = point(shared.url, "tiny", Work(format=form), api="v2", check=True)

    assert (found["checked"], found["wrong"]) == (24, 0)


def test_shared_memory_is_given_back(shared: Server) -> None:
    """No region and no segment is left, and answers are short."""
    point(shared.url, "mha", Work("4", "16", format="shared-memory"))

    assert shared.get("/v2/systemsharedmemory/status").json() == []
    assert not list(DIRECTORY.glob(f"loadtest-{os.getpid()}-*"))


def test_server_without_shared_memory_is_told_by_the_option(server: Server) -> None:
    """With what the server says."""
    with pytest.raises(TargetRefused, match=r"^--format: shared-memory: the server answered 403: "):
        point(server.url, "tiny", Work(format="shared-memory"))


@pytest.mark.parametrize("form", ["json", "binary"])
def test_any_server_of_the_protocol_can_be_asked(form: Format) -> None:
    """Names, shapes and types are read from its metadata."""
    with Stub(timing="queue;dur=1.5") as stub:
        found = point(stub.url, "stub", Work("3", "4", format=form), check=True)

    assert found["statuses"] == {"200": 24}
    assert (found["checked"], found["wrong"]) == (24, 0)
    queue = found["stages_ms"]["queue"]
    assert (queue["count"], queue["p50"], queue["p99"], queue["mean"]) == (24, 1.5, 1.5, 1.5)


@pytest.mark.parametrize("form", ["json", "binary"])
def test_wrong_answers_are_found(form: Format) -> None:
    """One number in one answer of six is enough."""
    with Stub(corrupt=6) as stub:
        found = point(stub.url, "stub", Work(format=form), check=True, bodies=1)

    assert found["checked"] == 24
    assert found["wrong"] == 4


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (Work(format="safetensors"), "--format: safetensors needs a Headwise server"),
        (Work(weights="on"), "--weights: on and heads need a Headwise server"),
        (Work(mask="causal"), "--mask: masks need a Headwise server"),
    ],
)
def test_what_only_headwise_can_do_is_not_asked_of_others(work: Work, message: str) -> None:
    """The option is named before anything is sent."""
    with Stub() as stub, pytest.raises(UsageWrong) as caught:
        point(stub.url, "stub", work)

    assert str(caught.value) == message


def test_call_that_is_refused_ends_the_test_with_the_servers_words(shared: Server) -> None:
    """Before the clock starts: a load of refusals measures nothing."""
    with pytest.raises(TargetRefused) as caught:
        point(shared.url, "mha", Work(length="65"))

    assert "answered 400: " in str(caught.value) or "answered 413: " in str(caught.value)
    assert "embeddings: at most 64 tokens long, got 65" in str(caught.value)


def test_model_that_is_not_there_is_told_with_those_that_are(server: Server) -> None:
    """As a spelling mistake deserves."""
    with pytest.raises(UsageWrong) as caught:
        discover(Endpoint.parse(server.url), model="mah")

    assert str(caught.value) == "--model: expected one of cross, mha, tiny, got 'mah'"


def test_repository_without_the_artifact_is_told_by_the_option(
    server: Server, tmp_path: Path
) -> None:
    """Nothing can be compared with it."""
    with pytest.raises(UsageWrong, match=r"^--repository: .*: holds no artifact tiny$"):
        point(server.url, "tiny", Work(), check=True, repository=tmp_path)


def test_drawn_lengths_follow_their_distribution(tmp_path: Path) -> None:
    """Uniform with both ends, lognormal with its median, a file with what is in it."""
    (tmp_path / "lengths").write_text("3\n5\n5\n")
    random = np.random.default_rng(0)

    def drawn(text: str) -> list[int]:
        draw = Draw.parse("--shape", text)
        return [draw(random) for _ in range(4000)]

    assert set(drawn("7")) == {7}
    assert set(drawn("uniform:2:5")) == {2, 3, 4, 5}
    lengths = drawn("lognormal:3:0.8")
    assert min(lengths) >= 1
    assert np.median(lengths) == pytest.approx(np.exp(3), rel=0.1)
    of_file = drawn(f"file:{tmp_path / 'lengths'}")
    assert set(of_file) == {3, 5}
    assert of_file.count(5) == pytest.approx(4000 * 2 / 3, rel=0.1)


@pytest.mark.parametrize("text", ["", "3\nx\n", "0\n", "-1\n"])
def test_file_without_lengths_is_refused(tmp_path: Path, text: str) -> None:
    """With the file's name and what was found."""
    (tmp_path / "lengths").write_text(text)

    with pytest.raises(UsageWrong, match=r"^--shape: .*lengths: expected whole numbers from 1 on"):
        Draw.parse("--shape", f"file:{tmp_path / 'lengths'}")


def test_bodies_are_no_more_than_memory_allows() -> None:
    """One that is too large alone is the only one."""
    inputs = [Input("x", "FP32", None, None, 1000)]

    few = draw_tensors(Work("1", "10"), inputs, 100, most_bytes=200_000, seed=0)
    one = draw_tensors(Work("9", "10"), inputs, 100, most_bytes=200_000, seed=0)

    assert (len(few), len(one)) == (5, 1)


def test_shape_that_the_model_does_not_take_names_the_option() -> None:
    """Axes that metadata fixes are kept."""
    fixed = [Input("x", "FP32", 1, 128, 8)]

    with pytest.raises(UsageWrong, match="--shape: the model's x has length fixed at 128, got 8"):
        draw_tensors(Work("1", "8"), fixed, 1, most_bytes=100, seed=0)


def test_answers_agree_by_their_own_size_and_weights_by_themselves() -> None:
    """The contract's rule: 1e-5 times the largest expected, weights 1e-5."""
    large = np.array([[100.0, 1.0]], np.float32)
    near, far = large + np.float32(5e-4), large + np.float32(2e-3)

    assert agree({"output": near}, {"output": large})
    assert not agree({"output": far}, {"output": large})
    assert not agree({"attention_weights": near}, {"attention_weights": large})
    assert not agree({}, {"output": large})
    assert not agree({"output": near[0]}, {"output": large})
    for odd, other in itertools.product([np.nan, np.inf], [0.0, -np.inf]):
        expected, found = large.copy(), large.copy()
        expected[0, 1], found[0, 1] = odd, other
        assert not agree({"output": found}, {"output": expected})
        assert agree({"output": expected}, {"output": expected})
