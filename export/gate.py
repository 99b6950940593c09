"""
The publishing gate: the engine that will serve an artifact against three references.

    layer    our PyTorch layer, the one that was exported
    torch    PyTorch's own nn.MultiheadAttention, where it has an answer
    formula  float64 numpy, head by head
    alone    the engine itself, one sequence at a time

Signature, shapes and values fail separately, each with its numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from export.formula import Formula
from export.sources import Source
from service.contract import FP32_TOLERANCE, ParityRow
from service.inference.calls import Bools, Floats, Inputs
from service.inference.engine import Engine
from service.inference.parity import absolute_error, relative_error

BATCHES = (1, 3)
LENGTHS = (1, 2, 7, 128, 512)
MASKS = ("none", "padding", "causal", "padding+causal", "pair", "empty row")
LOGIT_LIMIT = 50.0
"""
The gate scales its inputs to stay below.

The contract's bound holds up to 100, where a trained layer was seen to use three
quarters of it on one processor; half of that leaves room for the others' rounding.
"""

_SEED = 20260101


class GateFailed(Exception):
    """The artifact does not answer as its layer does."""


class ShapesDiffer(GateFailed):
    """An answer has another shape than the contract gives."""


class ValuesDiffer(GateFailed):
    """An answer is further from a reference than the tolerance."""


@dataclass(frozen=True)
class Cell:
    """One place of the grid."""

    batch: int
    length: int
    key_length: int
    masks: str


@dataclass(frozen=True)
class Report:
    """A gate that was passed."""

    rows: tuple[ParityRow, ...]
    input_scale: float
    """The standard deviation of the inputs that were tried."""


def grid(source: Source) -> list[Cell]:
    """List the cells for this layer; cross-attention has keys of other lengths and no causal."""
    cross = source.config.is_cross
    return [
        Cell(batch, length, max(1, length * 3 // 4) if cross else length, masks)
        for length in LENGTHS
        for batch in BATCHES
        for masks in MASKS
        if not (cross and "causal" in masks)
    ]


def pass_gate(
    engine: Engine, source: Source, *, on_cell: Callable[[Cell], None] = lambda cell: None
) -> Report:
    """
    Return how far the engine is from every reference, once it is near enough to all.

    `on_cell` is called after each cell of `grid(source)`.

    Raises:
        ShapesDiffer, ValuesDiffer: at the first cell that fails.
    """
    formula = formula_of(source)
    scale = _input_scale(source, formula)
    rows = []
    for cell in grid(source):
        rows += _check_cell(engine, source, formula, cell, scale)
        on_cell(cell)
    return Report(tuple(rows), scale)


def formula_of(source: Source) -> Formula:
    """Return the float64 formula with the weights of the source's own PyTorch layer."""
    state = {name: tensor.numpy() for name, tensor in source.reference.state_dict().items()}
    return Formula(state, source.config.num_heads)


def _check_cell(
    engine: Engine, source: Source, formula: Formula, cell: Cell, scale: float
) -> list[ParityRow]:
    inputs = _inputs(source, cell, scale)
    with_weights = engine.run(inputs, weights=True)
    without = engine.run(inputs, weights=False)
    weights = with_weights.attention_weights
    if weights is None:
        raise ShapesDiffer(f"{cell}: expected attention weights, got none")
    heads, embed_dim = source.config.num_heads, source.config.embed_dim
    _check_shape(cell, "output", with_weights.output, (cell.batch, cell.length, embed_dim))
    _check_shape(cell, "output", without.output, (cell.batch, cell.length, embed_dim))
    _check_shape(
        cell, "attention_weights", weights, (cell.batch, heads, cell.length, cell.key_length)
    )
    rows = []
    for name, output, expected_weights in _references(engine, source, formula, cell, inputs):
        row = ParityRow(
            batch=cell.batch,
            length=cell.length,
            key_length=cell.key_length,
            masks=cell.masks,
            reference=name,
            output_error=max(
                relative_error(with_weights.output, output), relative_error(without.output, output)
            ),
            weights_error=absolute_error(weights, expected_weights),
        )
        _check_row(row)
        rows.append(row)
    return rows


def _check_shape(cell: Cell, name: str, found: Floats, expected: tuple[int, ...]) -> None:
    if found.shape != expected:
        raise ShapesDiffer(
            f"{cell}: {name}: expected shape {list(expected)}, got {list(found.shape)}"
        )


def _check_row(row: ParityRow) -> None:
    for name, error in (("output", row.output_error), ("attention_weights", row.weights_error)):
        if not error <= FP32_TOLERANCE:
            raise ValuesDiffer(
                f"batch {row.batch}, length {row.length}, masks {row.masks}: {name} differs from"
                f" {row.reference} by {error:.3g}, allowed {FP32_TOLERANCE:.3g}"
            )


