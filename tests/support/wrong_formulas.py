"""Formulas with one error each, and an engine that answers what a formula says."""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from export.formula import Formula
from export.sources import Source
from service.inference.calls import Inputs, Outputs
from service.inference.engine import Provider, Stop
from service.layer_config import Rotary

Doubles = npt.NDArray[np.float64]


class FormulaEngine:
    """An engine that answers what a formula says, in FP32."""

    concurrent_runs = 1
    provider: Provider = "cpu"

    def __init__(self, source: Source, formula: type[Formula]) -> None:
        self.layer = source.config
        weights = {name: tensor.numpy() for name, tensor in source.spec.tensors.items()}
        self._formula = formula(source.config, weights)

    def run(
        self, inputs: Inputs, *, weights: bool, stop: Stop | None = None, concurrent: bool = False
    ) -> Outputs:
        """See `Engine.run`."""
        arguments = {
            field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)
        }
        found = self._formula(**arguments)
        parts = found.output, found.weights, found.extra_weights
        output, real, extra = (part.astype(np.float32) for part in parts)
        if not weights:
            return Outputs(output, None)
        return Outputs(output, real, extra if self.layer.extra_keys else None)


class GroupedInTurn(Formula):
    """Heads 0, K, 2K, … share keys and values, in place of heads 0, 1, 2, …"""

    def _key_rows(self, i: int) -> slice:
        return self._rows(i % self._config.num_kv_heads)


class CapAfterBias(Formula):
    """The cap also squeezes what is added for distances."""

    def _capped(self, products: Doubles) -> Doubles:
        return products * self._config.logit_scale

    def _logits(self, i: int, source: Any) -> Doubles:
        cap = self._config.softcap or 1.0
        return np.asarray(cap * np.tanh(super()._logits(i, source) / cap))


class CapAfterMask(Formula):
    """The cap makes a hidden key's logit of minus infinity a finite one."""

    def _with_extra_logits(self, i: int, source: Any, allowed: Any) -> Any:
        logits, allowed = super()._with_extra_logits(i, source, allowed)
        return np.where(allowed, logits, -(self._config.softcap or 1.0)), np.ones_like(allowed)


class NormAfterRotary(Formula):
    """Queries and keys are turned first and normalised then."""

    def _placed(self, name: str, rows: slice, x: Doubles, source: Any) -> Doubles:
        norm, rotary = self._config.norm, self._config.rotary
        assert norm is not None
        assert rotary is not None
        turned = self._turned(rotary, self._project(name, rows, x), source.positions)
        mean_square = (turned**2).mean(axis=-1, keepdims=True)
        normed = turned / np.sqrt(mean_square + norm.epsilon)
        return np.asarray(normed * self._weights[f"{name}_norm.weight"])


class LengthOfTheBatch(Formula):
    """Every sequence is taken for as long as the longest of the batch."""

    def _frequencies(self, rotary: Rotary, positions: Any) -> Any:
        longest = np.full_like(positions, positions.max())
        return super()._frequencies(rotary, longest)


class SinkScaled(Formula):
    """A sink's logit is scaled like those of keys."""

    def __init__(self, config: Any, tensors: Any) -> None:
        sinks = tensors["extra.sinks"] * config.logit_scale
        super().__init__(config, {**tensors, "extra.sinks": sinks})
