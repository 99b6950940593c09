"""Files of tensors: which of them count, and what is said of those that cannot be read."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from export.sources import SourceInvalid, from_hf, from_torch
from tests.support.checkpoints import (
    LAYERS,
    checkpoint_tensors,
    shard_name,
    write_checkpoint,
    write_tensors,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NAME = "bert.encoder.layer.4.attention.self.query.weight"


def _shards(directory: Path, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Write a checkpoint of two shards: the odd layers in the second, the rest in the first."""
    tensors = checkpoint_tensors() if tensors is None else tensors

    def shard_of(name: str) -> int:
        return int(name.split(".layer.")[1].split(".")[0]) % 2 if ".layer." in name else 0

    write_tensors(directory, tensors, shard_of=shard_of)
    return tensors


def _edit_index(directory: Path, **changes: object) -> None:
    """Change entries of the index's weight_map; `NAME` stands for the tensor of that name."""
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] |= {NAME if key == "NAME" else key: v for key, v in changes.items()}
    (directory / INDEX).write_text(json.dumps(index))


def _refusal(directory: Path, layer: int = 4) -> str:
    with pytest.raises(SourceInvalid) as caught:
        from_hf(directory, layer)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize("layer", [4, 5])
def test_open_folder_reads_each_tensor_from_the_shard_of_the_index(
    layer: int, tmp_path: Path
) -> None:
    """A sharded checkpoint is as good as one in one file."""
    tensors = _shards(tmp_path)

    source = from_hf(tmp_path, layer)

    start = f"bert.encoder.layer.{layer}.attention"
    assert torch.equal(
        source.spec.tensors["output.weight"], tensors[f"{start}.output.dense.weight"]
    )
    queries = source.spec.tensors["query.weight"]
    assert torch.equal(queries, tensors[f"{start}.self.query.weight"])


def test_open_folder_layer_across_two_shards_is_put_together(tmp_path: Path) -> None:
    """Shards are cut by size, amid a layer."""
    tensors = checkpoint_tensors()
    write_tensors(tmp_path, tensors, shard_of=lambda name: int("self" in name))

    source = from_hf(tmp_path, 4)

    assert torch.equal(source.spec.tensors["query.weight"], tensors[NAME])


def test_open_folder_index_may_list_the_single_file(tmp_path: Path) -> None:
    """One shard is called like the whole; that is no contradiction."""
    tensors = write_checkpoint(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, SINGLE)}))

    source = from_hf(tmp_path, 4)

    assert torch.equal(source.spec.tensors["query.weight"], tensors[NAME])


def test_open_folder_link_to_a_file_elsewhere_is_followed(tmp_path: Path) -> None:
    """A download cache keeps the files elsewhere and links them by name."""
    tensors = _shards(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(file)

    source = from_hf(snapshot, 4)

    assert torch.equal(source.spec.tensors["query.weight"], tensors[NAME])


@pytest.mark.fault("G3")
def test_open_folder_stale_single_file_beside_an_index_is_ambiguous(tmp_path: Path) -> None:
    """Which of two models is meant is not guessed; the message says what to delete."""
    write_checkpoint(tmp_path)
    _shards(tmp_path)

    message = _refusal(tmp_path)

    assert message == (
        f"{tmp_path}: ambiguous: {SINGLE} is there, but {INDEX} does not list it;"
        f" delete {SINGLE} if the shards are the model, else delete {INDEX} and the shards"
    )


@pytest.mark.parametrize("has_single", [True, False])
@pytest.mark.fault("G3")
def test_open_folder_shards_without_an_index_are_refused(has_single: bool, tmp_path: Path) -> None:
    """Shards are read as their index says, and a single file beside them may be another model."""
    _shards(tmp_path)
    (tmp_path / INDEX).unlink()
    if has_single:
        write_checkpoint(tmp_path)

    message = _refusal(tmp_path)

    assert f"expected {INDEX} beside {shard_name(0)}, got none" in message
    assert (f"and a {SINGLE} that may be stale" in message) == has_single


def test_open_folder_missing_shard_is_named(tmp_path: Path) -> None:
    """Half a download is no checkpoint, even where the other half holds the layer."""
    _shards(tmp_path)
    (tmp_path / shard_name(1)).unlink()

    message = _refusal(tmp_path)

    assert message == f"{tmp_path / shard_name(1)}: no such file; expected safetensors weights"


@pytest.mark.parametrize("elsewhere", [True, False])
def test_open_folder_tensor_missing_in_its_shard_is_named(elsewhere: bool, tmp_path: Path) -> None:
    """The index is not outvoted: a tensor is in the shard that it names, or the folder is wrong."""
    tensors = _shards(tmp_path)
    if elsewhere:
        _edit_index(tmp_path, NAME=shard_name(1))
        shard, place = shard_name(1), f"; it is in {shard_name(0)}"
    else:
        odd = [n for n in tensors if ".layer." in n and int(n.split(".")[3]) % 2]
        rest = {n: t for n, t in tensors.items() if n not in odd and n != NAME}
        save_file(rest, tmp_path / shard_name(0))
        shard, place = shard_name(0), ""

    message = _refusal(tmp_path)

    assert message == (
        f"{tmp_path / shard}: expected a tensor {NAME}, as {INDEX} says, got none{place}"
    )


def test_open_folder_tensor_that_the_index_does_not_list_is_refused(tmp_path: Path) -> None:
    """A shard of another model, or with an adapter added, does not pass for the index's own."""
    _shards(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    del index["weight_map"][NAME]
    (tmp_path / INDEX).write_text(json.dumps(index))

    message = _refusal(tmp_path)

    assert message == (
        f"{tmp_path / shard_name(0)}: {NAME}: expected only tensors that {INDEX} lists;"
        " the index and the shard are of different models"
    )


def test_open_folder_tensor_in_two_shards_is_ambiguous(tmp_path: Path) -> None:
    """Which of two tensors of one name is meant is not guessed."""
    tensors = _shards(tmp_path)
    odd = {n: t for n, t in tensors.items() if ".layer." in n and int(n.split(".")[3]) % 2}
    save_file(odd | {NAME: torch.ones(8, 8)}, tmp_path / shard_name(1))

    message = _refusal(tmp_path)

    assert message == (
        f"{tmp_path}: ambiguous: {NAME} is in both {shard_name(0)} and {shard_name(1)}"
    )


@pytest.mark.parametrize(
    "shard",
    [
        *("../model.safetensors", "/etc/passwd", "/srv/model.safetensors", "sub/x.safetensors"),
        *("..\\x.safetensors", "x\0.safetensors", "weights.bin", ".safetensors/..", "", "..", 7),
        *(None, ["x.safetensors"]),
    ],
    ids=repr,
)
def test_open_folder_index_that_leads_elsewhere_is_refused(shard: object, tmp_path: Path) -> None:
    """An index names files of its own folder, and nothing else is opened."""
    _shards(tmp_path / "checkpoint")
    write_checkpoint(tmp_path)
    _edit_index(tmp_path / "checkpoint", NAME=shard)

    message = _refusal(tmp_path / "checkpoint")

    assert message == (
        f"{tmp_path / 'checkpoint' / INDEX}: weight_map: {NAME}: expected the name of a"
        f" .safetensors file in the same folder, got {shard!r}"
    )


INDEXES: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "expected JSON: "),
    "a list": ("[]", "weight_map: expected the shard of each tensor, got none"),
    "no weight_map": ("{}", "weight_map: expected the shard of each tensor, got none"),
    "an empty weight_map": (
        '{"weight_map": {}}',
        "weight_map: expected the shard of each tensor, got none",
    ),
    "a tensor twice": (
        f'{{"weight_map": {{"{NAME}": "a.safetensors", "{NAME}": "b.safetensors"}}}}',
        f"'{NAME}' is there twice; expected it once",
    ),
    "nested too deeply": ("[" * 100_000, "expected JSON, got brackets nested too deeply"),
}


