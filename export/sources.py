"""
Where a layer's weights come from.

Every source ends in one `Source`: the layer's configuration and weights, and a record of their
origin for the manifest.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from export.attention import AttentionLayer
from export.checkpoint import Checkpoint, from_values, open_file
from export.errors import SourceInvalid
from export.families.config import Config, read_config
from export.families.family import Attention, Place, family_of
from export.folder import open_folder
from export.layer_spec import LayerSpec, tensor_shapes
from export.positional import Positional, stored_table, with_positional
from export.python_source import Oracle, read_function
from export.random_weights import random_spec
from export.refusals import is_adapters
from export.torch_layers import read_torch_layer, refuse_as_table, refuse_unsaid_cross
from export.torch_reference import torch_layer
from export.wrappers import unwrapped_prefix
from service.host.memory_limit import memory_limit
from service.layer_config import PROJECTIONS, LayerConfig, Rotary

__all__ = [
    "Attention",
    "HfLayers",
    "Positional",
    "Source",
    "SourceInvalid",
    "from_hf",
    "from_python",
    "from_state",
    "from_torch",
    "hf_layers",
    "random_layer",
]

_COPIES = 4
"""How many times its weights an export holds: PyTorch's, the file's, and the runtime's."""

_BESIDES_BYTES = 1_500_000_000
"""What an export takes besides: PyTorch itself, and the weights of the proof's attention."""


@dataclass(frozen=True)
class Source:
    """A layer ready for export."""

    spec: LayerSpec
    origin: dict[str, str | int]
    tensors: tuple[str, ...] = ()
    """The names of the source's tensors that the layer is made of; none for a seed."""
    oracle: Oracle | None = None
    """A reference that came with the weights, for calls without masks."""

    @property
    def config(self) -> LayerConfig:
        """What the layer computes."""
        return self.spec.config

    @cached_property
    def layer(self) -> AttentionLayer:
        """The layer in PyTorch, which shares the weights."""
        return AttentionLayer(self.spec)

    @cached_property
    def reference(self) -> nn.MultiheadAttention | None:
        """PyTorch's own layer (batch_first) with these weights; None = it does not compute this."""
        return torch_layer(self.spec)


def random_layer(
    embed_dim: int,
    num_heads: int,
    *,
    seed: int,
    memory_dim: int | None = None,
    bias: bool = True,
    rotary_base: float | None = None,
    **options: Any,
) -> Source:
    """
    Return a layer with weights from the seed: see `export.random_weights`.

    `rotary_base` turns all of each head's queries and keys, in halves; `options` are further
    fields of `LayerConfig`, such as `num_kv_heads`, `head_dim`, `causal` and `window`.

    Raises:
        SourceInvalid: the numbers contradict each other, or the seed has more than 64 bits.
    """
    try:
        config = LayerConfig(
            embed_dim, num_heads, memory_dim, biases=PROJECTIONS if bias else (), **options
        )
        if rotary_base is not None:
            config = replace(config, rotary=Rotary(rotary_base, config.head_dim))
    except ValueError as error:
        raise SourceInvalid(str(error)) from None
    _refuse_too_large(config)  # before anything of that size is allocated
    return Source(random_spec(config, seed), {"kind": "random", "seed": seed})


def from_torch(
    path: Path,
    num_heads: int,
    *,
    prefix: str = "",
    attention: Attention | None = None,
    add_zero_attn: bool = False,
    causal: bool = False,
    window: int | None = None,
    positional: Positional | None = None,
    positional_table: str | None = None,
) -> Source:
    """
    Return the layer whose `nn.MultiheadAttention` state dict is saved at `path`.

    `prefix` names the attention module where the file holds a larger one's state dict, as in
    `decoder.layers.0.multihead_attn`; for `attention` see `read_torch_layer`.  `positional_table`
    names the tensor of the file that learned positions are rows of.

    Raises:
        SourceInvalid: see the class.
    """
    checkpoint = open_file(path)
    refuse_unsaid_cross(checkpoint, prefix, path.stem, attention)
    origin: dict[str, str | int] = {"kind": "torch", "file": path.name}
    if module := unwrapped_prefix(prefix, checkpoint.wrappers):
        origin["module"] = module
    if checkpoint.wrappers:
        origin["wrappers"] = " ".join(checkpoint.wrappers)
    module_tensors = checkpoint
    if positional_table is not None:
        refuse_as_table(checkpoint, prefix, positional_table)
        # It may lie beside the weights, where every tensor must be known.
        table_name = unwrapped_prefix(positional_table, checkpoint.wrappers)
        module_tensors = checkpoint.without(table_name)
    source = _of_torch_state(module_tensors, prefix, num_heads, origin, attention, add_zero_attn)
    spec, tensors = source.spec, source.tensors
    order = {"--causal": causal, "--window": window is not None, "--positional": positional}
    given = ", ".join(flag for flag, is_given in order.items() if is_given)
    if given and spec.config.is_cross:
        raise SourceInvalid(
            f"{given}: expected self-attention, got cross-attention, whose queries and keys do not"
            " stand in one order; leave the option out, or say --attention self where keys and"
            " values come from the queries' own sequence"
        )
    try:
        spec = LayerSpec(replace(spec.config, causal=causal, window=window), spec.tensors)
    except ValueError as error:
        raise SourceInvalid(str(error)) from None
    if positional is not None:
        table = None
        if positional_table is not None:
            table = stored_table(checkpoint, table_name, spec.config.embed_dim)
            tensors = (*tensors, table_name)
        spec = with_positional(spec, positional, table)
    return replace(source, spec=spec, tensors=tensors)


