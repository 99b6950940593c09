"""What is refused of checkpoints of decoders, in one line each."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from export.errors import SourceInvalid
from export.families.config import Config
from export.families.family import Place, family_of
from tests.support.decoders import tiny_model
from tests.support.saved_models import edit, read_back, refusal

GROUPED = {"num_key_value_heads": 2}
WINDOWED = {**GROUPED, "head_dim": 8, "sliding_window": 4}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}

REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "keys and values of fewer heads than stated": (
        "llama",
        GROUPED,
        {"num_key_value_heads": 4},
        "model.safetensors: model.layers.1.self_attn.k_proj.weight: expected shape [32,"
        " 32], got [16, 32]",
    ),
    "heads that do not share keys evenly": (
        "llama",
        GROUPED,
        {"num_key_value_heads": 3},
        "config.json: num_kv_heads: expected a divisor of num_heads 4, got 3",
    ),
    "a head wider than any": (
        "llama",
        {},
        {"head_dim": 2**17},
        "config.json: head_dim: expected heads of at most 65536 numbers, got 131072",
    ),
    "an integer that no tensor has": (
        "llama",
        {},
        {"num_attention_heads": 2**31},
        "config.json: num_attention_heads: expected an integer below 2^31, got 2147483648",
    ),
    "a number beyond FP64": (
        "llama",
        {},
        {"rope_parameters": {"rope_theta": 10**400}},
        "config.json: rope_parameters: rope_theta: expected a number that FP64 can hold, got…",
    ),
    "width no multiple of heads": (
        "llama",
        {},
        {"num_attention_heads": 3, "head_dim": None},
        "config.json: hidden_size: expected a multiple of num_attention_heads 3, got 32",
    ),
    "biases that config.json does not have": (
        "llama",
        {"attention_bias": True},
        {"attention_bias": False},
        "model.safetensors: model.layers.1.self_attn.k_proj.bias (and 3 more): a tensor…",
    ),
    "biases that the weights do not have": (
        "qwen3",
        {**GROUPED, "head_dim": 8},
        {"attention_bias": True},
        "model.safetensors: expected a tensor model.layers.1.self_attn.q_proj.bias, got none",
    ),
    "another model's configuration": (
        "llama",
        {},
        {"num_hidden_layers": 3},
        "config.json: num_hidden_layers is 3, but the weights say 2 (layers below"
        " model.layers); expected the config.json that belongs to these weights",
    ),
    "layers configured one by one": (
        "llama",
        {},
        {"per_layer_config": {"0": {}}},
        "config.json: per_layer_config is {'0': {}}: layers are configured one by one,"
        " which is not read",
    ),
    "another family's norms": (
        "qwen3",
        {**GROUPED, "head_dim": 8},
        {"model_type": "llama"},
        "model.safetensors: model.layers.1.self_attn.k_norm.weight (and 1 more):…",
    ),
    "quantised weights": (
        "gpt_oss",
        {**WINDOWED, **EXPERTS},
        {"quantization_config": {"quant_method": "fp8"}},
        "config.json: quantization_config is {'quant_method': 'fp8'}: the weights are"
        " quantised; dequantise the model first, e.g. model.dequantize(), and export what"
        " save_pretrained() then writes",
    ),
    "experts quantised where the attention may be too": (
        "llama",
        {},
        {"quantization_config": {"quant_method": "mxfp4"}},
        "config.json: quantization_config is {'quant_method': 'mxfp4'}: the weights…",
    ),
    "a window in both directions": (
        "mistral",
        WINDOWED,
        {"is_causal": False},
        "config.json: is_causal: expected true, got False; a window in both directions is"
        " not read for this family",
    ),
    "types of layers in a family that has one": (
        "mistral",
        WINDOWED,
        {"layer_types": ["full_attention", "full_attention"]},
        "config.json: layer_types is ['full_attention', 'full_attention']: transformers"
        " gives every layer of a Mistral model the same window, and other programs may not; remove"
        " it if that is what is meant",
    ),
    "types of fewer layers": (
        "qwen2",
        GROUPED,
        {"layer_types": ["full_attention"]},
        "config.json: layer_types: expected a type for each of 2 layers, got ['full_attention']",
    ),
    "a layer that is no attention over all keys": (
        "qwen3",
        {**GROUPED, "head_dim": 8},
        {"layer_types": ["full_attention", "linear_attention"]},
        "config.json: layer_types: layer 1: expected full_attention or sliding_attention,"
        " got 'linear_attention'; such a layer cannot be exported",
    ),
    "a local layer without a window": (
        "qwen2",
        GROUPED,
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4},
        "config.json: use_sliding_window: expected true, for layer_types has layer 1"
        " sliding, got False",
    ),
    "a negative number of layers without a window": (
        "qwen2",
        GROUPED,
        {"max_window_layers": -1, "layer_types": None},
        "config.json: max_window_layers: expected a number of layers, got -1",
    ),
    "a local layer whose window is null": (
        "gemma2",
        WINDOWED,
        {"sliding_window": None, "layer_types": ["full_attention", "sliding_attention"]},
        "config.json: sliding_window: expected a positive integer, got None",
    ),
    "Gemma 2 in both directions": (
        "gemma2",
        WINDOWED,
        {"use_bidirectional_attention": True},
        "config.json: use_bidirectional_attention is True: transformers masks as if it"
        " were false, and marks the layer as if it were true; which is meant is not known",
    ),
    "a scale of nothing": (
        "gemma2",
        WINDOWED,
        {"query_pre_attn_scalar": 0},
        "config.json: query_pre_attn_scalar: expected a positive number, got 0",
    ),
    "Gemma 3 with capped logits": (
        "gemma3_text",
        WINDOWED,
        {"attn_logit_softcapping": 50.0},
        "config.json: attn_logit_softcapping is 50.0: transformers does not cap the logits"
        " of Gemma 3, and other programs may; remove it if they are not capped",
    ),
    "rotary positions of a kind of layer that is not there": (
        "gemma3_text",
        WINDOWED,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "config.json: rope_parameters: rope_theta: expected only full_attention and"
        " sliding_attention, got 10000.0",
    ),
    "a range of yarn for one kind of layers": (
        "gemma3_text",
        WINDOWED,
        {"rope_parameters": {"sliding_attention": {"truncate": False}}},
        "config.json: rope_parameters: sliding_attention: truncate: expected none, got False;"
        " transformers reads it for all layers alike, and never here",
    ),
    "Phi-3 with another scaling": (
        "phi3",
        {},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "config.json: rope_parameters: rope_type: expected default or longrope, got 'linear'",
    ),
    "a matrix of other groups": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"num_kv_heads": 4},
        "model.safetensors: transformer.h.1.self_attention.query_key_value.weight:"
        " expected shape [96, 32], got [64, 32]",
    ),
    "Falcon with ALiBi": (
        "falcon",
        {},
        {"alibi": True},
        "config.json: alibi is True: Falcon rounds its position bias to bfloat16, which no"
        " other computation reproduces; a layer with it cannot be exported",
    ),
    "BLOOM without the output's bias": (
        "bloom",
        {},
        {"slow_but_exact": True, "pretraining_tp": 2},
        "config.json: slow_but_exact is True: with pretraining_tp above 1 transformers"
        " leaves out the bias of the output; set it to false to have the layer as it was trained",
    ),
}


@pytest.mark.parametrize(
    ("model_type", "options", "changes", "message"), REFUSED.values(), ids=REFUSED
)
def test_contradictions_are_refused(
    model_type: str,
    options: dict[str, Any],
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    """In one line: where, what was expected, what came."""
    tiny_model(model_type, **options).save_pretrained(tmp_path)
    edit(tmp_path, changes)

    found = refusal(tmp_path, 1)

    expected, dots, _ = message.partition("…")
    assert found.startswith(expected)
    assert dots or found == expected


@pytest.mark.fault("G5")
@pytest.mark.parametrize(
    ("model_type", "root"),
    [
        *((family, "model.layers.1.") for family in ("llama", "gemma2", "phi3")),
        *((family, "transformer.h.1.") for family in ("bloom", "falcon")),
        ("gpt_neox", "gpt_neox.layers.1."),
    ],
)
@pytest.mark.parametrize("name", ["cross_attn.q_proj.weight", "attention2.bias", "gate"])
def test_module_that_no_decoder_has_is_refused(
    model_type: str, root: str, name: str, tmp_path: Path
) -> None:
    """It may be a part of the attention; the layer of another number does not matter."""
    tiny_model(model_type).save_pretrained(tmp_path)
    edit(tmp_path, tensors={root + name: torch.zeros(4)})

    assert refusal(tmp_path, 1) == (
        f"model.safetensors: {root}{name}: a tensor that this version does not know and that may"
        " change the layer's answer; if it has no part in the attention, save the checkpoint again"
        " without it"
    )
    assert read_back(tmp_path, 0).spec.config.causal


def test_names_that_do_not_tell_one_layer_are_refused(tmp_path: Path) -> None:
    """Two models in one folder, or none."""
    tiny_model("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")

    edit(tmp_path, tensors={f"draft.{name}": value for name, value in weights.items()})
    assert (
        "as draft.model.layers.1. and as model.layers.1.; save the model that is meant"
        in refusal(tmp_path, 1)
    )
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    assert refusal(tmp_path, 1) == "model.safetensors: expected tensors layers.1.…, got none"


@pytest.mark.parametrize(
    ("model_type", "place", "message"),
    [
        (
            "llama",
            {"attention": "cross"},
            "--attention: expected self for model_type llama, got cross",
        ),
        ("llama", {"part": "decoder"}, "--part: expected none for model_type llama, got decoder"),
        ("gemma3", {"part": "vision"}, "--part: expected text for model_type gemma3, got vision"),
    ],
    ids=["cross", "part", "vision"],
)
def test_what_a_decoder_has_not_is_refused(
    model_type: str, place: dict[str, Any], message: str
) -> None:
    """Cross-attention, and parts that cannot be chosen."""
    config = Config("config.json", {"model_type": model_type, "num_hidden_layers": 2})

    with pytest.raises(SourceInvalid) as refused:
        family_of(config).num_layers(config, Place(0, **place))

    assert str(refused.value) == f"config.json: {message}"


def test_names_of_bloom_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    """Its numbers have two names each; published checkpoints use either."""
    tiny_model("bloom").save_pretrained(tmp_path)
    expected = read_back(tmp_path, 1).spec.config

    edit(tmp_path, {"n_head": None, "num_attention_heads": 4})
    assert read_back(tmp_path, 1).spec.config == expected
    edit(tmp_path, {"n_head": 2})
    assert refusal(tmp_path, 1) == (
        "config.json: n_head: expected the same as num_attention_heads, 4, got 2"
    )
