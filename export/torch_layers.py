"""
The layer of a saved `nn.MultiheadAttention`, alone or in the state dict of a larger module.

Such as nn.TransformerEncoderLayer (`self_attn`), nn.TransformerDecoderLayer (`self_attn` and, over
a memory, `multihead_attn`) and nn.Transformer, which holds both below `encoder.layers.0` and
`decoder.layers.0`.  Every option of nn.MultiheadAttention is read that its weights show:

    in_proj_weight [3*E, E], or q_proj_weight [E, E], k_proj_weight [E, kdim] and
    v_proj_weight [E, vdim]; in_proj_bias [3*E]; out_proj.weight [E, E], out_proj.bias [E];
    bias_k, bias_v [1, 1, E]: add_bias_kv, a key and value that PyTorch puts after the sequence's

They do not show the number of heads, `add_zero_attn` (a key and value of zeros, after bias_k and
bias_v), nor whether packed weights are those of self- or cross-attention.
"""

import re
from collections.abc import Mapping

from torch import Tensor

from export.checkpoint import Checkpoint
from export.errors import SourceInvalid
from export.families.family import Attention, Found
from export.layer_spec import LayerSpec
from export.refusals import is_adapters, reason_against
from export.wrappers import unwrapped_prefix
from service.layer_config import PROJECTIONS, ExtraKey, LayerConfig

_PACKED = "in_proj_weight"
_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_LEARNED = ("bias_k", "bias_v")
_STATE_KEYS = frozenset(
    {_PACKED, *_SEPARATE, *_LEARNED, "in_proj_bias", "out_proj.weight", "out_proj.bias"}
)

_CROSS_NAMES = re.compile(
    r"multihead_attn|.*cross.*|enc(oder)?_(dec(oder)?_)?att(entio)?n.*|encdec.*|xattn|src_attn",
    re.IGNORECASE,
)
"""What decoders call the module that attends to a memory."""


def read_torch_layer(
    checkpoint: Checkpoint,
    prefix: str,
    num_heads: int,
    *,
    attention: Attention | None = None,
    add_zero_attn: bool = False,
) -> Found:
    """
    Return the layer of the attention module that `prefix` names; "" is the whole checkpoint.

    By default packed weights are those of self-attention and separate ones those of
    cross-attention; `attention` says otherwise, for keys and values as wide as the queries.

    Raises:
        SourceInvalid: a tensor is missing, unknown or of the wrong shape, or contradicts what was
            said.
    """
    prefix = unwrapped_prefix(prefix, checkpoint.wrappers)
    below = f"{prefix}." if prefix else ""
    tensors = _read_module(checkpoint, below)
    config = _config(checkpoint.where, tensors, num_heads, attention, add_zero_attn=add_zero_attn)
    for name, shape in _state_shapes(config).items():
        if name in tensors and tensors[name].shape != shape:
            raise SourceInvalid(
                f"{checkpoint.where}: {below}{name}: expected shape {list(shape)},"
                f" got {list(tensors[name].shape)}"
            )
    return Found(LayerSpec(config, spec_tensors(tensors)), tuple(below + name for name in tensors))


def refuse_unsaid_cross(
    checkpoint: Checkpoint, prefix: str, file_stem: str, attention: Attention | None
) -> None:
    """
    Return unless packed weights lie under the name of a cross-attention and nothing says which.

    A module that was saved alone has no name but its file's.

    Raises:
        SourceInvalid: they do.
    """
    below = unwrapped_prefix(prefix, checkpoint.wrappers)
    name = prefix or file_stem
    is_packed = f"{below}.{_PACKED}".lstrip(".") in checkpoint.tensors
    is_cross = any(_CROSS_NAMES.fullmatch(part) for part in name.split("."))
    if attention is None and is_packed and is_cross:
        raise SourceInvalid(
            f"{checkpoint.where}: {name}: the name is that of cross-attention, but packed weights"
            " are the same for both: say --attention cross (keys and values come from a memory)"
            " or --attention self"
        )


def refuse_as_table(checkpoint: Checkpoint, prefix: str, table: str) -> None:
    """
    Return when a table of positions is none of the attention module's weights.

    Raises:
        SourceInvalid: it is one of them, which would then be missing.
    """
    below = unwrapped_prefix(prefix, checkpoint.wrappers)
    module = f"{below}." if below else ""
    name = unwrapped_prefix(table, checkpoint.wrappers)
    if name in {module + key for key in _STATE_KEYS}:
        raise SourceInvalid(
            f"{checkpoint.where}: --positional-table {table}: expected a table of positions"
            " [rows, E], got a weight of the attention itself"
        )


def attention_modules(checkpoint: Checkpoint) -> list[str]:
    """List the modules of a checkpoint that are an `nn.MultiheadAttention`."""
    ends = (f".{_PACKED}", f".{_SEPARATE[0]}")
    return sorted({name.rsplit(".", 1)[0] for name in checkpoint.tensors if name.endswith(ends)})


