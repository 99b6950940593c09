"""The engine: the seam around onnxruntime."""

import threading
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from export.formula import Formula
from service.contract import GraphTensor, graph_inputs
from service.errors import ArtifactUnreadable, InferenceFailed, ProviderUnavailable
from service.inference.artifact import Graph, read_graph
from service.inference.calls import Inputs, Outputs
from service.inference.engine import OnnxEngine, check_signature, full_mask
from service.layer_config import LayerConfig
from tests.support.layers import CONFIGS, Layers

TOLERANCE = 1e-5
"""Rule 2 of the contract, for FP32."""


@pytest.fixture(scope="module")
def engine(layers: Layers) -> OnnxEngine:
    """Return the engine of the layer `mha`."""
    return OnnxEngine(read_graph(layers.artifact("mha") / "layer.onnx"), CONFIGS["mha"])


@pytest.fixture(scope="module")
def formula(layers: Layers) -> Formula:
    """Return the oracle of the layer `mha`."""
    return layers.formula("mha")


def check_weights(answer: Outputs, expected: np.ndarray) -> None:
    """Assert that weights came, and which."""
    assert answer.attention_weights is not None
    np.testing.assert_allclose(answer.attention_weights, expected, atol=TOLERANCE)


def embeddings(*shape: int, seed: int = 0) -> np.ndarray:
    """Return standard normal embeddings."""
    return np.random.default_rng(seed).standard_normal((*shape, 24)).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (2, 9), (64, 2), (1, 383), (2, 384), (1, 1000)])
@pytest.mark.parametrize("weights", [False, True])
def test_run_of_any_shape_equals_the_formula(
    engine: OnnxEngine, formula: Formula, shape: tuple[int, int], weights: bool
) -> None:
    """Batch and length are free."""
    x = embeddings(*shape)

    answer = engine.run(Inputs(x), weights=weights)

    exact = formula(x)
    np.testing.assert_allclose(answer.output, exact.output, atol=TOLERANCE)
    if weights:
        check_weights(answer, exact.weights)
    else:
        assert answer.attention_weights is None


@pytest.mark.parametrize(("length", "keys"), [(1, 400), (7, 384), (400, 3), (400, 383)])
def test_run_over_memory_of_any_length_equals_the_formula(
    layers: Layers, length: int, keys: int
) -> None:
    """Few queries may have many keys, and many queries few."""
    engine = OnnxEngine(read_graph(layers.artifact("cross") / "layer.onnx"), CONFIGS["cross"])
    rng = np.random.default_rng(2)
    x = rng.standard_normal((2, length, 12)).astype(np.float32)
    memory = rng.standard_normal((2, keys, 6)).astype(np.float32)

    answer = engine.run(Inputs(x, memory), weights=False)

    exact = layers.formula("cross")(x, memory)
    np.testing.assert_allclose(answer.output, exact.output, atol=TOLERANCE)


@pytest.mark.parametrize("shape", [(2, 3, 5, 5), (1, 3, 5, 5), (2, 1, 5, 5), (1, 1, 5, 5)])
def test_run_with_pair_mask_of_each_allowed_shape(
    engine: OnnxEngine, formula: Formula, shape: tuple[int, ...]
) -> None:
    """Batch and heads of the full mask broadcast."""
    x, mask = embeddings(2, 5), np.random.default_rng(1).random(shape) < 0.6

    answer = engine.run(Inputs(x, pair_mask=mask), weights=True)

    exact = formula(x, pair_mask=mask)
    np.testing.assert_allclose(answer.output, exact.output, atol=TOLERANCE)
    check_weights(answer, exact.weights)


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_run_with_head_mask_scales_heads(
    engine: OnnxEngine, formula: Formula, shape: tuple[int, ...]
) -> None:
    """One factor a head, for all rows or each."""
    x, factors = embeddings(2, 4), np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    answer = engine.run(Inputs(x, head_mask=factors), weights=False)

    exact = formula(x, head_mask=factors)
    np.testing.assert_allclose(answer.output, exact.output, atol=TOLERANCE * 10)


@pytest.mark.parametrize("weights", [False, True])
def test_run_row_with_nothing_to_attend_to_gets_bias_and_zeros(
    engine: OnnxEngine, layers: Layers, weights: bool
) -> None:
    """Rule 1: never NaN, with weights or without."""
    x, hidden = embeddings(2, 4), np.ones((2, 4), bool)
    hidden[1] = False
    alone = engine.run(Inputs(x[:1]), weights=False).output

    answer = engine.run(Inputs(x, attend_mask=hidden), weights=weights)

    bias = layers.tensors("mha")["output.bias"]
    np.testing.assert_allclose(answer.output[1], np.tile(bias, (4, 1)), atol=TOLERANCE)
    np.testing.assert_allclose(answer.output[0], alone[0], atol=TOLERANCE)
    if weights:
        assert answer.attention_weights is not None
        assert not answer.attention_weights[1].any()


@pytest.mark.parametrize("hide", [[3, 4], [0, 1], [1, 3]], ids=["right", "left", "scattered"])
def test_run_padding_anywhere_equals_the_formula(
    engine: OnnxEngine, formula: Formula, hide: list[int]
) -> None:
    """Nothing assumes that padding is on the right."""
    x, takes_part = embeddings(1, 5), np.ones((1, 5), bool)
    takes_part[0, hide] = False

    answer = engine.run(Inputs(x, attend_mask=takes_part), weights=True)

    exact = formula(x, attend_mask=takes_part)
    assert answer.attention_weights is not None
    np.testing.assert_allclose(answer.output, exact.output, atol=TOLERANCE)
    assert not answer.attention_weights[..., hide].any()


