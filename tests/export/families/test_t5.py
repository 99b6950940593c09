"""T5, mT5 and UMT5, against transformers' own modules."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5ForTokenClassification,
    T5Model,
    UMT5Config,
    UMT5Model,
)
from transformers.models.t5.modeling_t5 import T5Attention

from export.families.buckets import bucket_table
from tests.support.attention_cases import check
from tests.support.saved_models import (
    cross_cases,
    edit,
    names_below,
    randomised,
    read_back,
    refusal,
    seen_in,
    self_cases,
)

WIDTH = 24

SIZES: dict[str, Any] = {
    "vocab_size": 13,
    "d_model": WIDTH,
    "d_kv": 5,
    "d_ff": 40,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 7,
    "pad_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 1,
    "attn_implementation": "eager",
}
"""Heads that are not as wide as the model, and distances that are soon beyond the farthest."""

MODELS: dict[str, tuple[Any, Any]] = {
    "T5": (T5Model, T5Config),
    "mT5 with a head": (MT5ForConditionalGeneration, MT5Config),
    "UMT5": (UMT5Model, UMT5Config),
}

KINDS: dict[str, tuple[Literal["encoder", "decoder"] | None, Literal["self", "cross"] | None]] = {
    "encoder": ("encoder", None),
    "decoder": ("decoder", "self"),
    "cross": (None, "cross"),
}

TENSORS = ["q.weight", "k.weight", "v.weight", "o.weight"]
BIAS = "relative_attention_bias.weight"


def _module_name(kind: str, block: int = 1) -> str:
    if kind == "cross":
        return f"decoder.block.{block}.layer.1.EncDecAttention"
    return f"{kind}.block.{block}.layer.0.SelfAttention"


def _saved(directory: Path, name: str = "T5", **options: Any) -> Any:
    """Save a random model; return it."""
    make, configure = MODELS[name]
    model = randomised(make(configure(**SIZES, **options)))
    model.save_pretrained(directory)
    return model


def _bias_of(module: Any, positions: Tensor) -> Tensor:
    """Return the bias [B, H, S, S] with which a block 0 answers calls of these positions."""
    buckets = module._relative_position_bucket(
        positions[:, None, :] - positions[:, :, None],
        bidirectional=not module.is_decoder,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=module.relative_attention_max_distance,
    )
    bias: Tensor = module.relative_attention_bias(buckets)
    return bias.permute(0, 3, 1, 2)


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("name", ["T5", "mT5 with a head"])
def test_read_self_attention_gives_the_answers_of_the_trained_module(
    name: str, kind: str, block: int, tmp_path: Path
) -> None:
    """Block 0 has the bias for all blocks; it follows positions, and masks go by the index."""
    part, attention = KINDS[kind]
    model = _saved(tmp_path, name)
    module = model.get_submodule(_module_name(kind, block))
    first = model.get_submodule(_module_name(kind, 0))

    found = read_back(tmp_path, block, part=part, attention=attention)

    def attend(x: Tensor, _: Tensor | None, hidden: Tensor, positions: Tensor) -> Any:
        return module(x, mask=hidden, position_bias=_bias_of(first, positions))[::2]

    check(found.spec, self_cases(attend, WIDTH, moves=True))
    names = [f"{_module_name(kind, block)}.{name}" for name in TENSORS]
    assert names_below(found, "", [*names, f"{_module_name(kind, 0)}.{BIAS}"])
    assert found.spec.config.head_dim == 5


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_read_self_attention_of_umt5_has_a_bias_of_its_own(kind: str, tmp_path: Path) -> None:
    """There each block has one."""
    part, attention = KINDS[kind]
    model = _saved(tmp_path, "UMT5")
    module = model.get_submodule(_module_name(kind))

    found = read_back(tmp_path, 1, part=part, attention=attention)

    def attend(x: Tensor, _: Tensor | None, hidden: Tensor, __: Tensor) -> Any:
        return module(x, attention_mask=hidden)

    check(found.spec, self_cases(attend, WIDTH))
    assert names_below(found, f"{_module_name(kind)}.", [*TENSORS, BIAS])


@pytest.mark.parametrize("name", MODELS)
def test_read_cross_attention_has_no_bias_for_distances(name: str, tmp_path: Path) -> None:
    """Tokens of another sequence are at no distance."""
    model = _saved(tmp_path, name)
    module = model.get_submodule(_module_name("cross"))
    mask, memory_name = (
        ("attention_mask", "encoder_hidden_states")
        if name == "UMT5"
        else ("mask", "key_value_states")
    )

    found = read_back(tmp_path, 1, attention="cross")

    def attend(x: Tensor, memory: Tensor | None, hidden: Tensor, _: Tensor) -> Any:
        answer = module(x, **{memory_name: memory, mask: hidden})
        return answer[0], answer[-1]

    check(found.spec, cross_cases(attend, WIDTH))
    assert names_below(found, f"{_module_name('cross')}.", TENSORS)
    assert not found.spec.config.takes_positions


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_read_layer_is_what_the_whole_model_computes(
    name: str, kind: str, is_causal: bool, tmp_path: Path
) -> None:
    """Default causality, whose bias counts and what masks mean are the model's own."""
    part, attention = KINDS[kind]
    model = _saved(tmp_path, name, is_causal=is_causal)
    ids = torch.arange(24).reshape(2, 12) % 11 + 2
    shown = {part: torch.arange(12) < torch.tensor([[12], [3]]) for part in ("encoder", "decoder")}

    found = read_back(tmp_path, 1, part=part, attention=attention)

    case = seen_in(
        model,
        model.get_submodule(_module_name(kind)),
        lambda: model(
            input_ids=ids,
            attention_mask=shown["encoder"].long(),
            decoder_input_ids=ids,
            decoder_attention_mask=shown["decoder"].long(),
        ),
    )
    case.inputs.attend_mask = shown["decoder" if kind == "decoder" else "encoder"].numpy()
    case.inputs.causal = found.spec.config.causal
    check(found.spec, [case])
    assert found.spec.config.causal == (kind == "decoder" and is_causal)


