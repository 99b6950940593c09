"""
Where a layer's weights come from.

Every source ends in one `Source`: our layer with the weights in it, the same
weights in PyTorch's own `nn.MultiheadAttention` as an independent reference,
and a record of the origin for the manifest.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from export.attention import MultiHeadAttention
from export.bert import read_attention
from export.checkpoint import Checkpoint, from_values, open_file
from export.errors import SourceInvalid
from export.refusals import is_adapters, reason_against
from service.contract import LayerConfig
from service.host.memory_limit import memory_limit

__all__ = [
    "Attention",
    "Source",
    "SourceInvalid",
    "from_hf",
    "from_state",
    "from_torch",
    "random_layer",
]

Attention = Literal["self", "cross"]
"""Whether keys and values come from the queries' own sequence, or from a memory."""

_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_STATE_KEYS = frozenset(
    {"in_proj_weight", *_SEPARATE, "in_proj_bias", "out_proj.weight", "out_proj.bias"}
)
_COPIES = 5
"""How many times its weights an export holds: PyTorch's, the file's, and the runtime's."""

_BESIDES_BYTES = 1_500_000_000
"""What an export takes besides: PyTorch itself, and the weights of the proof's attention."""

_CROSS_NAMES = re.compile(
    r"multihead_attn|.*cross.*|enc(oder)?_(dec(oder)?_)?att(entio)?n.*|encdec.*|xattn|src_attn",
    re.IGNORECASE,
)
"""What decoders call the module that attends to a memory."""


@dataclass(frozen=True)
class Source:
    """A layer ready for export, in eval mode."""

    layer: MultiHeadAttention
    reference: nn.MultiheadAttention
    """PyTorch's own layer (batch_first) with the same weights."""
    origin: dict[str, str | int]

    @property
    def config(self) -> LayerConfig:
        """The layer's shape."""
        return self.layer.config


