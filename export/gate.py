"""
The publishing gate: the engine that will serve an artifact against three references.

    layer    our PyTorch layer, the one that was exported
    torch    PyTorch's own nn.MultiheadAttention, where it has an answer
    formula  float64 numpy, head by head
    module   what came with the weights (`Source.oracle`), if anything did, without masks
    alone    the engine itself, one sequence at a time

Signature, shapes and values fail separately, each with its numbers.

What is tried is in `export.grid`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from export.attention import AttentionLayer
from export.errors import ExportRefused
from export.formula import Formula
from export.grid import Cell, compares_weights, grid
from export.sources import Source
from service.contract import FP32_TOLERANCE, ParityRow
from service.host.malloc import give_back
from service.inference.calls import Floats, Inputs, Lengths, Outputs
from service.inference.engine import Engine
from service.inference.parity import absolute_error, relative_error
from service.layer_config import LayerConfig

Numbers = npt.NDArray[Any]

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
class Report:
    """A gate that was passed."""

    rows: tuple[ParityRow, ...]
    input_scale: float
    """The standard deviation of the inputs that were tried."""


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
        give_back()  # what the C library keeps of one cell's tensors fits no other's
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
    """Return the float64 formula with the weights of the source."""
    return Formula(source.config, {name: t.numpy() for name, t in source.spec.tensors.items()})


def _check_cell(
    engine: Engine, source: Source, formula: Formula, cell: Cell, scale: float
) -> list[ParityRow]:
    inputs = _inputs(source, cell, scale)
    heads, embed_dim = source.config.num_heads, source.config.embed_dim
    found = [engine.run(inputs, weights=False).output]
    weights = None
    if compares_weights(source.config, cell):
        with_weights = engine.run(inputs, weights=True)
        found, weights = [with_weights.output, *found], all_weights(with_weights)
        if weights is None:
            raise ShapesDiffer(f"{cell}: expected attention weights, got none")
    for one in found:
        _check_shape(cell, "output", one, (cell.batch, cell.length, embed_dim))
    if weights is not None:
        keys = cell.key_length + len(source.config.extra_keys)
        _check_shape(cell, "attention_weights", weights, (cell.batch, heads, cell.length, keys))
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
            weights_error=_weights_error(weights, expected_weights, cell.key_length),
        )
        _check_row(row)
        rows.append(row)
    return rows


def all_weights(outputs: Outputs) -> Floats | None:
    """Return the weights of all keys, those of the extra ones last, [B, H, S, T + n]."""
    weights, extra = outputs.attention_weights, outputs.extra_weights
    return weights if weights is None or extra is None else _joined(weights, extra)


def _joined(weights: Numbers, extra: Numbers) -> Numbers:
    """Return the weights of all keys; without extra ones they are not copied."""
    return np.concatenate((weights, extra), -1) if extra.shape[-1] else weights


def _weights_error(
    found: Floats | None, expected: npt.NDArray[Any] | None, keys: int
) -> float | None:
    """Return `absolute_error`, head by head: a float64 copy of all would be twice their size."""
    if found is None or expected is None:
        return None
    if expected.shape[-1] == keys:  # a caller's module, which leaves those of extra keys out
        found = found[..., :keys]
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
        sources = inputs.embeddings, inputs.memory, inputs.value_memory
        yield "formula", formula.plain_output(*sources), None
        return
    exact = formula(
        inputs.embeddings,
        inputs.memory,
        inputs.value_memory,
        attend_mask=inputs.attend_mask,
        pair_mask=inputs.pair_mask,
        causal=inputs.causal,
        head_mask=inputs.head_mask,
        positions=inputs.positions,
    )
    yield "formula", exact.output, _joined(exact.weights, exact.extra_weights)
    del exact
    yield "layer", *ask_layer(source.layer, inputs)
    # nn.MultiheadAttention answers NaN to an empty row, and has no head mask.
    if source.reference is not None and cell.masks not in ("empty row", "head mask", "all"):
        yield "torch", *_ask_torch(source.reference, inputs)
    if source.oracle is not None and cell.masks == "none":
        yield "module", *source.oracle(inputs)
    if cell.batch > 1:
        yield "alone", *_ask_one_by_one(engine, inputs)


def ask_layer(layer: AttentionLayer, inputs: Inputs) -> tuple[Floats, Floats]:
    """Return the PyTorch layer's output and the weights of all keys, those of extra ones last."""
    with torch.no_grad():
        answer = layer(
            torch.from_numpy(inputs.embeddings),
            _tensor(inputs.memory),
            _tensor(inputs.value_memory),
            attend_mask=_tensor(inputs.attend_mask),
            pair_mask=_tensor(inputs.pair_mask),
            causal=inputs.causal,
            head_mask=_tensor(inputs.head_mask),
            positions=_tensor(inputs.positions),
        )
    return answer.output.numpy(), _joined(answer.weights.numpy(), answer.extra_weights.numpy())


