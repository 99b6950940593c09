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
    unread_s: float = 0.5
    """How long an answer may lie unread, or `lag_ms` where that is more: else it stood still."""
    null_share: float = 0.7
    """Of the calls that it makes of a server that does nothing, that a load may come to."""
    spread: float = 0.5
    """How far the medians of windows may lie apart, as a share of the middle one ..."""
    spread_ms: float = 0.5
    """... or in milliseconds, where that is more."""
    silence_s: float = 1.0
    """How long no answer may come while a call waits for one ..."""
    silence_medians: float = 5.0
    """... or as a multiple of the median latency, where that is more."""
    errors: float = 0.01
    """Share of calls without a good answer, above which that is said."""
    waited: float = 0.001
    """Share of calls that found no connection free, above which that is said."""


DEFAULT: Final = Limits()
_FEW: Final = 20
"""A window with fewer answers has no median worth the name."""

BOTTLENECK: Final = "the generator was the bottleneck"
UNSTABLE: Final = "unstable"
INTERRUPTED: Final = "interrupted"
WRONG: Final = "wrong answers"
NO_ANSWER: Final = "no good answer"
LOST: Final = "lost calls"
SILENT: Final = "silent"
UNFINISHED: Final = "unfinished"
CLOCKS: Final = "clocks disagree"

_UNTRUSTWORTHY: Final = (
    *(BOTTLENECK, UNSTABLE, WRONG, NO_ANSWER),
    *(LOST, SILENT, UNFINISHED, CLOCKS),
)


def is_trustworthy(warnings: list[str]) -> bool:
    """Return whether none of a point's warnings means that its figures mislead."""
    return not any(warning.startswith(_UNTRUSTWORTHY) for warning in warnings)


def warnings_of(
    point: dict[str, Any], null_calls_per_s: float | None, limits: Limits = DEFAULT
) -> list[str]:
    """Return what must be said of a point, the worst first; nothing if all is well."""
    if not point["latency_ms"]["count"]:
        none = f"{NO_ANSWER} to {point['offered']} calls"
        return [none, *_lost(point), *_unfinished(point), *_refused(point, limits)]
    return [
        *_wrong(point),
        *_lost(point),
        *_unfinished(point),
        *_clocks(point),
        *_bottleneck(point, null_calls_per_s, limits),
        *_silent(point, limits),
        *_unstable(point, limits),
        *_unsent(point, limits),
        *_refused(point, limits),
        *_timestamps(point),
    ]


def _wrong(point: dict[str, Any]) -> list[str]:
    if not point["wrong"]:
        return []
    return [f"{WRONG}: {point['wrong']} of {point['checked']} differ from what was expected"]


def lost_text(failures: dict[str, int], offered: int) -> str | None:
    """Return which calls were never answered, which no percentile shows; None = none."""
    if not (lost := sum(failures.values())):
        return None
    named = ", ".join(f"{why}: {count}" for why, count in failures.items())
    return f"{LOST}: {lost} of {offered} were never answered, and are in no latency ({named})"


def _lost(point: dict[str, Any]) -> list[str]:
    told = lost_text(point["failures"], point["offered"])
    return [told] if told else []


def _unfinished(point: dict[str, Any]) -> list[str]:
    planned, offered = point["planned"], point["offered"]
    if planned is None or offered >= planned or point["interrupted"]:
        return []
    return [f"{UNFINISHED}: {offered} of {planned} calls were made before --duration was over"]


def _clocks(point: dict[str, Any]) -> list[str]:
    if not point["contradicted"]:
        return []
    return [
        f"{CLOCKS}: {point['contradicted']} calls took the server longer, as it says"
        " (Server-Timing), than they took here from being sent to being read"
    ]


def _timestamps(point: dict[str, Any]) -> list[str]:
    if point["timestamp_flaw"] is None:
        return []
    return [
        f"time stamps of the kernel left aside: {point['timestamp_flaw']};"
        " an answer counts as there when it was read"
    ]


def _bottleneck(point: dict[str, Any], null_calls_per_s: float | None, limits: Limits) -> list[str]:
    told = []
    if point["cpu_share"] > limits.cpu_share:
        told.append(f"used {point['cpu_share']:.0%} of its core")
    lag = point["lag_ms"]["p99"] or 0.0
    allowed = max(limits.lag_ms, limits.lag_share * point["latency_ms"]["p99"])
    if lag > allowed:
        told.append(f"sent {lag:.3g} ms late at p99, where {allowed:.3g} ms are allowed")
    if point["unread_s"] > max(limits.unread_s, limits.lag_ms / 1e3):
        told.append(f"left an answer unread for {point['unread_s']:.3g} s")
    if null_calls_per_s and point["good_per_s"] > limits.null_share * null_calls_per_s:
        told.append(
            f"made {point['good_per_s']:.0f} calls/s of the"
            f" {null_calls_per_s:.0f} that it can make at all"
        )
    return [f"{BOTTLENECK}: it {' and '.join(told)}"] if told else []


def _silent(point: dict[str, Any], limits: Limits) -> list[str]:
    silence = point["silence"]
    usual_s = point["latency_ms"]["p50"] / 1e3
    if silence["seconds"] < max(limits.silence_s, limits.silence_medians * usual_s):
        return []
    hides = " (a closed load hides most of that)" if point["model"] == "closed" else ""
    return [
        f"{SILENT}: no answer came for {silence['seconds']:.3g} s, from"
        f" {silence['at_s']:.3g} s on, while calls waited{hides}"
    ]


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


def _refused(point: dict[str, Any], limits: Limits) -> list[str]:
    """Return how many answers were not good, where that is many; lost calls have their own word."""
    refused = {status: n for status, n in point["statuses"].items() if status != "200"}
    bad = sum(refused.values())
    if not point["offered"] or bad / point["offered"] <= limits.errors:
        return []
    named = ", ".join(f"{status}: {count}" for status, count in refused.items())
    return [f"{bad / point['offered']:.1%} of calls were answered otherwise than well ({named})"]
