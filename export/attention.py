"""
Multi-head attention as the formula reads (Vaswani et al. 2017, section 3.2.2).

    head_i = softmax(Q_i K_i^T / sqrt(d_k)) V_i
    output = concat(head_1 .. head_H) W^O + b^O

with Q_i = X W_i^Q, K_i = Y W_i^K, V_i = Y W_i^V, where Y is X itself or, for
cross-attention, the memory.  Plain tensor operations, no dropout, no fast path.

Letters: B batch, S query length, T key length (= S for self-attention),
E embed_dim, M memory width, H heads, D = E / H.
"""

import torch
from torch import Tensor, nn

from service.contract import LayerConfig


class MultiHeadAttention(nn.Module):
    """
    One attention layer.

    The projections of one source are fused into one matrix: q, k and v for
    self-attention, k and v for cross-attention (bench/NOTES.md, "fused projection").
    """

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.config = config
        e, bias = config.embed_dim, config.bias
        if config.memory_dim is None:
            self.query_key_value = nn.Linear(e, 3 * e, bias=bias)
        else:
            self.query = nn.Linear(e, e, bias=bias)
            self.key_value = nn.Linear(config.memory_dim, 2 * e, bias=bias)
        self.out = nn.Linear(e, e, bias=bias)

    def forward(
        self,
        embeddings: Tensor,
        memory: Tensor | None = None,
        *,
        attend_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        causal: bool = False,
        head_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """
        Attend.

        Shapes:
            embeddings   [B, S, E]
            memory       [B, T, M], cross-attention only
            attend_mask  [B, T] bool, true = this key takes part
            pair_mask    [B or 1, H or 1, S, T] bool, true = this query may attend to this key
            head_mask    [H] or [B, H], multiplies each head's output
            returns      output [B, S, E] and weights [B, H, S, T]

        A query with nothing to attend to gets zero weights and the output bias.

        Raises:
            ValueError: memory given to self-attention or missing for cross-attention,
                or `causal` for cross-attention.
        """
        q, k, v = self.project(embeddings, memory)  # [B, S, E], [B, T, E], [B, T, E]
        if causal and memory is not None:
            raise ValueError("causal: queries and keys of cross-attention share no order")
        mask = torch.ones(1, 1, q.shape[1], k.shape[1], dtype=torch.bool)  # [1, 1, S, T]
        if causal:
            mask = mask.tril()
        if attend_mask is not None:
            mask = mask & attend_mask[:, None, None, :]  # [B, 1, S, T]
        if pair_mask is not None:
            mask = mask & pair_mask  # [B or 1, H or 1, S, T]
        if head_mask is None:
            head_mask = torch.ones(self.config.num_heads)
        head_mask = head_mask.expand(q.shape[0], -1)  # [B, H]
        concat, weights = attend(q, k, v, mask, head_mask)  # [B, S, E], [B, H, S, T]
        return self.out(concat), weights

    def project(self, embeddings: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """
        Return queries [B, S, E], keys [B, T, E] and values [B, T, E].

        Raises:
            ValueError: memory given to self-attention or missing for cross-attention.
        """
        if self.config.is_cross != (memory is not None):
            expected = "one" if self.config.is_cross else "none"
            raise ValueError(
                f"memory: expected {expected}, got {'none' if memory is None else 'one'}"
            )
        if memory is None:
            q, k, v = self.query_key_value(embeddings).chunk(3, dim=-1)
        else:
            q = self.query(embeddings)
            k, v = self.key_value(memory).chunk(2, dim=-1)
        return q, k, v


def attend(
    q: Tensor, k: Tensor, v: Tensor, pair_mask: Tensor, head_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """
    Attend with every head and put the heads side by side.

    Shapes:
        q                 [B, S, E]
        k, v              [B, T, E]
        pair_mask         [B or 1, H or 1, S, T] bool, true = may attend
        head_mask         [B, H]
        returns           concat [B, S, E] and weights [B, H, S, T]
    """
    num_heads = head_mask.shape[-1]
    q, k, v = (_split_heads(x, num_heads) for x in (q, k, v))  # [B, H, S or T, D]
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # [B, H, S, T]
    scores = scores.masked_fill(~pair_mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1)  # [B, H, S, T]
    # softmax over nothing is 0/0; a query without keys takes nothing instead.
    weights = weights.masked_fill(~pair_mask, 0.0)
    heads = weights @ v * head_mask[:, :, None, None]  # [B, H, S, D]
    return heads.transpose(1, 2).flatten(2), weights  # [B, S, E]


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    heads = x.view(*x.shape[:2], num_heads, -1)  # [B, L, H, D]
    return heads.transpose(1, 2)  # [B, H, L, D]