def _ask_torch(layer: nn.MultiheadAttention, inputs: Inputs) -> tuple[Floats, Floats]:
    """In nn.MultiheadAttention a true mask entry means *ignore*."""
    query = torch.from_numpy(inputs.embeddings)
    key = query if inputs.memory is None else torch.from_numpy(inputs.memory)
    value = key if inputs.value_memory is None else torch.from_numpy(inputs.value_memory)
    hidden = torch.zeros(query.shape[1], key.shape[1], dtype=torch.bool)
    if inputs.causal:
        hidden = ~torch.ones_like(hidden).tril()
    if inputs.pair_mask is not None:
        pairs = torch.from_numpy(inputs.pair_mask).expand(len(query), layer.num_heads, -1, -1)
        hidden = (hidden | ~pairs).flatten(0, 1)
    padding = None if inputs.attend_mask is None else ~torch.from_numpy(inputs.attend_mask)
    with torch.no_grad():
        output, weights = layer(
            query,
            key,
            value,
            key_padding_mask=padding,
            attn_mask=hidden,
            need_weights=True,
            average_attn_weights=False,
        )
    return output.numpy(), weights.numpy()


def _ask_one_by_one(engine: Engine, inputs: Inputs) -> tuple[Floats, Floats]:
    outputs, weights = [], []
    for row in range(len(inputs.embeddings)):
        answer = engine.run(_one(inputs, slice(row, row + 1)), weights=True)
        outputs.append(answer.output)
        weights.append(all_weights(answer))
    return np.concatenate(outputs), np.concatenate([w for w in weights if w is not None])


def _one(inputs: Inputs, row: slice) -> Inputs:
    values = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    rows: dict[str, Any] = {k: v[row] for k, v in values.items() if isinstance(v, np.ndarray)}
    return dataclasses.replace(inputs, **rows)


def _tensor(array: npt.NDArray[Any] | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(array)


def _inputs(source: Source, cell: Cell, scale: float) -> Inputs:
    random = np.random.default_rng((_SEED, cell.batch, cell.length))
    config = source.config

    def tokens(length: int, width: int) -> Floats:
        shape = (cell.batch, length, width)
        return (scale * random.standard_normal(shape)).astype(np.float32)

    embeddings = tokens(cell.length, config.embed_dim)
    memory, value_memory = (
        None if width is None else tokens(cell.key_length, width)
        for width in (config.memory_dim, config.value_memory_dim)
    )
    attend_mask = pair_mask = head_mask = positions = None
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
    if "positions" in cell.masks:
        positions = _positions(config, cell, random)
    causal = "not causal" not in cell.masks and (
        config.causal or "causal" in cell.masks or (cell.masks == "all" and not config.is_cross)
    )
    return Inputs(
        embeddings, memory, attend_mask, pair_mask, head_mask, causal, value_memory, positions
    )


def _positions(config: LayerConfig, cell: Cell, random: np.random.Generator) -> Lengths:
    """Return positions with gaps; those of the first row lie beyond the length of the training."""
    steps = np.sort(random.integers(0, 2 * cell.length, (cell.batch, cell.length)), axis=1)
    if config.max_positions is not None:
        return steps % config.max_positions
    if config.rotary is not None and config.rotary.original_length is not None:
        steps[0] += config.rotary.original_length
    return steps


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
        formula.largest_logit(inputs.embeddings, inputs.memory, inputs.value_memory) >= LOGIT_LIMIT
        for inputs in tried
    )
