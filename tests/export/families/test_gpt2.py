"""GPT-2, against transformers' own modules."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

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
    "n_positions": 16,
    "n_embd": WIDTH,
    "n_layer": 3,
    "n_head": 4,
    "n_inner": 40,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "attn_implementation": "eager",
}

MODELS: dict[str, tuple[Any, str]] = {
    "the model": (GPT2Model, ""),
    "with a head": (GPT2LMHeadModel, "transformer."),
}
"""A class, and what its tensors' names begin with."""

TENSORS = [f"{name}.{kind}" for name in ("c_attn", "c_proj") for kind in ("weight", "bias")]


def _saved(directory: Path, name: str = "the model", **options: Any) -> tuple[Any, str]:
    """Save a random model; return it and what its tensors' names begin with."""
    make, root = MODELS[name]
    model = randomised(make(GPT2Config(**SIZES, **options)))
    model.save_pretrained(directory)
    return model, root


SCALES: dict[str, dict[str, Any]] = {
    "as usual": {},
    "unscaled": {"scale_attn_weights": False},
    "by the layer's number": {"scale_attn_by_inverse_layer_idx": True},
    "by that alone": {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
    "in another order": {
        "scale_attn_by_inverse_layer_idx": True,
        "reorder_and_upcast_attn": True,
    },
}


@pytest.mark.parametrize("options", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("name", MODELS)
def test_read_layer_gives_the_answers_of_the_trained_module(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Whichever class was saved and however logits are scaled, under every mask."""
    model, root = _saved(tmp_path, name, **options)
    module = model.get_submodule(f"{root}h.2.attn")

    found = read_back(tmp_path, 2)

    def attend(x: Tensor, _: Tensor | None, hidden: Tensor, __: Tensor) -> Any:
        return module(x, attention_mask=hidden)

    check(found.spec, self_cases(attend, WIDTH))
    assert names_below(found, f"{root}h.2.attn.", TENSORS)


@pytest.mark.parametrize("is_causal", [True, False])
def test_read_layer_is_what_the_whole_model_computes(is_causal: bool, tmp_path: Path) -> None:
    """Default causality and the meaning of masks are the model's, not those of this test."""
    model, _ = _saved(tmp_path, is_causal=is_causal)
    shown = torch.arange(5) < torch.tensor([[5], [3]])

    found = read_back(tmp_path, 1)

    ids = torch.arange(10).reshape(2, 5) + 2
    case = seen_in(
        model, model.h[1].attn, lambda: model(input_ids=ids, attention_mask=shown.long())
    )
    case.inputs.attend_mask, case.inputs.causal = shown.numpy(), found.spec.config.causal
    check(found.spec, [case])
    assert found.spec.config.causal == is_causal


@pytest.mark.parametrize("options", [{}, {"scale_attn_by_inverse_layer_idx": True}], ids=str)
def test_read_cross_attention_of_a_decoder(options: dict[str, Any], tmp_path: Path) -> None:
    """GPT-2 as the decoder of another model: its keys and values are in one tensor."""
    model, _ = _saved(tmp_path, add_cross_attention=True, **options)
    module = model.h[2].crossattention

    found = read_back(tmp_path, 2, attention="cross")

    def attend(x: Tensor, memory: Tensor | None, hidden: Tensor, _: Tensor) -> Any:
        return module(x, encoder_hidden_states=memory, encoder_attention_mask=hidden)

    check(found.spec, cross_cases(attend, WIDTH))
    tensors = [*TENSORS, "q_attn.weight", "q_attn.bias"]
    assert names_below(found, "h.2.crossattention.", tensors)
    assert not found.spec.config.causal
    assert read_back(tmp_path, 2, attention="self").spec.config.causal


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32])
def test_read_layer_passes_over_old_buffers(dtype: torch.dtype, tmp_path: Path) -> None:
    """Older versions saved the causal mask, in whatever dtype it had."""
    model, _ = _saved(tmp_path)
    mask = torch.ones(16, 16).tril()[None, None].to(dtype)
    edit(
        tmp_path,
        tensors={"h.1.attn.bias": mask, "h.1.attn.masked_bias": torch.tensor(-1e4)},
    )

    found = read_back(tmp_path, 1)

    assert torch.equal(found.spec.tensors["output.bias"], model.h[1].attn.c_proj.bias)


def test_read_layer_of_an_old_file_of_pytorch(tmp_path: Path) -> None:
    """Most checkpoints of this family are pytorch_model.bin, with the mask in bytes."""
    model, root = _saved(tmp_path, "with a head")
    (tmp_path / "model.safetensors").unlink()
    mask = torch.ones(1, 1, 16, 16, dtype=torch.uint8).tril()
    buffers = {f"{root}h.{i}.attn.bias": mask for i in range(3)}
    torch.save(model.half().state_dict() | buffers, tmp_path / "pytorch_model.bin")

    found = read_back(tmp_path, 2)

    expected = model.transformer.h[2].attn.c_attn.weight[:, -WIDTH:].T.float()
    assert torch.equal(found.spec.tensors["value.weight"], expected)


REFUSED: dict[
    str,
    tuple[
        dict[str, object],
        dict[str, Tensor | None],
        tuple[str | None, Literal["self", "cross"] | None],
        str,
    ],
] = {
    "a part": (
        {},
        {},
        ("encoder", None),
        "config.json: --part: expected decoder for model_type gpt2, got encoder",
    ),
    "a cross-attention that is not there": (
        {},
        {},
        (None, "cross"),
        "config.json: --attention: expected self for model_type gpt2, got cross",
    ),
    "a decoder with both attentions": (
        {"add_cross_attention": True},
        {},
        (None, None),
        "config.json: --attention: expected self or cross for model_type gpt2, got none",
    ),
    "a cross-attention without its tensors": (
        {"add_cross_attention": True},
        {},
        (None, "cross"),
        "model.safetensors: expected a tensor h.1.crossattention.q_attn.weight, got none",
    ),
    "a matrix that is not transposed": (
        {},
        {"h.1.attn.c_attn.weight": torch.zeros(3 * WIDTH, WIDTH)},
        (None, None),
        "model.safetensors: h.1.attn.c_attn: expected a weight [E, 3*E] and a bias [3*E], got"
        " [72, 24] and [72]",
    ),
    "a matrix that does not make three": (
        {},
        {"h.1.attn.c_attn.weight": torch.zeros(1, 4), "h.1.attn.c_attn.bias": torch.zeros(4)},
        (None, None),
        "model.safetensors: h.1.attn.c_attn: expected a weight [E, 3*E] and a bias [3*E], got"
        " [1, 4] and [4]",
    ),
    "a missing bias": (
        {},
        {"h.1.attn.c_proj.bias": None},
        (None, None),
        "model.safetensors: expected a tensor h.1.attn.c_proj.bias, got none",
    ),
    "a quantised matrix": (
        {},
        {"h.1.attn.c_proj.weight": torch.zeros(WIDTH, WIDTH, dtype=torch.int8)},
        (None, None),
        "model.safetensors: h.1.attn.c_proj.weight: expected floating-point weights",
    ),
    "a tensor in the attention": (
        {},
        {"h.1.attn.gate": torch.zeros(4)},
        (None, None),
        "model.safetensors: h.1.attn.gate: a tensor that this version does not know",
    ),
    "an adapter in the layer": (
        {},
        {"h.1.adapters.x.down.weight": torch.zeros(4)},
        (None, None),
        "model.safetensors: h.1.adapters.x.down.weight: the model has an adapter",
    ),
    "slopes of all layers": (
        {},
        {"h.alibi_slopes": torch.zeros(4)},
        (None, None),
        "model.safetensors: h.alibi_slopes: relative positions",
    ),
    "another number of layers": (
        {"n_layer": 12},
        {},
        (None, None),
        "config.json: n_layer is 12, but the weights say 3 (layers below h)",
    ),
    "another feed-forward width": (
        {"n_inner": 96},
        {},
        (None, None),
        "config.json: n_inner is 96, but the weights say 40 (rows of h.1.mlp.c_fc.bias)",
    ),
    "another number of positions": (
        {"n_positions": 1024},
        {},
        (None, None),
        "config.json: n_positions is 1024, but the weights say 16 (rows of wpe.weight)",
    ),
    "heads under two names": (
        {"num_attention_heads": 2},
        {},
        (None, None),
        "config.json: num_attention_heads: expected the same as n_head, 4, got 2",
    ),
    "heads that do not divide the width": (
        {"n_head": 5},
        {},
        (None, None),
        "config.json: embed_dim: expected a multiple of num_heads 5, got 24",
    ),
    "layers configured one by one": (
        {"per_layer_config": {"1": {"n_head": 2}}},
        {},
        (None, None),
        "config.json: per_layer_config is {'1': {'n_head': 2}}: layers are configured one by one",
    ),
    "a scale in quotes": (
        {"scale_attn_weights": "false"},
        {},
        (None, None),
        "config.json: scale_attn_weights: expected true or false, got 'false'",
    ),
}


@pytest.mark.parametrize(("config", "tensors", "place", "message"), REFUSED.values(), ids=REFUSED)
def test_read_layer_that_is_not_understood_is_refused(
    config: dict[str, object],
    tensors: dict[str, Tensor | None],
    place: tuple[str | None, Literal["self", "cross"] | None],
    message: str,
    tmp_path: Path,
) -> None:
    """Nothing is left out of a layer, and config.json must be that of the weights."""
    _saved(tmp_path)
    edit(tmp_path, config, tensors)

    part, attention = place
    assert refusal(tmp_path, 1, part=part, attention=attention).startswith(message)
