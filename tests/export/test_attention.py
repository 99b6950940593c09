"""Our layer and the float64 formula against PyTorch's own layer and against arithmetic by hand."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from export.families.family import Attention
from export.gate import formula_of
from export.layer_spec import LayerSpec
from export.sources import Source, from_state
from service.layer_config import LayerConfig
from tests.support.specs import random_source

Array = npt.NDArray[Any]

SEED = 11
"""Any: every rule here holds for all weights and inputs."""

TOLERANCE = 1e-5
"""The contract's promise for FP32; these small layers answer within 1e-6."""

ROWS, LENGTH, KEYS = 3, 5, 4
"""All different, so that no axis can be taken for another; KEYS is for a memory."""

LAYERS: dict[str, LayerConfig] = {
    "self": LayerConfig(8, 2),
    "self without bias": LayerConfig(8, 2, biases=()),
    "one head": LayerConfig(8, 1),
    "odd heads": LayerConfig(12, 3),
    "heads of width 1": LayerConfig(4, 4),
    "cross": LayerConfig(8, 2, memory_dim=6),
    "cross without bias": LayerConfig(12, 3, memory_dim=5, biases=()),
    "cross of equal widths": LayerConfig(8, 2, memory_dim=8),
    "two memories": LayerConfig(8, 2, memory_dim=6, value_memory_dim=5),
    "learned key": LayerConfig(8, 2, extra_keys=("learned",)),
    "zero key": LayerConfig(8, 2, extra_keys=("zero",), biases=()),
    "learned and zero keys of cross": LayerConfig(
        12, 3, memory_dim=5, extra_keys=("learned", "zero")
    ),
}
"""Every layer that nn.MultiheadAttention can be."""

WITHOUT_EXTRA_KEYS = {name: config for name, config in LAYERS.items() if not config.extra_keys}


def _padding(*kept: str) -> Array:
    """Return an attend mask from one word per sequence, `x` = takes part."""
    return np.array([[letter == "x" for letter in word] for word in kept])


def _pairs(rows: int, heads: int, length: int, keys: int) -> Array:
    """Return a pair mask that leaves every query its first key."""
    mask = np.random.default_rng(SEED).random((rows, heads, length, keys)) < 0.6
    mask[..., 0] = True
    return mask


MASKS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "none": lambda heads, keys: {},
    "right padding": lambda heads, keys: {
        "attend_mask": np.arange(keys) < np.array([[keys], [2], [1]])
    },
    "left padding": lambda heads, keys: {
        "attend_mask": np.arange(keys) >= np.array([[0], [2], [keys - 1]])
    },
    "scattered padding": lambda heads, keys: {
        "attend_mask": np.arange(keys) % 2 == np.array([[0], [1], [0]])
    },
    "pair for all": lambda heads, keys: {"pair_mask": _pairs(1, 1, LENGTH, keys)},
    "pair per sequence": lambda heads, keys: {"pair_mask": _pairs(ROWS, 1, LENGTH, keys)},
    "pair per head": lambda heads, keys: {"pair_mask": _pairs(1, heads, LENGTH, keys)},
    "pair per both": lambda heads, keys: {"pair_mask": _pairs(ROWS, heads, LENGTH, keys)},
    "pair and padding": lambda heads, keys: {
        "pair_mask": _pairs(1, heads, LENGTH, keys),
        "attend_mask": np.arange(keys) < np.array([[keys], [2], [1]]),
    },
    "causal": lambda heads, keys: {"causal": True},
    "causal and padding": lambda heads, keys: {
        "causal": True,
        "attend_mask": np.arange(keys) < np.array([[keys], [2], [1]]),
    },
    "causal and pair": lambda heads, keys: {
        "causal": True,
        "pair_mask": _pairs(ROWS, heads, LENGTH, keys),
    },
}
"""Every one leaves every query a key: to a query without one nn.MultiheadAttention says NaN."""

