"""
Attention once more, in float64 numpy, written apart from `attention.py`.

    head_i = softmax(Q_i K_g^T * scale + bias_i) V_g        g = i // (H / K), the group of head i
    output = sum_i head_i W_i^O + b^O

(Vaswani et al. 2017, section 3.2.2; the sum over heads is the concatenation times W^O, spelt
out.)  What else a `LayerConfig` may ask for is explained there.  It works head by head from the
weights as the source has them, so a slip in fusing, splitting or ordering heads cannot hide in it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from service.layer_config import LayerConfig, Rotary

Doubles = npt.NDArray[np.float64]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Answer:
    """
    What the formula gives.

    Shapes:
        output         [B, S, E]
        weights        [B, H, S, T], those of the sequence's own keys
        extra_weights  [B, H, S, n]
    """

    output: Doubles
    weights: Doubles
    extra_weights: Doubles


@dataclass(frozen=True)
class _Sources:
    """
    What queries, keys and values are made of, and where they stand.

    Shapes: queries [B, S, E], keys [B, T, M], values [B, T, M_v], positions [B or 1, S].
    """

    queries: Doubles
    keys: Doubles
    values: Doubles
    positions: Array
    kept: dict[str, tuple[slice, Doubles]] = field(default_factory=dict)
    """What heads in turn share, by its name: the last rows of the weights and what they gave."""

    def keep(self, name: str, rows: slice, compute: Callable[[], Doubles]) -> Doubles:
        """Return what was computed for these rows just before, or compute it now."""
        if name not in self.kept or self.kept[name][0] != rows:
            self.kept[name] = rows, compute()
        return self.kept[name][1]


class Formula:
    """
    The formula for one layer, with its weights by the names of `export.layer_spec`.

    Beside those arrays, which are not copied, only one head is in memory at a time, in float64,
    with the keys and values of its group.
    """

    def __init__(self, config: LayerConfig, tensors: Mapping[str, npt.ArrayLike]) -> None:
        self._config = config
        self._weights = {name: np.asarray(value) for name, value in tensors.items()}

    def __call__(
        self,
        embeddings: npt.ArrayLike,
        memory: npt.ArrayLike | None = None,
        value_memory: npt.ArrayLike | None = None,
        *,
        attend_mask: npt.ArrayLike | None = None,
        pair_mask: npt.ArrayLike | None = None,
        causal: bool | None = None,
        head_mask: npt.ArrayLike | None = None,
        positions: npt.ArrayLike | None = None,
    ) -> Answer:
        """Attend; shapes as in the contract, `causal` None = the layer's default."""
        source = self._sources(embeddings, memory, value_memory, positions)
        rows, queries, keys = *source.queries.shape[:2], source.keys.shape[1]
        allowed = self._allowed((queries, keys), attend_mask, pair_mask, causal)
        heads, extra = self._config.num_heads, len(self._config.extra_keys)
        weights = np.empty((rows, heads, queries, keys + extra))
        output = self._attend(source, allowed, head_mask, weights)
        return Answer(output, weights[..., :keys], weights[..., keys:])

    def plain_output(
        self,
        embeddings: npt.ArrayLike,
        memory: npt.ArrayLike | None = None,
        value_memory: npt.ArrayLike | None = None,
    ) -> Doubles:
        """Return the output without masks; no more than one head's weights are in memory."""
        source = self._sources(embeddings, memory, value_memory, None)
        allowed = self._allowed((source.queries.shape[1], source.keys.shape[1]), None, None, None)
        return self._attend(source, allowed, None, None)

    def largest_logit(
        self,
        embeddings: npt.ArrayLike,
        memory: npt.ArrayLike | None = None,
        value_memory: npt.ArrayLike | None = None,
    ) -> float:
        """Return the largest size of a logit without its position bias, over all heads."""
        source = self._sources(embeddings, memory, value_memory, None)
        heads = range(self._config.num_heads)
        return max(float(np.abs(self._products(i, source)).max()) for i in heads)

    def _sources(
        self,
        embeddings: npt.ArrayLike,
        memory: npt.ArrayLike | None,
        value_memory: npt.ArrayLike | None,
        positions: npt.ArrayLike | None,
    ) -> _Sources:
        x = np.asarray(embeddings, np.float64)
        places = np.arange(x.shape[1])[None] if positions is None else np.asarray(positions)
        if self._config.positional is not None:
            x = x + self._positional(places)
        y = x if memory is None else np.asarray(memory, np.float64)
        z = y if value_memory is None else np.asarray(value_memory, np.float64)
        return _Sources(x, y, z, places)

    def _positional(self, positions: Array) -> Doubles:
        """Return what positions add to the embeddings, [B or 1, S, E]."""
        if self._config.positional == "learned":
            return self._weights["positional.table"][positions].astype(np.float64)
        width = self._config.embed_dim
        pairs = np.arange(width) // 2
        # Angles are FP32 in models that compute them; so are they here.
        frequencies = (10000.0 ** (-2 * pairs / width)).astype(np.float32)
        angles = (positions[..., None].astype(np.float32) * frequencies).astype(np.float64)
        return np.where(np.arange(width) % 2 == 0, np.sin(angles), np.cos(angles))

    def _attend(
        self,
        source: _Sources,
        allowed: npt.NDArray[np.bool_],
        head_mask: npt.ArrayLike | None,
        weights: Doubles | None,
    ) -> Doubles:
        """Return the output, and write each head's weights into `weights`, if given."""
        config = self._config
        rows, length, _ = source.queries.shape
        factors = np.ones((rows, config.num_heads))
        if head_mask is not None:
            factors = factors * np.asarray(head_mask, np.float64)
        output = np.zeros((rows, length, config.embed_dim)) + self._bias("output", slice(None))
        for i in range(config.num_heads):
            allowed_keys = allowed[:, i if allowed.shape[1] > 1 else 0]
            head_weights = _softmax(*self._with_extra_logits(i, source, allowed_keys))
            head = head_weights @ self._values(i, source)
            matrix = self._weights["output.weight"][:, self._rows(i)].astype(np.float64)
            share = (factors[:, i, None, None] * head) @ matrix.T
            output += share
            if weights is not None:
                weights[:, i] = head_weights
        return output

    def _with_extra_logits(
        self, i: int, source: _Sources, allowed: npt.NDArray[np.bool_]
    ) -> tuple[Doubles, npt.NDArray[np.bool_]]:
        """Return the logits of all keys, and which of them take part; extra ones always do."""
        logits = self._logits(i, source)
        shape = (*logits.shape[:2], 1)
        for kind in self._config.extra_keys:
            extra = np.zeros(shape)
            if kind == "learned":
                key = self._weights["extra.key"][self._key_rows(i)].astype(np.float64)
                extra = self._capped(self._queries(i, source) @ key[:, None])
            elif kind == "sink":
                extra = extra + float(self._weights["extra.sinks"][i])
            logits = np.concatenate([logits, extra], axis=-1)
        always = np.ones((*allowed.shape[:-1], len(self._config.extra_keys)), bool)
        return logits, np.concatenate([allowed, always], axis=-1)

    def _values(self, i: int, source: _Sources) -> Doubles:
        """Return the values of all keys for head i, [B, T + n, D]."""
        rows = self._key_rows(i)
        values = source.keep("value", rows, lambda: self._project("value", rows, source.values))
        for kind in self._config.extra_keys:
            extra = np.zeros((len(values), 1, values.shape[-1]))
            if kind == "learned":
                extra += self._weights["extra.value"][self._key_rows(i)]
            values = np.concatenate([values, extra], axis=1)
        return values

    def _logits(self, i: int, source: _Sources) -> Doubles:
        """Return the logits of the sequence's own keys for head i, [B, S, T]."""
        logits = self._products(i, source)
        bias = self._config.position_bias
        if bias is None:
            return logits
        distances = source.positions[:, None, :] - source.positions[:, :, None]  # t - s
        if bias.kind == "alibi":
            return logits + float(self._weights["position_bias.slopes"][i]) * distances
        table = self._weights["position_bias.table"][:, i].astype(np.float64)
        added: Doubles = logits + table[np.clip(distances, -bias.reach, bias.reach) + bias.reach]
        return added

    def _products(self, i: int, source: _Sources) -> Doubles:
        """Return the logits without their position bias, [B, S, T]."""
        keys = self._keys(i, source)
        return self._capped(self._queries(i, source) @ keys.swapaxes(1, 2))

    def _capped(self, products: Doubles) -> Doubles:
        """Return the logits of products of queries and keys."""
        logits = products * self._config.logit_scale
        cap = self._config.softcap
        return logits if cap is None else cap * np.tanh(logits / cap)

    def _queries(self, i: int, source: _Sources) -> Doubles:
        """Return the queries of head i, [B, S, D]."""
        return self._placed("query", self._rows(i), source.queries, source)

    def _keys(self, i: int, source: _Sources) -> Doubles:
        """Return the keys of head i's group, [B, T, D]."""
        rows = self._key_rows(i)
        return source.keep("key", rows, lambda: self._placed("key", rows, source.keys, source))

    def _placed(self, name: str, rows: slice, x: Doubles, source: _Sources) -> Doubles:
        """Return one head's projection, normalised and turned."""
        projected = self._project(name, rows, x)
        if (norm := self._config.norm) is not None:
            numbers = slice(None) if norm.span == "head" else rows
            moments = _moments(projected)
            if norm.span == "projection":
                everything = slice(None)
                moments = source.keep(
                    f"{name} moments",
                    everything,
                    lambda: _moments(self._project(name, everything, x)),
                )
            mean, variance, mean_square = moments
            if norm.kind == "layer":
                projected, mean_square = projected - mean, variance
            projected = projected / np.sqrt(mean_square + norm.epsilon)
            projected = projected * self._weights[f"{name}_norm.weight"][numbers]
            if norm.kind == "layer":
                projected = projected + self._weights[f"{name}_norm.bias"][numbers]
        rotary = self._config.rotary
        return projected if rotary is None else self._turned(rotary, projected, source.positions)

    def _turned(self, rotary: Rotary, x: Doubles, positions: Array) -> Doubles:
        """Return x [B, L, D] turned by its positions [B or 1, L]."""
        frequencies = self._frequencies(rotary, positions)  # [B or 1, 1, dims/2]
        angles = positions[..., None].astype(np.float32) * frequencies.astype(np.float32)
        cosine = np.cos(angles.astype(np.float64)) * rotary.magnitude
        sine = np.sin(angles.astype(np.float64)) * rotary.magnitude
        half = rotary.dims // 2
        if rotary.interleaved:
            first, second = np.arange(0, rotary.dims, 2), np.arange(1, rotary.dims, 2)
        else:
            first, second = np.arange(half), np.arange(half, rotary.dims)
        turned = x.copy()
        turned[..., first] = x[..., first] * cosine - x[..., second] * sine
        turned[..., second] = x[..., second] * cosine + x[..., first] * sine
        return turned

    def _frequencies(self, rotary: Rotary, positions: Array) -> Array:
        """Return radians a position, [B or 1, 1, dims/2]."""
        trained = self._weights["rotary.frequencies"][None, None]
        if not rotary.depends_on_length or rotary.original_length is None:
            return trained
        lengths = (positions.max(axis=1) + 1)[:, None, None]  # of each sequence
        longer = lengths > rotary.original_length
        if rotary.scaling == "longrope":
            return np.where(longer, self._weights["rotary.long_frequencies"], trained)
        # "NTK-aware" scaling, as in transformers.modeling_rope_utils.
        stretch = rotary.factor * lengths / rotary.original_length - (rotary.factor - 1)
        base = rotary.base * np.maximum(stretch, 1.0) ** (rotary.dims / (rotary.dims - 2))
        exponents = np.arange(0, rotary.dims, 2) / rotary.dims
        return np.where(longer, base**-exponents, trained)

    def _project(self, name: str, rows: slice, x: Doubles) -> Doubles:
        matrix = self._weights[f"{name}.weight"][rows].astype(np.float64)
        projected: Doubles = x @ matrix.T + self._bias(name, rows)
        return projected

    def _bias(self, name: str, rows: slice) -> Doubles | float:
        bias = self._weights.get(f"{name}.bias")
        return 0.0 if bias is None else bias[rows].astype(np.float64)

    def _rows(self, i: int) -> slice:
        """Return which numbers of the queries are head i's."""
        width = self._config.head_dim
        return slice(i * width, (i + 1) * width)

    def _key_rows(self, i: int) -> slice:
        """Return which numbers of keys and values are those of head i's group."""
        return self._rows(i // (self._config.num_heads // self._config.num_kv_heads))

    def _allowed(
        self,
        shape: tuple[int, int],
        attend_mask: npt.ArrayLike | None,
        pair_mask: npt.ArrayLike | None,
        causal: bool | None,
    ) -> npt.NDArray[np.bool_]:
        """Return where all masks agree, [B or 1, H or 1, S, T]."""
        allowed = np.ones((1, 1, *shape), bool)
        distances = np.arange(shape[1]) - np.arange(shape[0])[:, None]  # t - s
        if attend_mask is not None:
            allowed = allowed & np.asarray(attend_mask, bool)[:, None, None, :]
        if pair_mask is not None:
            allowed = allowed & np.asarray(pair_mask, bool)
        if self._config.causal if causal is None else causal:
            allowed = allowed & (distances <= 0)
        if self._config.window is not None:
            allowed = allowed & (np.abs(distances) < self._config.window)
        return allowed


def _moments(x: Doubles) -> Doubles:
    """Return mean, variance and mean square over the last axis, [3, …, 1]."""
    mean, mean_square = x.mean(-1, keepdims=True), (x**2).mean(-1, keepdims=True)
    return np.stack((mean, ((x - mean) ** 2).mean(-1, keepdims=True), mean_square))


def _softmax(logits: Doubles, allowed: npt.NDArray[np.bool_]) -> Doubles:
    """Return softmax over the allowed keys; a row without any is all zeros."""
    powers = np.where(allowed, logits, -np.inf)
    top = powers.max(axis=-1, keepdims=True)
    powers -= np.where(np.isfinite(top), top, 0.0)
    np.exp(powers, out=powers)
    total = powers.sum(axis=-1, keepdims=True)
    powers /= np.where(total > 0, total, 1.0)
    return powers
