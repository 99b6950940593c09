"""
Rotary positions of Hugging Face checkpoints: what config.json says of them, and the frequencies.

Formulas as in transformers.modeling_rope_utils (5.24), in FP32 as there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from export.errors import SourceInvalid
from export.families.config import Config, shortened
from service.layer_config import Rotary

_KNOWN_NAMES = (
    "rope_type type rope_theta partial_rotary_factor factor original_max_position_embeddings"
    " attention_factor beta_fast beta_slow short_factor long_factor low_freq_factor"
    " high_freq_factor mscale mscale_all_dim truncate"
)
_KNOWN = frozenset(_KNOWN_NAMES.split())
"""The keys that are understood where their scaling is, and mean nothing to the others."""


@dataclass(frozen=True)
class RotaryTurn:
    """The rotary positions of one layer, and their tensors by the names of `LayerSpec`."""

    rotary: Rotary
    tensors: Mapping[str, Tensor]


def rope_parameters(
    config: Config,
    *,
    base_key: str = "rope_theta",
    default_base: float = 10000.0,
    share_key: str = "partial_rotary_factor",
    default_share: float = 1.0,
) -> Config:
    """
    Return a model's rotary parameters by the names of transformers 5.

    They lie in `rope_parameters`; before that version in `rope_scaling`, base and share of the
    rotated numbers beside it, under names that differ by family.

    Raises:
        SourceInvalid: neither is an object.
    """
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    values = dict(config.part(key).values) if config.has(key) else {}
    if values.get("rope_theta") is None:
        values["rope_theta"] = config.number(base_key, default_base)
    if values.get("partial_rotary_factor") is None:
        values["partial_rotary_factor"] = config.number(share_key, default_share)
    return Config(f"{config.where}: {key}", values)


def read_rotary(
    config: Config, parameters: Config, head_dim: int, *, is_partial: bool = False
) -> RotaryTurn:
    """
    Return the rotary positions that `parameters`, as `rope_parameters` gives them, ask for.

    `is_partial` says whether the family can turn a part of each head only.

    Raises:
        SourceInvalid: the kind of scaling or a parameter is not understood, or lacks what it needs.
    """
    unknown = sorted(parameters.values.keys() - _KNOWN)
    if unknown:
        raise SourceInvalid(
            f"{parameters.where}: {unknown[0]} is {shortened(parameters.values[unknown[0]])}: a"
            " parameter of rotary positions that this version does not know; a layer with it cannot"
            " be exported"
        )
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if kind not in _SCALINGS:
        raise parameters.error(
            "rope_type" if parameters.has("rope_type") else "type", f"one of {', '.join(_SCALINGS)}"
        )
    share = _positive(parameters, "partial_rotary_factor", 1.0)
    if share != 1.0 and not is_partial:
        raise parameters.error("partial_rotary_factor", "1, as this family turns whole heads")
    dims = int(head_dim * share)
    smallest = 4 if kind == "dynamic" else 2
    if dims % 2 or not smallest <= dims <= head_dim:
        raise SourceInvalid(
            f"{parameters.where}: expected an even number of numbers to turn, {smallest} to"
            f" {head_dim}, got {dims} (head_dim {head_dim}, partial_rotary_factor {share:g})"
        )
    base = _positive(parameters, "rope_theta")
    if base <= 1:
        raise parameters.error("rope_theta", "a number above 1")
    turn = _SCALINGS[kind](_Model(config, parameters, base, dims))
    for name, tensor in turn.tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise SourceInvalid(f"{parameters.where}: expected finite {name}, got NaN or infinity")
    return turn


@dataclass(frozen=True)
class _Model:
    """What the formulas of all scalings know."""

    config: Config
    parameters: Config
    base: float
    dims: int

    def periods(self) -> Tensor:
        """Return base^(2i/dims), [dims/2]: positions a radian, before any scaling."""
        periods: Tensor = self.base ** (torch.arange(0, self.dims, 2).float() / self.dims)
        return periods

    def original_length(self) -> int:
        """Return the length of the training; beside the parameters it counts more than in them."""
        key = "original_max_position_embeddings"
        longest = self.config.integer("max_position_embeddings")
        return self.config.integer(key, self.parameters.integer(key, longest))

    def stretch(self) -> float:
        """Return `factor`; without one, how much longer sequences became than in the training."""
        if self.parameters.has("factor"):
            return _positive(self.parameters, "factor")
        return self.config.integer("max_position_embeddings") / self.original_length()


def _default(model: _Model) -> RotaryTurn:
    return _turn(Rotary(model.base, model.dims), 1.0 / model.periods())


def _linear(model: _Model) -> RotaryTurn:
    factor = _positive(model.parameters, "factor")
    rotary = Rotary(model.base, model.dims, scaling="linear", factor=factor)
    return _turn(rotary, 1.0 / model.periods() / factor)


def _dynamic(model: _Model) -> RotaryTurn:
    """Up to `max_position_embeddings` nothing changes; beyond, the formula has to compute."""
    rotary = Rotary(
        model.base,
        model.dims,
        scaling="dynamic",
        factor=_positive(model.parameters, "factor"),
        original_length=model.config.integer("max_position_embeddings"),
    )
    return _turn(rotary, 1.0 / model.periods())


def _yarn(model: _Model) -> RotaryTurn:
    """Fast pairs keep their frequencies, slow ones are stretched (Peng et al. 2023, YaRN)."""
    parameters, factor, length = model.parameters, model.stretch(), model.original_length()
    is_truncated = parameters.boolean("truncate", True)

    def pair_with(rotations: float) -> float:
        """Return which pair turns that often in the training's length."""
        logarithm = math.log(length / (rotations * 2 * math.pi))
        return model.dims * logarithm / (2 * math.log(model.base))

    first = pair_with(_positive(parameters, "beta_fast", 32.0))
    last = pair_with(_positive(parameters, "beta_slow", 1.0))
    if is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, model.dims - 1)
    pairs = torch.arange(model.dims // 2, dtype=torch.float32)
    ramp = ((pairs - first) / ((last - first) or 0.001)).clamp(0, 1)
    periods = model.periods()
    kept = 1 - ramp
    frequencies = 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept
    rotary = Rotary(
        model.base,
        model.dims,
        scaling="yarn",
        factor=factor,
        original_length=length,
        magnitude=_yarn_magnitude(parameters, factor),
    )
    return _turn(rotary, frequencies)


def _yarn_magnitude(parameters: Config, factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if parameters.has("attention_factor"):
        return _positive(parameters, "attention_factor")
    if parameters.has("mscale") and parameters.has("mscale_all_dim"):
        above, below = (_positive(parameters, key) for key in ("mscale", "mscale_all_dim"))
        return magnitude(above) / magnitude(below)
    return magnitude(1.0)


def _longrope(model: _Model) -> RotaryTurn:
    """Each pair has its factor; there is one set for short and one for longer sequences."""
    parameters, factor, length = model.parameters, model.stretch(), model.original_length()
    if parameters.has("attention_factor"):
        magnitude = _positive(parameters, "attention_factor")
    elif factor <= 1:
        magnitude = 1.0
    elif length == 1:
        raise parameters.error("original_max_position_embeddings", "more than 1")
    else:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(length))
    rotary = Rotary(
        model.base,
        model.dims,
        scaling="longrope",
        factor=factor,
        original_length=length,
        magnitude=magnitude,
    )
    short, long = (
        1.0 / (_factors(parameters, f"{name}_factor", model.dims // 2) * model.periods())
        for name in ("short", "long")
    )
    return RotaryTurn(rotary, {"rotary.frequencies": short, "rotary.long_frequencies": long})


def _llama3(model: _Model) -> RotaryTurn:
    """Slow pairs are stretched, fast ones are not, those between in part."""
    parameters, length = model.parameters, model.original_length()
    factor = _positive(parameters, "factor")
    low, high = _positive(parameters, "low_freq_factor"), _positive(parameters, "high_freq_factor")
    if low >= high:
        raise parameters.error("high_freq_factor", f"more than low_freq_factor {low:g}")
    frequencies = 1.0 / model.periods()
    wavelengths = 2 * math.pi / frequencies
    share = (length / wavelengths - low) / (high - low)
    between = (1 - share) * frequencies / factor + share * frequencies
    scaled = torch.where(wavelengths > length / low, frequencies / factor, between)
    rotary = Rotary(model.base, model.dims, scaling="llama3", factor=factor, original_length=length)
    return _turn(rotary, torch.where(wavelengths < length / high, frequencies, scaled))


_SCALINGS: Mapping[str, Callable[[_Model], RotaryTurn]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}


def _turn(rotary: Rotary, frequencies: Tensor) -> RotaryTurn:
    return RotaryTurn(rotary, {"rotary.frequencies": frequencies})


def _positive(parameters: Config, key: str, default: float | None = None) -> float:
    value = parameters.number(key, default)
    if not 0 < value < math.inf:
        raise parameters.error(key, "a positive number")
    return value


def _factors(parameters: Config, key: str, count: int) -> Tensor:
    values = parameters.values.get(key)
    if (
        not isinstance(values, list)
        or len(values) != count
        or not all(type(value) in (int, float) and value > 0 for value in values)
    ):
        raise parameters.error(key, f"{count} positive numbers, one for each pair")
    return torch.tensor(values, dtype=torch.float32)
