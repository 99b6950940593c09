"""Runs a whole test: its points or its search, what is kept of them, and the exit code."""

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any, Final, cast

from rich.console import Console

from loadtest import capacity, raw
from loadtest.endpoint import Endpoint
from loadtest.errors import LoadTestError, UsageWrong
from loadtest.exit_codes import BROKEN, STOPPED, TRUSTWORTHY, UNTRUSTWORTHY
from loadtest.formats import encode
from loadtest.generator import Generator
from loadtest.job import Job
from loadtest.machine import describe
from loadtest.notation import ANY, Objective
from loadtest.point import Point
from loadtest.progress import Display, duration_text
from loadtest.report.terminal import show
from loadtest.trust import BOTTLENECK, INTERRUPTED, is_trustworthy, warnings_of
from loadtest.work import Work, draw_tensors

_LEFT_OUT: Final = ("parity",)
"""What a server tells of a model at length, and no report shows."""
_HIGHEST: Final = 1e6
_FEWEST: Final = 10
"""Calls that a probe of a search must have to tell anything."""
_FILE_WIDTH: Final = 160


def run_job(job: Job, command: list[str], screen: Console) -> int:
    """
    Measure everything, show it, and return the exit code that `--help` describes.

    Raises:
        LoadTestError: nothing could be measured.
    """
    found = raw.Raw(command, describe(), _server(job), raw.now())
    if job.before is not None:
        found.go_on_with(job.before, measures_more=bool(job.points))
    found.slo = job.objective.text if job.objective is not None else None
    if job.raw is not None:
        found.write(job.raw)  # now, not after an hour, is it told that it cannot be
    total_s = None if job.find else sum(point.expected_s for point in job.points)
    display = Display(screen, total_s=total_s, quiet=job.quiet)
    with contextlib.ExitStack() as after, Generator() as generator, display:
        after.callback(_keep, found, job.raw)
        found.null_calls_per_s = _null_rate(generator, job)
        runner = _Runner(job, generator, display, found)
        try:
            _measure(job, runner, display, total_s)
        except KeyboardInterrupt:  # between two points; amid one it has an end of its own
            if not found.points:
                raise
            found.interrupted = True
        found.ended = raw.now()
    _show(job, found)
    if job.raw is not None and found.points:
        display.say(f"raw file: {job.raw}")
    if found.interrupted:
        return STOPPED
    if found.failure is not None:
        display.say(f"headwise-load: ended early: {found.failure}")
        return UNTRUSTWORTHY
    # In a search, a rate that was too high is unstable as a matter of course.
    judged = runner.kept if job.find else found.points
    if runner.is_bottleneck or not all(is_trustworthy(point["warnings"]) for point in judged):
        return UNTRUSTWORTHY
    return BROKEN if _is_broken(job, judged, display) else TRUSTWORTHY


def _measure(job: Job, runner: "_Runner", display: Display, total_s: float | None) -> None:
    """Measure all points, or search."""
    if job.find:
        _find_capacity(job, runner, display)
        return
    if len(job.points) > 1 and total_s:
        display.say(f"{len(job.points)} points, about {duration_text(total_s)}")
    for point in job.points:
        if not runner.run(point, of=len(job.points)):
            return


def _keep(found: raw.Raw, path: Path | None) -> None:
    """Write what there is, where a file is wanted; one of nothing would bar the mended command."""
    if path is None:
        return
    if found.points:
        found.write(path)
    else:
        path.unlink(missing_ok=True)


def _is_broken(job: Job, judged: list[dict[str, Any]], display: Display) -> bool:
    """Return whether the objective is, or at every rate was, and say where."""
    if job.find:
        return not judged
    objective, found = job.objective or ANY, False
    for told in judged:
        why = objective.broken(told["latency_ms"], offered=told["offered"])
        if why is not None:
            found = True
            display.say(f"{told['id']}: breaks {objective.text}: {why}")
    return found


def _show(job: Job, found: raw.Raw) -> None:
    stream = sys.stderr if job.prints_json else sys.stdout
    if job.prints_json:
        print(found.as_json())
    if not (job.prints_json and job.quiet):
        # In a file or a pipe there is no width to keep to.
        width = None if stream.isatty() else _FILE_WIDTH
        show(found.as_dict(), Console(file=stream, emoji=False, width=width))


