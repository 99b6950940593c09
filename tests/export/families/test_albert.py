"""ALBERT: a layer of a checkpoint answers as transformers' own module, whose weights it shares."""

from pathlib import Path

import pytest
from transformers import AlbertConfig, AlbertForMaskedLM

from export.sources import from_hf
from tests.support.attention_cases import check
from tests.support.encoders import EAGER, calls, output_of, saved

SIZES = {
    "hidden_size": 16,
    "embedding_size": 8,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "vocab_size": 30,
}


@pytest.mark.parametrize(
    ("groups", "inner", "layer", "place"),
    [(1, 1, 3, (0, 0)), (2, 1, 1, (0, 0)), (2, 1, 2, (1, 0)), (2, 2, 5, (1, 1)), (3, 1, 2, (1, 0))],
)
def test_albert_answers_as_transformers(
    groups: int, inner: int, layer: int, place: tuple[int, int], tmp_path: Path
) -> None:
    """Layers are counted as the model runs through them, whatever weights they share."""
    config = AlbertConfig(
        num_hidden_layers=4, num_hidden_groups=groups, inner_group_num=inner, **SIZES, **EAGER
    )
    model = saved(AlbertForMaskedLM(config), tmp_path)

    found = from_hf(tmp_path, layer)

    group, number = place
    module = model.albert.encoder.albert_layer_groups[group].albert_layers[number].attention
    check(
        found.spec,
        calls(config, lambda x, mask, _: output_of(module.dense, lambda: module(x, mask))),
    )
    assert f"albert_layer_groups.{group}.albert_layers.{number}." in found.tensors[0]
