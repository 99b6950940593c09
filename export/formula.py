"""
Multi-head attention once more, in float64 numpy, written apart from `attention.py`.

    head_i = softmax(Q_i K_i^T / sqrt(d_k)) V_i
    output = sum_i head_i W_i^O + b^O

(Vaswani et al. 2017, section 3.2.2; the sum over heads is the concatenation
times W^O, spelt out.)  It works head by head from the weights of PyTorch's own
layer, so a slip in fusing, splitting or ordering heads cannot hide in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Answer:
    """
    What the formula gives.

    Shapes:
        output     [B, S, E]
        weights    [B, H, S, T]
    """

    output: Doubles
    weights: Doubles


class Formula:
    """
    The formula with the weights of one `nn.MultiheadAttention` state dict.

    Beside the state dict's own arrays, which are not copied, only one head is in memory at a
    time, in float64.
    """

    def __init__(self, state: Mapping[str, npt.ArrayLike], num_heads: int) -> None:
        weights = {name: np.asarray(value) for name, value in state.items()}
        if "in_proj_weight" in weights:
            matrices = np.split(weights["in_proj_weight"], 3)
        else:
            matrices = [weights[f"{name}_proj_weight"] for name in "qkv"]
        embed_dim = matrices[0].shape[0]
        zeros = np.zeros(3 * embed_dim)
        biases = np.split(weights.get("in_proj_bias", zeros), 3)
        self._heads = [
            [(m[rows], b[rows]) for m, b in zip(matrices, biases, strict=True)]
            for rows in _slices(embed_dim, num_heads)
        ]
        self._out = np.split(weights["out_proj.weight"], num_heads, axis=1)
        self._out_bias = np.asarray(weights.get("out_proj.bias", zeros[:embed_dim]), np.float64)

    def __call__(
        self,
        embeddings: npt.ArrayLike,
        memory: npt.ArrayLike | None = None,
        *,
        attend_mask: npt.ArrayLike | None = None,
        pair_mask: npt.ArrayLike | None = None,
        causal: bool = False,
        head_mask: npt.ArrayLike | None = None,
    ) -> Answer:
        """Attend; shapes as in the contract."""
        x = np.asarray(embeddings, np.float64)
        y = x if memory is None else np.asarray(memory, np.float64)
        allowed = _allowed((x.shape[1], y.shape[1]), attend_mask, pair_mask, causal)
        weights = np.empty((x.shape[0], len(self._heads), x.shape[1], y.shape[1]))
        return Answer(self._attend(x, y, allowed, head_mask, weights), weights)

    def plain_output(
        self, embeddings: npt.ArrayLike, memory: npt.ArrayLike | None = None
    ) -> Doubles:
        """Return the output without masks; no more than one head's weights are in memory."""
        x = np.asarray(embeddings, np.float64)
        y = x if memory is None else np.asarray(memory, np.float64)
        return self._attend(x, y, np.ones((1, 1, 1, 1), bool), None, None)

    def _attend(
        self,
        x: Doubles,
        y: Doubles,
        allowed: npt.NDArray[np.bool_],
        head_mask: npt.ArrayLike | None,
        weights: Doubles | None,
    ) -> Doubles:
        """Return the output, and write each head's weights into `weights`, if given."""
        shape = x.shape[0], len(self._heads)
        factors = np.ones(shape) * (1.0 if head_mask is None else np.asarray(head_mask))
        output = np.zeros(x.shape) + self._out_bias
        for i, (_, _, value) in enumerate(self._heads):
            own = _softmax(self._logits(i, x, y), allowed[:, i if allowed.shape[1] > 1 else 0])
            values = own @ _project(y, *value)
            output += factors[:, i, None, None] * (values @ self._out[i].T.astype(np.float64))
            if weights is not None:
                weights[:, i] = own
        return output

    def largest_logit(
        self, embeddings: npt.ArrayLike, memory: npt.ArrayLike | None = None
    ) -> float:
        """Return max|Q_i K_i^T / sqrt(d_k)| over all queries, keys and heads."""
        x = np.asarray(embeddings, np.float64)
        y = x if memory is None else np.asarray(memory, np.float64)
        return max(float(np.abs(self._logits(i, x, y)).max()) for i in range(len(self._heads)))

    def _logits(self, i: int, x: Doubles, y: Doubles) -> Doubles:
        """Return Q_i K_i^T / sqrt(d_k), [B, S, T]."""
        query, key, _ = self._heads[i]
        scores = _project(x, *query) @ _project(y, *key).swapaxes(1, 2)
        logits: Doubles = scores / np.sqrt(len(query[1]))
        return logits


def _slices(embed_dim: int, num_heads: int) -> list[slice]:
    """Return the rows of each head: slices, so that the heads' matrices are views."""
    width = embed_dim // num_heads
    return [slice(i * width, (i + 1) * width) for i in range(num_heads)]


def _project(x: Doubles, matrix: npt.NDArray[Any], bias: npt.NDArray[Any]) -> Doubles:
    projected: Doubles = x @ matrix.T.astype(np.float64) + bias.astype(np.float64)
    return projected


def _allowed(
    shape: tuple[int, int],
    attend_mask: npt.ArrayLike | None,
    pair_mask: npt.ArrayLike | None,
    causal: bool,
) -> npt.NDArray[np.bool_]:
    """Return where all masks agree, [B or 1, H or 1, S, T]."""
    allowed = np.ones((1, 1, *shape), bool)
    if attend_mask is not None:
        allowed = allowed & np.asarray(attend_mask, bool)[:, None, None, :]
    if pair_mask is not None:
        allowed = allowed & np.asarray(pair_mask, bool)
    if causal:
        allowed = allowed & (np.arange(shape[1]) <= np.arange(shape[0])[:, None])
    return allowed


def _softmax(logits: Doubles, allowed: npt.NDArray[np.bool_]) -> Doubles:
    """Return softmax over the allowed keys; a row without any is all zeros."""
    masked = np.where(allowed, logits, -np.inf)
    top = masked.max(axis=-1, keepdims=True)
    powers = np.exp(masked - np.where(np.isfinite(top), top, 0.0))
    total = powers.sum(axis=-1, keepdims=True)
    weights: Doubles = np.divide(powers, total, out=np.zeros_like(powers), where=total > 0)
    return weights
