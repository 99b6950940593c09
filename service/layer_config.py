"""
What an attention layer computes, beside its weights.

Axes: B batch, S query length, T key length (= S for self-attention), n extra keys,
E embed_dim, M memory width, M_v value memory width, H heads, K key/value heads, D head_dim.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

STRICT: Final = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
"""
How pydantic, which this file does not import, must read the dataclasses of a manifest: no other
type is converted, no other key passed over.
"""

_LARGEST: Final = 2**31 - 1
"""Of the integers: what every reader of a manifest, and every client, can hold."""

Projection = Literal["query", "key", "value", "output"]
PROJECTIONS: Final[tuple[Projection, ...]] = ("query", "key", "value", "output")

ExtraKey = Literal["learned", "zero", "sink"]
"""
A key beside those of the sequence, which every query may attend to whatever is masked.

learned   a trained key and value (`bias_k`, `bias_v` of nn.MultiheadAttention)
zero      a key and value of zeros (`add_zero_attn` of nn.MultiheadAttention)
sink      a trained logit for each head, with a value of zeros (gpt-oss)
"""

MAX_POSITION: Final = 2**24 - 1
"""The largest position: FP32, in which angles are computed, counts no further."""


@dataclass(frozen=True)
class Rotary:
    """
    Rotary positions (Su et al. 2021, arXiv:2104.09864): the first `dims` numbers of each head's
    queries and keys are turned, in pairs, by position times the pair's frequency.

    The frequencies are among the layer's weights; angles are FP32, as trained models compute them.

    Raises:
        ValueError: a value is out of range, or a scaling lacks what it needs.
    """

    __pydantic_config__: ClassVar = STRICT

    base: float
    dims: int
    interleaved: bool = False
    """Pairs are (0, 1), (2, 3), …; else (0, dims/2), (1, dims/2 + 1), …"""
    scaling: Literal["none", "linear", "dynamic", "yarn", "longrope", "llama3"] = "none"
    """
    How frequencies were changed for longer sequences than those of the training, as Hugging Face
    transformers names it.  `dynamic` and `longrope` depend on each sequence's largest position.
    """
    factor: float = 1.0
    """By how much `scaling` stretches positions."""
    original_length: int | None = None
    """The length of the training, from which `dynamic` and `longrope` change."""
    magnitude: float = 1.0
    """Multiplies cosine and sine (`attention_factor` of transformers)."""

    def __post_init__(self) -> None:
        if self.dims < 2 or self.dims % 2:
            raise ValueError(f"rotary.dims: expected a positive even number, got {self.dims}")
        for name in ("base", "factor", "magnitude"):
            _check_positive(f"rotary.{name}", getattr(self, name))
        _check_integer("rotary.original_length", self.original_length)
        if self.depends_on_length and not self.original_length:
            raise ValueError(f"rotary.original_length: expected one for {self.scaling}, got none")
        if self.scaling == "dynamic" and self.dims < 4:
            raise ValueError(f"rotary.dims: expected at least 4 for dynamic, got {self.dims}")

    @property
    def depends_on_length(self) -> bool:
        """True when the frequencies depend on a sequence's largest position."""
        return self.scaling in ("dynamic", "longrope")


@dataclass(frozen=True)
class Norm:
    """
    The normalisation of queries and keys after their projections, before rotary positions.

    rms     x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019)
    layer   (x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias (Ba et al. 2016)
    """

    __pydantic_config__: ClassVar = STRICT

    kind: Literal["rms", "layer"]
    epsilon: float
    span: Literal["head", "projection"] = "head"
    """Over each head's numbers, with weights that all heads share, or over all heads' together."""

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < math.inf:
            raise ValueError(f"norm.epsilon: expected 0 or more, got {self.epsilon}")


@dataclass(frozen=True)
class PositionBias:
    """
    What is added to the logit of query s and key t for the distance of their positions.

    alibi     slope_h * (position_t - position_s) (Press et al. 2022)
    buckets   table[clip(position_t - position_s, -reach, reach) + reach, h]: T5's buckets
              (Raffel et al. 2020), one row a distance; beyond `reach` they do not change
    """

    __pydantic_config__: ClassVar = STRICT

    kind: Literal["alibi", "buckets"]
    reach: int = 0

    def __post_init__(self) -> None:
        if (self.kind == "buckets") != (self.reach > 0):
            raise ValueError(
                f"position_bias.reach: expected a positive number for buckets, 0 for alibi,"
                f" got {self.reach} for {self.kind}"
            )
        _check_integer("position_bias.reach", self.reach or None)