def random_layer(
    embed_dim: int,
    num_heads: int,
    *,
    seed: int,
    memory_dim: int | None = None,
    bias: bool = True,
) -> Source:
    """
    Return a layer as PyTorch initialises it after `torch.manual_seed(seed)`.

    Biases, which PyTorch starts at zero, are drawn too, so that leaving one out
    would show.

    Raises:
        SourceInvalid: embed_dim is no multiple of num_heads, or the seed has more than 64 bits.
    """
    config = _config(embed_dim, num_heads, memory_dim=memory_dim, bias=bias)
    if not -(2**63) <= seed < 2**64:
        raise SourceInvalid(f"seed: expected a number of 64 bits, got {seed}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = _torch_layer(config).state_dict()
        for name, tensor in state.items():
            if name.endswith("bias"):
                tensor.normal_(std=0.02)
    if "in_proj_weight" in state and memory_dim is not None:
        state = _separate(state)
    return from_state(state, num_heads, origin={"kind": "random", "seed": seed})


def from_torch(
    path: Path, num_heads: int, *, prefix: str = "", attention: Attention | None = None
) -> Source:
    """
    Return the layer whose `nn.MultiheadAttention` state dict is saved at `path`.

    `prefix` names the attention module where the file holds a larger one's state dict, as in
    `decoder.layers.0.multihead_attn`; for `attention` see `from_state`.

    Raises:
        SourceInvalid: see the class.
    """
    origin: dict[str, str | int] = {"kind": "torch", "file": path.name}
    if prefix:
        origin["module"] = prefix.rstrip(".")
    checkpoint = open_file(path)
    _check_stated(checkpoint, prefix, prefix or path.stem, attention)
    return _from_checkpoint(checkpoint, prefix, num_heads, origin, attention)


def from_hf(directory: Path, layer: int) -> Source:
    """
    Return the self-attention of one layer of a BERT-family checkpoint directory.

    Its output is that of `attention.output.dense`: before dropout, residual and LayerNorm.

    Raises:
        SourceInvalid: see the class.
    """
    found = read_attention(directory, layer)
    origin: dict[str, str | int] = {
        "kind": "hf",
        "checkpoint": found.checkpoint_name,
        "layer": layer,
    }
    return from_state(found.state, found.num_heads, origin=origin)


def from_state(
    state: Mapping[str, object],
    num_heads: int,
    *,
    origin: dict[str, str | int],
    attention: Attention | None = None,
) -> Source:
    """
    Return the layer of an `nn.MultiheadAttention` state dict, in FP32.

    Both forms are read: packed (`in_proj_weight`) and separate (`q_proj_weight`,
    `k_proj_weight`, `v_proj_weight`, for keys and values of another width).  By default packed
    weights are those of self-attention and separate ones those of cross-attention; `attention`
    says otherwise, for keys and values as wide as the queries.

    The tensors are copied.

    Raises:
        SourceInvalid: a key is missing, unknown or of the wrong shape, or
            kdim differs from vdim.
    """
    own = {name: v.clone() if isinstance(v, Tensor) else v for name, v in state.items()}
    return _from_checkpoint(from_values("state dict", own), "", num_heads, origin, attention)


def _from_checkpoint(
    checkpoint: Checkpoint,
    prefix: str,
    num_heads: int,
    origin: dict[str, str | int],
    attention: Attention | None,
) -> Source:
    where = checkpoint.where
    tensors = _read_module(checkpoint, prefix)
    embed_dim = tensors["out_proj.weight"].shape[0]
    memory_dim = _memory_dim(where, tensors, embed_dim, attention)
    bias = "in_proj_bias" in tensors
    config = _config(embed_dim, num_heads, memory_dim=memory_dim, bias=bias)
    _check_shapes(where, tensors, _state_shapes(config))
    if memory_dim in (None, embed_dim) and "in_proj_weight" not in tensors:
        # PyTorch packs when the widths agree, also where keys come from a memory.
        tensors = _packed(tensors)
    # Without memory of their own: both take the tensors as they are, and share them.
    with torch.device("meta"):
        reference, layer = _torch_layer(config), MultiHeadAttention(config)
    try:
        reference.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        problem = str(error).splitlines()[-1].strip()
        raise SourceInvalid(f"{where}: expected one nn.MultiheadAttention: {problem}") from None
    layer.load_state_dict(_our_state(config, tensors), assign=True)
    return Source(layer.eval(), reference.eval(), origin)


def _config(
    embed_dim: int, num_heads: int, *, memory_dim: int | None = None, bias: bool = True
) -> LayerConfig:
    try:
        config = LayerConfig(embed_dim, num_heads, memory_dim, bias)
    except ValueError as error:
        raise SourceInvalid(str(error)) from None
    size_bytes = 4 * 2 * embed_dim * (embed_dim + (memory_dim or embed_dim))
    needed_bytes, found_bytes = _COPIES * size_bytes + _BESIDES_BYTES, memory_limit()
    if needed_bytes > found_bytes and size_bytes > _BESIDES_BYTES:
        # Before anything of that size is allocated.
        raise SourceInvalid(
            f"embed_dim: weights of {size_bytes / 1e9:.1f} GB at width {embed_dim} take about"
            f" {needed_bytes / 1e9:.1f} GB of memory to be exported, and there are"
            f" {found_bytes / 1e9:.1f} GB here; export on a larger machine"
        )
    return config


def _read_module(checkpoint: Checkpoint, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of the module that `prefix` names; "" is the whole checkpoint."""
    where = checkpoint.where
    # An adapter of the module lies beside it as often as in it.
    checkpoint.refuse_if_any("", is_adapters)
    below = f"{prefix.rstrip('.')}." if prefix else ""
    names = checkpoint.below(below)
    modules = _modules(checkpoint)
    if below and not names:
        raise SourceInvalid(f"{where}: expected tensors below {below}, got none{_choice(modules)}")
    inner = [name for name in modules if name.startswith(below)]
    is_recognised = any(reason_against(name).is_recognised for name in names)
    if names and not _STATE_KEYS & set(names) and (inner or not is_recognised):
        raise SourceInvalid(
            f"{where}: expected the keys of one nn.MultiheadAttention,"
            f" got {below}{names[0]}{_choice(inner)}"
        )
    checkpoint.refuse_unknown(below, _STATE_KEYS)
    tensors = checkpoint.take(below, names)
    for key, tensor in tensors.items():
        if tensor.ndim != (2 if key.endswith("weight") else 1):
            kind = "matrix" if key.endswith("weight") else "vector"
            raise SourceInvalid(
                f"{where}: {below}{key}: expected a {kind}, got shape {list(tensor.shape)}"
            )
    if "out_proj.weight" not in tensors:
        raise SourceInvalid(f"{where}: {below}out_proj.weight is missing")
    if ("in_proj_bias" in tensors) != ("out_proj.bias" in tensors):
        raise SourceInvalid(f"{where}: expected in_proj_bias and out_proj.bias, or neither")
    return tensors


def _modules(checkpoint: Checkpoint) -> list[str]:
    """List the modules of a checkpoint that are an `nn.MultiheadAttention`."""
    ends = (".in_proj_weight", ".q_proj_weight")
    return sorted({name.rsplit(".", 1)[0] for name in checkpoint.tensors if name.endswith(ends)})


def _choice(modules: list[str]) -> str:
    if not modules:
        return "; there is no nn.MultiheadAttention in it"
    more = f" and {len(modules) - 8} more" if len(modules) > 8 else ""
    listed = ", ".join(modules[:8])
    return f"; it holds these attention modules: {listed}{more}; name one with --prefix"


def _check_stated(
    checkpoint: Checkpoint, prefix: str, name: str, attention: Attention | None
) -> None:
    """Refuse packed weights under the name of a cross-attention where nothing says what it is."""
    is_packed = f"{prefix.rstrip('.')}.in_proj_weight".lstrip(".") in checkpoint.tensors
    is_cross = any(_CROSS_NAMES.fullmatch(part) for part in name.split("."))
    if attention is None and is_packed and is_cross:
        raise SourceInvalid(
            f"{checkpoint.where}: {name}: the name is that of cross-attention, but packed weights"
            " are the same for both: say --attention cross (keys and values come from a memory)"
            " or --attention self"
        )


def _memory_dim(
    where: str, tensors: Mapping[str, Tensor], embed_dim: int, attention: Attention | None
) -> int | None:
    """Return M, or None for self-attention, which packed projections are unless stated."""
    if "in_proj_weight" in tensors:
        return embed_dim if attention == "cross" else None
    missing = sorted(set(_SEPARATE) - set(tensors))
    if missing:
        raise SourceInvalid(f"{where}: expected in_proj_weight or {missing[0]}, got neither")
    kdim, vdim = tensors["k_proj_weight"].shape[1], tensors["v_proj_weight"].shape[1]
    if kdim != vdim:
        raise SourceInvalid(
            f"{where}: expected kdim = vdim (one memory is the source of keys and values),"
            f" got kdim {kdim} and vdim {vdim}"
        )
    if attention != "self":
        return kdim
    if kdim != embed_dim:
        raise SourceInvalid(
            f"{where}: expected keys and values of width {embed_dim} for --attention self,"
            f" got {kdim}: the layer is cross-attention"
        )
    return None


def _state_shapes(config: LayerConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a state dict of this layer may hold."""
    e, m = config.embed_dim, config.memory_dim or config.embed_dim
    return {
        "in_proj_weight": (3 * e, e),
        "q_proj_weight": (e, e),
        "k_proj_weight": (e, m),
        "v_proj_weight": (e, m),
        "in_proj_bias": (3 * e,),
        "out_proj.weight": (e, e),
        "out_proj.bias": (e,),
    }


def _check_shapes(
    where: str, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]
) -> None:
    for key, tensor in tensors.items():
        if tensor.shape != expected[key]:
            raise SourceInvalid(
                f"{where}: {key}: expected shape {list(expected[key])}, got {list(tensor.shape)}"
            )


def _torch_layer(config: LayerConfig) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(
        config.embed_dim,
        config.num_heads,
        bias=config.bias,
        kdim=config.memory_dim,
        vdim=config.memory_dim,
        batch_first=True,
    )


def _packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    rest = {key: value for key, value in tensors.items() if key not in _SEPARATE}
    return {"in_proj_weight": torch.cat([tensors[key] for key in _SEPARATE]), **rest}


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    rest = {key: value for key, value in tensors.items() if key != "in_proj_weight"}
    return {**dict(zip(_SEPARATE, tensors["in_proj_weight"].chunk(3), strict=True)), **rest}


def _our_state(config: LayerConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    e, state = config.embed_dim, {"out.weight": tensors["out_proj.weight"]}
    if config.memory_dim is None:
        state["query_key_value.weight"] = tensors["in_proj_weight"]
    elif "in_proj_weight" in tensors:
        state["query.weight"], state["key_value.weight"] = torch.split(
            tensors["in_proj_weight"], [e, 2 * e]
        )
    else:
        state["query.weight"] = tensors["q_proj_weight"]
        state["key_value.weight"] = torch.cat([tensors["k_proj_weight"], tensors["v_proj_weight"]])
    if config.bias:
        state["out.bias"] = tensors["out_proj.bias"]
        if config.memory_dim is None:
            state["query_key_value.bias"] = tensors["in_proj_bias"]
        else:
            state["query.bias"], state["key_value.bias"] = torch.split(
                tensors["in_proj_bias"], [e, 2 * e]
            )
    return state
