"""Rotary positions: both layouts of config.json, and the frequencies that transformers computes."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from export.errors import SourceInvalid
from export.families.config import Config
from export.families.rotary import read_rotary, rope_parameters

HEAD_DIM = 16
MODEL: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32}
SHORT = [1.0 + i / 8 for i in range(HEAD_DIM // 2)]
LONG = [1.0 + i for i in range(HEAD_DIM // 2)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}

LAYOUTS: dict[str, dict[str, Any]] = {
    "nothing said": {},
    "base, old": {"rope_theta": 5e5},
    "base, old, no scaling": {"rope_theta": 5e5, "rope_scaling": None},
    "base, new": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "linear, old": {"rope_theta": 3e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear, new": {"rope_parameters": {"rope_type": "linear", "rope_theta": 3e4, "factor": 4}},
    "dynamic, old": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "dynamic, new": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3, old": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama3, new": {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    "yarn, old": {"rope_theta": 1e6, "rope_scaling": {**YARN, "type": "yarn"}},
    "yarn, new": {"rope_parameters": {**YARN, "rope_theta": 1e6}},
    "yarn, exact range": {"rope_parameters": {**YARN, "truncate": False}},
    "yarn, other range": {"rope_parameters": {**YARN, "beta_fast": 8, "beta_slow": 2.0}},
    "yarn, magnitude": {"rope_parameters": {**YARN, "attention_factor": 1.5}},
    "yarn, two magnitudes": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}},
    "yarn, no factor": {"rope_parameters": {**YARN, "factor": None}},
    "yarn, no stretch": {"rope_parameters": {**YARN, "factor": 1.0}},
    "yarn, length beside": {
        "rope_parameters": YARN,
        "original_max_position_embeddings": 16,
    },
    "yarn, no length": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
    "longrope": {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 32}},
    "longrope, factor": {
        "rope_parameters": {**LONGROPE, "factor": 3.0, "original_max_position_embeddings": 32}
    },
    "longrope, magnitude": {"rope_parameters": {**LONGROPE, "attention_factor": 1.25}},
    "longrope, no stretch": {"rope_parameters": LONGROPE},
}


@pytest.mark.parametrize("values", LAYOUTS.values(), ids=LAYOUTS)
def test_frequencies_are_those_of_transformers(values: dict[str, Any]) -> None:
    """In either layout of config.json, whatever may be left out."""
    theirs: Any = LlamaRotaryEmbedding(LlamaConfig(**MODEL, **_copied(values)))
    config = Config("config.json", {**MODEL, **values})

    turn = read_rotary(config, rope_parameters(config), HEAD_DIM)

    assert torch.equal(turn.tensors["rotary.frequencies"], theirs.inv_freq)
    assert turn.rotary.magnitude == pytest.approx(theirs.attention_scaling)
    assert turn.rotary.dims == HEAD_DIM
    assert turn.rotary.scaling == theirs.rope_type.replace("default", "none")
    if turn.rotary.scaling == "longrope":
        length = turn.rotary.original_length
        assert length is not None
        long, _ = ROPE_INIT_FUNCTIONS["longrope"](theirs.config, seq_len=length + 1)
        assert torch.equal(turn.tensors["rotary.long_frequencies"], long)
    if turn.rotary.scaling == "dynamic":
        assert turn.rotary.original_length == theirs.original_max_seq_len
        assert turn.rotary.factor == theirs.config.rope_parameters["factor"]


def test_part_of_a_head_turns_in_either_layout() -> None:
    """The share lies beside the base before transformers 5, and since then with it."""
    old = {"rope_theta": 1e4, "partial_rotary_factor": 0.75}
    for values in (old, {"rope_parameters": {"rope_type": "default", **old}}):
        theirs: Any = Phi3RotaryEmbedding(Phi3Config(**MODEL, **_copied(values)))
        config = Config("config.json", {**MODEL, **values})

        turn = read_rotary(config, rope_parameters(config), HEAD_DIM, is_partial=True)

        assert turn.rotary.dims == 12
        assert torch.equal(turn.tensors["rotary.frequencies"], theirs.inv_freq)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a kind of other models": (
        {"rope_scaling": {"type": "mrope", "factor": 2.0}},
        "config.json: rope_scaling: type: expected one of default, linear, dynamic, yarn, longrope,"
        " llama3, got 'mrope'",
    ),
    "a new kind": (
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
        "config.json: rope_parameters: rope_type: expected one of default, linear, dynamic, yarn,"
        " longrope, llama3, got 'proportional'",
    ),
    "a parameter of other models": (
        {"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}},
        "config.json: rope_scaling: mrope_section is [16, 24, 24]: a parameter of rotary positions"
        " that this version does not know; a layer with it cannot be exported",
    ),
    "no object": (
        {"rope_scaling": "linear"},
        "config.json: rope_scaling: expected an object, got 'linear'",
    ),
    "no factor": (
        {"rope_parameters": {"rope_type": "linear"}},
        "config.json: rope_parameters: factor: expected a number, got None",
    ),
    "a factor of 0": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 0}},
        "config.json: rope_parameters: factor: expected a positive number, got 0",
    ),
    "base 1": (
        {"rope_theta": 1},
        "config.json: rope_parameters: rope_theta: expected a number above 1, got 1.0",
    ),
    "a part where all is turned": (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "config.json: rope_parameters: partial_rotary_factor: expected 1, as this family turns"
        " whole heads, got 0.5",
    ),
    "factors of another head": (
        {"rope_parameters": {**LONGROPE, "long_factor": LONG[:-1]}},
        "config.json: rope_parameters: long_factor: expected 8 positive numbers, one for each pair,"
        " got [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]",
    ),
    "no range of llama3": (
        {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}},
        "config.json: rope_parameters: high_freq_factor: expected more than low_freq_factor 1,"
        " got 1.0",
    ),
    "a training of one token": (
        {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 1}},
        "config.json: rope_parameters: original_max_position_embeddings: expected more than 1,"
        " got 1",
    ),
    "frequencies beyond FP32": (
        {"rope_parameters": {**LONGROPE, "long_factor": [1e-60] * 8}},
        "config.json: rope_parameters: expected finite rotary.long_frequencies, got NaN or"
        " infinity",
    ),
}


@pytest.mark.parametrize(("values", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_understood_is_refused(values: dict[str, Any], message: str) -> None:
    """By name, with what was expected."""
    config = Config("config.json", {**MODEL, **values})

    with pytest.raises(SourceInvalid) as refusal:
        read_rotary(config, rope_parameters(config), HEAD_DIM)

    assert str(refusal.value) == message


@pytest.mark.parametrize("share", [0.05, 0.7, 1.5])
def test_uneven_part_of_a_head_is_refused(share: float) -> None:
    """Numbers are turned in pairs."""
    config = Config("config.json", {**MODEL, "partial_rotary_factor": share})

    with pytest.raises(SourceInvalid, match=r"expected an even number of numbers to turn, 2 to 16"):
        read_rotary(config, rope_parameters(config), HEAD_DIM, is_partial=True)


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values in objects of their own: transformers changes those that it is given."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