def test_run_causal_hides_the_future_exactly(engine: OnnxEngine) -> None:
    """The strict upper triangle is zero, not small."""
    answer = engine.run(Inputs(embeddings(2, 6), causal=True), weights=True)

    assert answer.attention_weights is not None
    assert not np.triu(answer.attention_weights, 1).any()


@pytest.mark.parametrize("length", [4, 400])
def test_run_nan_stays_in_its_own_sequence(engine: OnnxEngine, length: int) -> None:
    """Rule 6: a neighbour's NaN is not mine."""
    x = embeddings(3, length)
    x[1, 2, 0] = np.nan
    clean = engine.run(Inputs(x[[0, 2]]), weights=False).output

    answer = engine.run(Inputs(x), weights=False)

    np.testing.assert_allclose(answer.output[[0, 2]], clean, atol=TOLERANCE)
    assert np.isnan(answer.output[1]).all()


def test_run_views_are_read_as_they_are(engine: OnnxEngine) -> None:
    """Fortran order, strides and slices change nothing."""
    x = embeddings(4, 6)
    plain = engine.run(Inputs(x[::2, 1:5]), weights=False).output

    for view in (np.asfortranarray(x[::2, 1:5]), np.ascontiguousarray(x[::2, 1:5])):
        np.testing.assert_array_equal(engine.run(Inputs(view), weights=False).output, plain)


def test_run_from_many_threads_never_mixes_answers(engine: OnnxEngine) -> None:
    """One session may be shared."""
    batches = [embeddings(1, 1 + i % 5, seed=i) for i in range(32)]
    serial = [engine.run(Inputs(x), weights=False).output for x in batches]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            found = engine.run(Inputs(batches[i]), weights=False).output
            if not np.allclose(found, serial[i], atol=TOLERANCE):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong


def test_run_what_the_runtime_refuses_is_translated(engine: OnnxEngine) -> None:
    """Whatever class the runtime raises, ours comes out with the cause attached."""
    with pytest.raises(InferenceFailed, match="the runtime refused a batch") as caught:
        engine.run(Inputs(np.zeros((1, 2, 23), np.float32)), weights=False)

    assert caught.value.__cause__ is not None


def test_engine_of_missing_provider_refuses(layers: Layers) -> None:
    """Asked for CUDA and not getting it is no reason to use the CPU."""
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this machine's runtime offers CUDA")

    with pytest.raises(ProviderUnavailable, match="asked for cuda, but this onnxruntime"):
        OnnxEngine(
            read_graph(layers.artifact("tiny") / "layer.onnx"), CONFIGS["tiny"], provider="cuda"
        )


def test_engine_of_broken_graph_refuses(tmp_path: Path) -> None:
    """A file that is no graph is told by name."""
    with pytest.raises(ArtifactUnreadable, match=r"layer\.onnx: the runtime cannot read it"):
        OnnxEngine(Graph(tmp_path / "layer.onnx", b"no graph", b""), CONFIGS["tiny"])


def test_engine_of_another_layer_refuses(layers: Layers) -> None:
    """The signature must be the one that the manifest's layer has."""
    with pytest.raises(ArtifactUnreadable, match="input embeddings axes: expected"):
        OnnxEngine(read_graph(layers.artifact("tiny") / "layer.onnx"), CONFIGS["mha"])


def test_check_signature_names_dtypes_and_axes_fail_apart() -> None:
    """Each mistake has its own message."""
    good = graph_inputs(LayerConfig(8, 2))
    renamed = (GraphTensor("x", "float32", good[0].axes), *good[1:])
    retyped = (GraphTensor(good[0].name, "bool", good[0].axes), *good[1:])
    fixed = (GraphTensor(good[0].name, "float32", (2, "length", 8)), *good[1:])

    check_signature(good, good, "here")
    for bad, message in (
        (renamed, r"here names: expected \['embeddings'"),
        (retyped, "here embeddings: expected float32, found bool"),
        (fixed, r"here embeddings axes: expected \['batch', 'length', 8\], found \[2,"),
    ):
        with pytest.raises(ArtifactUnreadable, match=message):
            check_signature(bad, good, "here")


def test_full_mask_of_nothing_hidden_is_none() -> None:
    """Asking for nothing extra costs nothing extra."""
    assert full_mask(Inputs(embeddings(1, 2))) is None


def test_full_mask_is_the_intersection_of_all() -> None:
    """A key takes part only if every mask says so."""
    pairs = np.ones((1, 3, 3, 3), bool)
    pairs[0, 0, 2, 1] = False
    inputs = Inputs(
        embeddings(2, 3),
        attend_mask=np.array([[True, True, True], [False, True, True]]),
        pair_mask=pairs,
        causal=True,
    )

    mask = full_mask(inputs)

    assert mask is not None
    assert mask.shape == (2, 3, 3, 3)
    assert mask[0, 0].tolist() == [[True, False, False], [True, True, False], [True, False, True]]
    assert mask[1, 1].tolist() == [[False, False, False], [False, True, False], [False, True, True]]
