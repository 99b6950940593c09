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
    largest_logit: float
    """max|Q_i K_i^T / sqrt(d_k)| over what may be attended to."""


class Formula:
    """The formula with the weights of one `nn.MultiheadAttention` state dict."""

    def __init__(self, state: Mapping[str, npt.ArrayLike], num_heads: int) -> None:
        weights = {name: np.asarray(value, np.float64) for name, value in state.items()}
        if "in_proj_weight" in weights:
            matrices = np.split(weights["in_proj_weight"], 3)
        else:
            matrices = [weights[f"{name}_proj_weight"] for name in "qkv"]
        embed_dim = matrices[0].shape[0]
        zeros = np.zeros(3 * embed_dim)
        biases = np.split(weights.get("in_proj_bias", zeros), 3)
        self._heads = [
            [(m[rows].T, b[rows]) for m, b in zip(matrices, biases, strict=True)]
            for rows in np.split(np.arange(embed_dim), num_heads)
        ]
        self._out = np.split(weights["out_proj.weight"].T, num_heads)
        self._out_bias = weights.get("out_proj.bias", zeros[:embed_dim])

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
        rows, length, keys, num_heads = x.shape[0], x.shape[1], y.shape[1], len(self._heads)
        allowed = np.ones((rows, num_heads, length, keys), bool)
        if attend_mask is not None:
            allowed &= np.asarray(attend_mask, bool)[:, None, None, :]
        if pair_mask is not None:
            allowed &= np.asarray(pair_mask, bool)
        if causal:
            allowed &= np.arange(keys) <= np.arange(length)[:, None]
        factors = np.ones((rows, num_heads)) * (1.0 if head_mask is None else np.asarray(head_mask))
        output = np.zeros(x.shape) + self._out_bias
        weights = np.zeros(allowed.shape)
        largest = 0.0
        for i, ((wq, bq), (wk, bk), (wv, bv)) in enumerate(self._heads):
            logits = (x @ wq + bq) @ (y @ wk + bk).swapaxes(1, 2) / np.sqrt(wq.shape[1])
            largest = max(largest, float(np.max(np.abs(logits), where=allowed[:, i], initial=0.0)))
            weights[:, i] = _softmax(logits, allowed[:, i])
            head = weights[:, i] @ (y @ wv + bv)
            output += factors[:, i, None, None] * (head @ self._out[i])
        return Answer(output, weights, largest)


def _softmax(logits: Doubles, allowed: npt.NDArray[np.bool_]) -> Doubles:
    """Return softmax over the allowed keys; a row without any is all zeros."""
    top = np.max(logits, axis=-1, keepdims=True, where=allowed, initial=-np.inf)
    powers = np.exp(np.where(allowed, logits - np.where(np.isfinite(top), top, 0.0), -np.inf))
    total = powers.sum(axis=-1, keepdims=True)
    weights: Doubles = np.divide(powers, total, out=np.zeros_like(powers), where=total > 0)
    return weights
