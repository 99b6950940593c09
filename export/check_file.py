"""
Inputs and expected answers of the caller's own: `--check FILE.safetensors`.

The file holds tensors by their names in the contract:

    embeddings        [B, S, E]  and, where the layer takes them, memory, value_memory, positions
    attend_mask, pair_mask, head_mask   optional
    output            [B, S, E]  expected
    attention_weights [B, H, S, T], extra_weights [B, H, S, n]   expected, optional

Floating-point tensors may have any precision; inputs are rounded to FP32.  The option `causal` may
stand in the file's metadata as "true" or "false"; without it the call is as the layer's default.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from export.errors import SourceInvalid
from export.gate import GateFailed
from service.contract import (
    ATTEND_MASK,
    ATTENTION_WEIGHTS,
    EMBEDDINGS,
    EXTRA_WEIGHTS,
    FP32_TOLERANCE,
    HEAD_MASK,
    MEMORY,
    OUTPUT,
    PAIR_MASK,
    POSITIONS,
    VALUE_MEMORY,
    ParityRow,
)
from service.inference.calls import Inputs
from service.inference.engine import Engine
from service.inference.parity import absolute_error, relative_error
from service.layer_config import MAX_POSITION, LayerConfig

_MASKS = (ATTEND_MASK, PAIR_MASK)
_EXPECTED = (OUTPUT, ATTENTION_WEIGHTS, EXTRA_WEIGHTS)
_IGNORED_METADATA = "format"
"""What the safetensors library itself writes there."""

_INSTEAD = {
    "attention_mask": f"; a padding mask is {ATTEND_MASK}, a mask of pairs is {PAIR_MASK}",
    "mask": f"; a padding mask is {ATTEND_MASK}, a mask of pairs is {PAIR_MASK}",
    "input": f"; the layer's input is {EMBEDDINGS}",
}

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


class CheckFailed(GateFailed):
    """The layer does not answer a caller's inputs as the caller expects."""


@dataclass(frozen=True)
class Check:
    """One call, and what is expected of it."""

    file: Path
    inputs: Inputs
    expected: Mapping[str, Array]
    """By name, `output` always."""


def read_check(file: Path, config: LayerConfig) -> Check:
    """
    Return the call in a file, every shape checked against the layer.

    Raises:
        SourceInvalid: the file cannot be read, or is no call to this layer with its answer.
    """
    tensors, metadata = _read(file)
    shapes = _shapes(file, tensors, config)
    for name in tensors:
        if name not in shapes:
            raise SourceInvalid(
                f"{file}: {name}: expected only {', '.join(shapes)}{_INSTEAD.get(name, '')}"
            )
    for name, allowed in shapes.items():
        _check_shape(file, name, tensors.get(name), allowed, config)
    return Check(
        file,
        Inputs(
            embeddings=_floats(tensors[EMBEDDINGS]),
            memory=_floats(tensors[MEMORY]) if MEMORY in tensors else None,
            attend_mask=_mask(file, ATTEND_MASK, tensors),
            pair_mask=_mask(file, PAIR_MASK, tensors),
            head_mask=_floats(tensors[HEAD_MASK]) if HEAD_MASK in tensors else None,
            causal=_causal(file, metadata, config),
            value_memory=_floats(tensors[VALUE_MEMORY]) if VALUE_MEMORY in tensors else None,
            positions=_positions(file, tensors, config),
        ),
        {name: _doubles(file, name, tensors[name]) for name in _EXPECTED if name in tensors},
    )


def pass_check(engine: Engine, check: Check) -> ParityRow:
    """
    Return how far the engine is from what is expected, once it is near enough.

    Raises:
        CheckFailed: it is not; every tensor that differs is named, by how much and where.
    """
    with_weights = engine.run(check.inputs, weights=True)
    plain = engine.run(check.inputs, weights=False).output
    found = {
        OUTPUT: with_weights.output,
        ATTENTION_WEIGHTS: with_weights.attention_weights,
        EXTRA_WEIGHTS: with_weights.extra_weights,
    }
    problems = [
        problem
        for name, expected in check.expected.items()
        for problem in _differences(name, found[name], expected)
    ]
    if not problems:
        problems = list(_differences(OUTPUT, plain, check.expected[OUTPUT]))
    if problems:
        raise CheckFailed(f"{check.file}: {'; '.join(problems)}")
    output = check.expected[OUTPUT]
    inputs = check.inputs
    masks = [name for name in (*_MASKS, HEAD_MASK) if getattr(inputs, name) is not None]
    return ParityRow(
        batch=len(inputs.embeddings),
        length=inputs.embeddings.shape[1],
        key_length=inputs.key_length,
        masks=", ".join(masks + ["causal"] * inputs.causal) or "none",
        reference=f"check {check.file.name}",
        output_error=max(relative_error(one, output) for one in (with_weights.output, plain)),
        weights_error=max(
            (
                absolute_error(found[name], expected)
                for name, expected in check.expected.items()
                if name != OUTPUT
            ),
            default=None,
        ),
    )


