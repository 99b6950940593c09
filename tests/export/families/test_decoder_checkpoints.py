"""Checkpoints of decoders: as classes and versions of transformers save them."""

import importlib
import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextModel,
    GPTNeoXConfig,
)
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

from export.families.family import Found
from export.families.registry import MODULES
from tests.support.attention_cases import check
from tests.support.decoders import (
    TINY,
    Oracle,
    calls,
    seen_in_model,
    tiny_model,
)
from tests.support.saved_models import edit, randomised, read_back

GROUPED = {"num_key_value_heads": 2}
WINDOWED = {**GROUPED, "head_dim": 8, "sliding_window": 4}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


@pytest.mark.parametrize("model_type", ["llama", "phi3", "gpt_neox", "bloom", "falcon"])
def test_layer_is_found_whatever_class_was_saved(model_type: str, tmp_path: Path) -> None:
    """The names begin with the part of the model, or not, or with that of a larger one."""
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path / "whole")
    model.base_model.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "part")
    _change(tmp_path / "part", lambda name: f"language_model.{name}")

    found = [read_back(tmp_path / name, 1) for name in ("whole", "base", "part")]

    assert len({each.tensors for each in found}) == 3
    for each in found[1:]:
        _assert_same(each, found[0])


def test_half_precision_weights_become_fp32(tmp_path: Path) -> None:
    """Their numbers are kept as they are, and the answer is that of those numbers in FP32."""
    model = tiny_model("qwen2", **GROUPED).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    model = model.float()

    spec = read_back(tmp_path, 0).spec

    oracle = Oracle(model.base_model, 0)
    check(spec, [oracle.case(inputs) for inputs in calls(32, 4)])


def test_old_buffers_are_harmless(tmp_path: Path) -> None:
    """Frequencies and causal masks that versions before transformers 4.3x saved."""
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    tiny_model("gpt_neox").save_pretrained(tmp_path / "gpt_neox")
    expected = read_back(tmp_path / "llama", 0), read_back(tmp_path / "gpt_neox", 0)

    edit(
        tmp_path / "llama", tensors={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4)}
    )
    attention = "gpt_neox.layers.0.attention"
    edit(
        tmp_path / "gpt_neox",
        tensors={
            f"{attention}.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
            f"{attention}.masked_bias": torch.tensor(-1e9),
            f"{attention}.rotary_emb.inv_freq": torch.rand(1),
        },
    )

    _assert_same(read_back(tmp_path / "llama", 0), expected[0])
    _assert_same(read_back(tmp_path / "gpt_neox", 0), expected[1])


@pytest.mark.parametrize(
    ("old", "dims"), [({"rotary_pct": 0.5, "rotary_emb_base": 5e4}, 4), ({}, 2)], ids=["said", ""]
)
def test_gpt_neox_before_transformers_5(old: dict[str, Any], dims: int, tmp_path: Path) -> None:
    """Base and share of the rotary positions had names of their own, and defaults."""
    tiny_model("gpt_neox").save_pretrained(tmp_path)
    edit(tmp_path, {**old, "rope_parameters": None})
    theirs: Any = GPTNeoXRotaryEmbedding(GPTNeoXConfig(**TINY, **old))

    spec = read_back(tmp_path, 0).spec

    assert spec.config.rotary is not None
    assert spec.config.rotary.dims == dims
    assert torch.equal(spec.tensors["rotary.frequencies"], theirs.inv_freq)


TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen2-all": ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
    "qwen2-none": ("qwen2", {"use_sliding_window": False, "max_window_layers": 0}),
    "qwen3": ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {"sliding_window_pattern": 2}),
    "gemma3-default": ("gemma3_text", {}),
    "gpt-oss": ("gpt_oss", EXPERTS),
}


