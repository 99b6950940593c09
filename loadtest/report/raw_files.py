"""Raw files, read and checked; several may be the parts of one measurement."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from loadtest.raw import FORMAT
from loadtest.report.measurement import Measurement, RawInvalid


def load(paths: Sequence[Path]) -> Measurement:
    """
    Return what those raw files hold, as one measurement.

    Raises:
        RawInvalid: one cannot be read, or a point is in two of them.
    """
    parts = [_load(path) for path in paths]
    first, *others = parts
    points = [point for part in parts for point in part.points]
    for name, times in Counter(point.id for point in points).items():
        if times > 1:
            raise RawInvalid(
                f"{name}: expected each point once, got it {times} times; `compare` sets two"
                " files side by side"
            )
    if not others:
        return first
    return first.model_copy(
        update={
            "started": min(part.started for part in parts),
            "ended": max(part.ended for part in parts),
            "interrupted": any(part.interrupted for part in parts),
            "failure": next((part.failure for part in parts if part.failure), None),
            "points": tuple(points),
            "warnings": tuple(_differences(first, others)),
        }
    )


def read(raw: object, source: str = "raw") -> Measurement:
    """
    Return what a raw file's JSON holds.

    Raises:
        RawInvalid: a field is missing or wrong; the message names it.
    """
    if isinstance(raw, dict) and (found := raw.get("format")) != FORMAT:
        raise RawInvalid(f"{source}: format: expected {FORMAT}, got {found!r}")
    try:
        return Measurement.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        message = first["msg"].removeprefix("Value error, ")
        raise RawInvalid(f"{source}: {where}: {message[:1].lower()}{message[1:]}") from None


def _load(path: Path) -> Measurement:
    try:
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise RawInvalid(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RawInvalid(f"{path}: expected JSON, got something else: {error}") from None
    return read(raw, str(path))


def _differences(first: Measurement, others: Sequence[Measurement]) -> list[str]:
    """Return what the parts of one measurement should share and do not."""
    return [
        f"the files differ in {side}: they may be no one measurement"
        for side in ("client", "server", "tool", "slo")
        if any(getattr(other, side) != getattr(first, side) for other in others)
    ]
