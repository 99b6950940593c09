"""Small BERT-like checkpoints, as transformers writes them: one file, or shards and their index."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

SEED = 5
"""Any: every rule here holds for all weights."""

EMBED_DIM, HEADS = 8, 2

LAYERS = 12
"""As many as BERT-base has: layer 1 can be taken for layer 11, and 10 for 1."""

BERT = {
    "model_type": "bert",
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "position_embedding_type": "absolute",
}


def checkpoint_tensors(prefix: str = "bert.") -> dict[str, Tensor]:
    """Return the tensors of a checkpoint of small random layers, always the same."""
    random = torch.Generator().manual_seed(SEED)
    tensors = {f"{prefix}embeddings.word_embeddings.weight": torch.zeros(4, EMBED_DIM)}
    for layer in range(LAYERS):
        start = f"{prefix}encoder.layer.{layer}"
        for part in ("attention.self.query", "attention.self.key", "attention.self.value"):
            tensors[f"{start}.{part}.weight"] = torch.randn(8, 8, generator=random)
            tensors[f"{start}.{part}.bias"] = torch.randn(8, generator=random)
        for part in ("attention.output.dense", "intermediate.dense", "crossattention.self.query"):
            tensors[f"{start}.{part}.weight"] = torch.randn(8, 8, generator=random)
            tensors[f"{start}.{part}.bias"] = torch.randn(8, generator=random)
        tensors[f"{start}.attention.output.LayerNorm.weight"] = torch.randn(8, generator=random)
    return tensors


def write_checkpoint(
    directory: Path,
    *,
    prefix: str = "bert.",
    config: object = BERT,
    changes: dict[str, Tensor | None] | None = None,
) -> dict[str, Tensor]:
    """Write a checkpoint in one file, some tensors changed or left out; return its tensors."""
    tensors = checkpoint_tensors(prefix)
    for name, tensor in (changes or {}).items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    write_tensors(directory, tensors, config=config)
    return tensors


def write_tensors(
    directory: Path,
    tensors: dict[str, Tensor],
    *,
    config: object = BERT,
    shard_of: Callable[[str], int] | None = None,
) -> None:
    """Write these tensors as a checkpoint; with `shard_of`, as shards and an index."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shard_of is None:
        save_file(tensors, directory / "model.safetensors")
        return
    weight_map = {name: shard_name(shard_of(name)) for name in tensors}
    for shard in set(weight_map.values()):
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == shard}
        save_file(part, directory / shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def shard_name(number: int) -> str:
    """Return the file name of a shard, counted from 0."""
    return f"model-{number + 1:05}-of-00004.safetensors"