EMPTY_ROWS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "padding hides a whole sequence": lambda heads, keys: {
        "attend_mask": np.ones((ROWS, keys), bool) & np.array([[True], [False], [True]])
    },
    "padding hides everything": lambda heads, keys: {"attend_mask": np.zeros((ROWS, keys), bool)},
    "pair hides all keys of one query": lambda heads, keys: {
        "pair_mask": np.arange(LENGTH)[:, None] != np.full((1, 1, 1, keys), 2)
    },
    "pair and padding hide all together": lambda heads, keys: {
        "pair_mask": np.broadcast_to(np.arange(keys) > 1, (1, 1, LENGTH, keys)),
        "attend_mask": np.arange(keys) < np.array([[keys], [2], [1]]),
    },
    "causal and left padding": lambda heads, keys: {
        "causal": True,
        "attend_mask": np.arange(keys) >= np.array([[0], [2], [keys - 1]]),
    },
}

HEAD_MASKS: dict[str, Callable[[int], Array]] = {
    "first head off": lambda heads: np.arange(heads) != 0,
    "all heads off": np.zeros,
    "heads scaled": lambda heads: np.linspace(-1, 2, heads),
    "heads scaled per sequence": lambda heads: np.linspace(0, 2, ROWS * heads).reshape(ROWS, heads),
}


def _combinations(
    layers: dict[str, LayerConfig], *tables: dict[str, Callable[[int, int], dict[str, Any]]]
) -> list[Any]:
    """Return every layer with every mask that it takes."""
    return [
        pytest.param(config, make, id=f"{layer}, {name}")
        for layer, config in layers.items()
        for table in tables
        for name, make in table.items()
        if not ("causal" in name and config.is_cross)
    ]


@dataclass(frozen=True)
class Call:
    """One call of a layer and what it answers."""

    source: Source
    embeddings: Array
    memory: Array | None
    masks: dict[str, Any]
    value_memory: Array | None = None

    @property
    def allowed(self) -> Array:
        """All masks in one, [B, H, S, T], put together apart from the layer and the formula."""
        keys = self.embeddings if self.memory is None else self.memory
        shape = (len(keys), self.source.config.num_heads, self.embeddings.shape[1], keys.shape[1])
        return np.array([self._may_attend(*place) for place in np.ndindex(shape)]).reshape(shape)

    def _may_attend(self, row: int, head: int, query: int, key: int) -> bool:
        if "pair_mask" in self.masks:
            pairs = self.masks["pair_mask"]
            if not pairs[row % len(pairs), head % pairs.shape[1], query, key]:
                return False
        if "attend_mask" in self.masks and not self.masks["attend_mask"][row, key]:
            return False
        return not (self.masks.get("causal") and key > query)

    def layer(self, **more: Any) -> tuple[Array, Array]:
        """Return output and weights of our layer, those of extra keys last."""
        tensors = {
            name: torch.from_numpy(np.ascontiguousarray(mask)) if name != "causal" else mask
            for name, mask in (self.masks | more).items()
        }
        with torch.no_grad():
            answer = self.source.layer(*self._tensors(), **tensors)
        return answer.output.numpy(), torch.cat((answer.weights, answer.extra_weights), -1).numpy()

    def formula(self, **more: Any) -> tuple[Array, Array]:
        """Return output and weights of the formula, those of extra keys last."""
        answer = formula_of(self.source)(
            self.embeddings, self.memory, self.value_memory, **(self.masks | more)
        )
        return answer.output, np.concatenate((answer.weights, answer.extra_weights), -1)

    def torch(self, *, average: bool = False) -> tuple[Array, Array]:
        """Return output and weights of PyTorch's own layer, where true means ignore."""
        query, memory, value_memory = self._tensors()
        keys = query if memory is None else memory
        assert self.source.reference is not None
        with torch.no_grad():
            output, weights = self.source.reference(
                query,
                keys,
                keys if value_memory is None else value_memory,
                attn_mask=torch.from_numpy(~self.allowed).flatten(0, 1),
                average_attn_weights=average,
            )
        return output.numpy(), weights.numpy()

    def _tensors(self) -> list[Tensor | None]:
        arrays = self.embeddings, self.memory, self.value_memory
        return [None if array is None else torch.from_numpy(array) for array in arrays]


