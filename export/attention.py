"""
Attention as the formula reads (Vaswani et al. 2017, section 3.2.2), in PyTorch.

    head_i = softmax(Q_i K_g^T * scale) V_g        g = i // (H / K), the group of head i
    output = concat(head_1 .. head_H) W^O + b^O

What else a layer may do is written where `service.layer_config.LayerConfig` names it.  Plain tensor
operations, no dropout, no fast path.

Letters: B batch, S query length, T key length (= S for self-attention), n extra keys,
E embed_dim, M memory width, M_v value memory width, H heads, K key/value heads, D head_dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (PyTorch's own convention)

from export.layer_spec import LayerSpec
from service.layer_config import Rotary


class Attended(NamedTuple):
    """
    What a layer answers.

    Shapes: output [B, S, E], weights [B, H, S, T], extra_weights [B, H, S, n].
    """

    output: Tensor
    weights: Tensor
    extra_weights: Tensor


class AttentionLayer(nn.Module):
    """One attention layer in eval mode, with the weights of its `LayerSpec`, which it shares."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.config = spec.config
        for name, tensor in spec.tensors.items():
            self.register_parameter(_attribute(name), nn.Parameter(tensor, requires_grad=False))
        self.eval()

    def forward(
        self,
        embeddings: Tensor,
        memory: Tensor | None = None,
        value_memory: Tensor | None = None,
        *,
        attend_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        causal: bool | None = None,
        head_mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Attended:
        """
        Attend.

        Shapes:
            embeddings    [B, S, E]
            memory        [B, T, M], cross-attention only
            value_memory  [B, T, M_v], where the configuration has its width
            attend_mask   [B, T] bool, true = this key takes part
            pair_mask     [B or 1, H or 1, S, T] bool, true = this query may attend to this key
            head_mask     [H] or [B, H], multiplies each head's output
            positions     [B or 1, S] integers; None = 0, 1, 2, …

        `causal` None is the layer's default.  A query with nothing to attend to gets zero weights
        and the output bias.

        Raises:
            ValueError: memory given to self-attention or missing for cross-attention,
                or `causal` for cross-attention.
        """
        config = self.config
        if config.is_cross != (memory is not None):
            expected, found = ("one", "none") if config.is_cross else ("none", "one")
            raise ValueError(f"memory: expected {expected}, got {found}")
        if causal and config.is_cross:
            raise ValueError("causal: queries and keys of cross-attention share no order")
        if positions is None:
            positions = torch.arange(embeddings.shape[1])[None]  # [1, S]
        x = self._with_positions(embeddings, positions)
        y = x if memory is None else memory
        z = y if value_memory is None else value_memory
        q = self._turn(self._normalise("query", self._heads("query", x)), positions)  # [B, H, S, D]
        k = self._turn(self._normalise("key", self._heads("key", y)), positions)  # [B, K, T, D]
        v = self._heads("value", z)  # [B, K, T, D]
        mask = self._mask(q.shape[2], k.shape[2], attend_mask, pair_mask, causal)
        bias = self._position_bias(positions)  # [B or 1, H, S, T], or 0
        weights, extra, heads = self._attend(q, k, v, mask, bias)
        if head_mask is not None:
            heads = heads * head_mask.expand(len(q), -1)[:, :, None, None]
        concat = heads.transpose(1, 2).flatten(2)  # [B, S, H*D]
        output = F.linear(concat, self._weight("output.weight"), self._bias("output"))
        return Attended(output, weights, extra)

    def _weight(self, name: str) -> Tensor:
        return self.get_parameter(_attribute(name))

    def _bias(self, name: str) -> Tensor | None:
        return self._weight(f"{name}.bias") if name in self.config.biases else None

    def _heads(self, name: str, x: Tensor) -> Tensor:
        """Return a projection of x [B, L, …] as [B, heads, L, D]."""
        projected = F.linear(x, self._weight(f"{name}.weight"), self._bias(name))
        shape = (*projected.shape[:2], -1, self.config.head_dim)
        return projected.reshape(shape).transpose(1, 2)

    def _with_positions(self, embeddings: Tensor, positions: Tensor) -> Tensor:
        """Return the embeddings plus what `positional` adds to them."""
        if self.config.positional is None:
            return embeddings
        if self.config.positional == "learned":
            return embeddings + self._weight("positional.table")[positions]
        width = embeddings.shape[-1]
        pairs = torch.arange(width, dtype=torch.float64) // 2
        frequencies = (10000.0 ** (-2 * pairs / width)).to(torch.float32)
        angles = positions[..., None].to(torch.float32) * frequencies
        added = angles.sin()
        added[..., 1::2] = angles[..., 1::2].cos()
        return embeddings + added

    def _normalise(self, name: str, x: Tensor) -> Tensor:
        """Return queries or keys [B, heads, L, D] after the configured norm, if any."""
        norm = self.config.norm
        if norm is None:
            return x
        rows = x.transpose(1, 2)  # [B, L, heads, D]
        if norm.span == "projection":
            rows = rows.flatten(2)
        weight = self._weight(f"{name}_norm.weight")
        if norm.kind == "rms":
            rows = F.rms_norm(rows, weight.shape, weight, norm.epsilon)
        else:
            bias = self._weight(f"{name}_norm.bias")
            rows = F.layer_norm(rows, weight.shape, weight, bias, norm.epsilon)
        return rows.reshape(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return queries or keys [B, heads, L, D] turned by their rotary positions, if any."""
        rotary = self.config.rotary
        if rotary is None:
            return x
        angles = positions[..., None].to(torch.float32) * self._frequencies(rotary, positions)
        cosine = (angles.cos() * rotary.magnitude)[:, None]  # [B or 1, 1, L, dims/2]
        sine = (angles.sin() * rotary.magnitude)[:, None]
        part, rest = x[..., : rotary.dims], x[..., rotary.dims :]
        if rotary.interleaved:
            first, second = part[..., 0::2], part[..., 1::2]
        else:
            first, second = part.chunk(2, dim=-1)
        turned = first * cosine - second * sine, second * cosine + first * sine
        joined = (
            torch.stack(turned, -1).flatten(-2) if rotary.interleaved else torch.cat(turned, -1)
        )
        return torch.cat((joined, rest), -1)

    def _frequencies(self, rotary: Rotary, positions: Tensor) -> Tensor:
        """Return radians a position, [dims/2], or [B or 1, 1, dims/2] by each one's length."""
        trained = self._weight("rotary.frequencies")
        if not rotary.depends_on_length or rotary.original_length is None:
            return trained
        lengths = (positions.amax(dim=1) + 1)[:, None, None].to(torch.float64)
        longer = lengths > rotary.original_length
        if rotary.scaling == "longrope":
            return torch.where(longer, self._weight("rotary.long_frequencies"), trained)
        stretch = rotary.factor * lengths / rotary.original_length - (rotary.factor - 1)
        base = rotary.base * stretch.clamp(min=1) ** (rotary.dims / (rotary.dims - 2))
        exponents = torch.arange(0, rotary.dims, 2, dtype=torch.float64) / rotary.dims
        return torch.where(longer, (base**-exponents).to(torch.float32), trained)

    def _mask(
        self,
        queries: int,
        keys: int,
        attend_mask: Tensor | None,
        pair_mask: Tensor | None,
        causal: bool | None,
    ) -> Tensor:
        """Return where all masks agree, [B or 1, H or 1, S, T]."""
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool)
        if self.config.causal if causal is None else causal:
            mask = mask.tril()
        if (window := self.config.window) is not None:
            mask = mask.tril(window - 1).triu(1 - window)
        if attend_mask is not None:
            mask = mask & attend_mask[:, None, None, :]
        return mask if pair_mask is None else mask & pair_mask

    def _position_bias(self, positions: Tensor) -> Tensor | float:
        """Return what distances add to the logits, [B or 1, H, S, T]; 0 without such a bias."""
        bias = self.config.position_bias
        if bias is None:
            return 0.0
        distances = positions[:, None, :] - positions[:, :, None]  # t - s, [B or 1, S, T]
        if bias.kind == "alibi":
            return distances[:, None] * self._weight("position_bias.slopes")[:, None, None]
        rows = distances.clamp(-bias.reach, bias.reach) + bias.reach
        return self._weight("position_bias.table")[rows].movedim(-1, 1)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights [B, H, S, T], extra weights [B, H, S, n] and heads [B, H, S, D]."""
        config = self.config
        extra_keys, extra_values = self._extra("key"), self._extra("value")  # [K, n, D]
        group = config.num_heads // config.num_kv_heads
        logits = self._logits(q, k.repeat_interleave(group, 1)) + bias
        extra = self._logits(q, extra_keys.repeat_interleave(group, 0))
        if "sink" in config.extra_keys:
            sinks = self._weight("extra.sinks")[:, None]  # [H, 1]
            extra[..., config.extra_keys.index("sink")] += sinks
        logits = logits.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(torch.cat((logits, extra), -1), dim=-1)
        # softmax over nothing is 0/0; a query without keys takes nothing instead.
        weights, extra = torch.tensor_split(weights, [k.shape[2]], dim=-1)
        weights = weights.masked_fill(~mask, 0.0)
        heads = weights @ v.repeat_interleave(group, 1)
        heads = heads + extra @ extra_values.repeat_interleave(group, 0)
        return weights, extra, heads

    def _logits(self, q: Tensor, k: Tensor) -> Tensor:
        logits = q @ k.transpose(-2, -1) * self.config.logit_scale
        cap = self.config.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _extra(self, name: str) -> Tensor:
        """Return the keys or values of the extra keys, [K, n, D]; zeros unless learned."""
        config = self.config
        extra = torch.zeros(config.num_kv_heads, len(config.extra_keys), config.head_dim)
        if "learned" in config.extra_keys:
            learned = self._weight(f"extra.{name}").view(config.num_kv_heads, config.head_dim)
            extra[:, config.extra_keys.index("learned")] = learned
        return extra


def _attribute(name: str) -> str:
    """Return a tensor's name as that of a parameter, which holds no dot."""
    return name.replace(".", "_")
