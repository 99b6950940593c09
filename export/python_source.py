"""
A layer that a Python function returns: `--from-python package.module:function`.

The function takes no arguments and returns a `LayerSpec` (export/layer_spec.py), or a pair of it
and the module that it was made of:

    def layer() -> LayerSpec: ...
    def layer() -> tuple[LayerSpec, nn.Module]: ...

The module becomes one more reference of the proof.  It is asked without masks, in eval mode and
without gradients, as `module(embeddings)`; for cross-attention as `module(embeddings, memory)`,
or `module(embeddings, memory, value_memory)` where the layer has that too.  It returns the output,
or the output and the weights:

    output   [B, S, E]
    weights  [B, H, S, T], or [B, H, S, T + n] with those of extra keys; None = not compared

Letters as in `service.layer_config`.  The function's code runs as any program does: nothing here
makes code of others safe.
"""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from export.errors import ExportRefused, SourceInvalid
from export.layer_spec import LayerSpec
from service import contract
from service.inference.calls import Floats, Inputs
from service.layer_config import LayerConfig

Oracle = Callable[[Inputs], tuple[Floats, Floats | None]]
"""
What answers a call without masks: the output, and the weights if it has them, [B, H, S, T] or
[B, H, S, T + n] with those of extra keys.
"""


@dataclass(frozen=True)
class PythonLayer:
    """What a function returned."""

    spec: LayerSpec
    oracle: Oracle | None


class ModuleFailed(ExportRefused):
    """The module beside a spec raises, or answers in another form than a layer."""


def read_function(reference: str) -> PythonLayer:
    """
    Return what the function `package.module:function` returns; the current directory is searched.

    Raises:
        SourceInvalid: there is no such function, it raises, or it returns something else.
    """
    module_name, _, path = reference.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    function = _attribute(reference, _imported(reference, module_name), path)
    _check_callable(reference, function)
    try:
        returned = function()
    except (Exception, SystemExit) as error:
        raise SourceInvalid(f"{reference}: {_what_was_raised(error)}") from error
    spec, module = returned if _is_pair(returned) else (returned, None)
    if not isinstance(spec, LayerSpec) or not isinstance(module, nn.Module | None):
        raise SourceInvalid(
            f"{reference}: expected it to return a LayerSpec (from export.layer_spec), or a pair of"
            f" it and an nn.Module, got {_kind_of(returned)}"
        )
    oracle = None if module is None else module_oracle(reference, spec.config, module)
    return PythonLayer(_plain(spec), oracle)


def module_oracle(reference: str, config: LayerConfig, module: nn.Module) -> Oracle:
    """Return what asks the module; it raises ModuleFailed for whatever is wrong with an answer."""
    module = module.eval()

    def answer(inputs: Inputs) -> tuple[Floats, Floats | None]:
        sources = (inputs.embeddings, inputs.memory, inputs.value_memory)
        arguments = [torch.from_numpy(source) for source in sources if source is not None]
        try:
            with torch.no_grad():
                returned = module(*arguments)
        except Exception as error:
            shapes = ", ".join(str(list(argument.shape)) for argument in arguments)
            raise ModuleFailed(
                f"{reference}: the module, called with {shapes}: {_what_was_raised(error)}"
            ) from error
        output, weights = returned if _is_pair(returned) else (returned, None)
        rows, length, _ = inputs.embeddings.shape
        keys, heads, extra = inputs.key_length, config.num_heads, len(config.extra_keys)
        found = _array(reference, "output", output, [(rows, length, config.embed_dim)])
        if weights is None:
            return found, None
        shapes_allowed = [(rows, heads, length, keys), (rows, heads, length, keys + extra)]
        return found, _array(reference, "weights", weights, shapes_allowed)

    return answer


def _imported(reference: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise SourceInvalid(
                f"{reference}: there is no module {missing}; it is looked for in the current"
                f" directory ({os.getcwd()}) and where Python finds packages"
            ) from None
        raise SourceInvalid(f"{reference}: {_what_was_raised(error)}") from error
    except (Exception, SystemExit) as error:
        raise SourceInvalid(f"{reference}: {_what_was_raised(error)}") from error


def _attribute(reference: str, module: Any, path: str) -> Any:
    found = module
    for name in path.split("."):
        if not hasattr(found, name):
            defined = sorted(
                name
                for name, value in vars(module).items()
                if inspect.isfunction(value) and value.__module__ == module.__name__
            )
            there = f"; its functions are {', '.join(defined[:8])}" if defined else ""
            raise SourceInvalid(
                f"{reference}: there is no {path} in {module.__file__ or module.__name__}{there}"
            )
        found = getattr(found, name)
    return found


def _check_callable(reference: str, function: Any) -> None:
    if not callable(function):
        raise SourceInvalid(
            f"{reference}: expected a function without arguments that returns a LayerSpec,"
            f" got {_kind_of(function)}"
        )
    try:
        needed = [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):  # written in C, which need not have a signature
        return
    if needed:
        raise SourceInvalid(
            f"{reference}: expected a function that needs no arguments, got one that needs"
            f" {', '.join(needed)}; give them defaults, or name a function that calls it"
        )


def _plain(spec: LayerSpec) -> LayerSpec:
    """Return the spec with tensors without gradients, on the CPU; they may share their memory."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in spec.tensors.items()}
    return LayerSpec(spec.config, tensors)


def _array(reference: str, name: str, value: object, shapes: Sequence[tuple[int, ...]]) -> Floats:
    expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
    if not isinstance(value, Tensor) or tuple(value.shape) not in shapes:
        got = list(value.shape) if isinstance(value, Tensor) else _kind_of(value)
        raise ModuleFailed(
            f"{reference}: expected the module to return the output, or (output, weights):"
            f" {name} {expected}, got {got}"
        )
    return np.asarray(value.detach().cpu().to(torch.float32).numpy())


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _kind_of(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return "None" if value is None else type(value).__name__


def _what_was_raised(error: BaseException) -> str:
    """Say in one line what a caller's code raised, and where in it."""
    words = " ".join(str(error).split())
    what = f"{type(error).__name__}: {words}" if words else type(error).__name__
    if isinstance(error, ExportRefused):  # a LayerSpec that is none: its words are whole
        what = words
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg}, at {error.filename}:{error.lineno}"
    place = _place_of(error)
    return what if place is None else f"{what}, at {place}"


def _place_of(error: BaseException) -> str | None:
    """Return the last place in the caller's code; where all is installed, the last of that."""
    # A dataclass is made by code of no file.
    ours = (*(str(Path(file).parent) for file in (__file__, contract.__file__)), "<")
    installed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(ours)
    ]
    written = [f for f in frames if not f.filename.startswith((*installed, os.__file__[:-5]))]
    last = (written or frames)[-1:]
    return f"{last[0].filename}:{last[0].lineno}" if last else None
