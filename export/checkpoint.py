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
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from export.errors import SourceInvalid
from export.json_files import parse_json, read_json
from export.refusals import NOT_WEIGHTS, reason_against

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

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
        self, prefix: str, names: Iterable[str], *, harmless: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """
        Return the tensors `prefix + name` in FP32, by name, once nothing else lies below `prefix`.

        `harmless` are names below `prefix` that cannot change the layer's answer.

        Raises:
            SourceInvalid: a tensor below the prefix is neither used nor harmless, one is missing,
                or one that is used is no dense, finite tensor of floating-point weights.
        """
        names = list(names)
        self.refuse_unknown(prefix, {*names, *harmless})
        for name in names:
            if prefix + name not in self.tensors:
                raise SourceInvalid(f"{self.where}: expected a tensor {prefix}{name}, got none")
        # Each on its own, before any is read: put together, integers would become floats.
        for name in self.below(prefix):
            self._check_dtype(prefix + name)
        return {name: self._read(prefix + name) for name in names}

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
    Return the tensors of one file.

    `.safetensors` files are read as such, anything else with `torch.load` restricted to weights.

    Raises:
        SourceInvalid: it is not there, is damaged, or holds something else.
    """
    try:
        if path.suffix == ".safetensors":
            return Checkpoint(str(path), _open_safetensors(path))
        with warnings.catch_warnings():
            # It warns of pickle protocols; what it makes of one is checked below.
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True)
    except SourceInvalid:
        raise
    except FileNotFoundError:
        raise SourceInvalid(f"{path}: no such file") from None
    except pickle.UnpicklingError as error:
        if "Unsupported global" not in str(error):
            raise SourceInvalid(
                f"{path}: expected a file of weights only: {_first_words(error)}{_size(path)}"
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
            f"{path}: expected a file of weights only: {_first_words(error)}{_size(path)}"
        ) from error
    if not isinstance(state, Mapping):
        raise SourceInvalid(
            f"{path}: expected a state dict, got {type(state).__name__}; save it with"
            " torch.save(layer.state_dict(), FILE)"
        )
    nested = [key for key, value in state.items() if isinstance(value, Mapping)]
    if nested and not any(isinstance(value, Tensor) for value in state.values()):
        raise SourceInvalid(
            f"{path}: expected a state dict, got a training checkpoint; save what it holds under"
            f" {str(nested[0])!r} as a file of its own"
        )
    return from_values(str(path), state)


def _first_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].split(". ")[0].rstrip(": ")


def open_folder(directory: Path) -> Checkpoint:
    """
    Return the tensors of a folder with `model.safetensors`, or with shards and their index.

    Where there is an index, each tensor comes from the shard that the index names.

    Raises:
        SourceInvalid: a file is missing or damaged, or it is ambiguous which tensors count.
    """
    index = directory / INDEX_FILE
    if index.exists():
        return Checkpoint(str(directory), _open_shards(directory, index))
    file = directory / SINGLE_FILE
    shards = sorted(path.name for path in directory.glob("model-*-of-*.safetensors"))
    if shards:
        beside = f" and a {SINGLE_FILE} that may be stale" if file.exists() else ""
        raise SourceInvalid(
            f"{directory}: expected {INDEX_FILE} beside {shards[0]}, got none{beside};"
            " add the index of the shards, or delete the files that are not part of the model"
        )
    return Checkpoint(str(file), _open_weights(file))


def _stored(value: object) -> Stored:
    if isinstance(value, Tensor):
        return Stored(str(value.dtype).removeprefix("torch."), tuple(value.shape), lambda: value)
    return Stored(None, (), lambda: value)


def _open_shards(directory: Path, index: Path) -> dict[str, Stored]:
    shard_of = _weight_map(index)
    shards = sorted(set(shard_of.values()))
    if (directory / SINGLE_FILE).exists() and SINGLE_FILE not in shards:
        raise SourceInvalid(
            f"{directory}: ambiguous: {SINGLE_FILE} is there, but {INDEX_FILE} does not list it;"
            f" delete {SINGLE_FILE} if the shards are the model, else delete {INDEX_FILE}"
            " and the shards"
        )
    tensors: dict[str, Stored] = {}
    found_in: dict[str, str] = {}
    for shard in shards:
        for name, stored in _open_weights(directory / shard).items():
            if name in found_in:
                raise SourceInvalid(
                    f"{directory}: ambiguous: {name} is in both {found_in[name]} and {shard}"
                )
            found_in[name], tensors[name] = shard, stored
    for name in sorted(shard_of.keys() | found_in.keys()):
        if name not in shard_of:
            raise SourceInvalid(
                f"{directory / found_in[name]}: {name}: expected only tensors that"
                f" {INDEX_FILE} lists; the index and the shard are of different models"
            )
        if found_in.get(name) != shard_of[name]:
            raise SourceInvalid(
                f"{directory / shard_of[name]}: expected a tensor {name}, as {INDEX_FILE} says,"
                f" got none{f'; it is in {found_in[name]}' if name in found_in else ''}"
            )
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    value = read_json(index)
    shard_of = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(shard_of, dict) or not shard_of:
        raise SourceInvalid(f"{index}: weight_map: expected the shard of each tensor, got none")
    for name, shard in shard_of.items():
        # A name and no path: an index must not lead out of its folder.
        if not isinstance(shard, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", shard):
            raise SourceInvalid(
                f"{index}: weight_map: {name}: expected the name of a .safetensors file"
                f" in the same folder, got {shard!r}"
            )
    return shard_of


def _open_weights(file: Path) -> dict[str, Stored]:
    """Open a file of a folder; see `open_folder`."""
    try:
        return _open_safetensors(file)
    except FileNotFoundError:
        others = [
            name for name in ("pytorch_model.bin", "tf_model.h5") if (file.parent / name).exists()
        ]
        cure = (
            f"; {others[0]} is not read: load the model and save it again with"
            " save_pretrained(DIR, safe_serialization=True)"
            if others
            else ""
        )
        raise SourceInvalid(f"{file}: no such file; expected safetensors weights{cure}") from None
    except (SafetensorError, OSError) as error:
        raise SourceInvalid(f"{file}: expected safetensors: {error}{_size(file)}") from None


def _open_safetensors(file: Path) -> dict[str, Stored]:
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


def _size(file: Path) -> str:
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
