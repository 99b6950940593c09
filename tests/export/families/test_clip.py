"""CLIP and SigLIP: a layer of either part answers as transformers' own module."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedModel,
    SiglipConfig,
    SiglipModel,
    SiglipTextConfig,
    SiglipTextModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from export.sources import from_hf
from service.layer_config import LayerConfig
from tests.support.attention_cases import check
from tests.support.encoders import EAGER, calls, saved

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 20}
TEXT = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 40, **SIZES}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VISION = {"hidden_size": 24, "num_attention_heads": 3, "image_size": 8, "patch_size": 4, **SIZES}


def _whole(family: str) -> PreTrainedModel:
    config, model = {"clip": (CLIPConfig, CLIPModel), "siglip": (SiglipConfig, SiglipModel)}[family]
    return model(config(text_config=TEXT, vision_config=VISION, **EAGER))


@pytest.mark.parametrize("part", ["text", "vision"])
@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_clip_part_answers_as_transformers(family: str, part: str, tmp_path: Path) -> None:
    """Of the two parts, which have layers of the same names, the one that is meant is read."""
    model = saved(_whole(family), tmp_path)

    found = from_hf(tmp_path, 1, part=part)

    tower = getattr(model, f"{part}_model")
    module = tower.encoder.layers[1].self_attn
    check(found.spec, calls(tower.config, lambda x, mask, _: module(x, mask)))
    assert found.spec.config.causal == (family == "clip" and part == "text")


ALONE = {
    "clip text": (CLIPTextModel, CLIPTextConfig, TEXT),
    "clip text with its projection": (CLIPTextModelWithProjection, CLIPTextConfig, TEXT),
    "clip vision": (CLIPVisionModel, CLIPVisionConfig, VISION),
    "siglip text": (SiglipTextModel, SiglipTextConfig, TEXT),
    "siglip vision": (SiglipVisionModel, SiglipVisionConfig, VISION),
}


@pytest.mark.parametrize(("kind", "config", "sizes"), ALONE.values(), ids=ALONE)
def test_clip_part_that_was_saved_alone_answers_as_transformers(
    kind: Any, config: Any, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """No part has to be named where there is one."""
    model = saved(kind(config(**sizes, **EAGER)), tmp_path)

    found = from_hf(tmp_path, 0)

    tower = getattr(model, "text_model", model)
    module = tower.encoder.layers[0].self_attn
    check(found.spec, calls(tower.config, lambda x, mask, _: module(x, mask)))
    assert found.spec.config.causal == (kind in (CLIPTextModel, CLIPTextModelWithProjection))


def test_clip_part_is_read_with_its_defaults(tmp_path: Path) -> None:
    """Parts are saved without what is the default: the text's 512 numbers and 8 heads."""
    config = CLIPConfig(
        text_config={"num_hidden_layers": 1, "vocab_size": 40}, vision_config=VISION
    )
    model = saved(CLIPModel(config), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["text_config"] = {"num_hidden_layers": 1, "vocab_size": 40}
    (tmp_path / "config.json").write_text(json.dumps(values))

    found = from_hf(tmp_path, 0, part="text")

    assert model.text_model.config.num_attention_heads == 8
    assert found.config == LayerConfig(512, 8, causal=True)


def test_clip_part_of_an_old_configuration_is_read_as_transformers_does(tmp_path: Path) -> None:
    """Where both are there, text_config_dict is what counts."""
    model = saved(_whole("clip"), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["text_config_dict"] = values["text_config"]
    values["text_config"] = values["text_config"] | {"num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(values))

    found = from_hf(tmp_path, 0, part="text")

    heads = CLIPConfig.from_pretrained(tmp_path).text_config.num_attention_heads
    assert found.config.num_heads == heads == model.text_model.config.num_attention_heads
