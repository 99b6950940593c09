"""BART and the families laid out as it, against transformers' own modules."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForCausalLM,
    BartForConditionalGeneration,
    BartModel,
    BlenderbotConfig,
    BlenderbotModel,
    BlenderbotSmallConfig,
    BlenderbotSmallModel,
    M2M100Config,
    M2M100Model,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartModel,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PLBartConfig,
    PLBartModel,
)

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
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 16,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1),
    **dict.fromkeys(("decoder_start_token_id", "forced_eos_token_id"), 1),
    "attn_implementation": "eager",
}
"""Every number its own, so that none can stand for another."""

MODELS: dict[str, tuple[Any, Any, str]] = {
    "BART": (BartModel, BartConfig, ""),
    "BART with a head": (BartForConditionalGeneration, BartConfig, "model."),
    "mBART": (MBartModel, MBartConfig, ""),
    "Marian": (MarianMTModel, MarianConfig, "model."),
    "Blenderbot": (BlenderbotModel, BlenderbotConfig, ""),
    "Blenderbot, small": (BlenderbotSmallModel, BlenderbotSmallConfig, ""),
    "M2M-100, NLLB": (M2M100Model, M2M100Config, ""),
    "Pegasus": (PegasusForConditionalGeneration, PegasusConfig, "model."),
    "PLBart": (PLBartModel, PLBartConfig, ""),
}
"""A class, its configuration, and what its tensors' names begin with."""

KINDS: dict[str, tuple[Literal["encoder", "decoder"] | None, Literal["self", "cross"] | None]] = {
    "encoder": ("encoder", None),
    "decoder": ("decoder", "self"),
    "cross": (None, "cross"),
}

TENSORS = [
    f"{name}.{kind}"
    for name in ("q_proj", "k_proj", "v_proj", "out_proj")
    for kind in ("weight", "bias")
]


def _module_name(kind: str, layer: int = 1) -> str:
    part = "encoder" if kind == "encoder" else "decoder"
    return f"{part}.layers.{layer}.{'encoder_attn' if kind == 'cross' else 'self_attn'}"


