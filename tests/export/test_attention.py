"""Our layer and the float64 formula against PyTorch's own layer and against arithmetic by hand."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from export.attention import MultiHeadAttention
from export.formula import Formula
from export.gate import formula_of
from export.sources import Source, from_state, random_layer

Array = npt.NDArray[Any]

SEED = 11
"""Any: every rule here holds for all weights and inputs."""

TOLERANCE = 1e-5
"""The contract's promise for FP32; these small layers answer within 1e-6."""

ROWS, LENGTH, KEYS = 3, 5, 4
"""All different, so that no axis can be taken for another; KEYS is for a memory."""

LAYERS: dict[str, dict[str, Any]] = {
    "self": {"embed_dim": 8, "num_heads": 2},
    "self without bias": {"embed_dim": 8, "num_heads": 2, "bias": False},
    "one head": {"embed_dim": 8, "num_heads": 1},
    "odd heads": {"embed_dim": 12, "num_heads": 3},
    "heads of width 1": {"embed_dim": 4, "num_heads": 4},
    "cross": {"embed_dim": 8, "num_heads": 2, "memory_dim": 6},
    "cross without bias": {"embed_dim": 12, "num_heads": 3, "memory_dim": 5, "bias": False},
    "cross of equal widths": {"embed_dim": 8, "num_heads": 2, "memory_dim": 8},
}


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


def _combinations(*tables: dict[str, Callable[[int, int], dict[str, Any]]]) -> list[Any]:
    """Return every layer with every mask that it takes."""
    return [
        pytest.param(LAYERS[layer], make, id=f"{layer}, {name}")
        for layer in LAYERS
        for table in tables
        for name, make in table.items()
        if not ("causal" in name and "memory_dim" in LAYERS[layer])
    ]


@dataclass(frozen=True)
class Call:
    """One call of a layer and what it answers."""

    source: Source
    embeddings: Array
    memory: Array | None
    masks: dict[str, Any]

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
        """Return output and weights of our layer."""
        tensors = {
            name: torch.from_numpy(np.ascontiguousarray(mask)) if name != "causal" else mask
            for name, mask in (self.masks | more).items()
        }
        with torch.no_grad():
            output, weights = self.source.layer(
                torch.from_numpy(self.embeddings), self._memory(), **tensors
            )
        return output.numpy(), weights.numpy()

    def formula(self, **more: Any) -> tuple[Array, Array]:
        """Return output and weights of the formula."""
        answer = formula_of(self.source)(self.embeddings, self.memory, **(self.masks | more))
        return answer.output, answer.weights

    def torch(self, *, average: bool = False) -> tuple[Array, Array]:
        """Return output and weights of PyTorch's own layer, where true means ignore."""
        query = torch.from_numpy(self.embeddings)
        memory = self._memory()
        keys = query if memory is None else memory
        with torch.no_grad():
            output, weights = self.source.reference(
                query,
                keys,
                keys,
                attn_mask=torch.from_numpy(~self.allowed).flatten(0, 1),
                average_attn_weights=average,
            )
        return output.numpy(), weights.numpy()

    def _memory(self) -> Tensor | None:
        return None if self.memory is None else torch.from_numpy(self.memory)


def _call(
    layer: dict[str, Any], make: Callable[[int, int], dict[str, Any]] = MASKS["none"]
) -> Call:
    source = random_layer(**layer, seed=SEED)
    config, random = source.config, np.random.default_rng(SEED)
    embeddings = random.standard_normal((ROWS, LENGTH, config.embed_dim)).astype(np.float32)
    memory = None
    if config.memory_dim is not None:
        memory = random.standard_normal((ROWS, KEYS, config.memory_dim)).astype(np.float32)
    keys = LENGTH if memory is None else KEYS
    return Call(source, embeddings, memory, make(config.num_heads, keys))


def _assert_close(found: tuple[Array, Array], expected: tuple[Array, Array]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE, equal_nan=False)


@pytest.mark.parametrize(("layer", "make"), _combinations(MASKS))
def test_layer_answers_as_pytorchs_own(
    layer: dict[str, Any], make: Callable[[int, int], dict[str, Any]]
) -> None:
    """Output and every head's weights are those of nn.MultiheadAttention."""
    call = _call(layer, make)

    answer = call.layer()

    _assert_close(answer, call.torch())


@pytest.mark.parametrize(("layer", "make"), _combinations(MASKS, EMPTY_ROWS))
def test_layer_answers_as_the_formula(
    layer: dict[str, Any], make: Callable[[int, int], dict[str, Any]]
) -> None:
    """Layer and formula, written apart, agree also where PyTorch's own layer has no answer."""
    call = _call(layer, make)

    answer = call.layer()

    _assert_close(answer, call.formula())


@pytest.mark.parametrize(("layer", "make"), _combinations(MASKS, EMPTY_ROWS))
def test_layer_weights_rows_sum_to_one_or_zero(
    layer: dict[str, Any], make: Callable[[int, int], dict[str, Any]]
) -> None:
    """A row sums to 1, to 0 where nothing may be attended to, and is 0 at every hidden key."""
    call = _call(layer, make)

    _, weights = call.layer()

    sums = call.allowed.any(axis=-1).astype(np.float64)
    np.testing.assert_allclose(weights.sum(axis=-1), sums, rtol=0, atol=TOLERANCE)
    assert not weights[~call.allowed].any()


