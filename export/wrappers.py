"""
What training puts around a state dict, recognised and taken off.

    {"state_dict": …}, {"model": …}    the dictionary of a training checkpoint
    module.                            nn.DataParallel and DistributedDataParallel
    _orig_mod.                         torch.compile
    _fsdp_wrapped_module.              FullyShardedDataParallel
    _checkpoint_wrapped_module.        activation checkpointing

The underscored names are reserved by PyTorch and say nothing about the model, so they are taken
out of a name wherever they stand in it; `module` only from the beginning of all names.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from export.errors import SourceInvalid

_NESTS = ("state_dict", "model_state_dict", "model", "module")
"""The keys under which training scripts keep a model's weights; `module` is DeepSpeed's."""

_RESERVED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_PARALLEL = "module"


def innermost(where: str, state: Mapping[Any, Any]) -> tuple[Mapping[Any, Any], tuple[str, ...]]:
    """
    Return the state dict inside a training checkpoint, and the keys that lead to it.

    Raises:
        SourceInvalid: several keys could be meant, or none that is known.
    """
    path: list[str] = []
    while True:
        nested = [str(key) for key, value in state.items() if isinstance(value, Mapping)]
        known = [key for key in _NESTS if key in nested]
        if not known:
            break
        if len(known) > 1:
            raise SourceInvalid(
                f"{where}: ambiguous: a training checkpoint with weights under"
                f" {' and '.join(map(repr, known))}; save the one that counts as a file of its own"
            )
        path += known
        state = state[known[0]]
    if nested and not any(isinstance(value, Tensor) for value in state.values()):
        raise SourceInvalid(
            f"{where}: expected a state dict, got a training checkpoint; save what it holds under"
            f" {nested[0]!r} as a file of its own"
        )
    return state, tuple(path)


def unwrapped(where: str, names: Iterable[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """
    Return what each tensor is called without wrappers, and the wrappers that were taken off.

    Raises:
        SourceInvalid: two tensors would have one name.
    """
    plain = {name: _without_reserved(name) for name in names}
    found = {part for name in plain for part in name.split(".")[:-1] if part in _RESERVED}
    while plain and all(name.startswith(f"{_PARALLEL}.") for name in plain.values()):
        plain = {name: rest.removeprefix(f"{_PARALLEL}.") for name, rest in plain.items()}
        found.add(_PARALLEL)
    originals: dict[str, str] = {}
    for name, rest in plain.items():
        if rest in originals:
            raise SourceInvalid(
                f"{where}: ambiguous: {originals[rest]} and {name} are the same tensor without"
                " what training puts around a module; save the one that counts"
            )
        originals[rest] = name
    return plain, tuple(f"{part}." for part in (_PARALLEL, *_RESERVED) if part in found)


def unwrapped_prefix(prefix: str, wrappers: Iterable[str]) -> str:
    """Return the module that `prefix` names once these wrappers are taken off, without its dot."""
    plain = _without_reserved(prefix.rstrip("."))
    if f"{_PARALLEL}." in wrappers:
        while plain == _PARALLEL or plain.startswith(f"{_PARALLEL}."):
            plain = plain[len(_PARALLEL) + 1 :]
    return plain


def _without_reserved(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _RESERVED)
