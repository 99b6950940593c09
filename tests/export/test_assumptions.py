"""What is said after a publication: all that no weight shows, each with its source."""

from typing import Any

import pytest

from export.assumptions import assumptions
from export.options import parse_export
from service.contract import FP32_TOLERANCE, Manifest
from service.layer_config import LayerConfig, Norm, PositionBias, Rotary

HEADLINE = "The parity above cannot show these, which were assumed:"
NO_CODE = "no computation of the model's own code around these weights"
TORCH = ["--from-torch", "layer.pt", "--num-heads", "2"]
HF = ["--from-hf", "dir", "--layer", "0"]
FAMILY = "(config.json, or the default of its family)"

SAID: dict[str, tuple[list[str], dict[str, Any], list[str]]] = {
    "a saved layer": (
        TORCH,
        {},
        [
            "2 heads of width 4 (--num-heads)",
            "self-attention (packed weights, no --attention cross); not causal unless a call says"
            " so (no --causal)",
            f"no add_zero_attn, no window, no positions, and {NO_CODE}",
        ],
    ),
    "a saved layer with all that can be said": (
        [*TORCH, "--positional", "learned", "--positional-table", "pos", "--attention", "self"],
        {
            "causal": True,
            "window": 3,
            "extra_keys": ("zero",),
            "positional": "learned",
            "max_positions": 9,
        },
        [
            "2 heads of width 4 (--num-heads)",
            "self-attention (--attention); causal unless a call says false (--causal)",
            "attention to keys less than 3 tokens away (--window)",
            "rows of pos added to the embeddings for their positions (--positional learned)",
            "add_zero_attn (--add-zero-attn)",
            NO_CODE,
        ],
    ),
    "a saved layer with sinusoids": (
        [*TORCH, "--positional", "sinusoidal"],
        {"positional": "sinusoidal"},
        [
            "2 heads of width 4 (--num-heads)",
            "self-attention (packed weights, no --attention cross); not causal unless a call says"
            " so (no --causal)",
            "sines added to the embeddings for their positions (--positional sinusoidal)",
            f"no add_zero_attn, no window, and {NO_CODE}",
        ],
    ),
    "a saved cross-attention": (
        TORCH,
        {"memory_dim": 6},
        [
            "2 heads of width 4 (--num-heads)",
            "cross-attention (separate weights)",
            f"no add_zero_attn, and {NO_CODE}",
        ],
    ),
    "a checkpoint's encoder": (
        HF,
        {},
        [
            "2 heads of width 4 (config.json)",
            f"self-attention (the layout of the checkpoint); not causal unless a call says so"
            f" {FAMILY}",
            NO_CODE,
        ],
    ),
    "a checkpoint's decoder": (
        HF,
        {
            "num_kv_heads": 1,
            "causal": True,
            "window": 5,
            "scale": 0.25,
            "softcap": 50.0,
            "norm": Norm("rms", 1e-6),
            "rotary": Rotary(10000.0, 4, scaling="linear", factor=8.0),
        },
        [
            "2 heads of width 4, 1 of keys and values (config.json)",
            f"self-attention (the layout of the checkpoint); causal unless a call says false"
            f" {FAMILY}",
            f"attention to keys less than 5 tokens away {FAMILY}",
            f"logits multiplied by 0.25 and capped at 50 {FAMILY}",
            f"rms norm of queries and keys with epsilon 1e-06 {FAMILY}",
            f"rotary positions: base 10000, 4 of 4 numbers a head, paired as halves, linear scaling"
            f" by 8 {FAMILY}",
            NO_CODE,
        ],
    ),
    "a checkpoint's cross-attention": (
        [*HF, "--attention", "cross"],
        {"memory_dim": 8},
        ["2 heads of width 4 (config.json)", "cross-attention (--attention)", NO_CODE],
    ),
    "a checkpoint's position bias": (
        HF,
        {"causal": True, "position_bias": PositionBias("alibi")},
        [
            "2 heads of width 4 (config.json)",
            f"self-attention (the layout of the checkpoint); causal unless a call says false"
            f" {FAMILY}",
            f"a position bias: ALiBi {FAMILY}",
            NO_CODE,
        ],
    ),
}


@pytest.mark.fault("G7")
@pytest.mark.parametrize(("argv", "layer", "lines"), SAID.values(), ids=SAID)
def test_assumptions_name_what_no_weight_shows_and_its_source(
    argv: list[str], layer: dict[str, Any], lines: list[str]
) -> None:
    """Line by line: nothing that changes the answer is left out."""
    found = assumptions(parse_export(["--name", "x", *argv]), _manifest(layer))

    assert found == [HEADLINE, *(f"  {line}" for line in lines)]


def test_assumptions_of_a_seed_are_none() -> None:
    """Its layer is what was asked for."""
    args = parse_export(["--name", "x", "--embed-dim", "8", "--num-heads", "2", "--window", "3"])

    assert assumptions(args, _manifest({"window": 3})) == []


def _manifest(layer: dict[str, Any]) -> Manifest:
    config = LayerConfig(8, 2, **layer)
    return Manifest("x", 1, config, "fp32", FP32_TOLERANCE, 1.0, (), {}, {}, {}, "2026-01-01")
