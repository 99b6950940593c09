"""How options are written: numbers with units, lists by commas, ranges, objectives."""

import re
from dataclasses import dataclass
from typing import Any, Final

from loadtest.errors import UsageWrong

_UNITS_S: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|min|h)?")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_MOST_POINTS: Final = 10_000

FIGURES: Final = ("mean", "p50", "p90", "p99", "p99.9", "max")
"""What an objective may bound, beside `errors`."""
_DEFAULT_ERRORS: Final = 0.01
"""An objective on latency alone still wants 99 of 100 calls answered."""


def seconds(option: str, text: str) -> float:
    """
    Return a time in seconds; a bare number is seconds already.

    Raises:
        UsageWrong: anything else, under the option's name.
    """
    found = _DURATION.fullmatch(text.strip())
    if not found:
        raise UsageWrong(f"{option}: expected a time such as 10s, 500ms or 2m, got {text!r}")
    return float(found[1]) * _UNITS_S[found[2] or "s"]


def share(option: str, text: str) -> float:
    """
    Return a share, of `5%` or `0.05`.

    Raises:
        UsageWrong: anything else, or below 0.
    """
    number = text.strip().removesuffix("%")
    if not _NUMBER.fullmatch(number):
        raise UsageWrong(f"{option}: expected a share such as 5% or 0.05, got {text!r}")
    return float(number) / 100 if text.strip().endswith("%") else float(number)


def numbers(option: str, text: str) -> list[float]:
    """
    Return the numbers of a list such as `50,100` or of ranges such as `100:500:100`, all > 0.

    Raises:
        UsageWrong: anything else.
    """
    found: list[float] = []
    for part in text.split(","):
        bounds = [bound.strip() for bound in part.split(":")]
        if not all(_NUMBER.fullmatch(bound) for bound in bounds) or len(bounds) not in (1, 3):
            raise UsageWrong(
                f"{option}: expected numbers such as 100 or 50,100 or 100:500:100"
                f" (first:last:step), got {part!r}"
            )
        values = [float(bound) for bound in bounds]
        if min(values) <= 0:
            raise UsageWrong(f"{option}: expected numbers above 0, got {part!r}")
        if len(values) == 1:
            found += values
            continue
        first, last, step = values
        # Half a step more, so that rounding does not lose the last.
        steps = int((last - first) / step + 1e-9) + 1
        if last < first or steps > _MOST_POINTS:
            raise UsageWrong(
                f"{option}: expected first:last:step with first <= last and at most"
                f" {_MOST_POINTS} steps, got {part!r}"
            )
        found += [first + step * i for i in range(steps)]
    return found


def whole_numbers(option: str, text: str) -> list[int]:
    """
    Return whole numbers, written as for `numbers`.

    Raises:
        UsageWrong: a number is not whole, or as for `numbers`.
    """
    found = numbers(option, text)
    if any(number != int(number) for number in found):
        raise UsageWrong(f"{option}: expected whole numbers, got {text!r}")
    return [int(number) for number in found]


def words(text: str) -> list[str]:
    """Return what commas separate; `heads:0,3` is one word."""
    return [word.strip() for word in re.split(r",(?=\s*[a-z])", text)]


@dataclass(frozen=True)
class Objective:
    """What a service promises: bounds on figures of latency, and on the share of errors."""

    text: str
    bounds_ms: dict[str, float]
    errors: float = _DEFAULT_ERRORS
    """Largest share of calls without a good answer."""

    @classmethod
    def parse(cls, option: str, text: str) -> "Objective":
        """
        Return the objective that is written as `p99<20ms` or `p50<5ms,p99<20ms,errors<0.1%`.

        Raises:
            UsageWrong: it is written otherwise.
        """
        bounds: dict[str, float] = {}
        errors = _DEFAULT_ERRORS
        for part in text.split(","):
            figure, sign, bound = (piece.strip() for piece in part.partition("<"))
            if not sign or figure not in (*FIGURES, "errors"):
                raise UsageWrong(
                    f"{option}: expected bounds such as p99<20ms or errors<1%, on"
                    f" {', '.join(FIGURES)} or errors, got {part.strip()!r}"
                )
            if figure == "errors":
                errors = share(option, bound)
            else:
                if bound[-1:].isdigit():  # 20 could be meant as seconds or as milliseconds
                    raise UsageWrong(
                        f"{option}: expected a time with its unit, such as {figure}<{bound}ms,"
                        f" got {part.strip()!r}"
                    )
                bounds[figure] = seconds(option, bound) * 1e3
                if bounds[figure] <= 0:
                    raise UsageWrong(f"{option}: expected a time above 0, got {part.strip()!r}")
        return cls(text, bounds, errors)

    def broken(self, latency_ms: dict[str, Any], *, offered: int) -> str | None:
        """Return which bound figures of one load break, in words; None = they keep all."""
        good = int(latency_ms["count"])
        bad = (offered - good) / offered if offered else 1.0
        if bad > self.errors or not good:
            return f"errors {bad:.2%}, not below {self.errors:.2%}"
        for figure, bound in self.bounds_ms.items():
            if latency_ms[figure] >= bound:
                return f"{figure} {latency_ms[figure]:.3g} ms, not below {bound:g} ms"
        return None


ANY: Final = Objective(f"errors<{_DEFAULT_ERRORS:.0%}", {})
"""What every load is held against, where no objective is given."""