@pytest.mark.parametrize("make", [T5EncoderModel, T5ForTokenClassification])
def test_read_layer_of_an_encoder_alone(make: Any, tmp_path: Path) -> None:
    """With a head its names begin with `transformer.`."""
    model = randomised(make(T5Config(**SIZES)))
    model.save_pretrained(tmp_path)

    found = read_back(tmp_path, 2, part="encoder")

    [name] = [
        name for name in found.tensors if name.endswith("block.2.layer.0.SelfAttention.q.weight")
    ]
    assert torch.equal(found.spec.tensors["query.weight"], model.state_dict()[name])


@pytest.mark.parametrize("is_bidirectional", [True, False])
@pytest.mark.parametrize(("count", "max_distance"), [(32, 128), (32, 20), (7, 9), (64, 1000)])
def test_buckets_are_those_of_transformers(
    count: int, max_distance: int, is_bidirectional: bool
) -> None:
    """Every distance, and beyond the farthest they do not change."""
    distances = torch.arange(-2 * max_distance, 2 * max_distance + 1)
    numbers = torch.arange(float(count))[:, None]

    table = bucket_table(numbers, is_bidirectional=is_bidirectional, max_distance=max_distance)

    found = table[distances.clamp(-max_distance, max_distance) + max_distance, 0]
    oracle: Any = T5Attention
    expected = oracle._relative_position_bucket(
        distances, bidirectional=is_bidirectional, num_buckets=count, max_distance=max_distance
    )
    assert torch.equal(found, expected.float())


def test_read_layer_without_a_farthest_distance_takes_that_of_the_first_models(
    tmp_path: Path,
) -> None:
    """Files of the time before it could be chosen do not say 128."""
    _saved(tmp_path)
    edit(tmp_path, {"relative_attention_max_distance": None, "num_decoder_layers": None})
    edit(tmp_path, {"num_layers": 2}, dict.fromkeys(_names_of_block(2)))

    found = read_back(tmp_path, 1, part="decoder")

    assert found.spec.tensors["position_bias.table"].shape == (2 * 128 + 1, 4)


def _names_of_block(block: int) -> list[str]:
    return [
        name
        for name in randomised(T5Model(T5Config(**SIZES))).state_dict()
        if f".block.{block}." in name
    ]