def _call(config: LayerConfig, make: Callable[[int, int], dict[str, Any]] = MASKS["none"]) -> Call:
    source, random = random_source(config, SEED), np.random.default_rng(SEED)
    embeddings = random.standard_normal((ROWS, LENGTH, config.embed_dim)).astype(np.float32)
    memory, value_memory = (
        None if width is None else random.standard_normal((ROWS, KEYS, width)).astype(np.float32)
        for width in (config.memory_dim, config.value_memory_dim)
    )
    keys = LENGTH if memory is None else KEYS
    return Call(source, embeddings, memory, make(config.num_heads, keys), value_memory)


def _assert_close(found: tuple[Array, Array], expected: tuple[Array, Array]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE, equal_nan=False)


@pytest.mark.parametrize(("config", "make"), _combinations(LAYERS, MASKS))
def test_layer_answers_as_pytorchs_own(
    config: LayerConfig, make: Callable[[int, int], dict[str, Any]]
) -> None:
    """Output and every head's weights are those of nn.MultiheadAttention."""
    call = _call(config, make)

    answer = call.layer()

    _assert_close(answer, call.torch())


@pytest.mark.parametrize(("config", "make"), _combinations(LAYERS, MASKS, EMPTY_ROWS))
def test_layer_answers_as_the_formula(
    config: LayerConfig, make: Callable[[int, int], dict[str, Any]]
) -> None:
    """Layer and formula, written apart, agree also where PyTorch's own layer has no answer."""
    call = _call(config, make)

    answer = call.layer()

    _assert_close(answer, call.formula())


@pytest.mark.parametrize(("config", "make"), _combinations(LAYERS, MASKS, EMPTY_ROWS))
def test_layer_weights_rows_sum_to_one_or_zero(
    config: LayerConfig, make: Callable[[int, int], dict[str, Any]]
) -> None:
    """A row sums to 1, to 0 where nothing may be attended to, and is 0 at every hidden key."""
    call = _call(config, make)

    _, weights = call.layer()

    # Extra keys may always be attended to.
    sums = (call.allowed.any(axis=-1) | bool(config.extra_keys)).astype(np.float64)
    np.testing.assert_allclose(weights.sum(axis=-1), sums, rtol=0, atol=TOLERANCE)
    assert not weights[..., : call.allowed.shape[-1]][~call.allowed].any()


@pytest.mark.parametrize(("config", "make"), _combinations(WITHOUT_EXTRA_KEYS, EMPTY_ROWS))
def test_layer_query_without_keys_answers_the_output_bias(
    config: LayerConfig, make: Callable[[int, int], dict[str, Any]]
) -> None:
    """A row with nothing to attend to gives zero weights and the bias to the bit, never NaN."""
    call = _call(config, make)
    empty = ~call.allowed.any(axis=(1, 3))  # [B, S]

    output, weights = call.layer()

    bias = call.source.spec.tensors.get("output.bias")
    expected = np.zeros(output.shape[-1]) if bias is None else bias.numpy()
    assert empty.any()
    assert (output[empty] == expected).all()
    assert not np.moveaxis(weights, 1, 2)[empty].any()
    assert np.isfinite(output).all()


@pytest.mark.parametrize(("config", "make"), _combinations(WITHOUT_EXTRA_KEYS, EMPTY_ROWS))
def test_formula_query_without_keys_answers_the_output_bias(
    config: LayerConfig, make: Callable[[int, int], dict[str, Any]]
) -> None:
    """The oracle knows the rule as well."""
    call = _call(config, make)
    empty = ~call.allowed.any(axis=(1, 3))  # [B, S]

    output, weights = call.formula()

    bias = call.source.spec.tensors.get("output.bias")
    expected = 0.0 if bias is None else bias.numpy()
    assert (output[empty] == expected).all()
    assert not np.moveaxis(weights, 1, 2)[empty].any()


@pytest.mark.parametrize("kind", ["learned key", "zero key", "learned and zero keys of cross"])
def test_layer_query_without_keys_attends_to_the_extra_ones_alone(kind: str) -> None:
    """What is masked are keys of the sequence; the extra ones share the whole weight."""
    call = _call(LAYERS[kind], EMPTY_ROWS["padding hides everything"])

    for output, weights in (call.layer(), call.formula()):
        keys = call.allowed.shape[-1]
        assert not weights[..., :keys].any()
        sums = weights[..., keys:].sum(-1)
        np.testing.assert_allclose(sums, np.ones_like(sums), rtol=0, atol=TOLERANCE)
        assert np.isfinite(output).all()


