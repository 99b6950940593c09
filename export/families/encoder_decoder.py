"""Which attention of a model of an encoder and a decoder is meant."""

from typing import Literal

from export.errors import SourceInvalid
from export.families.config import Config
from export.families.family import Place

Part = Literal["encoder", "decoder"]


def part_of(config: Config, place: Place) -> Part:
    """
    Return the part that `place` means; cross-attention is the decoder's.

    Raises:
        SourceInvalid: it is not said, or there is no such attention.
    """
    is_cross = place.attention == "cross"
    if place.part == "encoder" and not is_cross:
        return "encoder"
    if place.part == "decoder" or (place.part is None and is_cross):
        return "decoder"
    said = {"--part": place.part, "--attention": place.attention}
    got = " ".join(f"{option} {value}" for option, value in said.items() if value is not None)
    raise SourceInvalid(
        f"{config.where}: which attention: expected --part encoder, --part decoder (its"
        " self-attention) or --attention cross (the decoder's, to the encoder's output) for"
        f" model_type {config.model_type}, got {got or 'none'}"
    )


def is_causal(config: Config, place: Place) -> bool:
    """
    Say whether the model runs this attention causally.

    `is_causal` lets a decoder attend in both directions (transformers.masking_utils).
    """
    is_decoders = part_of(config, place) == "decoder" and place.attention != "cross"
    return is_decoders and config.boolean("is_causal", True)
