"""Tiny decoders of transformers with random weights: saved, and as oracles of their layers."""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from service.inference.calls import Inputs
from tests.support.attention_cases import Case
from tests.support.saved_models import randomised

SEED = 16
"""Any: every rule here holds for all weights and inputs."""

TINY: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_model(model_type: str, **options: Any) -> Any:
    """Return a model for text of that family whose every weight, bias and norm is random."""
    config = AutoConfig.for_model(model_type, **{**TINY, **options}, attn_implementation="eager")
    return randomised(cast(Any, AutoModelForCausalLM).from_config(config))


@dataclass(frozen=True)
class Oracle:
    """One attention module of a decoder of transformers."""

    decoder: Any
    """What holds the layers."""
    layer: int

    @property
    def attention(self) -> Any:
        """The module itself."""
        layers = self.decoder.h if hasattr(self.decoder, "h") else self.decoder.layers
        layer = layers[self.layer]
        names = ("self_attn", "self_attention", "attention")
        return next(getattr(layer, name) for name in names if hasattr(layer, name))

    @property
    def window(self) -> int | None:
        """The window of this layer, as the model gives it to its masks."""
        config = self.decoder.config
        types = getattr(config, "layer_types", None)
        if types is not None and types[self.layer] != "sliding_attention":
            return None
        return getattr(config, "sliding_window", None)

    def case(self, inputs: Inputs) -> Case:
        """Return the call with what the module answers to each of its sequences alone."""
        rows = [self._row(inputs, i) for i in range(len(inputs.embeddings))]
        output, weights, extra = (np.concatenate(part) for part in zip(*rows, strict=True))
        return Case(inputs, output, weights, extra if hasattr(self.attention, "sinks") else None)

    def _row(self, inputs: Inputs, i: int) -> tuple[npt.NDArray[Any], ...]:
        embeddings = torch.from_numpy(inputs.embeddings[i : i + 1])
        length = embeddings.shape[1]
        positions = torch.arange(length)[None]
        if inputs.positions is not None:
            positions = torch.from_numpy(inputs.positions[i : i + 1])
        allowed = self._allowed(inputs, i)
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
        with torch.no_grad():
            output, weights = self._attend(embeddings, mask, positions)[:2]
            # transformers attends to all keys where none is allowed; the contract to none.
            empty = ~allowed.any(dim=-1)  # [1, 1 or H, S]
            if bool(empty.any()):
                assert empty.shape[1] == 1, "no case has rows that are empty for some heads only"
                weights = weights.masked_fill(empty[..., None], 0.0)
                nothing = self._project(torch.zeros_like(embeddings))
                output = torch.where(empty[0, 0][None, :, None], nothing, output)
        extra = 1 - weights.sum(dim=-1, keepdim=True)
        return output.numpy(), weights.numpy(), extra.numpy()

    def _allowed(self, inputs: Inputs, i: int) -> Tensor:
        """Return where all masks agree, [1, 1 or H, S, S]."""
        length = inputs.embeddings.shape[1]
        queries, keys = torch.arange(length)[:, None], torch.arange(length)[None]
        allowed = torch.ones(1, 1, length, length, dtype=torch.bool)
        if inputs.causal and self.window is not None:
            allowed = allowed & sliding_window_causal_mask_function(self.window)(
                0, 0, queries, keys
            )
        elif inputs.causal:
            allowed = allowed & (keys <= queries)
        elif self.window is not None:
            # A decoder has no such mask; this is what the contract says.
            allowed = allowed & ((queries - keys).abs() < self.window)
        if inputs.attend_mask is not None:
            allowed = allowed & torch.from_numpy(inputs.attend_mask[i])
        if inputs.pair_mask is not None:
            rows = inputs.pair_mask
            allowed = allowed & torch.from_numpy(rows[i : i + 1] if len(rows) > 1 else rows)
        return allowed

    def _attend(self, embeddings: Tensor, mask: Tensor, positions: Tensor) -> Any:
        attention, config = self.attention, self.decoder.config
        if config.model_type == "bloom":
            alibi = build_alibi_tensor(torch.ones_like(positions), config.n_head, torch.float32)
            slopes = alibi[:, :, -1:] / max(positions.shape[1] - 1, 1)
            if positions.shape[1] == 1:
                slopes = torch.zeros_like(slopes)  # one key: no bias changes its weight
            return attention(
                embeddings,
                residual=torch.zeros_like(embeddings),
                alibi=slopes * positions.float(),
                attention_mask=mask,
            )
        kind = [config.layer_types[self.layer]] if config.model_type == "gemma3_text" else []
        # A new one each time: `dynamic` remembers how long earlier sequences were.
        rotary = type(self.decoder.rotary_emb)(config)
        options: dict[str, Any] = {"position_embeddings": rotary(embeddings, positions, *kind)}
        if config.model_type == "falcon":
            options |= {"alibi": None, "output_attentions": True}
        return attention(embeddings, attention_mask=mask, **options)

    def _project(self, heads: Tensor) -> Tensor:
        """Return the output projection of a head's answer of zeros: its bias."""
        attention = self.attention
        projection = attention.o_proj if hasattr(attention, "o_proj") else attention.dense
        width = projection.weight.shape[1]
        bias: Tensor = projection(torch.zeros(*heads.shape[:2], width))
        return bias


