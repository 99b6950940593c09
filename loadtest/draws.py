"""Numbers of rows and lengths of sequences: fixed, or drawn from a distribution."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from loadtest.errors import UsageWrong

_NUMBER: Final = r"\d+(?:\.\d+)?"
_FORMS = re.compile(
    rf"(?P<fixed>\d+)|uniform:(?P<low>\d+):(?P<high>\d+)"
    rf"|lognormal:(?P<mu>{_NUMBER}):(?P<sigma>{_NUMBER})|file:(?P<file>.+)"
)
_HOW: Final = "a number, uniform:LOW:HIGH, lognormal:MU:SIGMA or file:PATH"
_MOST: Final = 1_000_000


@dataclass(frozen=True)
class Draw:
    """How a whole number >= 1 is chosen, as it was written: `8`, `uniform:1:64`, ..."""

    text: str
    _values: tuple[int, ...] = ()
    """Of a file."""

    @classmethod
    def parse(cls, option: str, text: str) -> "Draw":
        """
        Return the draw that a text describes; a file has been read by then.

        `lognormal:MU:SIGMA` is exp(normal(MU, SIGMA)), rounded; a file has one number a line.

        Raises:
            UsageWrong: it describes none, or names a file without numbers.
        """
        found = _FORMS.fullmatch(text)
        if not found:
            raise UsageWrong(f"{option}: expected {_HOW}, got {text!r}")
        if found["file"]:
            return cls(text, _of_file(option, Path(found["file"])))
        low, high = (int(found[name] or 1) for name in ("low", "high"))
        fixed = int(found["fixed"] or 1)
        if not 1 <= low <= high <= _MOST or not 1 <= fixed <= _MOST:
            raise UsageWrong(f"{option}: expected numbers from 1 to {_MOST}, got {text!r}")
        return cls(text)

    @property
    def is_fixed(self) -> bool:
        """True when it is always the same number."""
        return self.text.isdecimal()

    def __call__(self, random: np.random.Generator) -> int:
        """Return the next number."""
        kind, _, rest = self.text.partition(":")
        if kind == "uniform":
            low, high = rest.split(":")
            return int(random.integers(int(low), int(high), endpoint=True))
        if kind == "lognormal":
            mu, sigma = rest.split(":")
            drawn = random.lognormal(float(mu), float(sigma))
            return max(1, round(min(float(drawn), float(_MOST))))
        if kind == "file":
            return int(random.choice(self._values))
        return int(kind)


def _of_file(option: str, path: Path) -> tuple[int, ...]:
    try:
        lines = path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text"
        raise UsageWrong(f"{option}: {path}: {reason}") from None
    wrong = next((line for line in lines if not line.isdecimal() or int(line) < 1), None)
    if wrong is not None or not lines:
        got = "an empty file" if wrong is None else repr(wrong)
        raise UsageWrong(
            f"{option}: {path}: expected whole numbers from 1 on, one a line, got {got}"
        )
    return tuple(int(line) for line in lines)
