"""Families of decoders: a layer that is read back answers as transformers' own module."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.contract import FP32_TOLERANCE
from service.inference.batches import Batch, outputs_of, slices_of, stacked_inputs
from service.inference.calls import Call, Inputs
from tests.support.attention_cases import LIMITS, check, compare, engine_of
from tests.support.decoders import SEED, Oracle, calls, seen_in_model, tiny_model
from tests.support.saved_models import read_back

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 3.0, 4.0],
    "partial_rotary_factor": 0.75,
}
GROUPED = {"num_key_value_heads": 2}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-grouped-biased": ("llama", {**GROUPED, "attention_bias": True, "head_dim": 12}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5}}),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8},
    ),
    "llama-llama3": ("llama", {**GROUPED, "rope_parameters": LLAMA3}),
    "mistral": ("mistral", {**GROUPED, "sliding_window": 3}),
    "mistral-global": ("mistral", {"num_key_value_heads": 1, "sliding_window": None}),
    "qwen2": ("qwen2", {**GROUPED, "rope_parameters": YARN}),
    "qwen2-windowed": (
        "qwen2",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 16}),
    "qwen3-windowed-biased": (
        "qwen3",
        {
            **GROUPED,
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma2": (
        "gemma2",
        {
            **GROUPED,
            "head_dim": 16,
            "sliding_window": 3,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gemma2-uncapped": (
        "gemma2",
        {**GROUPED, "head_dim": 8, "attn_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma3": (
        "gemma3_text",
        {
            **GROUPED,
            "head_dim": 16,
            "sliding_window": 3,
            "query_pre_attn_scalar": 10,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("phi3", {**GROUPED, "sliding_window": 5}),
    "phi3-longrope": (
        "phi3",
        {**GROUPED, "rope_parameters": LONGROPE, "original_max_position_embeddings": 8},
    ),
    "gpt-neox": ("gpt_neox", {}),
    "gpt-neox-unbiased": (
        "gpt_neox",
        {
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
    "bloom": ("bloom", {}),
    "bloom-6-heads": ("bloom", {"hidden_size": 24, "num_attention_heads": 6}),
    "falcon-one-key": ("falcon", {"bias": True}),
    "falcon-grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-key-a-head": ("falcon", {"multi_query": False}),
    "gpt-oss": (
        "gpt_oss",
        {
            **GROUPED,
            "head_dim": 16,
            "sliding_window": 3,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
}


@pytest.mark.parametrize(("model_type", "options"), MODELS.values(), ids=MODELS)
def test_layer_that_is_read_answers_as_the_module(
    model_type: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Under every mask and position, and where the model itself masks, alone and in a batch."""
    model = tiny_model(model_type, **options)
    config = model.config
    model.save_pretrained(tmp_path)

    assert config.num_attention_heads == options.get("num_attention_heads", 4)
    for layer in range(config.num_hidden_layers):
        spec = read_back(tmp_path, layer).spec
        oracle = Oracle(model.base_model, layer)
        cases = [
            oracle.case(inputs) for inputs in calls(config.hidden_size, config.num_attention_heads)
        ]
        assert spec.config.causal
        check(spec, [*cases, seen_in_model(model.base_model, layer)])


@pytest.mark.parametrize("name", ["llama-dynamic", "phi3-longrope"])
def test_scaling_looks_at_the_length_of_each_sequence(name: str, tmp_path: Path) -> None:
    """Of a ragged call too, beside longer ones, on both sides of the training's length of 8."""
    model_type, options = MODELS[name]
    model = tiny_model(model_type, **options)
    model.save_pretrained(tmp_path)
    engine = engine_of(read_back(tmp_path, 0).spec)
    embeddings = np.random.default_rng(SEED).standard_normal((3, 11, 32), np.float32)
    lengths = np.array([11, 8, 3])
    call = Call(Inputs(embeddings, causal=True), lengths=lengths, weights=True)

    batch = Batch.of(slices_of(Call(Inputs(embeddings, causal=True), weights=True), LIMITS)[0])
    [ragged] = slices_of(call, LIMITS)
    assert batch.try_add(ragged, LIMITS)
    outputs = engine.run(stacked_inputs(batch, engine.layer), weights=True)

    [_, found] = outputs_of(batch, outputs)
    assert isinstance(ragged.rows, np.ndarray)
    for place, row in enumerate(ragged.rows):
        length = lengths[row]
        alone = Inputs(embeddings[row : row + 1, :length], causal=True)
        case = Oracle(model.base_model, 0).case(alone)
        assert found.attention_weights is not None
        weights = found.attention_weights[place, :, :length, :length]
        output = found.output[place, :length]
        assert max(compare(case, engine.layer, output[None], weights[None], None)) <= FP32_TOLERANCE
