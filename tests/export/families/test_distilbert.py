"""DistilBERT: a layer of a checkpoint answers as transformers' own module."""

from pathlib import Path

import pytest
from transformers import DistilBertConfig, DistilBertForMaskedLM

from export.sources import from_hf
from tests.support.attention_cases import check
from tests.support.encoders import EAGER, calls, saved

SIZES = {"dim": 24, "n_layers": 2, "hidden_dim": 20, "vocab_size": 30}


@pytest.mark.parametrize("heads", [1, 3, 24])
def test_distilbert_answers_as_transformers(heads: int, tmp_path: Path) -> None:
    """Each call alone and with others, under every mask; heads of 24, 8 and 1 numbers."""
    config = DistilBertConfig(n_heads=heads, **SIZES, **EAGER)
    model = saved(DistilBertForMaskedLM(config), tmp_path)

    found = from_hf(tmp_path, 1)

    module = model.distilbert.transformer.layer[1].attention
    check(found.spec, calls(config, lambda x, mask, _: module(x, mask)))