def test_read_cross_attention_passes_over_the_bias_of_old_checkpoints(tmp_path: Path) -> None:
    """Block 0 has one there that transformers does not load."""
    model = _saved(tmp_path)
    edit(tmp_path, tensors={f"{_module_name('cross', 0)}.{BIAS}": torch.ones(8, 4)})

    found = read_back(tmp_path, 0, attention="cross")

    assert names_below(found, f"{_module_name('cross', 0)}.", TENSORS)
    assert torch.equal(
        found.spec.tensors["value.weight"], model.decoder.block[0].layer[1].EncDecAttention.v.weight
    )


MODULE = _module_name("encoder")

REFUSED: dict[str, tuple[dict[str, object], dict[str, Tensor | None], str]] = {
    "a bias of a projection": (
        {},
        {f"{MODULE}.q.bias": torch.zeros(20)},
        f"model.safetensors: {MODULE}.q.bias: a tensor that this version does not know",
    ),
    "a bias for distances in another block": (
        {},
        {f"{MODULE}.{BIAS}": torch.zeros(8, 4)},
        f"model.safetensors: {MODULE}.{BIAS}: relative positions",
    ),
    "no bias for distances": (
        {},
        {f"encoder.block.0.layer.0.SelfAttention.{BIAS}": None},
        "model.safetensors: expected a tensor encoder.block.0.layer.0.SelfAttention."
        f"{BIAS}, got none",
    ),
    "another number of buckets": (
        {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
        {},
        f"model.safetensors: encoder.block.0.layer.0.SelfAttention.{BIAS}: expected shape"
        " [32, 4], got [8, 4]",
    ),
    "too few buckets": (
        {"relative_attention_num_buckets": 3},
        {},
        "config.json: expected relative_attention_num_buckets of 4 at least and a"
        " relative_attention_max_distance above a half of them, got 3 and 7",
    ),
    "a farthest distance that is near": (
        {"relative_attention_max_distance": 2},
        {},
        "config.json: expected relative_attention_num_buckets of 4 at least and a"
        " relative_attention_max_distance above a half of them, got 8 and 2",
    ),
    "a farthest distance beyond all texts": (
        {"relative_attention_max_distance": 10**9},
        {},
        "config.json: relative_attention_max_distance: expected 100000 at most, got 1000000000",
    ),
    "an encoder that is a decoder": (
        {"is_decoder": True},
        {},
        "config.json: is_decoder is True: an encoder that is computed as a decoder is not read",
    ),
    "heads of another width": (
        {"d_kv": 6},
        {},
        f"model.safetensors: {MODULE}.q.weight: expected shape [24, 24], got [20, 24]",
    ),
    "as many numbers in fewer heads": (
        {"num_heads": 2, "d_kv": 10},
        {},
        f"model.safetensors: encoder.block.0.layer.0.SelfAttention.{BIAS}: expected shape [8, 2],"
        " got [8, 4]",
    ),
    "heads under two names": (
        {"num_attention_heads": 8},
        {},
        "config.json: num_attention_heads: expected the same as num_heads, 4, got 8",
    ),
    "another number of layers": (
        {"num_layers": 12},
        {},
        "config.json: num_layers is 12, but the weights say 3 (layers below encoder.block)",
    ),
    "another feed-forward width": (
        {"d_ff": 64},
        {},
        "config.json: d_ff is 64, but the weights say 40 (rows of"
        " encoder.block.1.layer.1.DenseReluDense.wi.weight)",
    ),
    "a tensor in the block": (
        {},
        {"encoder.block.1.layer.0.gate": torch.ones(3)},
        "model.safetensors: encoder.block.1.layer.0.gate: a tensor that this version does not know",
    ),
}


@pytest.mark.parametrize(("config", "tensors", "message"), REFUSED.values(), ids=REFUSED)
def test_read_layer_that_is_not_understood_is_refused(
    config: dict[str, object], tensors: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    """Nothing is left out of a layer, and config.json must be that of the weights."""
    _saved(tmp_path)
    edit(tmp_path, config, tensors)

    assert refusal(tmp_path, 1, part="encoder").startswith(message)


def test_read_layer_that_may_be_several_is_refused(tmp_path: Path) -> None:
    """Encoder and decoder number their layers alike; which is meant is not guessed."""
    _saved(tmp_path)

    assert refusal(tmp_path, 0, attention="self") == (
        "config.json: which attention: expected --part encoder, --part decoder (its"
        " self-attention) or --attention cross (the decoder's, to the encoder's output) for"
        " model_type t5, got --attention self"
    )