def test_layer_empty_row_leaves_its_batch_mates_alone() -> None:
    """A sequence without keys changes nothing for the others."""
    call = _call(LAYERS["self"], EMPTY_ROWS["padding hides a whole sequence"])

    output, weights = call.layer()

    expected_output, expected_weights = _call(LAYERS["self"]).torch()
    mates = [0, 2]
    _assert_close(
        (output[mates], weights[mates]), (expected_output[mates], expected_weights[mates])
    )


def test_layer_one_head_without_keys_adds_nothing() -> None:
    """Where one head of a query may see nothing, the other heads answer as if it were off."""
    call = _call(LAYERS["self"])
    pair_mask = np.ones((1, 2, LENGTH, LENGTH), bool)
    pair_mask[:, 1] = False

    output, weights = call.layer(pair_mask=pair_mask)

    expected, _ = call.layer(head_mask=np.array([1, 0], np.float32))
    np.testing.assert_allclose(output, expected, rtol=0, atol=TOLERANCE, equal_nan=False)
    assert not weights[:, 1].any()


def test_layer_causal_with_padded_last_key_keeps_the_rest() -> None:
    """Masks intersect by key: the last query still attends to all keys before the hidden one."""
    call = _call(LAYERS["self"])
    attend_mask = _padding(*["xxxx."] * ROWS)

    _, weights = call.layer(causal=True, attend_mask=attend_mask)

    assert (weights[:, :, 4, :4] > 0).all()
    assert not weights[:, :, 4, 4].any()


def test_layer_mask_that_allows_the_first_key_gives_it_everything() -> None:
    """True in a mask means takes part."""
    call = _call(LAYERS["self"])

    _, weights = call.layer(attend_mask=_padding(*["x...."] * ROWS))

    assert (weights[..., 0] == 1).all()
    assert not weights[..., 1:].any()


def test_layer_causal_never_looks_ahead() -> None:
    """Above the diagonal every weight is exactly 0."""
    call = _call(LAYERS["odd heads"])

    _, weights = call.layer(causal=True)

    assert not weights[..., *np.triu_indices(LENGTH, k=1)].any()


def test_layer_positions_padded_in_every_sequence_stay_in_the_answer() -> None:
    """Padding hides keys; queries at hidden positions are answered like any other."""
    call = _call(LAYERS["self"])
    attend_mask = _padding(*["xx..."] * ROWS)

    output, weights = call.layer(attend_mask=attend_mask)

    assert output.shape == (ROWS, LENGTH, 8)
    assert weights.shape == (ROWS, 2, LENGTH, LENGTH)
    assert (weights[:, :, 2:, :2] > 0).all()


def test_layer_square_attend_mask_is_read_as_padding() -> None:
    """Where batch and length agree, a [B, T] mask is still one row per sequence."""
    source = random_source(LAYERS["self"], SEED)
    embeddings = np.random.default_rng(SEED).standard_normal((4, 4, 8)).astype(np.float32)
    attend_mask = np.tri(4, dtype=bool)
    call = Call(source, embeddings, None, {"attend_mask": attend_mask})

    _, weights = call.layer()

    assert ((weights > 0) == attend_mask[:, None, None, :]).all()


@pytest.mark.parametrize("config", LAYERS.values(), ids=LAYERS)
def test_layer_permuted_batch_answers_permuted(config: LayerConfig) -> None:
    """The first axis is the batch: sequences do not see each other."""
    call = _call(config)
    order = [2, 0, 1]
    permuted = Call(
        call.source,
        call.embeddings[order],
        None if call.memory is None else call.memory[order],
        {},
        None if call.value_memory is None else call.value_memory[order],
    )

    output, weights = permuted.layer()

    expected_output, expected_weights = call.layer()
    keys = (LENGTH if call.memory is None else KEYS) + len(config.extra_keys)
    assert weights.shape == (ROWS, config.num_heads, LENGTH, keys)
    _assert_close((output, weights), (expected_output[order], expected_weights[order]))