def _references(
    engine: Engine, source: Source, formula: Formula, cell: Cell, inputs: Inputs
) -> Iterator[tuple[str, npt.ArrayLike, npt.ArrayLike]]:
    exact = formula(
        inputs.embeddings,
        inputs.memory,
        attend_mask=inputs.attend_mask,
        pair_mask=inputs.pair_mask,
        causal=inputs.causal,
    )
    yield "formula", exact.output, exact.weights
    yield "layer", *_ask_layer(source, inputs)
    if cell.masks != "empty row":  # nn.MultiheadAttention answers NaN to that
        yield "torch", *_ask_torch(source, inputs)
    if cell.batch > 1:
        yield "alone", *_ask_one_by_one(engine, inputs)


def _ask_layer(source: Source, inputs: Inputs) -> tuple[Floats, Floats]:
    with torch.no_grad():
        output, weights = source.layer(
            torch.from_numpy(inputs.embeddings),
            None if inputs.memory is None else torch.from_numpy(inputs.memory),
            attend_mask=_tensor(inputs.attend_mask),
            pair_mask=_tensor(inputs.pair_mask),
            causal=inputs.causal,
        )
    return output.numpy(), weights.numpy()


def _ask_torch(source: Source, inputs: Inputs) -> tuple[Floats, Floats]:
    """In nn.MultiheadAttention a true mask entry means *ignore*."""
    query = torch.from_numpy(inputs.embeddings)
    key = query if inputs.memory is None else torch.from_numpy(inputs.memory)
    hidden = torch.zeros(query.shape[1], key.shape[1], dtype=torch.bool)
    if inputs.causal:
        hidden = ~torch.ones_like(hidden).tril()
    if inputs.pair_mask is not None:
        rows, heads = query.shape[0], source.config.num_heads
        pairs = torch.from_numpy(inputs.pair_mask).expand(rows, heads, -1, -1)
        hidden = (hidden | ~pairs).flatten(0, 1)
    padding = None if inputs.attend_mask is None else ~torch.from_numpy(inputs.attend_mask)
    with torch.no_grad():
        output, weights = source.reference(
            query,
            key,
            key,
            key_padding_mask=padding,
            attn_mask=hidden,
            need_weights=True,
            average_attn_weights=False,
        )
    return output.numpy(), weights.numpy()


def _ask_one_by_one(engine: Engine, inputs: Inputs) -> tuple[Floats, Floats]:
    outputs, weights = [], []
    for row in range(inputs.embeddings.shape[0]):
        answer = engine.run(_one(inputs, slice(row, row + 1)), weights=True)
        outputs.append(answer.output)
        weights.append(answer.attention_weights)
    return np.concatenate(outputs), np.concatenate([w for w in weights if w is not None])


def _one(inputs: Inputs, row: slice) -> Inputs:
    return Inputs(
        embeddings=inputs.embeddings[row],
        memory=None if inputs.memory is None else inputs.memory[row],
        attend_mask=None if inputs.attend_mask is None else inputs.attend_mask[row],
        pair_mask=None if inputs.pair_mask is None else inputs.pair_mask[row],
        causal=inputs.causal,
    )


def _tensor(mask: Bools | None) -> torch.Tensor | None:
    return None if mask is None else torch.from_numpy(mask)


def _inputs(source: Source, cell: Cell, scale: float) -> Inputs:
    random = np.random.default_rng((_SEED, cell.batch, cell.length))
    config = source.config
    shape = (cell.batch, cell.length, config.embed_dim)
    embeddings = (scale * random.standard_normal(shape)).astype(np.float32)
    memory = None
    if config.memory_dim is not None:
        shape = (cell.batch, cell.key_length, config.memory_dim)
        memory = (scale * random.standard_normal(shape)).astype(np.float32)
    attend_mask = pair_mask = None
    if "padding" in cell.masks:
        # Key 0 always takes part, so that every query has one; the rest is scattered.
        attend_mask = random.random((cell.batch, cell.key_length)) < 0.7
        attend_mask[:, 0] = True
    if cell.masks in ("pair", "empty row"):
        pairs = (cell.batch, config.num_heads, cell.length, cell.key_length)
        pair_mask = random.random(pairs) < 0.7
        pair_mask[..., 0] = True
    if cell.masks == "empty row" and pair_mask is not None:
        pair_mask[0, :, -1, :] = False
    return Inputs(embeddings, memory, attend_mask, pair_mask, causal="causal" in cell.masks)


def _input_scale(source: Source, formula: Formula) -> float:
    """Return the largest of 1, 1/2, 1/4 … that keeps the logits of every cell in bounds."""
    # The longest first: it is the likeliest to say no.
    cells = [cell for cell in reversed(grid(source)) if cell.masks == "none"]
    scale = 1.0
    while scale >= 1e-6 and _passes_limit(source, formula, cells, scale):
        scale /= 2
    return scale


def _passes_limit(source: Source, formula: Formula, cells: list[Cell], scale: float) -> bool:
    tried = (_inputs(source, cell, scale) for cell in cells)
    return any(
        formula(inputs.embeddings, inputs.memory).largest_logit >= LOGIT_LIMIT for inputs in tried
    )
