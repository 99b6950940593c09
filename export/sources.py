"""
Where a layer's weights come from.

Every source ends in one `Source`: our layer with the weights in it, the same
weights in PyTorch's own `nn.MultiheadAttention` as an independent reference,
and a record of the origin for the manifest.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from export.attention import MultiHeadAttention
from service.contract import LayerConfig

_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_STATE_KEYS = frozenset(
    {"in_proj_weight", *_SEPARATE, "in_proj_bias", "out_proj.weight", "out_proj.bias"}
)
_HF_FAMILIES = frozenset({"bert", "roberta", "xlm-roberta", "camembert", "electra"})


class SourceInvalid(Exception):
    """The weights cannot be read, or are not those of one attention layer."""


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


def from_torch(path: Path, num_heads: int) -> Source:
    """
    Return the layer whose `nn.MultiheadAttention` state dict is saved at `path`.

    `.safetensors` files are read as such, anything else with `torch.load` restricted
    to weights.

    Raises:
        SourceInvalid: see the class.
    """
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            with warnings.catch_warnings():
                # It warns of pickle protocols; what it makes of one is checked below.
                warnings.simplefilter("ignore")
                state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise SourceInvalid(f"{path}: no such file") from None
    except Exception as error:
        # torch's restricted reader raises whatever it stumbles on in bytes of another kind:
        # KeyError, IndexError, struct.error, ...
        reason = f"{type(error).__name__}: {error}".splitlines()[0].split(". ")[0].rstrip(": ")
        raise SourceInvalid(f"{path}: expected a file of weights only: {reason}") from error
    if not isinstance(state, Mapping):
        raise SourceInvalid(f"{path}: expected a state dict, got {type(state).__name__}")
    return from_state(state, num_heads, origin={"kind": "torch", "file": path.name})


def from_hf(directory: Path, layer: int) -> Source:
    """
    Return the self-attention of one layer of a BERT-family checkpoint directory.

    Its output is that of `attention.output.dense`: before dropout, residual and
    LayerNorm.  config.json and model.safetensors are read directly.

    Raises:
        SourceInvalid: see the class.
    """
    config = _hf_config(directory)
    num_layers = config["num_hidden_layers"]
    if not 0 <= layer < num_layers:
        raise SourceInvalid(f"layer: expected 0 to {num_layers - 1}, got {layer}")
    tensors = _hf_tensors(directory, layer)
    width = tensors["output.dense.bias"].numel()
    _check_shapes(
        f"layer {layer}",
        tensors,
        {name: (width, width) if name.endswith("weight") else (width,) for name in tensors},
    )
    state = {
        "in_proj_weight": torch.cat(
            [tensors[f"self.{x}.weight"] for x in ("query", "key", "value")]
        ),
        "in_proj_bias": torch.cat([tensors[f"self.{x}.bias"] for x in ("query", "key", "value")]),
        "out_proj.weight": tensors["output.dense.weight"],
        "out_proj.bias": tensors["output.dense.bias"],
    }
    name = str(config.get("_name_or_path") or directory.name)
    origin: dict[str, str | int] = {"kind": "hf", "checkpoint": name, "layer": layer}
    return from_state(state, config["num_attention_heads"], origin=origin)


def from_state(
    state: Mapping[str, object], num_heads: int, *, origin: dict[str, str | int]
) -> Source:
    """
    Return the layer of an `nn.MultiheadAttention` state dict, in FP32.

    Both forms are read: packed (`in_proj_weight`) and separate (`q_proj_weight`,
    `k_proj_weight`, `v_proj_weight`, for keys and values of another width).

    Raises:
        SourceInvalid: a key is missing, unknown or of the wrong shape, or
            kdim differs from vdim.
    """
    tensors = _check_state(state)
    weight = tensors["out_proj.weight"]
    embed_dim = weight.shape[0]
    memory_dim = _memory_dim(tensors)
    bias = "in_proj_bias" in tensors
    config = _config(embed_dim, num_heads, memory_dim=memory_dim, bias=bias)
    _check_shapes("state dict", tensors, _state_shapes(config))
    if memory_dim == embed_dim:
        # PyTorch packs when the widths agree, also where keys come from a memory.
        tensors = _packed(tensors)
    with torch.random.fork_rng(devices=[]):  # new layers draw weights, only to lose them
        reference, layer = _torch_layer(config), MultiHeadAttention(config)
    try:
        reference.load_state_dict(tensors)
    except RuntimeError as error:
        problem = str(error).splitlines()[-1].strip()
        raise SourceInvalid(f"state dict: expected one nn.MultiheadAttention: {problem}") from None
    layer.load_state_dict(_our_state(config, tensors))
    return Source(layer.eval(), reference.eval(), origin)


def _config(
    embed_dim: int, num_heads: int, *, memory_dim: int | None = None, bias: bool = True
) -> LayerConfig:
    try:
        return LayerConfig(embed_dim, num_heads, memory_dim, bias)
    except ValueError as error:
        raise SourceInvalid(str(error)) from None


def _check_state(state: Mapping[str, object]) -> dict[str, Tensor]:
    if {"bias_k", "bias_v"} & set(state):
        raise SourceInvalid("state dict: add_bias_kv (bias_k, bias_v) is not supported")
    unknown = sorted(str(key) for key in set(state) - _STATE_KEYS)
    if unknown:
        raise SourceInvalid(
            f"state dict: expected the keys of one nn.MultiheadAttention, got also {unknown[0]!r}"
        )
    tensors = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise SourceInvalid(f"state dict: {key}: expected a floating-point tensor")
        if value.layout != torch.strided or value.is_meta:
            raise SourceInvalid(f"state dict: {key}: expected a dense tensor with its numbers")
        if value.ndim != (2 if key.endswith("weight") else 1):
            kind = "matrix" if key.endswith("weight") else "vector"
            raise SourceInvalid(
                f"state dict: {key}: expected a {kind}, got shape {list(value.shape)}"
            )
        # First to FP32: what is finite in FP64 may not be so there.
        tensors[key] = value.detach().to(torch.float32)
        if not bool(torch.isfinite(tensors[key]).all()):
            raise SourceInvalid(
                f"state dict: {key}: expected finite FP32 numbers, got NaN or infinity"
            )
    if "out_proj.weight" not in tensors:
        raise SourceInvalid("state dict: out_proj.weight is missing")
    if ("in_proj_bias" in tensors) != ("out_proj.bias" in tensors):
        raise SourceInvalid("state dict: expected in_proj_bias and out_proj.bias, or neither")
    return tensors


def _memory_dim(tensors: Mapping[str, Tensor]) -> int | None:
    """Return M for separate projections, None for packed ones (which attend to themselves)."""
    if "in_proj_weight" in tensors:
        return None
    missing = sorted(set(_SEPARATE) - set(tensors))
    if missing:
        raise SourceInvalid(f"state dict: expected in_proj_weight or {missing[0]}, got neither")
    kdim, vdim = tensors["k_proj_weight"].shape[1], tensors["v_proj_weight"].shape[1]
    if kdim != vdim:
        raise SourceInvalid(
            f"state dict: expected kdim = vdim (one memory is the source of keys and values),"
            f" got kdim {kdim} and vdim {vdim}"
        )
    return kdim


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


def _hf_config(directory: Path) -> dict[str, int]:
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise SourceInvalid(f"{file}: no such file; expected a checkpoint directory") from None
    except ValueError as error:
        raise SourceInvalid(f"{file}: expected JSON: {error}") from None
    if not isinstance(config, dict):
        raise SourceInvalid(f"{file}: expected a JSON object, got {type(config).__name__}")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _HF_FAMILIES:
        raise SourceInvalid(
            f"{file}: model_type: expected one of {', '.join(sorted(_HF_FAMILIES))}, got {family!r}"
        )
    position = config.get("position_embedding_type", "absolute")
    if position != "absolute":
        # Relative positions add terms inside the softmax that the formula does not have.
        raise SourceInvalid(f"{file}: position_embedding_type: expected absolute, got {position!r}")
    for key in ("num_hidden_layers", "num_attention_heads"):
        if type(config.get(key)) is not int:
            raise SourceInvalid(f"{file}: {key}: expected an integer, got {config.get(key)!r}")
    return config


def _hf_tensors(directory: Path, layer: int) -> dict[str, Tensor]:
    """Return the layer's attention tensors by their name after `attention.`."""
    file = directory / "model.safetensors"
    part = f"encoder.layer.{layer}.attention."
    wanted = [f"self.{name}" for name in ("query", "key", "value")] + ["output.dense"]
    try:
        with safe_open(file, framework="pt") as checkpoint:
            names = {
                name.split(part, 1)[1]: name
                for name in checkpoint.keys()  # noqa: SIM118 (not a dict: it cannot be iterated)
                if part in name
            }
            return {
                short: checkpoint.get_tensor(names[short])
                for short in (f"{name}.{kind}" for name in wanted for kind in ("weight", "bias"))
            }
    except FileNotFoundError:
        raise SourceInvalid(f"{file}: no such file; expected safetensors weights") from None
    except KeyError as error:
        raise SourceInvalid(f"{file}: expected a tensor …{part}{error.args[0]}") from None
    except (SafetensorError, OSError) as error:
        raise SourceInvalid(f"{file}: expected safetensors: {error}") from None