def calls(width: int, heads: int, *, far: int = 40) -> list[Inputs]:
    """
    Return calls to a causal layer with each kind of mask and position, and with none.

    `far` is a position beyond what the layer was trained for, where that changes something.
    """
    random = np.random.default_rng(SEED)

    def embeddings(*shape: int) -> npt.NDArray[np.float32]:
        return random.standard_normal((*shape, width), np.float32)

    padded = np.arange(9) < np.array([9, 4, 1])[:, None]
    scattered = np.sort(random.integers(0, far, (2, 6)), axis=1)
    steps = np.arange(7)[None] + np.array([3, far])[:, None]
    return [
        Inputs(embeddings(1, 1), causal=True),
        Inputs(embeddings(2, 11), causal=True),
        Inputs(embeddings(2, 6), causal=False),
        Inputs(embeddings(3, 9), causal=True, attend_mask=padded),
        Inputs(embeddings(3, 9), causal=False, attend_mask=padded[:, ::-1].copy()),
        Inputs(embeddings(2, 5), causal=False, pair_mask=_pair_mask(random, (2, heads, 5, 5))),
        Inputs(embeddings(2, 5), causal=True, pair_mask=_pair_mask(random, (1, 1, 5, 5))),
        Inputs(embeddings(2, 6), causal=True, positions=scattered),
        Inputs(embeddings(2, 6), causal=False, positions=scattered[:, ::-1].copy()),
        Inputs(embeddings(2, 7), causal=True, positions=steps, attend_mask=padded[:2, :7]),
    ]


def _pair_mask(random: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Return a random mask in which every query may attend to itself."""
    mask: npt.NDArray[np.bool_] = random.random(shape) < 0.6
    return mask | np.eye(shape[-1], dtype=bool)


def seen_in_model(decoder: Any, layer: int, *, causal: bool = True) -> Case:
    """
    Return what the model itself asked of a layer, under its own masks, and what it got.

    Its texts differ in length; the shorter is padded at its end.
    """
    attention = Oracle(decoder, layer).attention
    seen: dict[str, Tensor] = {}

    def keep(_: nn.Module, args: Any, options: dict[str, Any], answer: Any) -> None:
        embeddings = options["hidden_states"] if "hidden_states" in options else args[0]
        output = answer[0]
        if "residual" in options or len(args) > 1:  # BLOOM adds it within its attention
            output = output - (options["residual"] if "residual" in options else args[1])
        seen.update(embeddings=embeddings, output=output, weights=answer[1])

    attend = np.arange(8) < np.array([8, 6])[:, None]
    random = torch.Generator().manual_seed(SEED)
    hook = attention.register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        decoder(
            inputs_embeds=torch.randn(2, 8, decoder.config.hidden_size, generator=random),
            attention_mask=torch.from_numpy(attend).long(),
            output_attentions=True,
        )
    hook.remove()
    inputs = Inputs(seen["embeddings"].numpy(), causal=causal, attend_mask=attend)
    return Case(inputs, seen["output"].numpy(), seen["weights"].numpy())
