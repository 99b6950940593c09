"""
What exporter and service agree on: tensor names, graph signature, manifest.

Only the standard library is known here, so that either side can read an
artifact's description without its runtime.

Axes: B batch, S query length, T key length (= S for self-attention),
E embed_dim, M memory width, H heads.
"""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal

EMBEDDINGS: Final = "embeddings"
MEMORY: Final = "memory"
ATTEND_MASK: Final = "attend_mask"
PAIR_MASK: Final = "pair_mask"
HEAD_MASK: Final = "head_mask"
OUTPUT: Final = "output"
ATTENTION_WEIGHTS: Final = "attention_weights"

PLAIN: Final = "plain"
"""Graph input only: true takes the path without masks and weights."""

FORMAT: Final = 1
"""
The manifest format that this code writes and reads.

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

_STRICT: Final = {"extra": "forbid", "strict": True}
"""How pydantic, which this file does not import, must read the dataclasses below."""


def is_valid_name(name: str) -> bool:
    """Say whether `name` may name an artifact: `[a-z0-9][a-z0-9._-]{0,62}`, not `…-weights`."""
    return re.fullmatch(NAME_PATTERN, name) is not None and not name.endswith(WEIGHTS_SUFFIX)


def is_valid_version(version: str) -> bool:
    """Say whether `version` is a positive decimal integer without leading zeros."""
    return re.fullmatch(VERSION_PATTERN, version) is not None


@dataclass(frozen=True)
class LayerConfig:
    """
    The shape of one attention layer.

    Raises:
        ValueError: the numbers contradict each other.
    """

    __pydantic_config__: ClassVar = _STRICT

    embed_dim: int
    num_heads: int
    memory_dim: int | None = None
    """Width M of `memory`; None = self-attention."""
    bias: bool = True

    def __post_init__(self) -> None:
        if self.embed_dim < 1 or self.num_heads < 1:
            raise ValueError(
                "embed_dim and num_heads: expected positive integers,"
                f" got {self.embed_dim} and {self.num_heads}"
            )
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim: expected a multiple of num_heads {self.num_heads},"
                f" got {self.embed_dim}"
            )
        if self.memory_dim is not None and self.memory_dim < 1:
            raise ValueError(f"memory_dim: expected a positive integer, got {self.memory_dim}")

    @property
    def head_dim(self) -> int:
        """The width d_k of one head."""
        return self.embed_dim // self.num_heads

    @property
    def token_width(self) -> int:
        """How many numbers a token of the embeddings or of the memory has at most."""
        return max(self.embed_dim, self.memory_dim or 0)

    @property
    def is_cross(self) -> bool:
        """True when keys and values come from `memory`."""
        return self.memory_dim is not None


@dataclass(frozen=True)
class GraphTensor:
    """One input or output of the ONNX graph; a named axis is free, a number is fixed."""

    name: str
    dtype: Literal["float32", "bool"]
    axes: tuple[str | int, ...]


def graph_inputs(layer: LayerConfig) -> tuple[GraphTensor, ...]:
    """
    List what the graph of `layer` must take, in order.

    The graph's one mask is the ASGI path; the engine folds `attend_mask` and
    `causal` into it.  While `plain` is true neither mask is looked at, so any
    shape will do.
    """
    keys = "key_length" if layer.is_cross else "length"
    memory = (
        (GraphTensor(MEMORY, "float32", ("batch", keys, layer.memory_dim)),)
        if layer.memory_dim is not None
        else ()
    )
    return (
        GraphTensor(EMBEDDINGS, "float32", ("batch", "length", layer.embed_dim)),
        *memory,
        GraphTensor(PAIR_MASK, "bool", ("mask_batch", "mask_heads", "mask_length", "mask_keys")),
        GraphTensor(HEAD_MASK, "float32", ("mask_rows", layer.num_heads)),
        GraphTensor(PLAIN, "bool", ()),
    )


def graph_outputs(layer: LayerConfig) -> tuple[GraphTensor, ...]:
    """List what the graph of `layer` must give, in order."""
    keys = "key_length" if layer.is_cross else "length"
    return (
        GraphTensor(OUTPUT, "float32", ("batch", "length", layer.embed_dim)),
        GraphTensor(ATTENTION_WEIGHTS, "float32", ("batch", layer.num_heads, "length", keys)),
    )


@dataclass(frozen=True)
class FileEntry:
    """How one file of an artifact must look."""

    __pydantic_config__: ClassVar = _STRICT

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class ParityRow:
    """One cell of the publishing gate: how far the served answer was from one reference."""

    __pydantic_config__: ClassVar = _STRICT

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

    __pydantic_config__: ClassVar = _STRICT

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
    format: Literal[1] = FORMAT

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
