"""Small models of transformers with random weights: saved, read back, and called as an oracle."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from export.errors import SourceInvalid
from export.families.config import read_config
from export.families.family import Found, Place, family_of
from export.folder import open_folder
from service.inference.calls import Inputs
from tests.support.attention_cases import Case

SEED = 11
"""Any: every rule here holds for all weights."""

SPREAD = 0.3
"""The standard deviation of weights and biases: large enough that leaving one out shows."""

SHAPES = ((1, 1), (2, 5), (1, 9), (3, 4))
"""Sequences and their length."""

MASKS = ("none", "padding", "causal", "both", "pairs")

Attend = Callable[[Tensor, Tensor | None, Tensor, Tensor], tuple[Tensor, Tensor]]
"""
What an independent module answers: its output and weights.

Shapes: embeddings [B, S, E], memory [B, T, M], hidden [B, 1, S, T] (0 where a query attends,
else -infinity), positions [B, S].
"""


def randomised(model: nn.Module) -> Any:
    """Return the model with every parameter drawn anew, so that none is zero, one, or shared."""
    random = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=SPREAD, generator=random)
    return model.eval()


def read_back(
    directory: Path,
    layer: int,
    *,
    attention: Literal["self", "cross"] | None = None,
    part: str | None = None,
) -> Found:
    """Return a layer of a saved checkpoint, as the exporter reads it."""
    config, place = read_config(directory), Place(layer, attention, part)
    family = family_of(config)
    assert layer < family.num_layers(config, place)
    return family.read(open_folder(directory), config, place)


def self_cases(attend: Attend, width: int, *, moves: bool = False) -> list[Case]:
    """
    Return calls of self-attention of several lengths, under every mask, with their answers.

    `moves` gives every other call positions that are not 0, 1, 2, …
    """
    random = np.random.default_rng(SEED)
    cases = []
    for number, (rows, length) in enumerate(SHAPES):
        for masks in MASKS:
            x = _floats(random, rows, length, width)
            positions = random.integers(0, 40, (rows, length)) if moves and number % 2 else None
            inputs = _masked(random, Inputs(x, positions=positions), masks)
            cases.append(answered(inputs, attend))
    return cases


def cross_cases(attend: Attend, width: int) -> list[Case]:
    """Return calls of cross-attention to memories of several lengths, with their answers."""
    random = np.random.default_rng(SEED)
    cases = []
    for rows, length in SHAPES:
        for masks in ("none", "padding", "pairs"):
            x = _floats(random, rows, length, width)
            memory = _floats(random, rows, int(random.integers(1, 8)), width)
            cases.append(answered(_masked(random, Inputs(x, memory), masks), attend))
    return cases


def answered(inputs: Inputs, attend: Attend) -> Case:
    """Return the call with the module's answer to it."""
    rows, length, _ = inputs.embeddings.shape
    allowed = np.ones((rows, 1, length, inputs.key_length), bool)
    if inputs.attend_mask is not None:
        allowed = allowed & inputs.attend_mask[:, None, None]
    if inputs.pair_mask is not None:
        allowed = allowed & inputs.pair_mask
    if inputs.causal:
        allowed = allowed & np.tri(length, dtype=bool)
    hidden = torch.zeros(allowed.shape).masked_fill(~torch.from_numpy(allowed), -torch.inf)
    positions = np.arange(length)[None] if inputs.positions is None else inputs.positions
    memory = None if inputs.memory is None else torch.from_numpy(inputs.memory)
    with torch.no_grad():
        output, weights = attend(
            torch.from_numpy(inputs.embeddings), memory, hidden, torch.from_numpy(positions)
        )
    return Case(inputs, output.numpy(), weights.numpy())


def seen_in(model: nn.Module, module: nn.Module, call: Callable[[], object]) -> Case:
    """
    Return what `module` was given and what it answered while the whole model computed `call`.

    Masks are not seen: the caller adds those that it gave to the model.
    """
    seen: list[Case] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        names = ("key_value_states", "encoder_hidden_states")
        memory = next((kwargs[name] for name in names if kwargs.get(name) is not None), None)
        inputs = Inputs(x.numpy(), None if memory is None else memory.numpy())
        seen.append(Case(inputs, answer[0].numpy(), answer[-1].numpy()))

    handle = module.register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        call()
    handle.remove()
    [case] = seen
    return case


def edit(
    directory: Path,
    config: Mapping[str, object] | None = None,
    tensors: Mapping[str, Tensor | None] | None = None,
) -> None:
    """Change what a saved checkpoint says and holds; None takes a tensor out of it."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(config or {})))
    if tensors:
        weights = directory / "model.safetensors"
        changed: dict[str, Tensor | None] = {**load_file(weights), **tensors}
        save_file({name: x for name, x in changed.items() if x is not None}, weights)


def refusal(
    directory: Path,
    layer: int,
    *,
    attention: Literal["self", "cross"] | None = None,
    part: str | None = None,
) -> str:
    """Return the one line with which a layer is refused, without the folder's path."""
    with pytest.raises(SourceInvalid) as caught:
        read_back(directory, layer, attention=attention, part=part)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value).replace(f"{directory}/", "")


def names_below(found: Found, prefix: str, names: Iterable[str]) -> bool:
    """Say whether a layer was made of the tensors `prefix + name`, and of no others."""
    return sorted(found.tensors) == sorted(prefix + name for name in names)


def _floats(random: np.random.Generator, *shape: int) -> npt.NDArray[np.float32]:
    return random.standard_normal(shape).astype(np.float32)


def _masked(random: np.random.Generator, inputs: Inputs, masks: str) -> Inputs:
    """Return the call with masks under which every query attends to a key."""
    rows, length, _ = inputs.embeddings.shape
    keys = inputs.key_length
    if masks in ("padding", "both"):
        inputs.attend_mask = np.arange(keys) < random.integers(1, keys + 1, (rows, 1))
    if masks in ("causal", "both"):
        inputs.causal = True
    if masks == "pairs":
        pairs = random.random((rows, 1, length, keys)) < 0.5
        pairs[..., 0] = True
        inputs.pair_mask = pairs
    return inputs