@pytest.mark.parametrize(("layer", "make"), _combinations(EMPTY_ROWS))
def test_layer_query_without_keys_answers_the_output_bias(
    layer: dict[str, Any], make: Callable[[int, int], dict[str, Any]]
) -> None:
    """A row with nothing to attend to gives zero weights and the bias to the bit, never NaN."""
    call = _call(layer, make)
    empty = ~call.allowed.any(axis=(1, 3))  # [B, S]

    output, weights = call.layer()

    bias = call.source.layer.out.bias
    expected = np.zeros(output.shape[-1]) if bias is None else bias.detach().numpy()
    assert empty.any()
    assert (output[empty] == expected).all()
    assert not np.moveaxis(weights, 1, 2)[empty].any()
    assert np.isfinite(output).all()


@pytest.mark.parametrize(("layer", "make"), _combinations(EMPTY_ROWS))
def test_formula_query_without_keys_answers_the_output_bias(
    layer: dict[str, Any], make: Callable[[int, int], dict[str, Any]]
) -> None:
    """The oracle knows the rule as well."""
    call = _call(layer, make)
    empty = ~call.allowed.any(axis=(1, 3))  # [B, S]

    output, weights = call.formula()

    bias = call.source.reference.out_proj.bias
    expected = 0.0 if bias is None else bias.detach().numpy()
    assert (output[empty] == expected).all()
    assert not np.moveaxis(weights, 1, 2)[empty].any()


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
    source = random_layer(8, 2, seed=SEED)
    embeddings = np.random.default_rng(SEED).standard_normal((4, 4, 8)).astype(np.float32)
    attend_mask = np.tri(4, dtype=bool)
    call = Call(source, embeddings, None, {"attend_mask": attend_mask})

    _, weights = call.layer()

    assert ((weights > 0) == attend_mask[:, None, None, :]).all()


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layer_permuted_batch_answers_permuted(layer: dict[str, Any]) -> None:
    """The first axis is the batch: sequences do not see each other."""
    call = _call(layer)
    order = [2, 0, 1]
    permuted = Call(
        call.source,
        call.embeddings[order],
        None if call.memory is None else call.memory[order],
        {},
    )

    output, weights = permuted.layer()

    expected_output, expected_weights = call.layer()
    keys = LENGTH if call.memory is None else KEYS
    assert weights.shape == (ROWS, call.source.config.num_heads, LENGTH, keys)
    _assert_close((output, weights), (expected_output[order], expected_weights[order]))


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layer_weights_average_to_pytorchs_default(layer: dict[str, Any]) -> None:
    """Weights come per head; their mean is what nn.MultiheadAttention hands out by default."""
    call = _call(layer)

    _, weights = call.layer()

    _, averaged = call.torch(average=True)
    np.testing.assert_allclose(weights.mean(axis=1), averaged, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("make", HEAD_MASKS.values(), ids=HEAD_MASKS)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layer_head_mask_multiplies_each_heads_output(
    layer: dict[str, Any], make: Callable[[int], Array]
) -> None:
    """A factor on a head equals the same factor on its columns of the output matrix."""
    call = _call(layer)
    head_mask = make(call.source.config.num_heads).astype(np.float32)

    answer = call.layer(head_mask=head_mask)

    _assert_close(answer, call.formula(head_mask=head_mask))
    _, untouched = call.layer()
    assert (answer[1] == untouched).all()
    factors = np.broadcast_to(head_mask, (ROWS, call.source.config.num_heads))
    for row in range(ROWS):
        expected, _ = _with_scaled_heads(call, factors[row]).torch()
        np.testing.assert_allclose(answer[0][row], expected[row], rtol=0, atol=TOLERANCE)


def _with_scaled_heads(call: Call, factors: Array) -> Call:
    state = call.source.reference.state_dict()
    if call.memory is not None and "in_proj_weight" in state:
        query, key, value = state.pop("in_proj_weight").chunk(3)
        state |= {"q_proj_weight": query, "k_proj_weight": key, "v_proj_weight": value}
    columns = torch.tensor(factors).repeat_interleave(call.source.config.head_dim)
    state["out_proj.weight"] = state["out_proj.weight"] * columns
    source = from_state(state, call.source.config.num_heads, origin={})
    return Call(source, call.embeddings, call.memory, call.masks)


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
    source = random_layer(heads * head_dim, heads, seed=seed, memory_dim=memory_dim)
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
    module = random_layer(**LAYERS[layer], seed=SEED).layer
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
    formula = Formula({name: tensor.numpy() for name, tensor in _by_hand().items()}, 2)

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
    formula = Formula({name: tensor.numpy() for name, tensor in _by_hand().items()}, 2)

    output = formula.plain_output(BY_HAND_TOKENS)

    np.testing.assert_allclose(output, BY_HAND_OUTPUT, rtol=0, atol=TOLERANCE)


def test_formula_reads_separate_projections_as_packed_ones() -> None:
    """Both forms of a state dict give one formula."""
    state = {name: tensor.numpy() for name, tensor in _by_hand().items()}
    query, key, value = np.split(state["in_proj_weight"], 3)
    separate = {name: array for name, array in state.items() if name != "in_proj_weight"}
    separate |= {"q_proj_weight": query, "k_proj_weight": key, "v_proj_weight": value}

    answer = Formula(separate, 2)(BY_HAND_TOKENS)

    np.testing.assert_allclose(answer.output, BY_HAND_OUTPUT, rtol=0, atol=TOLERANCE)


def test_layer_holds_one_matrix_per_source() -> None:
    """What reads one input is one projection: three in one for self, two in one for memory."""
    own = random_layer(**LAYERS["self"], seed=SEED).layer
    cross = random_layer(**LAYERS["cross"], seed=SEED).layer

    assert _matrices(own) == {"query_key_value": (24, 8), "out": (8, 8)}
    assert _matrices(cross) == {"query": (8, 8), "key_value": (16, 6), "out": (8, 8)}


def _matrices(layer: MultiHeadAttention) -> dict[str, tuple[int, ...]]:
    return {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in layer.state_dict().items()
        if name.endswith("weight")
    }
