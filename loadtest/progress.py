"""What is shown while a test runs: a bar with live figures on a terminal, else a line a point."""

import math
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from loadtest.plan import Live
from loadtest.point import Point
from loadtest.report.words import ms, number

SILENT_S: Final = 5.0
"""After so long without an answer, that is said."""


class Display:
    """The progress of a whole test, from entering to leaving."""

    def __init__(self, console: Console, *, total_s: float | None, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._total_s = total_s
        self._before_s = 0.0
        self._number = 0
        self._heard_s: float | None = 0.0
        """When the last answer of this point came; None = its silence has been told."""
        self._task: TaskID | None = None
        self._progress: Progress | None = None
        if console.is_terminal and not quiet:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f} %" if total_s else ""),
                TimeRemainingColumn() if total_s else TextColumn(""),
                TextColumn("{task.fields[live]}", markup=False),
                console=console,
                transient=True,
                refresh_per_second=4,
            )

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
            self._task = self._progress.add_task("", total=self._total_s, live="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, text: str) -> None:
        """Show a line that stays."""
        if not self._quiet:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, point: Point, of: int | None) -> None:
        """Show which point is next, of how many."""
        self._number += 1
        self._heard_s = 0.0
        if self._progress is not None and self._task is not None:
            number = f"{self._number}/{of}" if of else f"{self._number}"
            self._progress.update(self._task, description=f"[{number}] {point.id}", live="")

    def live(self, live: Live) -> None:
        """Show how it goes; say once when no answer comes any more."""
        if live.is_warmup or live.good:
            self._heard_s = live.elapsed_s
        elif self._heard_s is not None and live.elapsed_s - self._heard_s >= SILENT_S:
            self._heard_s = None
            self.say(f"no answer for {SILENT_S:g} s; a call is given up after --timeout")
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task, completed=self._before_s + live.elapsed_s, live=live_text(live)
            )

    def end(self, point: Point, found: dict[str, Any]) -> None:
        """Show what came of it."""
        self._before_s += point.expected_s
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self._before_s)
        self.say(result_text(found))


def live_text(live: Live) -> str:
    """Return a live figure in words."""
    if live.is_warmup:
        return "warming up"
    if math.isnan(live.p50_ms):
        return f"{live.offered} calls, no answer now"
    return f"p50 {ms(live.p50_ms)}  p99 {ms(live.p99_ms)}  {live.rate:.0f}/s"


def result_text(found: dict[str, Any]) -> str:
    """Return a measured point in one line."""
    latency = found["latency_ms"]
    told = "no good answer"
    if latency["count"]:
        told = "  ".join(f"{name} {number(latency[name])}" for name in ("p50", "p95", "p99", "max"))
        told = f"{told} ms  {number(found['good_per_s'])} good/s"
    bad = found["offered"] - latency["count"]
    return f"{found['id']}: {told}{f'  {bad} not good' if bad else ''}"


def duration_text(seconds: float) -> str:
    """Return a length of time as people say it."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {rest} s"
    return f"{rest} s"
