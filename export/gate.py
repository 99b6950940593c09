"""
The publishing gate: the engine that will serve an artifact against three references.

    layer    our PyTorch layer, the one that was exported
    torch    PyTorch's own nn.MultiheadAttention, where it has an answer
    formula  float64 numpy, head by head
    alone    the engine itself, one sequence at a time

Signature, shapes and values fail separately, each with its numbers.

What is tried, and why.  A call takes one of three ways through the graph (export/graph.py):
plain, without masks and weights, below `LONG` keys; plain from `LONG` keys on; and the branch
with masks and weights.  Each cell of the grid runs twice, with weights (always the third way)
and without.  The runtime's kernels differ by size, not by content: one query (vectors), a few
(the ends of vectorised loops), many (full blocks, shared among threads), and in the operator for
many keys whole blocks of them and a rest.

    length  batch  masks
    1       1      none, empty row      vectors; the softmax of one number, and of none
    1       3      none, all            the same in a batch
    7       1      none, causal, pair   odd; masks without the batch's axis
    7       3      each one, and all    odd; every way in which the engine folds masks into one
    128     3      none, padding        full blocks, many threads
    389     2      none, padding+causal an odd length above LONG: a rest; heads of a batch in order
    512     1      none, all            whole blocks above LONG; every mask at once there

What a mask hides depends on no length and no batch but through these; so the rest of the product
of lengths, batches and masks would run the same code again.

Memory.  Weights are compared where they, and what each reference holds of their size, fit into
`WEIGHTS_BYTES`.  Beyond that (about 150 heads at 389 tokens) a plain cell is compared by
its output only, with the formula only, which needs one head at a time; and the cell with all
masks, whose branch makes all weights at once, takes the longest length that fits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from export.errors import ExportRefused
from export.formula import Formula
from export.sources import Source
from service.contract import FP32_TOLERANCE, LayerConfig, ParityRow
from service.inference.calls import Bools, Floats, Inputs
from service.inference.engine import Engine
from service.inference.parity import absolute_error, relative_error

GRID = (
    (1, 1, ("none", "empty row")),
    (1, 3, ("none", "all")),
    (7, 1, ("none", "causal", "pair")),
    (
        7,
        3,
        ("none", "padding", "causal", "padding+causal", "pair", "head mask", "empty row", "all"),
    ),
    (128, 3, ("none", "padding")),
    (389, 2, ("none", "padding+causal")),
    (512, 1, ("none", "all")),
)
"""Length, batch and masks of each cell; "all" = padding, causal, pair and head mask at once."""

CROSS_KEYS = {1: 1, 7: 5, 128: 96, 389: 401, 512: 384}
"""How many keys the cells of cross-attention have, by their length: fewer, and more."""

WEIGHTS_BYTES = 2**30
"""What a cell's weights may take, with all that the references hold of the same size."""

_BYTES_OF_WEIGHT = 24
"""
Of one attention weight, while the hungriest reference (PyTorch's own layer) runs: the engine's
answer, scores, softmax and both masks as bytes and as numbers.
"""

LOGIT_LIMIT = 50.0
"""
The gate scales its inputs to stay below.

The contract's bound holds up to 100, where a trained layer was seen to use three
quarters of it on one processor; half of that leaves room for the others' rounding.
"""

_SEED = 20260101


class GateFailed(ExportRefused):
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


def grid(config: LayerConfig) -> list[Cell]:
    """List the cells for a layer; cross-attention has keys of other lengths and no causal."""
    return [
        _within_memory(
            config, Cell(batch, length, CROSS_KEYS[length] if config.is_cross else length, masks)
        )
        for length, batch, kinds in GRID
        for masks in kinds
        if not (config.is_cross and "causal" in masks)
    ]


