"""
A checkpoint's folder: which of its files hold the weights.

The weights are in one file, or in shards with an index that names the shard of each tensor, and
in safetensors or in PyTorch's own format, which is read restricted to weights.  Where there are
safetensors they are the ones that count, as for transformers.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from export.checkpoint import (
    Checkpoint,
    Stored,
    looks_like,
    open_as_named,
    open_safetensors,
    without_wrappers,
)
from export.errors import SourceInvalid
from export.json_files import read_json


@dataclass(frozen=True)
class _Format:
    """How the files of one format are called."""

    stem: str
    suffix: str

    @property
    def single(self) -> str:
        return f"{self.stem}{self.suffix}"

    @property
    def index(self) -> str:
        return f"{self.single}.index.json"

    def shards(self, directory: Path) -> list[str]:
        """List, sorted, what is called like a shard."""
        return sorted(path.name for path in directory.glob(f"{self.stem}-*-of-*{self.suffix}"))

    def is_in(self, directory: Path) -> bool:
        """Say whether the folder holds weights in this format, whole or not."""
        names = (self.index, self.single)
        return any((directory / name).exists() for name in names) or bool(self.shards(directory))


_SAFETENSORS = _Format("model", ".safetensors")
_PICKLED = _Format("pytorch_model", ".bin")

_UNREAD = ("tf_model.h5", "flax_model.msgpack")
"""What other libraries' weights are called."""


def open_folder(directory: Path) -> Checkpoint:
    """
    Return the tensors of a checkpoint's folder, without what training put around their names.

    Where there is an index, each tensor comes from the shard that the index names.

    Raises:
        SourceInvalid: a file is missing or damaged, or it is ambiguous which tensors count.
    """
    return without_wrappers(_open_as_named(directory))


def _open_as_named(directory: Path) -> Checkpoint:
    is_pickled = _PICKLED.is_in(directory) and not _SAFETENSORS.is_in(directory)
    form = _PICKLED if is_pickled else _SAFETENSORS
    if (directory / form.index).exists():
        return Checkpoint(str(directory), _open_shards(directory, form))
    file = directory / form.single
    if shards := form.shards(directory):
        beside = f" and a {form.single} that may be stale" if file.exists() else ""
        raise SourceInvalid(
            f"{directory}: expected {form.index} beside {shards[0]}, got none{beside};"
            " add the index of the shards, or delete the files that are not part of the model"
        )
    return _open_weights(file)


def _open_shards(directory: Path, form: _Format) -> dict[str, Stored]:
    shard_of = _weight_map(directory / form.index, form.suffix)
    shards = sorted(set(shard_of.values()))
    if (directory / form.single).exists() and form.single not in shards:
        raise SourceInvalid(
            f"{directory}: ambiguous: {form.single} is there, but {form.index} does not list it;"
            f" delete {form.single} if the shards are the model, else delete {form.index}"
            " and the shards"
        )
    tensors: dict[str, Stored] = {}
    found_in: dict[str, str] = {}
    for shard in shards:
        for name, stored in _open_weights(directory / shard).tensors.items():
            if name in found_in:
                raise SourceInvalid(
                    f"{directory}: ambiguous: {name} is in both {found_in[name]} and {shard}"
                )
            found_in[name], tensors[name] = shard, stored
    for name in sorted(shard_of.keys() | found_in.keys()):
        if name not in shard_of:
            raise SourceInvalid(
                f"{directory / found_in[name]}: {name}: expected only tensors that"
                f" {form.index} lists; the index and the shard are of different models"
            )
        if found_in.get(name) != shard_of[name]:
            raise SourceInvalid(
                f"{directory / shard_of[name]}: expected a tensor {name}, as {form.index} says,"
                f" got none{f'; it is in {found_in[name]}' if name in found_in else ''}"
            )
    return tensors


def _weight_map(index: Path, suffix: str) -> dict[str, str]:
    value = read_json(index)
    shard_of = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(shard_of, dict) or not shard_of:
        raise SourceInvalid(f"{index}: weight_map: expected the shard of each tensor, got none")
    for name, shard in shard_of.items():
        # A name and no path: an index must not lead out of its folder.
        if not isinstance(shard, str) or not re.fullmatch(rf"[^/\\\0]+{re.escape(suffix)}", shard):
            raise SourceInvalid(
                f"{index}: weight_map: {name}: expected the name of a {suffix} file"
                f" in the same folder, got {shard!r}"
            )
    return shard_of


def _open_weights(file: Path) -> Checkpoint:
    if file.suffix == _PICKLED.suffix:
        return open_as_named(file)
    try:
        return Checkpoint(str(file), open_safetensors(file))
    except FileNotFoundError:
        other = next((name for name in _UNREAD if (file.parent / name).exists()), None)
        cure = (
            f"; {other} is not read: load the model in PyTorch and save it again with"
            " save_pretrained(DIR)"
            if other
            else ""
        )
        raise SourceInvalid(f"{file}: no such file; expected safetensors weights{cure}") from None
    except (SafetensorError, OSError) as error:
        raise SourceInvalid(f"{file}: expected safetensors: {error}{looks_like(file)}") from None