@dataclass(frozen=True)
class LayerConfig:
    """
    What one attention layer computes, beside its weights.

    Raises:
        ValueError: a value is out of range, or values contradict each other.
    """

    __pydantic_config__: ClassVar = STRICT

    embed_dim: int
    num_heads: int
    memory_dim: int | None = None
    """Width M of `memory`; None = self-attention."""
    value_memory_dim: int | None = None
    """Width M_v of `value_memory`, the source of values; None = they are made of `memory`."""
    num_kv_heads: int = 0
    """How many heads keys and values have; each serves H/K query heads.  0 becomes H."""
    head_dim: int = 0
    """The width D of one head; 0 becomes E/H."""
    biases: tuple[Projection, ...] = PROJECTIONS
    """The projections that have a bias."""
    scale: float | None = None
    """Multiplies Q K^T; None = 1/sqrt(D)."""
    softcap: float | None = None
    """Logits x become softcap * tanh(x / softcap), before masks and position bias."""
    causal: bool = False
    """What a call is that does not say: true = query s attends to keys t <= s only."""
    window: int | None = None
    """Query s attends to key t only where |s - t| < window."""
    rotary: Rotary | None = None
    norm: Norm | None = None
    """Of queries and keys."""
    position_bias: PositionBias | None = None
    extra_keys: tuple[ExtraKey, ...] = ()
    """Keys beside those of the sequence, in the order of `extra_weights`."""
    positional: Literal["sinusoidal", "learned"] | None = None
    """
    What is added to the embeddings for their positions: sin(p / 10000^(2i/E)) and the cosine in
    turn (Vaswani et al. 2017, section 3.5), or a row of a table.
    """
    max_positions: int | None = None
    """How many rows the table of `positional` learned has."""

    def __post_init__(self) -> None:
        if self.embed_dim < 1 or self.num_heads < 1:
            raise ValueError(
                "embed_dim and num_heads: expected positive integers,"
                f" got {self.embed_dim} and {self.num_heads}"
            )
        if self.head_dim == 0 and self.embed_dim % self.num_heads:
            expected = f"a multiple of num_heads {self.num_heads}"
            raise ValueError(f"embed_dim: expected {expected}, got {self.embed_dim}")
        object.__setattr__(self, "head_dim", self.head_dim or self.embed_dim // self.num_heads)
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        for name in _INTEGERS:
            _check_integer(name, getattr(self, name))
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            expected = f"a divisor of num_heads {self.num_heads}"
            raise ValueError(f"num_kv_heads: expected {expected}, got {self.num_kv_heads}")
        for name in ("scale", "softcap"):
            _check_positive(name, getattr(self, name))
        for problem in self._contradictions():
            raise ValueError(problem)

    def _contradictions(self) -> Iterator[str]:
        if self.value_memory_dim is not None and self.memory_dim is None:
            yield "value_memory_dim: expected none for self-attention, which has no memory"
        if self.is_cross and (self.takes_positions or self.causal or self.window):
            yield "memory_dim: cross-attention has no positions, causal default or window"
        if self.rotary is not None and self.rotary.dims > self.head_dim:
            yield f"rotary.dims: expected at most head_dim {self.head_dim}, got {self.rotary.dims}"
        if (self.positional == "learned") != (self.max_positions is not None):
            yield "max_positions: expected with positional learned, and only there"
        if (self.max_positions or 0) > MAX_POSITION + 1:
            yield f"max_positions: expected at most {MAX_POSITION + 1}, got {self.max_positions}"
        if len(set(self.biases)) < len(self.biases):
            yield f"biases: expected each projection once, got {list(self.biases)}"
        if len(set(self.extra_keys)) < len(self.extra_keys):
            yield f"extra_keys: expected each kind once, got {list(self.extra_keys)}"

    @property
    def token_width(self) -> int:
        """How many numbers a token of the embeddings, or a key of both memories, has at most."""
        return max(self.embed_dim, (self.memory_dim or 0) + (self.value_memory_dim or 0))

    @property
    def is_cross(self) -> bool:
        """True when keys and values come from `memory`."""
        return self.memory_dim is not None

    @property
    def takes_positions(self) -> bool:
        """True when the answer depends on the tokens' positions, so that a call may give them."""
        return not (self.rotary is None and self.position_bias is None and self.positional is None)

    @property
    def is_of_format_1(self) -> bool:
        """True when manifests of format 1 could describe the layer."""
        e, h, m, biases = self.embed_dim, self.num_heads, self.memory_dim, self.biases
        return biases in ((), PROJECTIONS) and self == LayerConfig(e, h, m, biases=biases)

    def to_json(self) -> str:
        """Return the configuration as text, the same for equal ones."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @property
    def logit_scale(self) -> float:
        """What multiplies Q K^T."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


_INTEGERS: Final = (
    *("embed_dim", "num_heads", "memory_dim", "value_memory_dim", "num_kv_heads", "head_dim"),
    *("window", "max_positions"),
)


def _check_integer(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{name}: expected a positive integer, got {value}")
    if value is not None and value > _LARGEST:
        raise ValueError(f"{name}: expected at most {_LARGEST}, got {value}")


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:  # NaN neither
        raise ValueError(f"{name}: expected a positive number, got {value}")