def _within_memory(config: LayerConfig, cell: Cell) -> Cell:
    """Return a masked cell halved until its weights fit; plain ones do without them."""
    while cell.masks != "none" and not compares_weights(config, cell) and cell.key_length > 1:
        cell = replace(cell, length=-(-cell.length // 2), key_length=-(-cell.key_length // 2))
    return cell


def compares_weights(config: LayerConfig, cell: Cell) -> bool:
    """Say whether a cell's weights, and not only its output, fit into memory."""
    weights = cell.batch * config.num_heads * cell.length * cell.key_length
    return weights * _BYTES_OF_WEIGHT <= WEIGHTS_BYTES


def pass_gate(
    engine: Engine,
    source: Source,
    *,
    on_cell: Callable[[Cell | None, float], None] = lambda cell, share: None,
) -> Report:
    """
    Return how far the engine is from every reference, once it is near enough to all.

    `on_cell` is called with each cell of the grid when it has passed, and with the share of all
    the work that is done by then, 0 to 1; before that twice with None, at the beginning and when
    the inputs' scale is found.

    Raises:
        ShapesDiffer, ValuesDiffer: at the first cell that fails.
    """
    config = source.config
    formula, cells = formula_of(source), grid(config)
    plain = [cell for cell in cells if cell.masks == "none"]
    work = [sum(_work(config, cell) for cell in plain) / 4, *(_work(config, c) for c in cells)]
    shares = (np.cumsum(work) / np.sum(work)).tolist()
    on_cell(None, 0.0)
    scale = _input_scale(source, formula, plain)
    on_cell(None, shares[0])
    rows = []
    for cell, share in zip(cells, shares[1:], strict=True):
        rows += _check_cell(engine, source, formula, cell, scale)
        on_cell(cell, share)
    return Report(tuple(rows), scale)


def _work(config: LayerConfig, cell: Cell) -> float:
    """Return about how much computing a cell is, against other cells of the same layer."""
    e, m = config.embed_dim, config.memory_dim or config.embed_dim
    projections = 2 * e * (e * cell.length + m * cell.key_length)
    weights = cell.length * cell.key_length * (2 * e + 20 * config.num_heads)
    # Weights are read from memory once a run, and a run has its fixed cost, however few its rows.
    return cell.batch * (projections + weights) + 20 * 2 * e * (e + m) + 1e6


def formula_of(source: Source) -> Formula:
    """Return the float64 formula with the weights of the source's own PyTorch layer."""
    state = {name: tensor.numpy() for name, tensor in source.reference.state_dict().items()}
    return Formula(state, source.config.num_heads)


def _check_cell(
    engine: Engine, source: Source, formula: Formula, cell: Cell, scale: float
) -> list[ParityRow]:
    inputs = _inputs(source, cell, scale)
    heads, embed_dim = source.config.num_heads, source.config.embed_dim
    found = [engine.run(inputs, weights=False).output]
    weights = None
    if compares_weights(source.config, cell):
        with_weights = engine.run(inputs, weights=True)
        found, weights = [with_weights.output, *found], with_weights.attention_weights
        if weights is None:
            raise ShapesDiffer(f"{cell}: expected attention weights, got none")
    for one in found:
        _check_shape(cell, "output", one, (cell.batch, cell.length, embed_dim))
    if weights is not None:
        _check_shape(
            cell, "attention_weights", weights, (cell.batch, heads, cell.length, cell.key_length)
        )
    rows = []
    for name, output, expected_weights in _references(
        engine, source, formula, cell, inputs, want_weights=weights is not None
    ):
        row = ParityRow(
            batch=cell.batch,
            length=cell.length,
            key_length=cell.key_length,
            masks=cell.masks,
            reference=name,
            output_error=max(relative_error(one, output) for one in found),
            weights_error=_weights_error(weights, expected_weights),
        )
        _check_row(row)
        rows.append(row)
    return rows


def _weights_error(found: Floats | None, expected: npt.NDArray[Any] | None) -> float | None:
    """Return `absolute_error`, head by head: a float64 copy of all would be twice their size."""
    if found is None or expected is None:
        return None
    if found.shape != expected.shape:
        return absolute_error(found, expected)
    return max(absolute_error(found[:, i], expected[:, i]) for i in range(found.shape[1]))


def _check_shape(cell: Cell, name: str, found: Floats, expected: tuple[int, ...]) -> None:
    if found.shape != expected:
        raise ShapesDiffer(
            f"{cell}: {name}: expected shape {list(expected)}, got {list(found.shape)}"
        )


def _check_row(row: ParityRow) -> None:
    for name, error in (("output", row.output_error), ("attention_weights", row.weights_error)):
        if error is not None and not error <= FP32_TOLERANCE:
            raise ValuesDiffer(
                f"batch {row.batch}, length {row.length}, masks {row.masks}: {name} differs from"
                f" {row.reference} by {error:.3g}, allowed {FP32_TOLERANCE:.3g}"
            )


def _references(
    engine: Engine,
    source: Source,
    formula: Formula,
    cell: Cell,
    inputs: Inputs,
    *,
    want_weights: bool,
) -> Iterator[tuple[str, npt.ArrayLike, npt.NDArray[Any] | None]]:
    """Give each reference's answer by its name; none is kept while the next one runs."""
    if not want_weights:  # all others make all weights at once
        yield "formula", formula.plain_output(inputs.embeddings, inputs.memory), None
        return
    exact = formula(
        inputs.embeddings,
        inputs.memory,
        attend_mask=inputs.attend_mask,
        pair_mask=inputs.pair_mask,
        causal=inputs.causal,
        head_mask=inputs.head_mask,
    )
    yield "formula", exact.output, exact.weights
    del exact
    yield "layer", *_ask_layer(source, inputs)
    # nn.MultiheadAttention answers NaN to an empty row, and has no head mask.
    if cell.masks not in ("empty row", "head mask", "all"):
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
            head_mask=_tensor(inputs.head_mask),
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
        head_mask=None if inputs.head_mask is None else inputs.head_mask[row],
    )


def _tensor(mask: Bools | Floats | None) -> torch.Tensor | None:
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
    attend_mask = pair_mask = head_mask = None
    if "padding" in cell.masks or cell.masks == "all":
        # Key 0 always takes part, so that every query has one; the rest is scattered.
        attend_mask = random.random((cell.batch, cell.key_length)) < 0.7
        attend_mask[:, 0] = True
    if cell.masks in ("pair", "empty row", "all"):
        pairs = (cell.batch, config.num_heads, cell.length, cell.key_length)
        pair_mask = random.random(pairs, np.float32) < 0.7
        pair_mask[..., 0] = True
    if cell.masks == "empty row" and pair_mask is not None:
        pair_mask[0, :, -1, :] = False
    if cell.masks in ("head mask", "all"):
        head_mask = random.uniform(0.2, 2, (cell.batch, config.num_heads)).astype(np.float32)
    causal = "causal" in cell.masks or (cell.masks == "all" and not config.is_cross)
    return Inputs(embeddings, memory, attend_mask, pair_mask, head_mask, causal)


def _input_scale(source: Source, formula: Formula, plain: list[Cell]) -> float:
    """Return the largest of 1, 1/2, 1/4 … that keeps the logits of every cell in bounds."""
    scale = 1.0
    while scale >= 1e-6 and _passes_limit(source, formula, plain, scale):
        scale /= 2
    return scale


def _passes_limit(source: Source, formula: Formula, plain: list[Cell], scale: float) -> bool:
    # The longest first: it is the likeliest to say no.
    tried = (_inputs(source, cell, scale) for cell in reversed(plain))
    return any(
        formula.largest_logit(inputs.embeddings, inputs.memory) >= LOGIT_LIMIT for inputs in tried
    )
