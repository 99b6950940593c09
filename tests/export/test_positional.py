"""Positions in front of a layer: with them order matters, without them it does not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from export.checkpoint import from_values
from export.errors import SourceInvalid
from export.positional import stored_table, with_positional
from export.random_weights import random_spec
from export.sources import from_torch, random_layer
from service.contract import FP32_TOLERANCE
from service.inference.calls import Inputs
from service.inference.parity import absolute_error, relative_error
from service.layer_config import LayerConfig, Rotary
from tests.support.attention_cases import Case, check, engine_of

SEED = 4
"""Any: every rule here holds for all weights."""

EMBED_DIM, HEADS, ROWS = 8, 2, 6

WORDS = dict(
    zip(["the", "cat", "chased", "mouse"], np.eye(4, EMBED_DIM, dtype=np.float32), strict=True)
)
"""An embedding for each word."""

CAT = "the cat chased the mouse"
MOUSE = "the mouse chased the cat"
ORDER = [0, 4, 2, 3, 1]
"""Which words of CAT make MOUSE."""


def sentence(text: str) -> np.ndarray:
    """Return the embeddings of a sentence, [1, S, E]."""
    return np.stack([WORDS[word] for word in text.split()])[None]


def test_without_positions_a_permuted_sentence_has_the_permuted_answer() -> None:
    """Attention alone does not know order: both sentences give each word the same output."""
    engine = engine_of(random_layer(EMBED_DIM, HEADS, seed=SEED).spec)

    cat = engine.run(Inputs(sentence(CAT)), weights=True)
    mouse = engine.run(Inputs(sentence(MOUSE)), weights=True)

    assert relative_error(mouse.output, cat.output[:, ORDER]) <= FP32_TOLERANCE
    assert cat.attention_weights is not None
    permuted = cat.attention_weights[:, :, ORDER][..., ORDER]
    assert absolute_error(mouse.attention_weights, permuted) <= FP32_TOLERANCE


@pytest.mark.parametrize(
    "options",
    [{"positional": "sinusoidal"}, {"positional": "learned", "max_positions": ROWS}],
    ids=["sinusoidal", "learned"],
)
def test_with_positions_the_cat_and_the_mouse_differ(options: dict[str, Any]) -> None:
    """Who chased whom is in the answer, and the same position always adds the same."""
    engine = engine_of(random_layer(EMBED_DIM, HEADS, seed=SEED, **options).spec)

    cat = engine.run(Inputs(sentence(CAT)), weights=False).output
    mouse = engine.run(Inputs(sentence(MOUSE)), weights=False).output
    moved = Inputs(sentence(CAT)[:, ORDER], positions=np.array([ORDER], np.int64))
    again = engine.run(moved, weights=False).output

    assert relative_error(mouse, cat[:, ORDER]) > 1000 * FP32_TOLERANCE
    assert relative_error(again, cat[:, ORDER]) <= FP32_TOLERANCE


def vaswani(length: int, width: int) -> Tensor:
    """Return the table of Vaswani et al. 2017, section 3.5, written out from the page."""
    table = torch.zeros(length, width)
    for position in range(length):
        for i in range(0, width, 2):
            angle = position / 10000 ** (i / width)
            table[position, i] = np.sin(angle)
            if i + 1 < width:
                table[position, i + 1] = np.cos(angle)
    return table


@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
def test_positions_are_added_to_the_input_of_pytorchs_own_layer(kind: str, tmp_path: Path) -> None:
    """The oracle is nn.MultiheadAttention with the sum as its input."""
    torch.manual_seed(SEED)
    module = nn.MultiheadAttention(EMBED_DIM, HEADS, batch_first=True).eval()
    rows = torch.randn(1, ROWS, EMBED_DIM)
    file = tmp_path / "model.safetensors"
    state = {f"module.attn.{name}": tensor for name, tensor in module.state_dict().items()}
    save_file({**state, "module.pos_embed": rows}, file)

    source = from_torch(
        file,
        HEADS,
        prefix="attn",
        positional=kind,  # type: ignore[arg-type]
        positional_table="module.pos_embed" if kind == "learned" else None,
    )

    table = rows[0] if kind == "learned" else vaswani(ROWS, EMBED_DIM)
    cases = []
    for places in (None, [[3, 0, 5, 1], [5, 4, 2, 2]]):
        x = torch.randn(2, 4, EMBED_DIM)
        positions = None if places is None else np.array(places, np.int64)
        placed = x + (table[:4] if places is None else table[torch.tensor(places)])
        with torch.no_grad():
            output, weights = module(placed, placed, placed, average_attn_weights=False)
        inputs = Inputs(x.numpy(), positions=positions)
        cases.append(Case(inputs, output.numpy(), weights.numpy()))
    check(source.spec, cases)
    assert source.config.max_positions == (ROWS if kind == "learned" else None)
    assert ("pos_embed" in source.tensors) == (kind == "learned")
    assert source.origin["wrappers"] == "module."


def test_table_may_lie_beside_the_weights_of_a_module_saved_alone(tmp_path: Path) -> None:
    """Every tensor of the file must be known; this one is."""
    state = nn.MultiheadAttention(EMBED_DIM, HEADS).state_dict()
    file = tmp_path / "layer.safetensors"
    save_file({**state, "positions.weight": torch.randn(ROWS, EMBED_DIM)}, file)

    source = from_torch(file, HEADS, positional="learned", positional_table="positions.weight")

    assert source.tensors[-1] == "positions.weight"
    with pytest.raises(SourceInvalid, match=r"positions\.weight: a tensor that this version does"):
        from_torch(file, HEADS)


@pytest.mark.parametrize("name", ["attn.in_proj_weight", "attn.out_proj.weight"])
def test_table_that_is_a_weight_of_the_attention_is_refused(name: str, tmp_path: Path) -> None:
    """The option is named, not what would be missing without the tensor."""
    module = nn.MultiheadAttention(EMBED_DIM, HEADS)
    file = tmp_path / "model.safetensors"
    save_file({f"attn.{key}": tensor for key, tensor in module.state_dict().items()}, file)

    with pytest.raises(SourceInvalid) as caught:
        from_torch(file, HEADS, prefix="attn", positional="learned", positional_table=name)

    assert str(caught.value) == (
        f"{file}: --positional-table {name}: expected a table of positions [rows, E], got a weight"
        " of the attention itself"
    )


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"causal": True}, "--causal"),
        ({"window": 3}, "--window"),
        ({"positional": "sinusoidal"}, "--positional"),
        ({"causal": True, "window": 3}, "--causal, --window"),
    ],
    ids=str,
)
def test_order_of_a_saved_cross_attention_is_refused(
    options: dict[str, Any], flags: str, tmp_path: Path
) -> None:
    """By the options that were given."""
    file = tmp_path / "kv.safetensors"
    save_file(nn.MultiheadAttention(EMBED_DIM, HEADS, kdim=6, vdim=6).state_dict(), file)

    with pytest.raises(SourceInvalid) as caught:
        from_torch(file, HEADS, **options)

    assert str(caught.value) == (
        f"{flags}: expected self-attention, got cross-attention, whose queries and keys do not"
        " stand in one order; leave the option out, or say --attention self where keys and values"
        " come from the queries' own sequence"
    )


TABLES: dict[str, tuple[dict[str, Tensor], str]] = {
    "missing": (
        {"embed.pos.weight": torch.zeros(ROWS, EMBED_DIM)},
        "expected a tensor table, got none; it has embed.pos.weight",
    ),
    "missing, and nothing alike": ({}, "expected a tensor table, got none"),
    "another width": (
        {"table": torch.zeros(ROWS, 4)},
        f"table: expected a table of positions [rows, {EMBED_DIM}], got [{ROWS}, 4]",
    ),
    "several": (
        {"table": torch.zeros(2, ROWS, EMBED_DIM)},
        f"table: expected a table of positions [rows, {EMBED_DIM}], got [2, {ROWS}, {EMBED_DIM}]",
    ),
    "integers": (
        {"table": torch.zeros(ROWS, EMBED_DIM, dtype=torch.int64)},
        "table: expected floating-point weights",
    ),
}


@pytest.mark.parametrize(("tensors", "message"), TABLES.values(), ids=TABLES)
def test_stored_table_that_is_none_is_refused(tensors: dict[str, Tensor], message: str) -> None:
    """A misspelt name is answered with names that are alike."""
    with pytest.raises(SourceInvalid) as caught:
        stored_table(from_values("state dict", tensors), "table", EMBED_DIM)

    assert str(caught.value).startswith(f"state dict: {message}")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LayerConfig(EMBED_DIM, HEADS, EMBED_DIM),
            "--positional sinusoidal: expected self-attention without positions inside, got"
            " cross-attention",
        ),
        (
            LayerConfig(EMBED_DIM, HEADS, rotary=Rotary(1e4, 4)),
            "--positional sinusoidal: expected self-attention without positions inside, got a layer"
            " that has its own",
        ),
    ],
    ids=["cross", "rotary"],
)
def test_with_positional_layer_that_has_no_place_for_them_is_refused(
    config: LayerConfig, message: str
) -> None:
    """Positions are never added twice, nor to queries alone."""
    with pytest.raises(SourceInvalid) as caught:
        with_positional(random_spec(config, SEED), "sinusoidal")

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("kind", "table", "message"),
    [
        ("learned", None, "expected a table for learned, and only there"),
        ("sinusoidal", torch.zeros(1, EMBED_DIM), "expected a table for learned, and only there"),
        ("learned", torch.zeros(0, EMBED_DIM), "max_positions: expected a positive integer, got 0"),
    ],
    ids=str,
)
def test_with_positional_other_table_is_refused(
    kind: str, table: Tensor | None, message: str
) -> None:
    """Learned positions have a table of at least one row, sinusoidal ones have none."""
    spec = random_spec(LayerConfig(EMBED_DIM, HEADS), SEED)

    with pytest.raises(SourceInvalid, match=message):
        with_positional(spec, kind, table)  # type: ignore[arg-type]
