"""
What exporter and service agree on: tensor names, graph signature, manifest.

Only the standard library is known here, so that either side can read an
artifact's description without its runtime.

Axes: B batch, S query length, T key length (= S for self-attention), n extra keys,
E embed_dim, M memory width, M_v value memory width, H heads, K key/value heads, D head_dim.
"""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal

from service.layer_config import STRICT, LayerConfig

EMBEDDINGS: Final = "embeddings"
MEMORY: Final = "memory"
VALUE_MEMORY: Final = "value_memory"
POSITIONS: Final = "positions"
ATTEND_MASK: Final = "attend_mask"
PAIR_MASK: Final = "pair_mask"
HEAD_MASK: Final = "head_mask"
OUTPUT: Final = "output"
ATTENTION_WEIGHTS: Final = "attention_weights"
EXTRA_WEIGHTS: Final = "extra_weights"

PLAIN: Final = "plain"
"""
Graph input only: true takes the path without masks and weights, on which the layer is causal if
its configuration says so.
"""

LAYER_METADATA: Final = "headwise.layer"
"""
The graph's own word on which layer it is: `LayerConfig.to_json` among its metadata.

Parts of a configuration are computed outside the graph (windows, causal masks), so that a manifest
with another one would be answered wrongly.  Graphs of format 1 have none.
"""

FORMAT: Final = 2
"""
The manifest format that this code writes; it reads this and format 1.

It rises when a manifest of the old form would be misread.  A field that is only added has a
default instead, so that older manifests are still read; an older reader refuses the field by name.
"""

MANIFEST_FILE: Final = "manifest.json"
GRAPH_FILE: Final = "layer.onnx"
WEIGHTS_FILE: Final = "layer.weights"
GOLDEN_FILE: Final = "golden.safetensors"
ARTIFACT_FILES: Final = (GRAPH_FILE, WEIGHTS_FILE, GOLDEN_FILE)

PLAIN_OUTPUT: Final = "plain_output"
"""In the golden file: the answer to the same embeddings without any mask."""

WEIGHTS_SUFFIX: Final = "-weights"
"""Protocol clients reach `<name>` with its weights as the model `<name>-weights`."""

FP32_TOLERANCE: Final = 1e-5
"""|a-b| <= tolerance * max(1, max|expected|); weights absolute."""

NAME_PATTERN: Final = "[a-z0-9][a-z0-9._-]{0,62}"
VERSION_PATTERN: Final = "[1-9][0-9]{0,8}"
MAX_VERSION: Final = 999_999_999


def is_valid_name(name: str) -> bool:
    """Say whether `name` may name an artifact: `[a-z0-9][a-z0-9._-]{0,62}`, not `…-weights`."""
    return re.fullmatch(NAME_PATTERN, name) is not None and not name.endswith(WEIGHTS_SUFFIX)


def is_valid_version(version: str) -> bool:
    """Say whether `version` is a positive decimal integer without leading zeros."""
    return re.fullmatch(VERSION_PATTERN, version) is not None


@dataclass(frozen=True)
class GraphTensor:
    """One input or output of the ONNX graph; a named axis is free, a number is fixed."""

    name: str
    dtype: Literal["float32", "bool", "int64"]
    axes: tuple[str | int, ...]


def graph_inputs(layer: LayerConfig) -> tuple[GraphTensor, ...]:
    """
    List what the graph of `layer` must take, in order.

    The graph has one mask; the engine folds `attend_mask`, `causal` and the window into it.  While
    `plain` is true neither mask is looked at, so any shape will do.  `positions` has one row for
    all sequences, or one for each.
    """
    keys = "key_length" if layer.is_cross else "length"
    optional = []
    if layer.memory_dim is not None:
        optional.append(GraphTensor(MEMORY, "float32", ("batch", keys, layer.memory_dim)))
    if layer.value_memory_dim is not None:
        axes = ("batch", keys, layer.value_memory_dim)
        optional.append(GraphTensor(VALUE_MEMORY, "float32", axes))
    if layer.takes_positions:
        optional.append(GraphTensor(POSITIONS, "int64", ("position_rows", "length")))
    return (
        GraphTensor(EMBEDDINGS, "float32", ("batch", "length", layer.embed_dim)),
        *optional,
        GraphTensor(PAIR_MASK, "bool", ("mask_batch", "mask_heads", "mask_length", "mask_keys")),
        GraphTensor(HEAD_MASK, "float32", ("mask_rows", layer.num_heads)),
        GraphTensor(PLAIN, "bool", ()),
    )


def graph_outputs(layer: LayerConfig) -> tuple[GraphTensor, ...]:
    """List what the graph of `layer` must give, in order."""
    keys = "key_length" if layer.is_cross else "length"
    weights = ("batch", layer.num_heads, "length")
    extra = GraphTensor(EXTRA_WEIGHTS, "float32", (*weights, len(layer.extra_keys)))
    return (
        GraphTensor(OUTPUT, "float32", ("batch", "length", layer.embed_dim)),
        GraphTensor(ATTENTION_WEIGHTS, "float32", (*weights, keys)),
        *([extra] if layer.extra_keys else []),
    )


@dataclass(frozen=True)
class FileEntry:
    """How one file of an artifact must look."""

    __pydantic_config__: ClassVar = STRICT

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class ParityRow:
    """One cell of the publishing gate: how far the served answer was from one reference."""

    __pydantic_config__: ClassVar = STRICT

    batch: int
    length: int
    key_length: int
    masks: str
    reference: str
    output_error: float
    """max|a-b| / max(1, max|expected|)"""
    weights_error: float | None
    """max|a-b|; None = too many for the proof's memory, not compared in this cell"""


@dataclass(frozen=True)
class Manifest:
    """An artifact's description of itself."""

    __pydantic_config__: ClassVar = STRICT

    name: str
    version: int
    layer: LayerConfig
    precision: Literal["fp32"]
    tolerance: float
    input_scale: float
    """The standard deviation of the random inputs that the gate tried."""
    parity: tuple[ParityRow, ...]
    files: dict[str, FileEntry]
    source: dict[str, str | int]
    """Where the weights came from: a `kind` and what that kind needs."""
    versions: dict[str, str]
    """The torch, onnx and onnxruntime that made and checked it."""
    created: str
    """UTC, ISO 8601."""
    proven_on: dict[str, str | int] = field(default_factory=dict)
    """The processor and threads of the proof; empty = made before this was recorded."""
    tensors: tuple[str, ...] = ()
    """The names of the source's tensors that the layer was made of."""
    proof: Literal["whole", "reduced"] = "whole"
    """Which grid the parity rows are of: weights above 1 GB have fewer and smaller cells."""
    format: Literal[1, 2] = FORMAT

    def __post_init__(self) -> None:
        if not 0 < self.tolerance <= FP32_TOLERANCE:
            expected = f"more than 0, at most {FP32_TOLERANCE:g}"
            raise ValueError(f"tolerance: expected {expected}, got {self.tolerance:g}")

    @property
    def worst_output_error(self) -> float:
        """The largest relative output error of all parity rows."""
        return max((row.output_error for row in self.parity), default=0.0)

    @property
    def worst_weights_error(self) -> float:
        """The largest absolute weights error of all parity rows."""
        return max((row.weights_error or 0.0 for row in self.parity), default=0.0)

    def to_json(self) -> str:
        """Write the manifest as the text of `manifest.json`."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"