def _saved(directory: Path, name: str = "BART", **options: Any) -> tuple[Any, str]:
    """Save a random model; return it and what its tensors' names begin with."""
    make, configure, root = MODELS[name]
    model = randomised(make(configure(**SIZES, **options)))
    model.save_pretrained(directory)
    return model, root


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_read_layer_gives_the_answers_of_the_trained_module(
    name: str, kind: str, tmp_path: Path
) -> None:
    """Every attention of encoder and decoder, whichever class was saved, under every mask."""
    part, attention = KINDS[kind]
    model, root = _saved(tmp_path, name)
    module = model.get_submodule(root + _module_name(kind))

    found = read_back(tmp_path, 1, part=part, attention=attention)

    def attend(x: Tensor, memory: Tensor | None, hidden: Tensor, _: Tensor) -> Any:
        return module(x, memory, attention_mask=hidden)

    cases = cross_cases(attend, WIDTH) if kind == "cross" else self_cases(attend, WIDTH)
    check(found.spec, cases)
    assert names_below(found, f"{root}{_module_name(kind)}.", TENSORS)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_read_layer_is_what_the_whole_model_computes(
    kind: str, is_causal: bool, tmp_path: Path
) -> None:
    """Default causality and the meaning of masks are the model's, not those of this test."""
    part, attention = KINDS[kind]
    model, root = _saved(tmp_path, is_causal=is_causal)
    module = model.get_submodule(root + _module_name(kind))
    ids = torch.arange(10).reshape(2, 5) + 2
    shown = {part: torch.arange(5) < torch.tensor([[5], [3]]) for part in ("encoder", "decoder")}

    found = read_back(tmp_path, 1, part=part, attention=attention)

    case = seen_in(
        model,
        module,
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


def test_read_layer_from_shards_of_transformers(tmp_path: Path) -> None:
    """A large model is saved in several files, whose index says where each tensor is."""
    model = randomised(BartModel(BartConfig(**SIZES)))
    model.save_pretrained(tmp_path, max_shard_size="16KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2

    found = read_back(tmp_path, 2, attention="cross")

    module = model.decoder.layers[2].encoder_attn
    assert torch.equal(found.spec.tensors["query.weight"], module.q_proj.weight)
    assert torch.equal(found.spec.tensors["output.bias"], module.out_proj.bias)


def test_read_layer_of_a_decoder_alone_needs_no_encoder(tmp_path: Path) -> None:
    """A language model made of the decoder has its names under `model.decoder.`."""
    model = randomised(BartForCausalLM(BartConfig(**SIZES | {"is_encoder_decoder": False})))
    model.save_pretrained(tmp_path)

    found = read_back(tmp_path, 2, part="decoder")

    expected = model.state_dict()["model.decoder.layers.2.self_attn.k_proj.weight"]
    assert torch.equal(found.spec.tensors["key.weight"], expected)
    assert refusal(tmp_path, 1, part="encoder") == (
        "model.safetensors: expected tensors encoder.layers.1.…, got none"
    )


@pytest.mark.parametrize(
    ("part", "attention", "got"),
    [
        (None, None, "none"),
        (None, "self", "--attention self"),
        ("encoder", "cross", "--part encoder --attention cross"),
        ("text", None, "--part text"),
        ("text", "cross", "--part text --attention cross"),
    ],
)
def test_read_layer_that_may_be_several_is_refused(
    part: str | None, attention: Literal["self", "cross"] | None, got: str, tmp_path: Path
) -> None:
    """Encoder and decoder number their layers alike; which is meant is not guessed."""
    _saved(tmp_path)

    assert refusal(tmp_path, 1, part=part, attention=attention) == (
        "config.json: which attention: expected --part encoder, --part decoder (its"
        " self-attention) or --attention cross (the decoder's, to the encoder's output) for"
        f" model_type bart, got {got}"
    )


LAYER = "encoder.layers.1"
MODULE = f"{LAYER}.self_attn"
OTHER = "expected the config.json that belongs to these weights"

REFUSED: dict[str, tuple[dict[str, object], dict[str, Tensor | None], str]] = {
    "a missing bias": (
        {},
        {f"{MODULE}.k_proj.bias": None},
        f"model.safetensors: expected a tensor {MODULE}.k_proj.bias, got none",
    ),
    "a matrix of another shape": (
        {},
        {f"{MODULE}.v_proj.weight": torch.zeros(WIDTH, 8)},
        f"model.safetensors: {MODULE}.v_proj.weight: expected shape [24, 24], got [24, 8]",
    ),
    "a norm of queries": (
        {},
        {f"{MODULE}.q_norm.weight": torch.ones(8)},
        f"model.safetensors: {MODULE}.q_norm.weight: a normalisation inside the layer",
    ),
    "a gate in the layer": (
        {},
        {f"{LAYER}.gate": torch.ones(3)},
        f"model.safetensors: {LAYER}.gate: a tensor that this version does not know",
    ),
    "positions of all layers": (
        {},
        {"encoder.rel_pos.weight": torch.ones(3)},
        "model.safetensors: encoder.rel_pos.weight: relative positions",
    ),
    "an adapter": (
        {},
        {f"{MODULE}.q_proj.lora_A.weight": torch.ones(2, WIDTH)},
        f"model.safetensors: {MODULE}.q_proj.lora_A.weight: the layer has an adapter",
    ),
    "quantised weights": (
        {},
        {f"{MODULE}.q_proj.weight": torch.zeros(WIDTH, WIDTH, dtype=torch.int8)},
        f"model.safetensors: {MODULE}.q_proj.weight: expected floating-point weights",
    ),
    "the layer twice": (
        {},
        {f"teacher.{MODULE}.q_proj.weight": torch.zeros(WIDTH, WIDTH)},
        f"model.safetensors: ambiguous: layer 1 is there as {LAYER}. and as teacher.{LAYER}.;",
    ),
    "heads that do not divide the width": (
        {"encoder_attention_heads": 5},
        {},
        "config.json: embed_dim: expected a multiple of num_heads 5, got 24",
    ),
    "heads under two names": (
        {"num_attention_heads": 6},
        {},
        "config.json: num_attention_heads: expected the same as encoder_attention_heads, 3, got 6",
    ),
    "another width": (
        {"d_model": 48},
        {},
        f"config.json: d_model is 48, but the weights say 24 (the width of layer 1); {OTHER}",
    ),
    "another number of layers": (
        {"encoder_layers": 6},
        {},
        "config.json: encoder_layers is 6, but the weights say 2 (layers below encoder.layers);"
        f" {OTHER}",
    ),
    "another feed-forward width": (
        {"encoder_ffn_dim": 64},
        {},
        "config.json: encoder_ffn_dim is 64, but the weights say 32 (rows of"
        f" {LAYER}.fc1.weight); {OTHER}",
    ),
    "another vocabulary": (
        {"vocab_size": 50265},
        {},
        "config.json: vocab_size is 50265, but the weights say 13 (rows of shared.weight);"
        f" {OTHER}",
    ),
    "a number in quotes": (
        {"encoder_attention_heads": "3"},
        {},
        "config.json: encoder_attention_heads: expected a positive integer, got '3'",
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


def test_read_layer_of_a_decoder_believes_its_own_number_of_heads(tmp_path: Path) -> None:
    """The key num_attention_heads is another name of the encoder's alone."""
    _saved(tmp_path)
    edit(tmp_path, {"num_attention_heads": 3})

    found = [read_back(tmp_path, 0, part=part).spec.config for part in ("encoder", "decoder")]

    assert [config.num_heads for config in found] == [3, 4]
