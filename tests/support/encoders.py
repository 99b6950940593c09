"""Encoders of transformers as oracles: tiny models of random weights, saved and read back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from service.inference.calls import Inputs
from tests.support.attention_cases import Case
from tests.support.saved_models import randomised

SEED = 16
"""Any: what is compared holds for all weights and inputs."""

SHAPES = ((2, 7), (1, 1), (3, 4), (1, 12))
"""Of calls: sequences and length."""

MASKS = ("none", "padding", "causal", "padding and causal", "pairs")

EAGER = {"attn_implementation": "eager"}
"""The implementation that gives weights."""

Model = TypeVar("Model", bound=PreTrainedModel)

Masks = Callable[[PreTrainedConfig, Tensor, Tensor, bool], Tensor]
"""(config, embeddings, attend mask [B, T], causal) gives what a model adds to the logits."""

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(embeddings, added mask, positions [B, S]) gives output and weights of a model's module."""


def saved(model: Model, directory: Path, **options: Any) -> Model:
    """Save a model of random weights, every bias among them, and return it."""
    randomised(model).save_pretrained(directory, **options)
    return model


def model_masks(config: PreTrainedConfig, x: Tensor, attend: Tensor, causal: bool) -> Tensor:
    """Return the mask that models make for layers without a window."""
    if causal:
        mask = create_causal_mask(config, x, attend, cache=None)
    else:
        mask = create_bidirectional_mask(config, x, attend)
    return torch.zeros(()) if mask is None else mask


def calls(
    config: PreTrainedConfig,
    attend: Attend,
    *,
    masks: Masks = model_masks,
    with_positions: bool = False,
) -> list[Case]:
    """Return calls of every shape and mask with what a module of the model answers."""
    random = torch.Generator().manual_seed(SEED)
    return [
        _call(config, attend, masks, random, shape, mask, with_positions)
        for shape in SHAPES
        for mask in MASKS
    ]


def _call(
    config: PreTrainedConfig,
    attend: Attend,
    masks: Masks,
    random: torch.Generator,
    shape: tuple[int, int],
    mask: str,
    with_positions: bool,
) -> Case:
    rows, length = shape
    x = torch.randn(rows, length, config.hidden_size, generator=random)
    # A key is left for each query, causal or in a window of 3: transformers' modules answer
    # otherwise where there is none.
    visible, pairs = torch.ones(rows, length, dtype=torch.bool), None
    if "padding" in mask:
        visible[0, 1::3] = False
        visible[-1, 2::3] = False
    added = masks(config, x, visible, "causal" in mask)
    if mask == "pairs":
        pairs = torch.rand(rows, 1, length, length, generator=random) < 0.6
        pairs |= torch.eye(length, dtype=torch.bool)
        added = added.masked_fill(~pairs, torch.finfo(torch.float32).min)
    places = torch.arange(length).expand(rows, -1)
    if with_positions:
        places = torch.randint(0, 300, (rows, length), generator=random)
    with torch.no_grad():
        output, weights = attend(x, added, places)
    inputs = Inputs(
        x.numpy(),
        attend_mask=visible.numpy() if "padding" in mask else None,
        pair_mask=None if pairs is None else pairs.numpy(),
        causal="causal" in mask,
        positions=places.numpy() if with_positions else None,
    )
    return Case(inputs, output.numpy(), weights.numpy())


def output_of(
    projection: nn.Module, run: Callable[[], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return what a projection gives inside a module that goes on after it, and the weights."""
    seen: list[Tensor] = []
    hook = projection.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    try:
        _, weights = run()
    finally:
        hook.remove()
    [output] = seen
    return output, weights
