"""Whisper, against transformers' own modules."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import (
    WhisperConfig,
    WhisperForAudioClassification,
    WhisperForConditionalGeneration,
    WhisperModel,
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
    "num_mel_bins": 4,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 40,
    "max_source_positions": 6,
    "max_target_positions": 16,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
    "attn_implementation": "eager",
}

MODELS: dict[str, tuple[Any, str]] = {
    "the model": (WhisperModel, ""),
    "with a head": (WhisperForConditionalGeneration, "model."),
}
"""A class, and what its tensors' names begin with."""

KINDS: dict[str, tuple[Literal["encoder", "decoder"] | None, Literal["self", "cross"] | None]] = {
    "encoder": ("encoder", "self"),
    "decoder": ("decoder", None),
    "cross": ("decoder", "cross"),
}

TENSORS = [
    *(f"{name}_proj.weight" for name in ("q", "k", "v", "out")),
    *(f"{name}_proj.bias" for name in ("q", "v", "out")),
]


def _module_name(kind: str) -> str:
    part = "encoder" if kind == "encoder" else "decoder"
    return f"{part}.layers.1.{'encoder_attn' if kind == 'cross' else 'self_attn'}"


def _saved(directory: Path, name: str = "the model", **options: Any) -> tuple[Any, str]:
    """Save a random model; return it and what its tensors' names begin with."""
    make, root = MODELS[name]
    model = randomised(make(WhisperConfig(**SIZES, **options)))
    model.save_pretrained(directory)
    return model, root


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_read_layer_gives_the_answers_of_the_trained_module(
    name: str, kind: str, tmp_path: Path
) -> None:
    """Every attention of encoder and decoder, under every mask; keys have no bias."""
    part, attention = KINDS[kind]
    model, root = _saved(tmp_path, name)
    module = model.get_submodule(root + _module_name(kind))

    found = read_back(tmp_path, 1, part=part, attention=attention)

    def attend(x: Tensor, memory: Tensor | None, hidden: Tensor, _: Tensor) -> Any:
        return module(x, memory, attention_mask=hidden)

    cases = cross_cases(attend, WIDTH) if kind == "cross" else self_cases(attend, WIDTH)
    check(found.spec, cases)
    assert names_below(found, f"{root}{_module_name(kind)}.", TENSORS)
    assert found.spec.config.biases == ("query", "value", "output")


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_read_layer_is_what_the_whole_model_computes(
    kind: str, is_causal: bool, tmp_path: Path
) -> None:
    """Default causality and the meaning of masks are the model's, not those of this test."""
    part, attention = KINDS[kind]
    model, root = _saved(tmp_path, is_causal=is_causal)
    module = model.get_submodule(root + _module_name(kind))
    shown = torch.arange(5) < torch.tensor([[5], [3]])

    found = read_back(tmp_path, 1, part=part, attention=attention)

    case = seen_in(
        model,
        module,
        lambda: model(
            input_features=torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(3)),
            decoder_input_ids=torch.arange(10).reshape(2, 5) + 2,
            decoder_attention_mask=shown.long(),
        ),
    )
    # Audio is not padded: Whisper's encoder has no mask.
    case.inputs.attend_mask = shown.numpy() if kind == "decoder" else None
    case.inputs.causal = found.spec.config.causal
    check(found.spec, [case])
    assert found.spec.config.causal == (kind == "decoder" and is_causal)


def test_read_layer_of_an_encoder_alone(tmp_path: Path) -> None:
    """A model that classifies audio has no decoder, though its config.json speaks of one."""
    model = randomised(WhisperForAudioClassification(WhisperConfig(**SIZES)))
    model.save_pretrained(tmp_path)

    found = read_back(tmp_path, 0, part="encoder")

    expected = model.encoder.layers[0].self_attn.k_proj.weight
    assert torch.equal(found.spec.tensors["key.weight"], expected)
    assert refusal(tmp_path, 0, part="decoder") == (
        "model.safetensors: expected tensors decoder.layers.0.…, got none"
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_read_layer_of_half_precision_is_widened_exactly(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Every FP16 and BF16 number is an FP32 number."""
    model = randomised(WhisperModel(WhisperConfig(**SIZES))).to(dtype)
    model.save_pretrained(tmp_path)

    found = read_back(tmp_path, 1, attention="cross")

    module = model.decoder.layers[1].encoder_attn
    assert torch.equal(found.spec.tensors["value.bias"], module.v_proj.bias.float())
    assert torch.equal(found.spec.tensors["output.weight"], module.out_proj.weight.float())


def test_read_layer_with_a_bias_for_keys_is_refused(tmp_path: Path) -> None:
    """No Whisper has one: the checkpoint is another family's, or was changed."""
    _saved(tmp_path)
    name = "encoder.layers.0.self_attn.k_proj.bias"
    edit(tmp_path, tensors={name: torch.zeros(WIDTH)})

    assert refusal(tmp_path, 0, part="encoder").startswith(f"model.safetensors: {name}: a tensor")


def test_read_layer_that_may_be_several_is_refused(tmp_path: Path) -> None:
    """Encoder and decoder number their layers alike; which is meant is not guessed."""
    _saved(tmp_path)

    assert refusal(tmp_path, 0) == (
        "config.json: which attention: expected --part encoder, --part decoder (its"
        " self-attention) or --attention cross (the decoder's, to the encoder's output) for"
        " model_type whisper, got none"
    )
