"""
The calls with which the publishing gate tries a layer: lengths, batches and masks.

A call takes one of three ways through the graph (export/graph.py):
plain, without masks and weights, below `LONG` keys; plain from `LONG` keys on; and the branch
with masks and weights.  Each cell of the grid runs twice, with weights (always the third way)
and without.  The runtime's kernels differ by size, not by content: one query (vectors), a few
(the ends of vectorised loops), many (full blocks, shared among threads), and in the operator for
many keys whole blocks of them and a rest.

    length  batch  masks, and positions
    1       1      none, empty row      vectors; the softmax of one number, and of none
    1       3      none, all            the same in a batch
    7       1      none, causal, pair   odd; masks without the batch's axis
    7       3      each one, and all    odd; every way in which the engine folds masks into one
    128     2      none, padding        full blocks, many threads; positions of each row
    389     2      none                 an odd length above LONG: a rest; heads of a batch in order
    512     1      none, all            whole blocks above LONG; every mask at once there

What a mask hides depends on no length and no batch but through these; so the rest of the product
of lengths, batches and masks would run the same code again.

A layer whose weights exceed `LARGE_BYTES` has the reduced grid, since each run reads all of them
and each formula makes them float64, head by head, which takes seconds whatever the cell:

    1       1      none                 vectors
    7       3      none, causal, empty row, all     masks, batches and rows by themselves
    389     1      none                 full blocks and a rest, many threads, above LONG

Nothing in graph or engine depends on the width of a layer but the sizes of its products; what is
left out has been proven with smaller layers of the same configuration, by the same code.

Memory.  Weights are compared where they, and what each reference holds of their size, fit into
`WEIGHTS_BYTES`.  Beyond that (about 150 heads at 389 tokens) a plain cell is compared by
its output only, with the formula only, which needs one head at a time; and the cell with all
masks, whose branch makes all weights at once, takes the longest length that fits.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from export.layer_spec import tensor_shapes
from service.layer_config import LayerConfig

GRID = (
    (1, 1, ("none", "empty row")),
    (1, 3, ("none", "all")),
    (7, 1, ("none", "causal", "pair")),
    (
        7,
        3,
        ("none", "padding", "causal", "padding+causal", "pair", "head mask", "empty row", "all"),
    ),
    (128, 2, ("none", "padding")),
    (389, 2, ("none",)),
    (512, 1, ("none", "all")),
)
"""Length, batch and masks of each cell; "all" = padding, causal, pair and head mask at once."""

REDUCED_GRID = (
    (1, 1, ("none",)),
    (7, 3, ("none", "causal", "empty row", "all")),
    (389, 1, ("none",)),
)
"""The grid of layers with weights above `LARGE_BYTES`."""

LARGE_BYTES = 2**30
"""Layers with larger weights have the reduced grid."""

POSITION_KINDS = {7: ("positions",), 128: ("positions+padding",)}
"""The further masks of the grid's lengths, where calls may say positions."""

_SHORT = 7
"""The longest cells in which a layer that is causal by default is asked not to be."""

CROSS_KEYS = {1: 1, 7: 5, 128: 96, 389: 401, 512: 384}
"""How many keys the cells of cross-attention have, by their length: fewer, and more."""

WEIGHTS_BYTES = 2**30
"""What a cell's weights may take, with all that the references hold of the same size."""

_BYTES_OF_WEIGHT = 24
"""
Of one attention weight, while the hungriest reference (PyTorch's own layer) runs: the engine's
answer, scores, softmax and both masks as bytes and as numbers.
"""


@dataclass(frozen=True)
class Cell:
    """One place of the grid."""

    batch: int
    length: int
    key_length: int
    masks: str


def grid(config: LayerConfig) -> list[Cell]:
    """
    List the cells for a layer.

    Cross-attention has keys of other lengths and no causal; a layer that is causal by default is
    asked not to be instead; one that takes positions is given some in two more cells.  Sequences
    longer than a table of positions are given theirs, or else cut to its length.
    """
    cells = []
    for length, batch, kinds in GRID if proof_of(config) == "whole" else REDUCED_GRID:
        is_beyond = config.max_positions is not None and length > config.max_positions
        for kind in (*kinds, *(POSITION_KINDS.get(length, ()) if config.takes_positions else ())):
            if config.is_cross and "causal" in kind:
                continue
            masks = _for_causal(kind, length) if config.causal else kind
            if is_beyond and masks == "none":
                masks = "positions"
            is_cut = is_beyond and "positions" not in masks
            queries = (config.max_positions or length) if is_cut else length
            keys = CROSS_KEYS[length] if config.is_cross else queries
            cells.append(_within_memory(config, Cell(batch, queries, keys, masks)))
    return list(dict.fromkeys(cells))


def proof_of(config: LayerConfig) -> Literal["whole", "reduced"]:
    """Return which grid a layer of this configuration has."""
    size_bytes = 4 * sum(math.prod(shape) for shape in tensor_shapes(config).values())
    return "whole" if size_bytes <= LARGE_BYTES else "reduced"


def _for_causal(kind: str, length: int) -> str:
    """
    Return the masks that a layer which is causal by default has in place of those of a cell.

    It is causal wherever nothing else is said, and is asked not to be where sequences are short:
    without the mask, ALiBi's bias grows past what FP32 and a softmax tell apart.
    """
    if length <= _SHORT:
        return kind.replace("causal", "not causal")
    return kind.replace("+causal", "")


def _within_memory(config: LayerConfig, cell: Cell) -> Cell:
    """Return a masked cell halved until its weights fit; plain ones do without them."""
    while cell.masks != "none" and not compares_weights(config, cell) and cell.key_length > 1:
        cell = dataclasses.replace(
            cell, length=-(-cell.length // 2), key_length=-(-cell.key_length // 2)
        )
    return cell


def compares_weights(config: LayerConfig, cell: Cell) -> bool:
    """Say whether a cell's weights, and not only its output, fit into memory."""
    weights = cell.batch * config.num_heads * cell.length * cell.key_length
    return weights * _BYTES_OF_WEIGHT <= WEIGHTS_BYTES
