"""Which files of a checkpoint's folder count, and PyTorch's own format in it."""

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from export.errors import SourceInvalid
from export.folder import open_folder

INDEX = "pytorch_model.bin.index.json"
SINGLE = "pytorch_model.bin"
SHARDS = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")


def _tensors(value: float = 1.0) -> dict[str, Tensor]:
    return {f"layer.{i}.weight": torch.full((2, 2), value + i) for i in range(4)}


def _write_shards(directory: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write every second tensor into the second shard, and the index; return its map."""
    shard_of = {name: SHARDS[i % 2] for i, name in enumerate(tensors)}
    for shard in SHARDS:
        part = {name: tensor for name, tensor in tensors.items() if shard_of[name] == shard}
        torch.save(part, directory / shard)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    return shard_of


def _found(directory: Path) -> dict[str, Tensor]:
    checkpoint = open_folder(directory)
    return checkpoint.take("", sorted(checkpoint.tensors))


def _refusal(directory: Path) -> str:
    with pytest.raises(SourceInvalid) as caught:
        open_folder(directory)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def _is_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        tensor.dtype == torch.float32 and torch.equal(tensor, expected[name].float())
        for name, tensor in found.items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_zip", [True, False])
def test_open_folder_reads_a_file_of_pytorch(
    is_zip: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """In the format of today and in that of before 1.6, and in any precision."""
    tensors = {name: tensor.to(dtype) for name, tensor in _tensors(0.1).items()}
    torch.save(OrderedDict(tensors), tmp_path / SINGLE, _use_new_zipfile_serialization=is_zip)

    assert _is_same(_found(tmp_path), tensors)


def test_open_folder_reads_tensors_that_share_their_numbers(tmp_path: Path) -> None:
    """Tied weights and views are saved once, and are what they are."""
    whole = torch.arange(6.0).reshape(2, 3)
    torch.save(
        {"a": whole, "b": whole, "c": whole.T, "d": nn.Parameter(whole[1])}, tmp_path / SINGLE
    )

    assert _is_same(_found(tmp_path), {"a": whole, "b": whole, "c": whole.T, "d": whole[1]})


def test_open_folder_reads_shards_of_pytorch(tmp_path: Path) -> None:
    """Each tensor comes from the shard that the index names."""
    tensors = _tensors()
    _write_shards(tmp_path, tensors)

    assert _is_same(_found(tmp_path), tensors)


@pytest.mark.parametrize("sharded", [True, False])
def test_open_folder_prefers_safetensors(sharded: bool, tmp_path: Path) -> None:
    """A converted checkpoint keeps its old files; transformers reads the new ones, too."""
    torch.save(_tensors(7.0), tmp_path / SINGLE)
    if sharded:
        _write_shards(tmp_path, _tensors(8.0))
    save_file(_tensors(), tmp_path / "model.safetensors")

    assert _is_same(_found(tmp_path), _tensors())


WRAPPED = {f"module._orig_mod.{name}": tensor for name, tensor in _tensors().items()}


def _one_file(directory: Path) -> None:
    save_file(WRAPPED, directory / "model.safetensors")


def _nested(directory: Path) -> None:
    torch.save({"epoch": 3, "state_dict": WRAPPED}, directory / SINGLE)


def _in_shards(directory: Path) -> None:
    _write_shards(directory, WRAPPED)


@pytest.mark.parametrize("write", [_one_file, _nested, _in_shards])
def test_open_folder_takes_off_what_training_put_around(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    """Names in the index are those of the shards, with all that is around them."""
    write(tmp_path)

    assert _is_same(_found(tmp_path), _tensors())
    nests = ("state_dict",) if write is _nested else ()
    assert open_folder(tmp_path).wrappers == (*nests, "module.", "_orig_mod.")


@pytest.mark.fault("G3")
def test_open_folder_half_of_the_safetensors_is_not_made_up_for(tmp_path: Path) -> None:
    """Shards without their index are half a download, whatever lies beside them."""
    torch.save(_tensors(), tmp_path / SINGLE)
    save_file(_tensors(), tmp_path / "model-00001-of-00002.safetensors")

    assert "expected model.safetensors.index.json beside" in _refusal(tmp_path)


def _no_index(directory: Path) -> str:
    (directory / INDEX).unlink()
    return (
        f"{directory}: expected {INDEX} beside {SHARDS[0]}, got none; add the index of the shards,"
        " or delete the files that are not part of the model"
    )


def _no_shard(directory: Path) -> str:
    (directory / SHARDS[1]).unlink()
    return f"{directory / SHARDS[1]}: no such file"


def _stale(directory: Path) -> str:
    torch.save(_tensors(9.0), directory / SINGLE)
    return (
        f"{directory}: ambiguous: {SINGLE} is there, but {INDEX} does not list it; delete {SINGLE}"
        f" if the shards are the model, else delete {INDEX} and the shards"
    )


def _other_format(directory: Path) -> str:
    weight_map = dict.fromkeys(_tensors(), "model.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return (
        f"{directory / INDEX}: weight_map: layer.0.weight: expected the name of a .bin file in the"
        " same folder, got 'model.safetensors'"
    )


def _unlisted(directory: Path) -> str:
    torch.save(_tensors() | {"lora_A": torch.ones(1)}, directory / SHARDS[0])
    return f"{directory}: ambiguous: layer.1.weight is in both {SHARDS[0]} and {SHARDS[1]}"


@pytest.mark.parametrize("spoil", [_no_index, _no_shard, _stale, _other_format, _unlisted])
@pytest.mark.fault("G3")
def test_open_folder_shards_that_are_not_whole_are_refused(
    spoil: Callable[[Path], str], tmp_path: Path
) -> None:
    """The same rules hold as for safetensors."""
    _write_shards(tmp_path, _tensors())

    expected = spoil(tmp_path)

    assert _refusal(tmp_path) == expected


class _Other:
    """What is no tensor."""


@pytest.mark.fault("G10")
def test_open_folder_does_not_run_what_a_file_says(tmp_path: Path) -> None:
    """A pickle may run code as it is read; only weights are."""
    torch.save({"layer": _Other()}, tmp_path / SINGLE)

    assert _refusal(tmp_path) == (
        f"{tmp_path / SINGLE}: expected a state dict, got objects of other classes; save the"
        " weights alone: torch.save(layer.state_dict(), FILE)"
    )


@pytest.mark.parametrize("size", [0, 10, 500])
@pytest.mark.fault("G10")
def test_open_folder_half_a_file_of_pytorch_is_refused(size: int, tmp_path: Path) -> None:
    """The message says how large it is."""
    torch.save(_tensors(), tmp_path / SINGLE)
    (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:size])

    message = _refusal(tmp_path)

    assert message.startswith(f"{tmp_path / SINGLE}: expected a file of weights only: ")
    assert message.endswith(f"({size} bytes; download or save it again)")


@pytest.mark.parametrize("name", ["tf_model.h5", "flax_model.msgpack"])
def test_open_folder_weights_of_other_libraries_are_named(name: str, tmp_path: Path) -> None:
    """The message says how to get the format that is read."""
    (tmp_path / name).touch()

    assert _refusal(tmp_path) == (
        f"{tmp_path / 'model.safetensors'}: no such file; expected safetensors weights; {name} is"
        " not read: load the model in PyTorch and save it again with save_pretrained(DIR)"
    )
