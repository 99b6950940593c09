"""
ONNX's cases of the operator Attention as calls to layers whose projections are identities.

Two layers can express a case.  In the form `memory` its Q, K and V are embeddings, memory and
value memory of cross-attention, and all that hides a key is in the pair mask.  In the form
`sequence` they are joined to the tokens of one sequence, of which the query projection takes the
first part, the key projection the second, the value projection the third, and causality, the
window and the number of valid keys are those of the layer; a key/value cache is the beginning of
the sequence.

Heads of values that are wider or narrower than those of queries are made equal with zeros, which
change no product; so are the lengths of queries and keys in the form `sequence`.

Axes: B batch, S queries, T keys, H heads, K key/value heads, D and D_v their widths.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from export.layer_spec import LayerSpec
from service.inference.calls import Bools, Floats, Inputs
from service.layer_config import LayerConfig
from tests.support.conformance.cases import OperatorCase

Array = npt.NDArray[Any]
Form = Literal["memory", "sequence"]

AFTER_SOFTMAX = 3
"""The `qk_matmul_output_mode` that asks for attention weights."""

UNDERSTOOD = {
    *("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"),
    *("Y", "present_key", "present_value", "qk_matmul_output"),
    *("scale", "softcap", "is_causal", "q_num_heads", "kv_num_heads", "softmax_precision"),
    *("qk_matmul_output_mode", "left_window_size", "right_window_size"),
}
"""The operator's inputs, outputs and attributes up to opset 25."""


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A call to a layer, and where in its answer the operator's is."""

    form: Form
    spec: LayerSpec
    inputs: Inputs
    rows: Array
    """[B, S], which tokens are the queries."""
    keys: int
    """T; what follows them is padding."""
    value_width: int
    """D_v."""

    def output(self, answer: npt.ArrayLike) -> Array:
        """Return Y [B, H, S, D_v] of the layer's output."""
        config = self.spec.config
        rows = np.take_along_axis(np.asarray(answer), self.rows[..., None], axis=1)
        width = config.num_heads * config.head_dim
        heads = rows[..., :width].reshape(*self.rows.shape, config.num_heads, config.head_dim)
        return heads.swapaxes(1, 2)[..., : self.value_width]

    def weights(self, answer: npt.ArrayLike) -> Array:
        """Return the attention weights [B, H, S, T] of the layer's."""
        rows = self.rows[:, None, :, None]
        return np.take_along_axis(np.asarray(answer), rows, axis=2)[..., : self.keys]


