"""How options are written: numbers with units, lists by commas, ranges, objectives."""

import re
from dataclasses import dataclass
from typing import Any, Final

from loadtest.errors import UsageWrong

_UNITS_S: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|min|h)?")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_MOST_POINTS: Final = 10_000

FIGURES: Final = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")
"""What an objective may bound, beside `errors`."""
_BOUND = re.compile(r"(?P<figure>[\w.]+)\s*(?P<sign><=?)\s*(?P<limit>.+)")
_SUPPORT: Final = 10
"""Calls beyond a percentile that it takes to say where it lies."""


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


def needed_calls(figure: str) -> int:
    """
    Return how many calls a figure such as `p99` rests on, if it is to mean anything.

    Ten lie beyond the percentile then: 20 for p50, 1 000 for p99, 10 000 for p99.9; one for
    what is no percentile.
    """
    if not figure.startswith("p"):
        return 1
    return round(_SUPPORT / (1 - float(figure[1:]) / 100))


def is_supported(figure: str, calls: int) -> bool:
    """Return whether so many calls are enough for a figure."""
    return calls >= needed_calls(figure)


def words(text: str) -> list[str]:
    """Return what commas separate; `heads:0,3` is one word."""
    return [word.strip() for word in re.split(r",(?=\s*[a-z])", text)]


@dataclass(frozen=True)
class Bound:
    """What a figure must stay below, or may reach where `reachable`."""

    limit: float
    reachable: bool = False

    def holds(self, value: float) -> bool:
        """Return whether a figure keeps it."""
        return value < self.limit or (self.reachable and value == self.limit)

    @property
    def sign(self) -> str:
        """How it is written."""
        return "<=" if self.reachable else "<"


_DEFAULT_ERRORS: Final = Bound(0.01, reachable=True)
"""An objective on latency alone still wants 99 of 100 calls answered."""


@dataclass(frozen=True)
class Objective:
    """What a service promises: bounds on figures of latency, and on the share of errors."""

    text: str
    bounds_ms: dict[str, Bound]
    errors: Bound = _DEFAULT_ERRORS
    """On the share of calls without a good answer."""

    @classmethod
    def parse(cls, option: str, text: str) -> "Objective":
        """
        Return the objective written as `p99<20ms` or `p50<5ms,p95<=20ms,errors<0.1%`.

        Raises:
            UsageWrong: it is written otherwise.
        """
        bounds: dict[str, Bound] = {}
        errors = _DEFAULT_ERRORS
        for part in text.split(","):
            found = _BOUND.fullmatch(part.strip())
            if not found or found["figure"] not in (*FIGURES, "errors"):
                raise UsageWrong(
                    f"{option}: expected bounds such as p99<20ms or errors<=1%, on"
                    f" {', '.join(FIGURES)} or errors, got {part.strip()!r}"
                )
            figure, sign, limit = found.groups()
            if figure == "errors":
                errors = Bound(share(option, limit), sign == "<=")
                if errors == Bound(0.0):
                    raise UsageWrong(
                        f"{option}: no share is below 0: errors<=0% allows none,"
                        f" got {part.strip()!r}"
                    )
            else:
                if limit[-1:].isdigit():  # 20 could be meant as seconds or as milliseconds
                    raise UsageWrong(
                        f"{option}: expected a time with its unit, such as {figure}{sign}{limit}ms,"
                        f" got {part.strip()!r}"
                    )
                bounds[figure] = Bound(seconds(option, limit) * 1e3, sign == "<=")
                if bounds[figure].limit <= 0:
                    raise UsageWrong(f"{option}: expected a time above 0, got {part.strip()!r}")
        return cls(text, bounds, errors)

    def broken(self, latency_ms: dict[str, Any], *, offered: int) -> str | None:
        """Return which bound figures of one load break, in words; None = they keep all."""
        good = int(latency_ms["count"])
        bad = (offered - good) / offered if offered else 1.0
        if not self.errors.holds(bad) or not good:
            return f"errors {bad:.2%}, not {self.errors.sign} {self.errors.limit:.2%}"
        for figure, bound in self.bounds_ms.items():
            if not bound.holds(latency_ms[figure]):
                return f"{figure} {latency_ms[figure]:.3g} ms, not {bound.sign} {bound.limit:g} ms"
        return None

    def unsupported(self, good: int) -> list[str]:
        """Return the bound percentiles that so many good calls do not support."""
        return [figure for figure in self.bounds_ms if not is_supported(figure, good)]


ANY: Final = Objective(f"errors<={_DEFAULT_ERRORS.limit:.0%}", {})
"""What every load is held against, where no objective is given."""
