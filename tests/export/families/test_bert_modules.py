"""BERT and its relatives: a layer of a checkpoint answers as transformers' own module."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    CamembertConfig,
    CamembertForMaskedLM,
    ElectraConfig,
    ElectraForPreTraining,
    PreTrainedModel,
    RobertaConfig,
    RobertaForCausalLM,
    RobertaForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from export.sources import from_hf
from service.layer_config import LayerConfig
from tests.support.attention_cases import check
from tests.support.encoders import EAGER, calls, model_masks, saved
from tests.support.saved_models import cross_cases

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "vocab_size": 30,
    **EAGER,
}

ENCODERS = {
    "bert": (BertModel, BertConfig),
    "roberta": (RobertaForMaskedLM, RobertaConfig),
    "xlm-roberta": (XLMRobertaForMaskedLM, XLMRobertaConfig),
    "camembert": (CamembertForMaskedLM, CamembertConfig),
    "electra": (ElectraForPreTraining, ElectraConfig),
}

DECODERS = {"bert": (BertLMHeadModel, BertConfig), "roberta": (RobertaForCausalLM, RobertaConfig)}


def _layer(model: PreTrainedModel, number: int) -> Any:
    return model.base_model.encoder.layer[number]


def _answer(module: Any, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return what an attention gives before its residual and norm."""
    context, weights = module.self(x, *args, **options)
    return module.output.dense(context), weights


@pytest.mark.parametrize(("kind", "config"), ENCODERS.values(), ids=ENCODERS)
def test_bert_encoder_answers_as_transformers(kind: Any, config: Any, tmp_path: Path) -> None:
    """Each call alone and with others, under every mask; whatever class was saved."""
    model = saved(kind(config(**SIZES)), tmp_path)

    found = from_hf(tmp_path, 1)

    module = _layer(model, 1).attention
    check(found.spec, calls(model.config, lambda x, mask, _: _answer(module, x, mask)))
    assert found.config == LayerConfig(24, 3)


@pytest.mark.parametrize(("kind", "config"), DECODERS.values(), ids=DECODERS)
def test_bert_decoder_is_causal_by_default(kind: Any, config: Any, tmp_path: Path) -> None:
    """So a call that says nothing is answered as the model would; one may say false."""
    model = saved(kind(config(**SIZES, is_decoder=True)), tmp_path)

    found = from_hf(tmp_path, 0)

    module = _layer(model, 0).attention
    check(found.spec, calls(model.config, lambda x, mask, _: _answer(module, x, mask)))
    assert found.config == LayerConfig(24, 3, causal=True)


def test_bert_decoder_may_attend_in_both_directions(tmp_path: Path) -> None:
    """The model's mask is not causal where its configuration says so."""
    config = BertConfig(**SIZES, is_decoder=True, is_causal=False)
    saved(BertLMHeadModel(config), tmp_path)

    found = from_hf(tmp_path, 0)

    x, everything = torch.randn(1, 3, 24), torch.ones(1, 3, dtype=torch.bool)
    assert bool((model_masks(config, x, everything, True) == 0).all())
    assert found.config == LayerConfig(24, 3)


@pytest.mark.parametrize(("kind", "config"), DECODERS.values(), ids=DECODERS)
def test_bert_decoder_has_two_attentions(kind: Any, config: Any, tmp_path: Path) -> None:
    """Both are read by name, the cross-attention with a memory as wide as the layer."""
    decoder = config(**SIZES, is_decoder=True, add_cross_attention=True)
    model = saved(kind(decoder), tmp_path)

    cross = from_hf(tmp_path, 1, attention="cross")
    own = from_hf(tmp_path, 1, attention="self")

    layer = _layer(model, 1)

    def attend(x: Tensor, memory: Tensor | None, hidden: Tensor, _: Tensor) -> Any:
        return _answer(layer.crossattention, x, encoder_hidden_states=memory, attention_mask=hidden)

    check(cross.spec, cross_cases(attend, 24))
    check(own.spec, calls(decoder, lambda x, mask, _: _answer(layer.attention, x, mask)))
    assert cross.config == LayerConfig(24, 3, memory_dim=24)
    assert own.config == LayerConfig(24, 3, causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bert_of_half_precision_in_shards_answers_as_transformers(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """The numbers are those of the file, upcast: the same model computes with them in FP32."""
    model = saved(BertModel(BertConfig(**SIZES)).to(dtype), tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2

    found = from_hf(tmp_path, 1)

    module = _layer(model.float(), 1).attention
    check(found.spec, calls(model.config, lambda x, mask, _: _answer(module, x, mask)))
