"""ViT and DeiT: a layer of a checkpoint answers as transformers' own module."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from transformers import (
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

from export.sources import from_hf
from tests.support.attention_cases import check
from tests.support.encoders import EAGER, calls, saved

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "image_size": 8,
    "patch_size": 4,
}


def _model(family: str, **options: Any) -> PreTrainedModel:
    if family == "vit":
        return ViTForImageClassification(ViTConfig(**SIZES, **EAGER, **options))
    return DeiTForImageClassificationWithTeacher(DeiTConfig(**SIZES, **EAGER, **options))


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("family", ["vit", "deit"])
def test_vit_answers_as_transformers(family: str, qkv_bias: bool, tmp_path: Path) -> None:
    """Each call alone and with others, under every mask."""
    model = saved(_model(family, qkv_bias=qkv_bias), tmp_path)

    found = from_hf(tmp_path, 1)

    module = getattr(model, family).layers[1].attention
    check(found.spec, calls(model.config, lambda x, mask, _: module(x, mask)))
    assert f"{family}.encoder.layer.1.attention.attention.query.weight" in found.tensors


def test_vit_by_the_names_of_its_modules_is_the_same_layer(tmp_path: Path) -> None:
    """A state dict has other names than a checkpoint since transformers 5."""
    model = saved(_model("vit"), tmp_path)
    expected = from_hf(tmp_path, 1).spec
    save_file(model.state_dict(), tmp_path / "model.safetensors")

    found = from_hf(tmp_path, 1)

    assert "vit.layers.1.attention.q_proj.weight" in found.tensors
    assert found.spec.config == expected.config
    assert all(tensor.equal(expected.tensors[name]) for name, tensor in found.spec.tensors.items())
