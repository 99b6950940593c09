"""
NaN and infinity in tokens: who is answered with NaN, and who is not.

A hidden key has weight 0, but 0 times NaN is NaN in the sum over the values, so that one
token would spoil every query of its sequence.  Such tokens are therefore computed as zeros,
and the queries that attend to them are answered with NaN afterwards.
"""

from dataclasses import dataclass, replace

import numpy as np

from service.inference.calls import Bools, Floats, Inputs, Outputs


@dataclass(frozen=True)
class Spoilt:
    """
    A batch some of whose tokens are not finite.

    Shapes: `queries` [B, H or 1, S], true = it is not finite itself and attends to a key (of the
    sequence, of a memory or an extra one), or attends to a key whose token or value is not.
    """

    inputs: Inputs
    """The batch with zeros in place of those tokens."""
    queries: Bools

    def mark(self, outputs: Outputs) -> Outputs:
        """Return the outputs, with NaN where a query is spoilt; its weights of each head alike."""
        outputs.output[self.queries.any(axis=1)] = np.nan
        for weights in (outputs.attention_weights, outputs.extra_weights):
            if weights is not None:
                weights[np.broadcast_to(self.queries, weights.shape[:3])] = np.nan
        return outputs


def spoilt(inputs: Inputs, mask: Bools | None, *, extra_keys: bool = False) -> Spoilt | None:
    """
    Return what to compute in place of a batch with NaN or infinity; None = it has none.

    `mask` [B or 1, H or 1, S, T] is true where a query may attend to a key; None = everywhere.
    `extra_keys` says that the layer has keys beside those of the sequence, to which every query
    attends: one that is not finite is then spoilt even where the mask hides everything.
    """
    sources = (inputs.embeddings, inputs.memory, inputs.value_memory)
    tokens = [tensor for tensor in sources if tensor is not None]
    finite = [np.isfinite(tensor) for tensor in tokens]
    if all(tensor.all() for tensor in finite):
        return None
    odd: list[Bools] = [~np.asarray(tensor.all(axis=-1)) for tensor in finite]
    keys: Bools = np.logical_or.reduce(odd[1:] or odd)
    pairs: Bools = odd[0][:, None, :, None] | keys[:, None, None, :]
    queries = np.asarray((pairs if mask is None else pairs & mask).any(axis=-1))
    if extra_keys:
        queries = queries | odd[0][:, None, :]
    zeroed = [_zeroed(*pair) for pair in zip(tokens, odd, strict=True)]
    embeddings, memory, value_memory, *_ = [*zeroed, None, None]
    clean = replace(inputs, embeddings=embeddings, memory=memory, value_memory=value_memory)
    return Spoilt(clean, queries)


def _zeroed(tensor: Floats, odd: Bools) -> Floats:
    return np.where(odd[..., None], np.float32(0), tensor)