@pytest.mark.parametrize("config", LAYERS.values(), ids=LAYERS)
def test_layer_weights_average_to_pytorchs_default(config: LayerConfig) -> None:
    """Weights come per head; their mean is what nn.MultiheadAttention hands out by default."""
    call = _call(config)

    _, weights = call.layer()

    _, averaged = call.torch(average=True)
    np.testing.assert_allclose(weights.mean(axis=1), averaged, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("make", HEAD_MASKS.values(), ids=HEAD_MASKS)
@pytest.mark.parametrize("config", LAYERS.values(), ids=LAYERS)
def test_layer_head_mask_multiplies_each_heads_output(
    config: LayerConfig, make: Callable[[int], Array]
) -> None:
    """A factor on a head equals the same factor on its columns of the output matrix."""
    call = _call(config)
    head_mask = make(config.num_heads).astype(np.float32)

    answer = call.layer(head_mask=head_mask)

    _assert_close(answer, call.formula(head_mask=head_mask))
    _, untouched = call.layer()
    assert (answer[1] == untouched).all()
    factors = np.broadcast_to(head_mask, (ROWS, config.num_heads))
    for row in range(ROWS):
        expected, _ = _with_scaled_heads(call, factors[row]).torch()
        np.testing.assert_allclose(answer[0][row], expected[row], rtol=0, atol=TOLERANCE)


def _with_scaled_heads(call: Call, factors: Array) -> Call:
    config, tensors = call.source.config, dict(call.source.spec.tensors)
    columns = torch.tensor(factors).repeat_interleave(config.head_dim)
    tensors["output.weight"] = tensors["output.weight"] * columns
    return replace(call, source=Source(LayerSpec(config, tensors), {}))


def test_layer_in_training_mode_drops_nothing() -> None:
    """There is no dropout to forget: two calls agree to the bit, in training mode too."""
    call = _call(LAYERS["self"])
    output, weights = call.layer()
    call.source.layer.train()

    again_output, again_weights = call.layer()

    assert (again_output == output).all()
    assert (again_weights == weights).all()


@given(
    rows=st.integers(1, 3),
    length=st.integers(1, 6),
    keys=st.integers(1, 6),
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 4),
    cross=st.booleans(),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, derandomize=True)
def test_layer_of_any_shape_answers_as_the_formula(
    rows: int,
    length: int,
    keys: int,
    heads: int,
    head_dim: int,
    cross: bool,
    density: float,
    seed: int,
) -> None:
    """No size of any axis is special, nor any pattern of hidden keys."""
    memory_dim = 5 if cross else None
    source = random_source(LayerConfig(heads * head_dim, heads, memory_dim), seed)
    random = np.random.default_rng(seed)
    embeddings = random.standard_normal((rows, length, heads * head_dim)).astype(np.float32)
    memory = random.standard_normal((rows, keys, 5)).astype(np.float32) if cross else None
    pairs = (rows, heads, length, keys if cross else length)
    pair_mask = random.random(pairs) < density
    call = Call(source, embeddings, memory, {"pair_mask": pair_mask, "causal": not cross})

    answer = call.layer()

    _assert_close(answer, call.formula())


@pytest.mark.parametrize(
    ("layer", "memory", "causal", "message"),
    [
        ("self", True, False, "memory: expected none, got one"),
        ("cross", False, False, "memory: expected one, got none"),
        ("cross", True, True, "causal: queries and keys of cross-attention share no order"),
    ],
)
def test_layer_wrong_input_is_refused_by_name(
    layer: str, memory: bool, causal: bool, message: str
) -> None:
    """The message names the input, what was expected and what came."""
    module = random_source(LAYERS[layer], SEED).layer
    embeddings = torch.zeros(1, 2, 8)

    with pytest.raises(ValueError, match=f"^{message}$"):
        module(embeddings, torch.zeros(1, 2, 6) if memory else None, causal=causal)