class _Runner:
    """Measures points, and keeps what is found."""

    def __init__(self, job: Job, generator: Generator, display: Display, found: raw.Raw) -> None:
        self._job, self._generator, self._display = job, generator, display
        self._found = found
        self.kept: list[dict[str, Any]] = []
        """Points that kept the objective."""
        self.is_bottleneck = False
        """Whether the generator was, in any point."""

    def run(self, point: Point, of: int | None = None) -> dict[str, Any] | None:
        """Measure a point, and return it; None = interrupted, and what there is is kept."""
        self._display.begin(point, of)
        try:
            told = self._generator.measure(self._job.target, point, self._display.live)
        except KeyboardInterrupt:
            self._found.interrupted = True
            return None
        except LoadTestError as error:
            if not self._found.points:
                raise
            self._found.failure = f"{point.id} could not be measured: {error}"
            self.save()
            return None
        told["warnings"] = warnings_of(told, self._found.null_calls_per_s, self._job.limits)
        self.is_bottleneck |= any(w.startswith(BOTTLENECK) for w in told["warnings"])
        if told["interrupted"]:
            self._found.interrupted = True
            planned = point.plan.count or f"{point.plan.seconds:g} s"
            told["warnings"].append(
                f"{INTERRUPTED} after {told['seconds']:.1f} s: {told['offered']} calls,"
                f" where {planned} were planned"
            )
        if told["offered"] and told["seconds"] > 0:
            self._found.points.append(told)
            self._display.end(point, told)
            self._judge(told)
        self.save()
        return None if told["interrupted"] else told

    def _judge(self, told: dict[str, Any]) -> None:
        objective = self._job.objective
        if objective is None:
            return
        if objective.broken(told["latency_ms"], offered=told["offered"]) is None:
            self.kept.append(told)

    def save(self) -> None:
        """Write what there is by now, where a file is wanted."""
        self._found.ended = raw.now()
        _keep(self._found, self._job.raw)

    def tell(self, rate: float | None, broken_at: float | None, probes: int) -> None:
        """Keep what a search has found."""
        self._found.capacity = {
            "rate": rate,
            "slo": self._found.slo,
            "broken_at": broken_at,
            "probes": probes,
        }


class _Interrupted(Exception):
    """A search was."""


def _find_capacity(job: Job, runner: _Runner, display: Display) -> None:
    objective, start = cast(Objective, job.objective), job.points[0]
    tried: dict[float, int] = {}

    def keeps(rate: float) -> bool:
        tried[rate] = tried.get(rate, 0) + 1
        point = dataclasses.replace(start, rate=rate, attempt=tried[rate])
        told = runner.run(point)
        if told is None:
            raise _Interrupted
        why = objective.broken(told["latency_ms"], offered=told["offered"])
        display.say(f"  {rate:.4g}/s: {'keeps ' + objective.text if why is None else why}")
        return why is None

    try:
        found = capacity.find(
            keeps,
            start=start.rate or 1.0,
            precision=job.precision,
            most=_HIGHEST,
            least=_FEWEST / start.plan.seconds,
        )
    except _Interrupted:
        return
    runner.tell(found.good, found.bad, found.probes)
    if found.good is None:
        display.say(f"no rate keeps {objective.text}: not even {found.bad:.3g}/s")
    else:
        display.say(f"highest rate that keeps {objective.text}: {found.good:.4g}/s")


def _null_rate(generator: Generator, job: Job) -> float | None:
    """Return what the generator can do at most, with calls of one row of eight tokens."""
    if not job.null_s:
        return None
    work = Work("1", "8")
    try:
        tensors = draw_tensors(work, job.target.inputs, 4, most_bytes=2**26, seed=0)
    except UsageWrong:  # the model takes no such shape
        work = job.points[0].work
        tensors = draw_tensors(work, job.target.inputs, 4, most_bytes=2**26, seed=0)
    plain = dataclasses.replace(work, weights="off", mask="none", format="binary")
    messages = [encode(job.target, plain, one) for one in tensors]
    endpoint = Endpoint("http", "127.0.0.1", 80)
    requests = [endpoint.post_bytes(m.path, m.body, m.headers) for m in messages]
    return generator.null_calls_per_s(requests, len(messages[0].body), seconds=job.null_s)


def _server(job: Job) -> dict[str, Any]:
    told = job.target.as_dict()
    if not job.target.is_named and any(point.work.body for point in job.points):
        return told | {"model": None, "details": None}  # each body says for itself
    details = told["details"] or {}
    return told | {"details": {k: v for k, v in details.items() if k not in _LEFT_OUT}}