def _read_module(checkpoint: Checkpoint, below: str) -> dict[str, Tensor]:
    """Return the tensors of one module, each a matrix or a vector, complete as far as names go."""
    where = checkpoint.where
    # An adapter of the module lies beside it as often as in it.
    checkpoint.refuse_if_any("", is_adapters)
    names = checkpoint.below(below)
    modules = attention_modules(checkpoint)
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
    for name, tensor in tensors.items():
        if name in _LEARNED:
            if tensor.shape[:-1] != (1, 1):
                raise SourceInvalid(
                    f"{where}: {below}{name}: expected shape [1, 1, E], got {list(tensor.shape)}"
                )
            tensors[name] = tensor[0, 0]
        elif tensor.ndim != (2 if name.endswith("weight") else 1):
            kind = "matrix" if name.endswith("weight") else "vector"
            raise SourceInvalid(
                f"{where}: {below}{name}: expected a {kind}, got shape {list(tensor.shape)}"
            )
    if "out_proj.weight" not in tensors:
        raise SourceInvalid(f"{where}: {below}out_proj.weight is missing")
    for pair in (("in_proj_bias", "out_proj.bias"), _LEARNED):
        if len(tensors.keys() & set(pair)) == 1:
            raise SourceInvalid(f"{where}: expected {' and '.join(pair)}, or neither")
    return tensors


def _choice(modules: list[str]) -> str:
    if not modules:
        return "; there is no nn.MultiheadAttention in it"
    more = f" and {len(modules) - 8} more" if len(modules) > 8 else ""
    listed = ", ".join(modules[:8])
    return f"; it holds these attention modules: {listed}{more}; name one with --prefix"


def _config(
    where: str,
    tensors: Mapping[str, Tensor],
    num_heads: int,
    attention: Attention | None,
    *,
    add_zero_attn: bool,
) -> LayerConfig:
    embed_dim = tensors["out_proj.weight"].shape[0]
    memory_dim, value_memory_dim = _memory_dims(where, tensors, embed_dim, attention)
    extra: list[ExtraKey] = ["learned"] if _LEARNED[0] in tensors else []
    if add_zero_attn:
        extra.append("zero")
    try:
        return LayerConfig(
            embed_dim,
            num_heads,
            memory_dim,
            value_memory_dim,
            biases=PROJECTIONS if "in_proj_bias" in tensors else (),
            extra_keys=tuple(extra),
        )
    except ValueError as error:
        raise SourceInvalid(str(error)) from None


def _memory_dims(
    where: str, tensors: Mapping[str, Tensor], embed_dim: int, attention: Attention | None
) -> tuple[int | None, int | None]:
    """Return M and M_v; None for self-attention, and where values come from the keys' source."""
    if _PACKED in tensors:
        beside = [name for name in _SEPARATE if name in tensors]
        if beside:
            raise SourceInvalid(
                f"{where}: expected {_PACKED} or {', '.join(_SEPARATE)}, got both"
                f" {_PACKED} and {beside[0]}"
            )
        return (embed_dim if attention == "cross" else None), None
    missing = sorted(set(_SEPARATE) - set(tensors))
    if missing:
        raise SourceInvalid(f"{where}: expected {_PACKED} or {missing[0]}, got neither")
    kdim, vdim = tensors["k_proj_weight"].shape[1], tensors["v_proj_weight"].shape[1]
    if attention != "self":
        return kdim, (vdim if vdim != kdim else None)
    if (kdim, vdim) != (embed_dim, embed_dim):
        raise SourceInvalid(
            f"{where}: expected keys and values of width {embed_dim} for --attention self,"
            f" got {kdim if kdim == vdim else f'{kdim} and {vdim}'}: the layer is cross-attention"
        )
    return None, None


def _state_shapes(config: LayerConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a state dict of this layer may hold, as it is read."""
    e, m = config.embed_dim, config.memory_dim or config.embed_dim
    return {
        _PACKED: (3 * e, e),
        "q_proj_weight": (e, e),
        "k_proj_weight": (e, m),
        "v_proj_weight": (e, config.value_memory_dim or m),
        "in_proj_bias": (3 * e,),
        "bias_k": (e,),
        "bias_v": (e,),
        "out_proj.weight": (e, e),
        "out_proj.bias": (e,),
    }


def spec_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a module's tensors by the names of `LayerSpec`; parts of packed ones share memory."""
    inputs = PROJECTIONS[:3]
    if _PACKED in tensors:
        weights = tensors[_PACKED].chunk(3)
    else:
        weights = tuple(tensors[name] for name in _SEPARATE)
    spec = {f"{name}.weight": weight for name, weight in zip(inputs, weights, strict=True)}
    spec["output.weight"] = tensors["out_proj.weight"]
    if "in_proj_bias" in tensors:
        biases = tensors["in_proj_bias"].chunk(3)
        spec |= {f"{name}.bias": bias for name, bias in zip(inputs, biases, strict=True)}
        spec["output.bias"] = tensors["out_proj.bias"]
    if _LEARNED[0] in tensors:
        spec |= {"extra.key": tensors["bias_k"], "extra.value": tensors["bias_v"]}
    return spec