class Attention:
    """
    A case of the operator Attention whose masks hide keys and add nothing else.

    What is left out has its default, a cache is joined with the current keys and values, and all
    heads are apart.
    """

    def __init__(self, case: OperatorCase) -> None:
        unknown = {*case.inputs, *case.outputs, *case.attributes} - UNDERSTOOD
        assert not unknown, f"{case.name} has {unknown}"
        attribute = case.attributes.get
        q_heads, kv_heads = attribute("q_num_heads", 0), attribute("kv_num_heads", 0)
        self.queries = heads_of(case.inputs["Q"], q_heads)
        self.keys = _joined(case, "past_key", heads_of(case.inputs["K"], kv_heads))
        self.values = _joined(case, "past_value", heads_of(case.inputs["V"], kv_heads))
        self.scale: float | None = attribute("scale")
        self.softcap: float | None = attribute("softcap") or None
        self.causal = bool(attribute("is_causal", 0))
        self.left: int = attribute("left_window_size", -1)
        self.right: int = attribute("right_window_size", -1)
        self.output = heads_of(case.outputs["Y"], q_heads)
        self.weights = case.outputs.get("qk_matmul_output")
        if attribute("qk_matmul_output_mode", 0) != AFTER_SOFTMAX:
            self.weights = None
        self._mask = case.inputs.get("attn_mask")
        self._valid = case.inputs.get("nonpad_kv_seqlen")
        self._past = case.inputs["past_key"].shape[2] if "past_key" in case.inputs else 0

    @property
    def starts(self) -> Array:
        """
        [B], the position of each sequence's first query among its keys.

        The operator's causality and window count from there: the length of the cache, or what
        makes the last query stand at the last valid key.  Without them it does not matter.
        """
        rows, _, queries, _ = self.queries.shape
        if self._valid is None or not (self.causal or max(self.left, self.right) >= 0):
            return np.full(rows, self._past)
        return np.asarray(self._valid - queries)

    @property
    def mask(self) -> Bools:
        """The case's mask as booleans, [B, H or 1, S, T]; keys beyond its columns are hidden."""
        rows, _, queries, _ = self.queries.shape
        keys = self.keys.shape[2]
        if self._mask is None:
            return np.ones((rows, 1, queries, keys), bool)
        mask = self._mask if self._mask.dtype == bool else self._mask == 0
        padding = [(0, 0)] * (mask.ndim - 1) + [(0, keys - mask.shape[-1])]
        mask = np.pad(mask, padding)
        heads = mask.shape[-3] if mask.ndim > 2 else 1
        return np.broadcast_to(mask, (rows, heads, queries, keys)).copy()

    @property
    def valid(self) -> Bools:
        """Which keys are valid, [B, T]."""
        rows, _, keys, _ = self.keys.shape
        counts = np.full(rows, keys) if self._valid is None else self._valid
        return np.arange(keys) < counts[:, None]

    def within(self, *, causal: bool, left: int, right: int) -> Bools:
        """Return which keys causality and window leave, [B, 1, S, T]; -1 = no limit."""
        queries, keys = self.queries.shape[2], self.keys.shape[2]
        positions = self.starts[:, None] + np.arange(queries)
        ahead = np.arange(keys) - positions[..., None]
        allowed = np.ones(ahead.shape, bool)
        if causal:
            allowed &= ahead <= 0
        if left >= 0:
            allowed &= -ahead <= left
        if right >= 0:
            allowed &= ahead <= right
        return allowed[:, None]

    @property
    def window(self) -> int | None:
        """The layer's window that leaves the same keys; None = there is none."""
        same = self.left >= 0 and (self.causal or self.left == self.right)
        return self.left + 1 if same else None

    @cached_property
    def width(self) -> int:
        """The width of all heads once they are equal."""
        return int(max(self.queries.shape[3], self.values.shape[3]))

    def config(self, **own: Any) -> LayerConfig:
        """Return the configuration of a layer with these heads."""
        scale = self.queries.shape[3] ** -0.5 if self.scale is None else self.scale
        return LayerConfig(
            num_heads=self.queries.shape[1],
            num_kv_heads=self.keys.shape[1],
            head_dim=self.width,
            biases=(),
            scale=scale,
            softcap=self.softcap,
            **own,
        )

    def calls(self) -> Iterator[LayerCall]:
        """Yield the calls that express the case."""
        yield self._of_memory()
        if self.starts.min() >= 0:  # else a query stands before the first token
            yield self._of_sequence()

    def _of_memory(self) -> LayerCall:
        embeddings, memory, value_memory = self._tokens()
        config = self.config(
            embed_dim=embeddings.shape[2],
            memory_dim=memory.shape[2],
            value_memory_dim=value_memory.shape[2],
        )
        seen = self.within(causal=self.causal, left=self.left, right=self.right)
        inputs = Inputs(
            embeddings,
            memory,
            pair_mask=self.mask & self.valid[:, None, None] & seen,
            value_memory=value_memory,
        )
        rows, length, _ = embeddings.shape
        places = np.broadcast_to(np.arange(length), (rows, length))
        return self._call("memory", config, inputs, places)

    def _of_sequence(self) -> LayerCall:
        queries, keys, values = self._tokens()
        places = self.starts[:, None] + np.arange(queries.shape[1])
        length = max(keys.shape[1], int(places.max()) + 1)
        own_row = np.arange(len(places))[:, None]
        embeddings = np.zeros((len(places), length, 0), np.float32)
        for part, tokens in ((queries, places), (keys, None), (values, None)):
            wide = np.zeros((*embeddings.shape[:2], part.shape[2]), np.float32)
            if tokens is None:
                wide[:, : part.shape[1]] = part
            else:
                wide[own_row, tokens] = part
            embeddings = np.concatenate([embeddings, wide], axis=2)
        config = self.config(embed_dim=embeddings.shape[2], causal=self.causal, window=self.window)
        mask = self.mask
        if self.window is None:
            mask &= self.within(causal=False, left=self.left, right=self.right)
        pairs = np.ones((len(places), mask.shape[1], length, length), bool)
        for row, tokens in enumerate(places):
            pairs[row, :, tokens, : keys.shape[1]] = mask[row].swapaxes(0, 1)
        valid = np.pad(self.valid, [(0, 0), (0, length - keys.shape[1])])
        inputs = Inputs(
            embeddings,
            attend_mask=None if valid.all() else valid,
            pair_mask=None if pairs.all() else pairs,
            causal=self.causal,
        )
        return self._call("sequence", config, inputs, places)

    def _call(self, form: Form, config: LayerConfig, inputs: Inputs, places: Array) -> LayerCall:
        keys, width = self.keys.shape[2], self.values.shape[3]
        return LayerCall(form, identities(config), inputs, places, keys, width)

    def _tokens(self) -> list[Floats]:
        parts = (self.queries, self.keys, self.values)
        return [tokens_of(heads, self.width) for heads in parts]


def identities(config: LayerConfig) -> LayerSpec:
    """Return the layer of this configuration that projects nothing: see the top of this file."""
    e = config.embed_dim
    queries, keys = (count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
    starts = (0, 0, 0) if config.is_cross else (0, queries, queries + keys)
    weights = {
        "query.weight": _rows_of_identity(e, starts[0], queries),
        "key.weight": _rows_of_identity(config.memory_dim or e, starts[1], keys),
        "value.weight": _rows_of_identity(config.value_memory_dim or e, starts[2], keys),
        "output.weight": _rows_of_identity(e, 0, queries).T.contiguous(),
    }
    if (rotary := config.rotary) is not None:
        exponents = torch.arange(0, rotary.dims, 2) / rotary.dims
        weights["rotary.frequencies"] = rotary.base**-exponents
    return LayerSpec(config, weights)


def _rows_of_identity(size: int, start: int, count: int) -> torch.Tensor:
    return torch.eye(size)[start : start + count].contiguous()


def tokens_of(heads: Array, width: int) -> Floats:
    """Return [B, L, heads * width] of [B, heads, L, D], each head filled up with zeros."""
    rows, count, length, own = heads.shape
    wide = np.pad(heads, [(0, 0)] * 3 + [(0, width - own)])
    return np.ascontiguousarray(wide.swapaxes(1, 2).reshape(rows, length, count * width))


def heads_of(x: Array, count: int) -> Array:
    """Return [B, heads, L, D] of an operator's input or output of either rank."""
    if x.ndim == 4:
        return x
    rows, length, _ = x.shape
    return x.reshape(rows, length, count, -1).swapaxes(1, 2)


def _joined(case: OperatorCase, past: str, current: Array) -> Array:
    """Return a cache and the current tokens, as the operator gives them back."""
    if past not in case.inputs:
        return current
    joined = np.concatenate([case.inputs[past], current], axis=2)
    np.testing.assert_array_equal(joined, case.outputs[past.replace("past", "present")])
    return joined