def _by_hand() -> dict[str, Tensor]:
    """
    Return two heads of width 4 whose answer to two tokens can be worked out on paper.

    Head 0 scales its query by 2 ln 3, so that after the division by sqrt(4) the
    second token gives the first a logit of 0 and itself one of ln 3: weights 1/4
    and 3/4.  Head 1 has no query, so its weights are 1/2 and 1/2.
    """
    query, key, value = torch.zeros(3, 8, 8)
    query[0, 0] = 2 * math.log(3)
    key[0, 0] = key[4, 4] = 1
    value[0, 0], value[4, 4] = 4, 2
    return {
        "in_proj_weight": torch.cat([query, key, value]),
        "in_proj_bias": torch.zeros(24),
        "out_proj.weight": torch.eye(8),
        "out_proj.bias": torch.ones(8),
    }


BY_HAND_TOKENS = np.zeros((1, 2, 8), np.float32)
BY_HAND_TOKENS[0, 1, [0, 4]] = 1

BY_HAND_WEIGHTS = [[[[1 / 2, 1 / 2], [1 / 4, 3 / 4]], [[1 / 2, 1 / 2], [1 / 2, 1 / 2]]]]
BY_HAND_OUTPUT = [[[3, 1, 1, 1, 2, 1, 1, 1], [4, 1, 1, 1, 2, 1, 1, 1]]]
"""Head 0 values 0 and 4, head 1 values 0 and 2, and 1 is the output bias."""


def test_formula_answers_as_worked_out_by_hand() -> None:
    """The oracle itself is right, scaling by sqrt(d_k) included."""
    formula = formula_of(from_state(_by_hand(), 2, origin={}))

    answer = formula(BY_HAND_TOKENS)

    np.testing.assert_allclose(answer.weights, BY_HAND_WEIGHTS, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(answer.output, BY_HAND_OUTPUT, rtol=0, atol=TOLERANCE)
    assert formula.largest_logit(BY_HAND_TOKENS) == pytest.approx(math.log(3), abs=TOLERANCE)


def test_layer_answers_as_worked_out_by_hand() -> None:
    """The layer is right by arithmetic alone, without any other implementation."""
    source = from_state(_by_hand(), 2, origin={})

    output, weights = Call(source, BY_HAND_TOKENS, None, {}).layer()

    np.testing.assert_allclose(weights, BY_HAND_WEIGHTS, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(output, BY_HAND_OUTPUT, rtol=0, atol=TOLERANCE)


def test_formula_without_weights_gives_the_same_output() -> None:
    """What is compared where all weights do not fit is the same formula."""
    formula = formula_of(from_state(_by_hand(), 2, origin={}))

    output = formula.plain_output(BY_HAND_TOKENS)

    np.testing.assert_allclose(output, BY_HAND_OUTPUT, rtol=0, atol=TOLERANCE)


def test_separate_projections_are_read_as_packed_ones() -> None:
    """Both forms of a state dict give one layer."""
    state = _by_hand()
    query, key, value = state.pop("in_proj_weight").chunk(3)
    separate = state | {"q_proj_weight": query, "k_proj_weight": key, "v_proj_weight": value}

    answer = formula_of(from_state(separate, 2, origin={}, attention="self"))(BY_HAND_TOKENS)

    np.testing.assert_allclose(answer.output, BY_HAND_OUTPUT, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("options", "attention"),
    [({}, None), ({"bias": False}, None), ({}, "cross"), ({"kdim": 6, "vdim": 6}, None)],
    ids=str,
)
def test_layer_of_a_modules_state_dict_answers_as_that_module(
    options: dict[str, Any], attention: Attention | None
) -> None:
    """The way from PyTorch's names to ours and back cannot hide a slip in either."""
    torch.manual_seed(SEED)
    module = nn.MultiheadAttention(8, 2, batch_first=True, **options).eval()
    x = torch.randn(ROWS, LENGTH, 8)
    is_cross = attention == "cross" or "kdim" in options
    memory = torch.randn(ROWS, KEYS, options.get("kdim", 8)) if is_cross else None
    keys = x if memory is None else memory

    source = from_state(module.state_dict(), 2, origin={}, attention=attention)

    with torch.no_grad():
        answer = source.layer(x, memory)
        output, weights = module(x, keys, keys, average_attn_weights=False)
        again = (source.reference or pytest.fail("expected PyTorch's layer"))(
            x, keys, keys, average_attn_weights=False
        )
    _assert_close((answer.output.numpy(), answer.weights.numpy()), (output, weights))
    assert torch.equal(again[0], output)
    assert torch.equal(again[1], weights)