def from_state(
    state: Mapping[str, object],
    num_heads: int,
    *,
    origin: dict[str, str | int],
    attention: Attention | None = None,
    add_zero_attn: bool = False,
) -> Source:
    """
    Return the layer of an `nn.MultiheadAttention` state dict: see `read_torch_layer`.

    The tensors are copied.

    Raises:
        SourceInvalid: see there.
    """
    copies = {name: v.clone() if isinstance(v, Tensor) else v for name, v in state.items()}
    checkpoint = from_values("state dict", copies)
    return _of_torch_state(checkpoint, "", num_heads, origin, attention, add_zero_attn)


def from_python(reference: str) -> Source:
    """
    Return the layer that the function `package.module:function` returns: see `read_function`.

    Raises:
        SourceInvalid: see there.
    """
    found = read_function(reference)
    _refuse_too_large(found.spec.config)
    origin: dict[str, str | int] = {"kind": "python", "function": reference}
    return Source(found.spec, origin, tuple(found.spec.tensors), found.oracle)


def from_hf(
    directory: Path,
    layer: int,
    *,
    attention: Attention | None = None,
    part: str | None = None,
) -> Source:
    """
    Return one attention layer of a checkpoint directory: see `HfLayers`.

    Raises:
        SourceInvalid: see the class.
    """
    return hf_layers(directory, attention=attention, part=part).source(layer)


@dataclass(frozen=True)
class HfLayers:
    """
    The attention layers of one kind in a checkpoint directory, of a family that is read.

    A layer's output is that of the attention's last projection: before dropout, residual and norm.
    """

    count: int
    _config: Config
    _checkpoint: Checkpoint
    _attention: Attention | None
    _part: str | None
    _directory: Path
    _name: str

    def source(self, layer: int) -> Source:
        """
        Return one of them.

        Raises:
            SourceInvalid: there is none of this number, or its tensors are not all understood.
        """
        if not 0 <= layer < self.count:
            raise SourceInvalid(
                f"{self._directory}: --layer: expected 0 to {self.count - 1}, got {layer}"
            )
        place = Place(layer, self._attention, self._part)
        found = family_of(self._config).read(self._checkpoint, self._config, place)
        _refuse_too_large(found.spec.config)
        origin: dict[str, str | int] = {
            "kind": "hf",
            "checkpoint": self._name,
            "family": self._config.model_type,
            "layer": layer,
        }
        said = {"attention": self._attention, "part": self._part}
        origin |= {name: value for name, value in said.items() if value is not None}
        if self._checkpoint.wrappers:
            origin["wrappers"] = " ".join(self._checkpoint.wrappers)
        return Source(found.spec, origin, found.tensors)


def hf_layers(
    directory: Path, *, attention: Attention | None = None, part: str | None = None
) -> HfLayers:
    """
    Return the layers of the kind that is meant, for `attention` and `part` see `Place`.

    The files are opened once; a tensor is read when its layer is.

    Raises:
        SourceInvalid: the checkpoint cannot be read, or it is not said which of several is meant.
    """
    config = read_config(directory)
    count = family_of(config).num_layers(config, Place(0, attention, part))
    checkpoint = open_folder(directory)
    # Adapters need not bear the name of the layer that they change.
    checkpoint.refuse_if_any("", is_adapters)
    name = config.text("_name_or_path", "") or directory.name
    return HfLayers(count, config, checkpoint, attention, part, directory, name)


def _of_torch_state(
    checkpoint: Checkpoint,
    prefix: str,
    num_heads: int,
    origin: dict[str, str | int],
    attention: Attention | None,
    add_zero_attn: bool,
) -> Source:
    found = read_torch_layer(
        checkpoint, prefix, num_heads, attention=attention, add_zero_attn=add_zero_attn
    )
    _refuse_too_large(found.spec.config)
    return Source(found.spec, origin, found.tensors)


def _refuse_too_large(config: LayerConfig) -> None:
    """Refuse a layer that needs more memory than there is."""
    size_bytes = 4 * sum(math.prod(shape) for shape in tensor_shapes(config).values())
    needed_bytes, found_bytes = _COPIES * size_bytes + _BESIDES_BYTES, memory_limit()
    if needed_bytes > found_bytes and size_bytes > _BESIDES_BYTES:
        raise SourceInvalid(
            f"embed_dim: weights of {size_bytes / 1e9:.1f} GB at width {config.embed_dim} take"
            f" about {needed_bytes / 1e9:.1f} GB of memory to be exported, and there are"
            f" {found_bytes / 1e9:.1f} GB here; export on a larger machine"
        )
