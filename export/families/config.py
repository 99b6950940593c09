"""
A checkpoint's config.json: whether its family is read, and its values with their types checked.

Known without PyTorch, so that a checkpoint that cannot be exported is refused at once.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.errors import SourceInvalid
from export.families.refused import reason_against_family
from export.families.registry import MODULES, QUANTISED_BESIDE
from export.json_files import read_json


@dataclass(frozen=True)
class Config:
    """
    The values of a config.json, or of an object in it.

    Every method raises SourceInvalid, naming file and key, for a value of another type.
    """

    where: str
    """The file, as messages name it, with the key of the object in it."""
    values: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        """The family."""
        return self.text("model_type")

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer; `default` where the key is absent or null."""
        value = self._value(key, default)
        if type(value) is not int or value < 1:
            raise self.error(key, "a positive integer")
        if value >= 2**31:
            raise self.error(key, "an integer below 2^31")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number; `default` where the key is absent or null."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self.error(key, "a number that FP64 can hold") from None

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """Return a boolean; `default` where the key is absent or null."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string; `default` where the key is absent or null."""
        value = self._value(key, default)
        if type(value) is not str:
            raise self.error(key, "a string")
        return value

    def part(self, key: str) -> "Config":
        """Return the object under that key."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return Config(f"{self.where}: {key}", value)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Config":
        """Return the configuration with its family's values for keys that are absent, not null."""
        return Config(self.where, {**defaults, **self.values})

    def has(self, key: str) -> bool:
        """Say whether the key has a value other than null."""
        return self.values.get(key) is not None

    def refuse(self, **reasons: str) -> None:
        """
        Return when none of these keys is set to what is true.

        Raises:
            SourceInvalid: one is; with its reason.
        """
        for key, reason in reasons.items():
            # transformers goes by truth: "false" in quotes is true, too.
            if self.values.get(key):
                raise SourceInvalid(
                    f"{self.where}: {key} is {shortened(self.values[key])}: {reason}"
                )

    def refuse_others(self, known: Collection[str]) -> None:
        """
        Return when there are no keys but these, all of which the family understands.

        Raises:
            SourceInvalid: there is another.
        """
        for key in self.values:
            if key not in known:
                raise SourceInvalid(
                    f"{self.where}: {key}: expected one of {', '.join(known)}; this version does"
                    " not know what another key changes"
                )

    def error(self, key: str, expected: str, reason: str = "") -> SourceInvalid:
        """Return the error for a value that is not the expected one, with the reason, if any."""
        return SourceInvalid(
            f"{self.where}: {key}: expected {expected}, got {shortened(self.values.get(key))}"
            f"{'; ' if reason else ''}{reason}"
        )

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        return default if value is None else value


_ADAPTER_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "pytorch_adapter.bin",
)


def read_config(directory: Path) -> Config:
    """
    Return a checkpoint's config.json, of a family that is read.

    Raises:
        SourceInvalid: it is missing, damaged, or of a family or configuration that is refused.
        OSError: it cannot be read.
    """
    _refuse_adapter_files(directory)
    file = directory / "config.json"
    if directory.is_file():
        raise SourceInvalid(
            f"{directory}: expected a directory with config.json and model.safetensors, got a"
            f" file; name its folder: --from-hf {directory.parent}"
        )
    try:
        config = read_json(file)
    except FileNotFoundError:
        raise SourceInvalid(
            f"{file}: no such file; expected a checkpoint directory with config.json and"
            " model.safetensors"
        ) from None
    if not isinstance(config, dict):
        raise SourceInvalid(f"{file}: expected a JSON object, got {type(config).__name__}")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in MODULES:
        raise SourceInvalid(
            f"{file}: model_type: expected one of {', '.join(sorted(MODULES))}, got"
            f" {shortened(family)}; {reason_against_family(family)}"
        )
    found = Config(str(file), config)
    found.refuse(
        pruned_heads="heads were pruned away, and layers with fewer heads than width allows"
        " cannot be exported",
        per_layer_config="layers are configured one by one, which is not read",
        auto_map="the model is computed by code of its own (trust_remote_code), which may differ"
        " from the family's; remove auto_map if its attention is exactly the family's",
    )
    if not _is_quantised_beside(found):
        found.refuse(
            quantization_config="the weights are quantised; dequantise the model first, e.g."
            " model.dequantize(), and export what save_pretrained() then writes"
        )
    return found


def _is_quantised_beside(config: Config) -> bool:
    """Say whether only other parts of the model than its attention are quantised."""
    quantisation = config.values.get("quantization_config")
    return (
        isinstance(quantisation, dict)
        and config.model_type in QUANTISED_BESIDE
        and quantisation.get("quant_method") == QUANTISED_BESIDE[config.model_type]
    )


def _refuse_adapter_files(directory: Path) -> None:
    found = next((name for name in _ADAPTER_FILES if (directory / name).exists()), None)
    if found is not None:
        raise SourceInvalid(
            f"{directory / found}: the folder holds an adapter that was not merged into the"
            " weights; load the model with it, merge it with model.merge_and_unload(), and export"
            " what save_pretrained() then writes"
        )


def shortened(value: object) -> str:
    """Return how a value of a file is shown, 40 characters at most."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
