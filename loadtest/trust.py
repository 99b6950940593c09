"""Whether a load's figures can be trusted, and what there is to say if not."""

import math
import statistics
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Limits:
    """Beyond what a load is not to be trusted."""

    cpu_share: float = 0.85
    """Of one core, that the generator may use: beyond, it cannot keep its own time."""
    lag_ms: float = 1.0
    """How late the generator may send, at p99 ..."""
    lag_share: float = 0.1
    """... or as a share of p99 latency, where that is more."""
    null_share: float = 0.7
    """Of the calls that it makes of a server that does nothing, that a load may come to."""
    spread: float = 0.5
    """How far the medians of windows may lie apart, as a share of the middle one ..."""
    spread_ms: float = 0.5
    """... or in milliseconds, where that is more."""
    errors: float = 0.01
    """Share of calls without a good answer that is worth a word; it says nothing on trust."""
    waited: float = 0.001
    """Share of calls that found no connection free that is worth a word."""


DEFAULT: Final = Limits()
_FEW: Final = 20
"""A window with fewer answers has no median worth the name."""

BOTTLENECK: Final = "the generator was the bottleneck"
UNSTABLE: Final = "unstable"
INTERRUPTED: Final = "interrupted"
WRONG: Final = "wrong answers"
NO_ANSWER: Final = "no good answer"

_UNTRUSTWORTHY: Final = (BOTTLENECK, UNSTABLE, WRONG, NO_ANSWER)


def is_trustworthy(warnings: list[str]) -> bool:
    """Return whether none of a point's warnings means that its figures mislead."""
    return not any(warning.startswith(_UNTRUSTWORTHY) for warning in warnings)


def warnings_of(
    point: dict[str, Any], null_calls_per_s: float | None, limits: Limits = DEFAULT
) -> list[str]:
    """Return what must be said of a point, the worst first; nothing if all is well."""
    if not point["latency_ms"]["count"]:
        return [f"{NO_ANSWER} to {point['offered']} calls", *_errors(point, limits)]
    return [
        *_wrong(point),
        *_bottleneck(point, null_calls_per_s, limits),
        *_unstable(point, limits),
        *_unsent(point, limits),
        *_errors(point, limits),
    ]


def _wrong(point: dict[str, Any]) -> list[str]:
    if not point["wrong"]:
        return []
    return [f"{WRONG}: {point['wrong']} of {point['checked']} differ from what was expected"]


def _bottleneck(point: dict[str, Any], null_calls_per_s: float | None, limits: Limits) -> list[str]:
    told = []
    if point["cpu_share"] > limits.cpu_share:
        told.append(f"used {point['cpu_share']:.0%} of its core")
    lag = point["lag_ms"]["p99"] or 0.0
    allowed = max(limits.lag_ms, limits.lag_share * point["latency_ms"]["p99"])
    if lag > allowed:
        told.append(f"sent {lag:.3g} ms late at p99, where {allowed:.3g} ms are allowed")
    if null_calls_per_s and point["good_per_s"] > limits.null_share * null_calls_per_s:
        told.append(
            f"made {point['good_per_s']:.0f} calls/s of the"
            f" {null_calls_per_s:.0f} that it can make at all"
        )
    return [f"{BOTTLENECK}: it {' and '.join(told)}"] if told else []


def _unstable(point: dict[str, Any], limits: Limits) -> list[str]:
    medians = [window["p50"] for window in point["windows"] if window["count"] >= _FEW]
    if len(medians) < 2:
        return []
    low, middle, high = min(medians), statistics.median(medians), max(medians)
    if high - low <= max(limits.spread * middle, limits.spread_ms):
        return []
    share = math.ceil(100 * (high - low) / middle)  # what is too much shall not look allowed
    return [
        f"{UNSTABLE}: the median went from {low:.3g} to {high:.3g} ms over {len(medians)} windows,"
        f" {share}% of the middle one, where {limits.spread:.0%} are allowed"
    ]


def _unsent(point: dict[str, Any], limits: Limits) -> list[str]:
    waited = point["latency_ms"]["p99"] - point["sent_ms"]["p99"]
    if point["model"] != "open" or waited <= max(1.0, 0.1 * point["latency_ms"]["p99"]):
        return []
    if point["waited"] <= limits.waited * point["offered"]:
        return []  # they were late for another reason, which is told as the generator's own
    return [
        f"{point['waited'] / point['offered']:.1%} of calls waited for a free connection: more"
        " --connections, or a rate that the server can take"
    ]


def _errors(point: dict[str, Any], limits: Limits) -> list[str]:
    bad = point["offered"] - point["latency_ms"]["count"]
    if not point["offered"] or bad / point["offered"] <= limits.errors:
        return []
    kinds = point["failures"] | {k: n for k, n in point["statuses"].items() if k != "200"}
    named = ", ".join(f"{kind}: {count}" for kind, count in kinds.items())
    return [f"{bad / point['offered']:.1%} of calls have no good answer ({named})"]
