"""What the file of a family offers, and what families share: places, names, projections."""

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, cast

from torch import Tensor

from export.checkpoint import Checkpoint
from export.errors import SourceInvalid
from export.families.config import Config
from export.families.registry import MODULES
from export.layer_spec import LayerSpec
from service.layer_config import PROJECTIONS, LayerConfig, Projection

Attention = Literal["self", "cross"]
"""Whether keys and values come from the queries' own sequence, or from a memory."""


@dataclass(frozen=True)
class Place:
    """Which attention of a checkpoint is meant; None = not said."""

    layer: int
    attention: Attention | None = None
    part: str | None = None
    """Of a model of several: encoder, decoder, text or vision."""


@dataclass(frozen=True)
class Found:
    """One attention layer of a checkpoint."""

    spec: LayerSpec
    tensors: tuple[str, ...]
    """The names of the checkpoint's tensors that it was made of."""


class Family(Protocol):
    """What the file of a family offers."""

    def num_layers(self, config: Config, place: Place) -> int:
        """
        Return how many attention layers there are of the kind that `place` names.

        Raises:
            SourceInvalid: there is no such part, or it is not said which of several is meant.
        """
        ...

    def read(self, checkpoint: Checkpoint, config: Config, place: Place) -> Found:
        """
        Return one attention layer; `place.layer` is one of `num_layers`.

        Its output is that of the attention's last projection: before dropout, residual and norm.

        Raises:
            SourceInvalid: configuration and weights contradict each other, or hold more than is
                understood.
        """
        ...


def family_of(config: Config) -> Family:
    """Return what reads a checkpoint of this configuration."""
    return cast(Family, importlib.import_module(f"export.families.{MODULES[config.model_type]}"))


@dataclass(frozen=True)
class Module:
    """The tensors of one attention module, by the names of `LayerSpec`, in FP32."""

    tensors: dict[str, Tensor]
    names: tuple[str, ...]
    """What the checkpoint calls them."""

    @property
    def biases(self) -> tuple[Projection, ...]:
        """The projections that have a bias."""
        return tuple(name for name in PROJECTIONS if f"{name}.bias" in self.tensors)


def read_module(
    checkpoint: Checkpoint,
    prefix: str,
    linear: Mapping[str, str],
    *,
    exact: Mapping[str, str] | None = None,
    harmless: Collection[str] = (),
    biases: Collection[str] | None = None,
) -> Module:
    """
    Return the tensors of the attention module below `prefix` (with its dot), once all are known.

    `linear` gives, by the name of `LayerSpec` ("query"), what the checkpoint calls a linear layer
    ("q_proj"): its weight is needed, and so is its bias if it is one of `biases`; None = biases
    are taken where there are any.  `exact` gives names of whole tensors in the same way
    ("query_norm.weight": "q_norm.weight"), all needed.

    Raises:
        SourceInvalid: see `Checkpoint.take`.
    """
    stored = set(checkpoint.below(prefix))
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in linear.items()}
    names |= {
        f"{ours}.bias": f"{theirs}.bias"
        for ours, theirs in linear.items()
        if (f"{theirs}.bias" in stored if biases is None else ours in biases)
    }
    names |= exact or {}
    taken = checkpoint.take(prefix, names.values(), harmless=harmless)
    return Module(
        {ours: taken[theirs] for ours, theirs in names.items()},
        tuple(prefix + theirs for theirs in names.values()),
    )


def weights_and_biases(*modules: str) -> frozenset[str]:
    """Return what the tensors of linear layers and norms are called."""
    return frozenset(f"{module}.{kind}" for module in modules for kind in ("weight", "bias"))


def check_shapes(
    checkpoint: Checkpoint, module: Module, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """
    Return when every tensor of a `Module` has the shape that `shapes` gives by our name.

    Raises:
        SourceInvalid: one has not; it is named as the checkpoint names it.
    """
    for (ours, tensor), theirs in zip(module.tensors.items(), module.names, strict=True):
        if tuple(tensor.shape) != shapes[ours]:
            raise SourceInvalid(
                f"{checkpoint.where}: {theirs}: expected shape {list(shapes[ours])},"
                f" got {list(tensor.shape)}"
            )


def layer_config(config: Config, make: Callable[[], LayerConfig]) -> LayerConfig:
    """
    Return what `make` makes of numbers of config.json.

    Raises:
        SourceInvalid: they contradict each other.
    """
    try:
        return make()
    except ValueError as error:
        raise SourceInvalid(f"{config.where}: {error}") from None
