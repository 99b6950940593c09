"""ModernBERT: global and local layers of a checkpoint answer as transformers' own modules."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import ModernBertConfig, ModernBertForMaskedLM, ModernBertModel, PreTrainedConfig
from transformers.masking_utils import create_bidirectional_sliding_window_mask

from export.sources import from_hf
from service.layer_config import Rotary
from tests.support.attention_cases import check
from tests.support.encoders import EAGER, calls, model_masks, saved

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "vocab_size": 30,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 1),
}


def local_masks(config: PreTrainedConfig, x: Tensor, attend: Tensor, causal: bool) -> Tensor:
    """Return the mask of local layers; causal is what Headwise's callers may add to it."""
    window = create_bidirectional_sliding_window_mask(config, x, attend)
    if window is None:  # it hides nothing
        return model_masks(config, x, attend, causal)
    return torch.minimum(window, model_masks(config, x, attend, causal))


@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("local_attention", [4, 5])
@pytest.mark.parametrize("attention_bias", [False, True])
def test_modernbert_answers_as_transformers(
    layer: int, local_attention: int, attention_bias: bool, tmp_path: Path
) -> None:
    """The windows of local layers end where the model's do, and positions move the rotation."""
    config = ModernBertConfig(
        **SIZES, **EAGER, local_attention=local_attention, attention_bias=attention_bias
    )
    model = saved(ModernBertModel(config), tmp_path)

    found = from_hf(tmp_path, layer)

    kind = config.layer_types[layer]
    module = model.layers[layer].attn

    def attend(x: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        embeddings = model.rotary_emb(x, positions, kind)
        output, weights = module(x, position_embeddings=embeddings, attention_mask=mask)
        return output, weights

    is_local = kind == "sliding_attention"
    masks = local_masks if is_local else model_masks
    for with_positions in (False, True):
        check(found.spec, calls(config, attend, masks=masks, with_positions=with_positions))
    assert is_local == (layer % 3 != 0) == (found.spec.config.window == 3)


def test_modernbert_of_older_configuration_is_the_same_layer(tmp_path: Path) -> None:
    """Before transformers 5, config.json had the pattern of layers and two bases of its own."""
    bases = {
        kind: {"rope_type": "default", "rope_theta": base}
        for kind, base in (("full_attention", 5000.0), ("sliding_attention", 70.0))
    }
    config = ModernBertConfig(
        **SIZES,
        layer_types=["full_attention", "sliding_attention"] * 2,
        rope_parameters=bases,
    )
    saved(ModernBertForMaskedLM(config), tmp_path)
    expected = [from_hf(tmp_path, layer).spec for layer in range(4)]
    values = json.loads((tmp_path / "config.json").read_text())
    del values["layer_types"], values["rope_parameters"]
    old = {
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 5000.0,
        "local_rope_theta": 70,
    }
    (tmp_path / "config.json").write_text(json.dumps(values | old))

    found = [from_hf(tmp_path, layer).spec for layer in range(4)]

    assert [spec.config for spec in found] == [spec.config for spec in expected]
    for spec, other in zip(found, expected, strict=True):
        name = "rotary.frequencies"
        assert torch.equal(spec.tensors[name], other.tensors[name])


@pytest.mark.parametrize(
    "old", [{}, {"global_rope_theta": 5000.0}, {"local_rope_theta": 70, "local_attention": 10}]
)
def test_modernbert_is_read_with_its_defaults(old: dict[str, Any], tmp_path: Path) -> None:
    """What config.json does not say is what transformers takes."""
    saved(ModernBertModel(ModernBertConfig(**SIZES)), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "rope_parameters", "local_attention", "attention_bias"):
        del values[key]
    (tmp_path / "config.json").write_text(json.dumps(values | old))

    found = [from_hf(tmp_path, layer).config for layer in range(4)]

    config = ModernBertConfig.from_pretrained(tmp_path)
    for layer, kind in zip(found, config.layer_types, strict=True):
        is_local = kind == "sliding_attention"
        assert layer.rotary == Rotary(config.rope_parameters[kind]["rope_theta"], dims=8)
        assert layer.window == (config.sliding_window + 1 if is_local else None)
