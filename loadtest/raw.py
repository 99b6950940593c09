"""The raw file: everything that was measured, written anew after every point."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from loadtest.errors import UsageWrong

FORMAT: Final = 1
TOOL: Final = "headwise-load 0.1.0"
_HIDDEN: Final = "***"


@dataclass
class Raw:
    """One test as its file has it."""

    command: list[str]
    client: dict[str, Any]
    server: dict[str, Any]
    started: str
    ended: str = ""
    interrupted: bool = False
    failure: str | None = None
    """Why loads are missing that were to be made; None = none is, or it was interrupted."""
    null_calls_per_s: float | None = None
    points: list[dict[str, Any]] = field(default_factory=list)
    slo: str | None = None
    capacity: dict[str, Any] | None = None
    """What a search for the highest good rate has found."""
    resumed: list[dict[str, Any]] = field(default_factory=list)
    """When the measurement was gone on with: command, start and machine of each time."""

    def go_on_with(self, before: dict[str, Any], *, measures_more: bool) -> None:
        """Take over what an earlier raw file holds; what was begun now is one of `resumed`."""
        again = {"command": self.command, "started": self.started, "client": self.client}
        self.resumed = [*before.get("resumed", []), *([again] if measures_more else [])]
        self.command, self.started = before["command"], before["started"]
        self.client, self.server = before["client"], before["server"]
        self.points = list(measured(before).values())

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "format": FORMAT,
            "tool": TOOL,
            "command": self.command,
            "started": self.started,
            "ended": self.ended,
            "interrupted": self.interrupted,
            "failure": self.failure,
            "client": self.client,
            "resumed": self.resumed,
            "server": self.server,
            "generator": {"null_calls_per_s": self.null_calls_per_s},
            "points": self.points,
            "slo": self.slo,
            "capacity": self.capacity,
        }

    def as_json(self) -> str:
        """Return it as the file has it."""
        return json.dumps(self.as_dict(), indent=1, allow_nan=False)

    def write(self, path: Path) -> None:
        """
        Replace the file as a whole: whoever reads it sees one state or the other.

        Raises:
            UsageWrong: it cannot be written.
        """
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            beside.write_text(self.as_json() + "\n")
            beside.replace(path)
        except OSError as error:
            raise UsageWrong(f"--raw: {path}: {error.strerror}") from None


def read(option: str, path: Path) -> dict[str, Any]:
    """
    Return what a raw file holds.

    Raises:
        UsageWrong: it cannot be read, or holds anything else.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise UsageWrong(f"{option}: {path}: {error.strerror}") from None
    except ValueError:
        raise UsageWrong(f"{option}: {path}: expected JSON, got something else") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or "points" not in found:
        raise UsageWrong(f"{option}: {path}: expected a raw file of format {FORMAT}")
    return found


def measured(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the points of a raw file that were measured to their end, by id."""
    return {point["id"]: point for point in found["points"] if not point.get("interrupted")}


def shown(argv: Sequence[str]) -> list[str]:
    """Return a command line as it may be written down: without what headers say."""
    told = []
    is_value = False
    for word in argv:
        prefix = next((p for p in ("--header=", "-H") if word.startswith(p) and word != p), "")
        if is_value or prefix:
            name = word.removeprefix("" if is_value else prefix).partition(":")[0]
            told.append(f"{'' if is_value else prefix}{name}: {_HIDDEN}")
            is_value = False
        else:
            told.append(word)
            is_value = word in ("--header", "-H")
    return told


def now() -> str:
    """Return the time, UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