@pytest.mark.parametrize(("model_type", "options"), TYPES.values(), ids=TYPES)
def test_types_of_layers_before_there_were_layer_types(
    model_type: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The family says which layers are local."""
    model = tiny_model(model_type, **{**WINDOWED, **options})
    model.save_pretrained(tmp_path)
    edit(tmp_path, {**options, "layer_types": None})

    windows = [read_back(tmp_path, layer).spec.config.window for layer in range(2)]

    is_local = [kind == "sliding_attention" for kind in model.config.layer_types]
    assert windows == [4 if local else None for local in is_local]


def test_gpt_oss_with_quantised_experts(tmp_path: Path) -> None:
    """Its experts are no part of the attention, whose weights are as they were trained."""
    tiny_model("gpt_oss", **WINDOWED, **EXPERTS).save_pretrained(tmp_path)
    expected = read_back(tmp_path, 0)
    edit(tmp_path, {"quantization_config": {"quant_method": "mxfp4"}})
    name = "model.layers.0.mlp.experts.gate_up_proj"
    edit(tmp_path, tensors={f"{name}_blocks": torch.zeros(2, 16, 1, 16, dtype=torch.uint8)})

    _assert_same(read_back(tmp_path, 0), expected)


def test_gemma3_with_a_vision_tower(tmp_path: Path) -> None:
    """The text model is read, under the names of either version of transformers."""
    vision = {"image_size": 8, "patch_size": 4, "hidden_size": 8, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config={**TINY, **WINDOWED},
        vision_config={**vision, "num_hidden_layers": 2, "intermediate_size": 8},
        mm_tokens_per_image=4,
    )
    config._attn_implementation = "eager"
    model = randomised(Gemma3ForConditionalGeneration(config))
    model.save_pretrained(tmp_path / "saved")
    text = model.model.language_model
    tensors = {f"model.language_model.{name}": value for name, value in text.state_dict().items()}
    tower = {"model.vision_tower.vision_model.encoder.layers.1.self_attn.q_proj.weight"}
    _write(tmp_path / "new", config.to_dict(), tensors | dict.fromkeys(tower, torch.ones(2, 2)))

    found = read_back(tmp_path / "saved", 1, part="text")

    oracle = Oracle(text, 1)
    check(found.spec, [oracle.case(inputs) for inputs in calls(32, 4)])
    _assert_same(read_back(tmp_path / "new", 1), found)


def test_gemma3_leaves_out_what_is_the_same_in_all_of_its_checkpoints(tmp_path: Path) -> None:
    """Heads, head size, scale and bases, as published configurations do; scaling is of old."""
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "vocab_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
    }
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    for last in ("sliding_attention", "full_attention"):
        types = {"layer_types": ["sliding_attention", last]}
        config: Any = AutoConfig.for_model("gemma3_text", **sizes, **types, **deepcopy(scaling))
        config._attn_implementation = "eager"
        model = randomised(Gemma3TextModel(config))
        values = {"model_type": "gemma3", "text_config": {**sizes, **types, **scaling}}
        tensors = {
            f"language_model.model.{name}": value for name, value in model.state_dict().items()
        }
        _write(tmp_path / last, values, tensors)

        spec = read_back(tmp_path / last, 1).spec

        assert (spec.config.num_heads, spec.config.num_kv_heads, spec.config.head_dim) == (
            8,
            4,
            256,
        )
        check(spec, [Oracle(model, 1).case(inputs) for inputs in calls(8, 8)[:4]])


@pytest.mark.parametrize("layer", [0, 1])
def test_gemma3_in_both_directions(layer: int, tmp_path: Path) -> None:
    """As embedding models are trained: not causal, half of the window on either side."""
    types = {"layer_types": ["sliding_attention", "full_attention"]}
    model = tiny_model("gemma3_text", **WINDOWED, **types, use_bidirectional_attention=True)
    model.save_pretrained(tmp_path)

    spec = read_back(tmp_path, layer).spec

    assert not spec.config.causal
    assert spec.config.window == (None if layer else 3)
    check(spec, [seen_in_model(model.base_model, layer, causal=False)])


def test_decoder_in_both_directions(tmp_path: Path) -> None:
    """Transformers lets any decoder attend to what follows, by a key of its configuration."""
    model = tiny_model("llama", is_causal=False)
    model.save_pretrained(tmp_path)

    spec = read_back(tmp_path, 0).spec

    assert not spec.config.causal
    check(spec, [seen_in_model(model.base_model, 0, causal=False)])


@pytest.mark.parametrize(
    "model_type",
    ["mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "phi3"],
)
def test_absent_keys_mean_what_transformers_takes(model_type: str) -> None:
    """The values of a family's configuration class."""
    module = importlib.import_module(f"export.families.{MODULES[model_type]}")
    config = AutoConfig.for_model(model_type, use_sliding_window=True)

    assert {key: getattr(config, key) for key in module._DEFAULTS} == module._DEFAULTS


def _assert_same(found: Found, expected: Found) -> None:
    assert found.spec.config == expected.spec.config
    for name, tensor in expected.spec.tensors.items():
        assert torch.equal(found.spec.tensors[name], tensor), name


def _write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config, default=str))
    save_file(
        {name: value.contiguous() for name, value in tensors.items()},
        directory / "model.safetensors",
    )


def _change(directory: Path, rename: Callable[[str], str]) -> None:
    """Give all tensors other names."""
    file = directory / "model.safetensors"
    save_file({rename(name): value for name, value in load_file(file).items()}, file)