def _differences(name: str, found: Array | None, expected: Array) -> list[str]:
    """Say where an answer is furthest from the expected one, if it is too far."""
    if found is None or found.shape != expected.shape:
        got = "none" if found is None else list(found.shape)
        return [f"{name}: expected shape {list(expected.shape)}, got {got}"]
    allowed = FP32_TOLERANCE
    if name == OUTPUT:
        allowed *= max(1.0, float(np.abs(expected).max(initial=0.0)))
    difference = np.nan_to_num(np.abs(found.astype(np.float64) - expected), nan=np.inf)
    if not difference.size or difference.max() <= allowed:
        return []
    place = np.unravel_index(int(difference.argmax()), difference.shape)
    count = int((difference > allowed).sum())
    return [
        f"{name}{[int(i) for i in place]}: expected {expected[place]:.7g}, got"
        f" {found[place]:.7g}, which differs by {difference[place]:.3g}; allowed {allowed:.3g};"
        f" {count} of {difference.size} numbers differ by more"
    ]


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in sorted(opened.keys())}
            return tensors, dict(opened.metadata() or {})
    except FileNotFoundError:
        raise SourceInvalid(f"{file}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise SourceInvalid(f"{file}: expected a safetensors file: {error}") from None


def _shapes(
    file: Path, tensors: Mapping[str, Tensor], config: LayerConfig
) -> dict[str, tuple[Shape, ...]]:
    """Return the shapes that each tensor may have, by the names that this layer knows."""
    embeddings = tensors.get(EMBEDDINGS)
    if embeddings is None or embeddings.ndim != 3:
        got = "none" if embeddings is None else list(embeddings.shape)
        raise SourceInvalid(f"{file}: {EMBEDDINGS}: expected [B, S, {config.embed_dim}], got {got}")
    rows, length, heads = embeddings.shape[0], embeddings.shape[1], config.num_heads
    if config.max_positions is not None and length > config.max_positions:
        raise SourceInvalid(
            f"{file}: {EMBEDDINGS}: at most {config.max_positions} positions, got {length}"
        )
    keys, memory = length, tensors.get(MEMORY)
    if config.is_cross:
        if memory is None or memory.ndim != 3:
            got = "none" if memory is None else list(memory.shape)
            raise SourceInvalid(
                f"{file}: {MEMORY}: expected [B, T, {config.memory_dim}], got {got}"
            )
        keys = memory.shape[1]
    shapes: dict[str, tuple[Shape, ...]] = {
        EMBEDDINGS: ((rows, length, config.embed_dim),),
        ATTEND_MASK: ((rows, keys),),
        PAIR_MASK: tuple(
            (b, h, length, keys) for b in sorted({rows, 1}) for h in sorted({heads, 1})
        ),
        HEAD_MASK: ((heads,), (rows, heads)),
        OUTPUT: ((rows, length, config.embed_dim),),
        ATTENTION_WEIGHTS: ((rows, heads, length, keys),),
    }
    if config.memory_dim is not None:
        shapes[MEMORY] = ((rows, keys, config.memory_dim),)
    if config.value_memory_dim is not None:
        shapes[VALUE_MEMORY] = ((rows, keys, config.value_memory_dim),)
    if config.takes_positions:
        shapes[POSITIONS] = ((rows, length),)
    if config.extra_keys:
        shapes[EXTRA_WEIGHTS] = ((rows, heads, length, len(config.extra_keys)),)
    return shapes


_NEEDED = (EMBEDDINGS, MEMORY, VALUE_MEMORY, OUTPUT)


def _check_shape(
    file: Path, name: str, tensor: Tensor | None, allowed: tuple[Shape, ...], config: LayerConfig
) -> None:
    if tensor is None:
        if name in _NEEDED:
            raise SourceInvalid(f"{file}: {name}: expected {list(allowed[0])}, got none")
        return
    if tuple(tensor.shape) not in allowed:
        expected = " or ".join(str(list(shape)) for shape in allowed)
        raise SourceInvalid(f"{file}: {name}: expected {expected}, got {list(tensor.shape)}")
    is_float = name not in (*_MASKS, POSITIONS)
    if is_float != tensor.is_floating_point():
        kind = "floating-point numbers" if is_float else "integers or booleans"
        raise SourceInvalid(f"{file}: {name}: expected {kind}, got {tensor.dtype}")


def _floats(tensor: Tensor) -> npt.NDArray[np.float32]:
    return cast(npt.NDArray[np.float32], tensor.to(torch.float32).contiguous().numpy())


def _doubles(file: Path, name: str, tensor: Tensor) -> Array:
    if not bool(torch.isfinite(tensor).all()):
        raise SourceInvalid(f"{file}: {name}: expected finite numbers, got NaN or infinity")
    return tensor.to(torch.float64).numpy()


def _mask(file: Path, name: str, tensors: Mapping[str, Tensor]) -> npt.NDArray[np.bool_] | None:
    if name not in tensors:
        return None
    mask = tensors[name]
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise SourceInvalid(f"{file}: {name}: expected true and false, or 1 and 0")
    return cast(npt.NDArray[np.bool_], mask.to(torch.bool).contiguous().numpy())


def _positions(
    file: Path, tensors: Mapping[str, Tensor], config: LayerConfig
) -> npt.NDArray[np.int64] | None:
    if POSITIONS not in tensors:
        return None
    highest = (config.max_positions or MAX_POSITION + 1) - 1
    positions = tensors[POSITIONS].to(torch.int64).contiguous()
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) <= highest:
        raise SourceInvalid(f"{file}: {POSITIONS}: expected 0 to {highest}")
    return cast(npt.NDArray[np.int64], positions.numpy())


def _causal(file: Path, metadata: Mapping[str, str], config: LayerConfig) -> bool:
    unknown = sorted(set(metadata) - {"causal", _IGNORED_METADATA})
    if unknown:
        raise SourceInvalid(f"{file}: metadata: expected causal alone, got {unknown[0]}")
    text = metadata.get("causal", str(config.causal).lower())
    if text not in ("true", "false"):
        raise SourceInvalid(f"{file}: metadata: causal: expected true or false, got {text!r}")
    if text == "true" and config.is_cross:
        raise SourceInvalid(f"{file}: metadata: causal: expected false for cross-attention")
    return text == "true"
