"""MPNet: a layer of a checkpoint answers as transformers' own module, with its relative bias."""

from pathlib import Path

import pytest
from torch import Tensor
from transformers import MPNetConfig, MPNetForMaskedLM

from export.sources import from_hf
from tests.support.attention_cases import check
from tests.support.encoders import EAGER, calls, saved

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "vocab_size": 30,
}


@pytest.mark.parametrize("with_positions", [False, True])
def test_mpnet_answers_as_transformers(with_positions: bool, tmp_path: Path) -> None:
    """Positions move the bias, up to distances that share the last bucket."""
    config = MPNetConfig(**SIZES, **EAGER)
    model = saved(MPNetForMaskedLM(config), tmp_path)

    found = from_hf(tmp_path, 1)

    encoder = model.mpnet.encoder
    module = encoder.layer[1].attention.attn

    def attend(x: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        bias = encoder.compute_position_bias(x)
        if with_positions:
            # Given positions, compute_position_bias of transformers 5.24 fails; its parts do not.
            distances = positions[:, None, :] - positions[:, :, None]
            buckets = encoder.relative_position_bucket(distances)
            bias = encoder.relative_attention_bias(buckets).permute(0, 3, 1, 2)
        output, weights = module(x, mask, bias, output_attentions=True)
        return output, weights

    check(found.spec, calls(config, attend, with_positions=with_positions))
