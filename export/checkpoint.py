"""
Tensors in files: what a file or a folder holds, and each tensor read only when it is used.

Nothing here knows an architecture.  A family names the tensors that it uses and those that
cannot change its answer; `Checkpoint.take` reads the former and refuses everything else, so
that no layer is published with a part of it left out (export/refusals.py says why and what
to do instead).
"""

import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from export.errors import SourceInvalid
from export.json_files import parse_json
from export.refusals import NOT_WEIGHTS, reason_against
from export.wrappers import innermost, unwrapped

_FLOATS = ("float32", "float16", "bfloat16", "float64")
"""The dtypes whose numbers are weights as they stand."""

_DTYPE_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""safetensors' names of dtypes, as PyTorch says them; any other is shown as it stands."""


@dataclass(frozen=True)
class Stored:
    """One tensor of a file, as the file's header describes it."""

    dtype: str | None
    """As PyTorch names it; None for what is no tensor."""
    shape: tuple[int, ...]
    read: Callable[[], object]


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors that belong together."""

    where: str
    """The file or folder, as messages name it."""
    tensors: Mapping[str, Stored]
    wrappers: tuple[str, ...] = ()
    """What training had put around the state dict, and is left out of the names."""

    def below(self, prefix: str) -> list[str]:
        """List, sorted, the names below `prefix`, without it."""
        return sorted(name.removeprefix(prefix) for name in self.tensors if name.startswith(prefix))

    def prefixes(self, pattern: str) -> list[str]:
        """List, sorted, the prefixes that match: `pattern` up to and including a dot."""
        matches = (re.match(rf"(?:.*\.)??{pattern}\.", name) for name in self.tensors)
        return sorted({match[0] for match in matches if match})

    def refuse_if_any(self, prefix: str, is_refused: Callable[[str], bool]) -> None:
        """
        Return when no tensor below `prefix`, of whatever layer, is of a refused kind.

        Raises:
            SourceInvalid: one is.
        """
        refused = [name for name in self.below(prefix) if is_refused(name)]
        if refused:
            raise SourceInvalid(self._refusal(prefix, refused))

    def take(
        self,
        prefix: str,
        names: Iterable[str],
        *,
        harmless: Collection[str] = (),
        buffers: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """
        Return the tensors `prefix + name` in FP32, by name, once nothing else lies below `prefix`.

        `harmless` are names below `prefix` that cannot change the layer's answer, and `buffers`
        those of no weights, which may have any dtype.

        Raises:
            SourceInvalid: a tensor below the prefix is neither used nor harmless, one is missing,
                has another dtype than weights, or one that is used is not dense and finite.
        """
        names = list(names)
        self.refuse_unknown(prefix, {*names, *harmless, *buffers})
        for name in names:
            if prefix + name not in self.tensors:
                raise SourceInvalid(f"{self.where}: expected a tensor {prefix}{name}, got none")
        # Each on its own, before any is read: put together, integers would become floats.
        for name in self.below(prefix):
            if name not in buffers:
                self._check_dtype(prefix + name)
        return {name: self._read(prefix + name) for name in names}

    def read(self, name: str) -> Tensor:
        """
        Return one tensor in FP32, whatever lies beside it.

        Raises:
            SourceInvalid: there is none, or none of floating-point weights.
        """
        if name not in self.tensors:
            raise SourceInvalid(f"{self.where}: expected a tensor {name}, got none")
        self._check_dtype(name)
        return self._read(name)

    def without(self, name: str) -> "Checkpoint":
        """Return the same tensors but one."""
        kept = {other: stored for other, stored in self.tensors.items() if other != name}
        return replace(self, tensors=kept)

    def refuse_unknown(self, prefix: str, known: Collection[str]) -> None:
        """
        Return when every tensor below `prefix` is known.

        Raises:
            SourceInvalid: one is not; one whose purpose is recognised is named first.
        """
        unknown = [name for name in self.below(prefix) if name not in known]
        if unknown:
            raise SourceInvalid(self._refusal(prefix, unknown))

    def _refusal(self, prefix: str, names: list[str]) -> str:
        reasons = {name: reason_against(name) for name in names}
        name = next((name for name in names if reasons[name].is_recognised), names[0])
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        return f"{self.where}: {prefix}{name}{more}: {reasons[name].text}"

    def _check_dtype(self, name: str) -> None:
        dtype = self.tensors[name].dtype
        if dtype is not None and dtype not in _FLOATS:
            raise SourceInvalid(
                f"{self.where}: {name}: expected floating-point weights"
                f" ({', '.join(_FLOATS)}), got {dtype}; {NOT_WEIGHTS}"
            )

    def _read(self, name: str) -> Tensor:
        value = self.tensors[name].read()
        if not isinstance(value, Tensor):
            raise SourceInvalid(
                f"{self.where}: {name}: expected a tensor, got {type(value).__name__}"
            )
        # A subclass may hold quantised or distributed numbers and call itself float32.
        if type(value) not in (Tensor, nn.Parameter):
            raise SourceInvalid(
                f"{self.where}: {name}: expected a plain tensor, got {type(value).__name__};"
                f" {NOT_WEIGHTS}"
            )
        if value.layout != torch.strided or value.is_meta:
            raise SourceInvalid(f"{self.where}: {name}: expected a dense tensor with its numbers")
        # First to FP32: what is finite in FP64 may not be so there.
        tensor = value.detach().to(torch.float32)
        if not bool(torch.isfinite(tensor).all()):
            raise SourceInvalid(
                f"{self.where}: {name}: expected finite FP32 numbers, got NaN or infinity"
            )
        return tensor


def from_values(where: str, values: Mapping[str, object]) -> Checkpoint:
    """Return what is in memory already as a checkpoint; keys become text."""
    return Checkpoint(where, {str(name): _stored(value) for name, value in values.items()})


def open_file(path: Path) -> Checkpoint:
    """
    Return the tensors of one file, by their names without what training put around them.

    Raises:
        SourceInvalid: see `open_as_named`; or two tensors would have one name.
    """
    return without_wrappers(open_as_named(path))


def without_wrappers(checkpoint: Checkpoint) -> Checkpoint:
    """
    Return a checkpoint whose names are without what training put around them.

    Raises:
        SourceInvalid: two tensors would have one name.
    """
    names, wrappers = unwrapped(checkpoint.where, checkpoint.tensors)
    tensors = {names[name]: stored for name, stored in checkpoint.tensors.items()}
    return Checkpoint(checkpoint.where, tensors, (*checkpoint.wrappers, *wrappers))


def open_as_named(path: Path) -> Checkpoint:
    """
    Return the tensors of one file, by the names that they have there.

    `.safetensors` files are read as such, anything else with `torch.load` restricted to weights.

    Raises:
        SourceInvalid: it is not there, is damaged, or holds something else.
    """
    try:
        if path.suffix == ".safetensors":
            return Checkpoint(str(path), open_safetensors(path))
        with warnings.catch_warnings():
            # It warns of pickle protocols; what it makes of one is checked below.
            warnings.simplefilter("ignore")
            # Mapped, a file of many layers takes no memory for those that are not used; PyTorch's
            # older format cannot be.
            mmap = zipfile.is_zipfile(path)
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except SourceInvalid:
        raise
    except FileNotFoundError:
        raise SourceInvalid(f"{path}: no such file") from None
    except pickle.UnpicklingError as error:
        if "Unsupported global" not in str(error):
            raise SourceInvalid(
                f"{path}: expected a file of weights only: {_first_words(error)}{looks_like(path)}"
            ) from error
        raise SourceInvalid(
            f"{path}: expected a state dict, got objects of other classes; save the weights alone:"
            " torch.save(layer.state_dict(), FILE)"
        ) from error
    except Exception as error:
        if "TorchScript" in str(error):
            raise SourceInvalid(
                f"{path}: expected a state dict, got a TorchScript module; save the weights alone:"
                " torch.save(module.state_dict(), FILE)"
            ) from error
        # torch's restricted reader raises whatever it stumbles on in bytes of another kind:
        # KeyError, IndexError, struct.error, ...
        raise SourceInvalid(
            f"{path}: expected a file of weights only: {_first_words(error)}{looks_like(path)}"
        ) from error
    if not isinstance(state, Mapping):
        raise SourceInvalid(
            f"{path}: expected a state dict, got {type(state).__name__}; save it with"
            " torch.save(layer.state_dict(), FILE)"
        )
    inner, nests = innermost(str(path), state)
    return replace(from_values(str(path), inner), wrappers=nests)


def _first_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].split(". ")[0].rstrip(": ")


def _stored(value: object) -> Stored:
    if isinstance(value, Tensor):
        return Stored(str(value.dtype).removeprefix("torch."), tuple(value.shape), lambda: value)
    return Stored(None, (), lambda: value)


def open_safetensors(file: Path) -> dict[str, Stored]:
    """
    Return the tensors of a safetensors file.

    Raises:
        SafetensorError: it is none.
        SourceInvalid: a name is there twice.
        OSError: it cannot be read.
    """
    tensors = {}
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (not a dict: it cannot be iterated)
            part = opened.get_slice(name)
            dtype = _DTYPE_NAMES.get(part.get_dtype(), part.get_dtype())
            tensors[name] = Stored(dtype, tuple(part.get_shape()), partial(_read, file, name))
    # The library takes the last of two tensors of one name, if they share their bytes.
    with file.open("rb") as raw:
        parse_json(str(file), raw.read(int.from_bytes(raw.read(8), "little")))
    return tensors


def _read(file: Path, name: str) -> Tensor:
    try:
        with safe_open(file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor
    except (SafetensorError, OSError) as error:
        raise SourceInvalid(f"{file}: {name}: cannot be read: {error}") from None


def looks_like(file: Path) -> str:
    """Say what a file that is no file of weights looks like, and what to do about it."""
    try:
        with file.open("rb") as opened:
            start = opened.read(200).lstrip()
        size = file.stat().st_size
    except OSError:
        return ""
    if start.startswith(b"version https://git-lfs"):
        return f" (a Git LFS pointer of {size} bytes; run `git lfs pull` to get the file itself)"
    if start[:1] == b"<":
        return f" (a page of HTML or XML, {size} bytes; download the file itself)"
    return f" ({size} bytes; download or save it again)"
