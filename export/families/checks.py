"""What the files of several families check: the place that is meant, and config against weights."""

from collections.abc import Mapping, Sequence

from export.checkpoint import Checkpoint
from export.errors import SourceInvalid
from export.families.config import Config, shortened
from export.families.family import Place

Facts = Mapping[str, tuple[int, str]]
"""What the weights say of keys of config.json, each with the place where they do."""


def choose(config: Config, option: str, said: str | None, choices: Sequence[str]) -> str:
    """
    Return which of `choices` is meant by a command's option: what was said, or the only one.

    Raises:
        SourceInvalid: it is not one of them, or it is not said which of several.
    """
    if said is None and len(choices) == 1:
        return choices[0]
    if said is None or said not in choices:
        raise SourceInvalid(
            f"{config.where}: {option}: expected {' or '.join(choices)} for model_type"
            f" {config.model_type}, got {said or 'none'}"
        )
    return said


def refuse_part(config: Config, place: Place) -> None:
    """
    Return when no part of the model is named, for a family whose models have no parts.

    Raises:
        SourceInvalid: one is.
    """
    if place.part is not None:
        raise SourceInvalid(
            f"{config.where}: --part: expected none for model_type {config.model_type},"
            f" got {place.part}"
        )


def expect_self_attention(config: Config, place: Place) -> None:
    """
    Return when `place` is one of a model that has one encoder and only self-attention.

    Raises:
        SourceInvalid: cross-attention or a part is asked for.
    """
    refuse_part(config, place)
    choose(config, "--attention", place.attention, ("self",))


def refuse_relative_positions(config: Config) -> None:
    """
    Return when positions are only added to the embeddings, for families related to BERT.

    Raises:
        SourceInvalid: they are relative, as in Shaw et al. 2018 or Huang et al. 2020.
    """
    if config.text("position_embedding_type", "absolute") != "absolute":
        raise config.error(
            "position_embedding_type",
            "absolute",
            "relative positions add terms inside the softmax that the formula of this version does"
            " not have",
        )


def refuse_contradictions(config: Config, facts: Facts) -> None:
    """
    Return when config.json says nothing else than the weights, so that it belongs to them.

    Raises:
        SourceInvalid: it is of other weights; its number of heads would be wrong.
    """
    for key, (value, meaning) in facts.items():
        stated = config.values.get(key)
        if stated is not None and stated != value:
            raise SourceInvalid(
                f"{config.where}: {key} is {shortened(stated)}, but the weights say {value}"
                f" ({meaning}); expected the config.json that belongs to these weights"
            )


def row_facts(checkpoint: Checkpoint, names: Mapping[str, str]) -> Facts:
    """Return how many rows tensors have, by the key of config.json that says so."""
    return {
        key: (stored.shape[0], f"rows of {name}")
        for key, name in names.items()
        if (stored := checkpoint.tensors.get(name)) is not None and stored.shape
    }


def refuse_aliases(config: Config, **aliases: str) -> None:
    """
    Return when no key is contradicted by its alias, which transformers would rather believe.

    Raises:
        SourceInvalid: one is.
    """
    for key, alias in aliases.items():
        if config.has(alias) and config.values[alias] != config.values.get(key):
            raise config.error(alias, f"the same as {key}, {shortened(config.values.get(key))}")