@pytest.mark.parametrize(("text", "message"), INDEXES.values(), ids=INDEXES)
def test_open_folder_index_that_is_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """The message names the index and what is wrong with it."""
    _shards(tmp_path)
    (tmp_path / INDEX).write_text(text)

    assert _refusal(tmp_path).startswith(f"{tmp_path / INDEX}: {message}")


@pytest.mark.fault("G10")
def test_open_folder_nested_configuration_is_refused(tmp_path: Path) -> None:
    """Brackets without end are no traceback."""
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)

    assert _refusal(tmp_path) == (
        f"{tmp_path / 'config.json'}: expected JSON, got brackets nested too deeply"
    )


def test_open_folder_configuration_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    """Which of two numbers of heads is meant is not guessed."""
    write_checkpoint(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text[:-1] + ', "num_attention_heads": 4}')

    assert _refusal(tmp_path).endswith("'num_attention_heads' is there twice; expected it once")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 90868376\n"

WRONG_FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a Git LFS pointer": (lambda whole: POINTER, f"({'a Git LFS pointer of'} {len(POINTER)} bytes"),
    "a page": (
        lambda whole: b"\n<!DOCTYPE html><html></html>",
        "(a page of HTML or XML, 29 bytes; download the file itself)",
    ),
    "an empty file": (lambda whole: b"", "(0 bytes; download or save it again)"),
    "half a file": (
        lambda whole: whole[: len(whole) // 2],
        " bytes; download or save it again)",
    ),
}


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize(("make", "message"), WRONG_FILES.values(), ids=WRONG_FILES)
@pytest.mark.fault("G10")
def test_open_what_is_no_file_of_weights_says_what_it_is(
    make: Callable[[bytes], bytes], message: str, is_folder: bool, tmp_path: Path
) -> None:
    """The size and the look of a file tell what went wrong, in one line."""
    write_checkpoint(tmp_path)
    file = tmp_path / SINGLE
    file.write_bytes(make(file.read_bytes()))

    with pytest.raises(SourceInvalid) as caught:
        from_hf(tmp_path, 0) if is_folder else from_torch(file, 2)

    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_open_file_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    """The library takes the last of two tensors that share their bytes, whatever their type."""
    one, two = (
        f'"in_proj_bias": {{"dtype": "{dtype}", "shape": [2], "data_offsets": [0, 8]}}'
        for dtype in ("F32", "I32")
    )
    header = f"{{{one}, {two}}}".encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))

    with pytest.raises(SourceInvalid, match="'in_proj_bias' is there twice; expected it once"):
        from_torch(tmp_path / "x.safetensors", 2)


def test_open_folder_every_layer_of_every_form_is_readable(tmp_path: Path) -> None:
    """Nothing above refuses what is right."""
    write_checkpoint(tmp_path / "one")
    _shards(tmp_path / "shards")

    found = [
        torch.equal(
            from_hf(tmp_path / "one", layer).spec.tensors["output.weight"],
            from_hf(tmp_path / "shards", layer).spec.tensors["output.weight"],
        )
        for layer in range(LAYERS)
    ]

    assert all(found)
