"""A whole test: every option read, and the server found."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from loadtest import notation, raw, sweep
from loadtest.arrivals import Arrivals
from loadtest.endpoint import Endpoint
from loadtest.errors import UsageWrong
from loadtest.formats import encode
from loadtest.notation import Objective
from loadtest.own_bodies import messages_of, work_of
from loadtest.plan import Plan
from loadtest.point import Point
from loadtest.target import Target, discover
from loadtest.trust import Limits
from loadtest.work import Work, check_format, check_mask, check_weights, draw_tensors, shapes

_COUNTED_S: Final = 3600.0
"""How long a load may go on that is to make a number of calls, when no time is given."""


@dataclass(frozen=True)
class Job:
    """A whole test, every option read."""

    target: Target
    points: list[Point]
    limits: Limits
    objective: Objective | None
    find: bool
    precision: float
    raw: Path | None
    before: dict[str, Any] | None
    """The raw file that is gone on with."""
    null_s: float
    quiet: bool
    prints_json: bool
    """Whether what was measured goes to standard output as JSON."""


def read_job(given: argparse.Namespace) -> Job:
    """
    Return the test that options describe, once the server has told what it is.

    Raises:
        LoadTestError: they make no sense, or there is no server.
    """
    kinds = _kinds(given)
    objective = None if given.slo is None else Objective.parse("--slo", given.slo)
    rates, clients = _loads(given, objective)
    plan = _plan(given)
    limits = Limits(
        spread=notation.share("--max-spread", given.max_spread),
        lag_ms=notation.seconds("--max-lag", given.max_lag) * 1e3,
    )
    precision = notation.share("--precision", given.precision)
    null_s = notation.seconds("--null-time", given.null_time)
    _check(given, kinds, precision)
    wanted = sweep.points(_point_of(given, plan), kinds, rates, clients)
    before = _before(given, wanted, objective)
    target = _target(given, kinds)
    if before is not None:
        _check_same_server(before["server"], target)
        objective = objective or _objective_of(before)
    return Job(
        target=target,
        points=sweep.left(wanted, raw.measured(before) if before else {}),
        limits=limits,
        objective=objective,
        find=given.find_capacity,
        precision=precision,
        raw=given.raw,
        before=before,
        null_s=null_s,
        quiet=given.quiet,
        prints_json=given.json,
    )


def _kinds(given: argparse.Namespace) -> list[Work]:
    if given.body is not None:
        for option in ("shape", "weights", "mask", "format"):
            if getattr(given, option) is not None:
                raise UsageWrong(f"--{option}: the bodies of --body say that themselves")
        return [work_of("--body", given.body)]
    return sweep.works(
        shapes("--shape", given.shape or "1x8"),
        [check_weights("--weights", word) for word in notation.words(given.weights or "off")],
        [check_mask("--mask", word) for word in notation.words(given.mask or "none")],
        [check_format("--format", word) for word in notation.words(given.format or "binary")],
    )


def _check(given: argparse.Namespace, kinds: Sequence[Work], precision: float) -> None:
    """
    Return when options that are read by themselves make sense, also together.

    Raises:
        UsageWrong: they do not.
    """
    if precision <= 0:
        raise UsageWrong(f"--precision: expected a share above 0, got {given.precision!r}")
    for option in ("connections", "bodies"):
        value = getattr(given, option)
        if value is not None and value < 1:
            raise UsageWrong(f"--{option}: expected a whole number from 1 on, got {value}")
    if given.repository is not None and given.body is not None:
        raise UsageWrong("--repository: checks drawn calls, not those of --body")
    if given.repository is not None and not given.check:
        raise UsageWrong("--repository: only means something together with --check")
    if given.find_capacity and len(kinds) > 1:
        raise UsageWrong("--find-capacity: expected one shape, weights mode, mask and format")


def _point_of(
    given: argparse.Namespace, plan: Plan
) -> Callable[[Work, float | None, int | None], Point]:
    """Return how a point is made of its work and of a rate or a number of clients."""

    def point(work: Work, rate: float | None, number: int | None) -> Point:
        return Point(
            work=work,
            rate=rate,
            clients=number,
            arrivals=cast(Arrivals, given.arrivals),
            connections=given.connections,
            plan=plan,
            bodies=given.bodies,
            seed=given.seed,
            check=given.check,
            repository=given.repository,
        )

    return point


def _target(given: argparse.Namespace, kinds: Sequence[Work]) -> Target:
    """
    Return the server and its model, which can be asked for every kind of work.

    Raises:
        LoadTestError: there is no such server.
    """
    endpoint = Endpoint.parse(
        given.url,
        tuple(given.header),
        ca_file=given.ca_file,
        cert_file=given.cert_file,
        insecure=given.insecure,
    )
    target = discover(endpoint, model=given.model, api=given.api)
    for work in kinds:  # what cannot be asked is told before anything is measured
        if work.body:
            messages_of(target, work)
            continue
        encode(target, work, draw_tensors(work, target.inputs, 1, most_bytes=1, seed=0)[0])
    return target


def _loads(given: argparse.Namespace, objective: Objective | None) -> tuple[list[float], list[int]]:
    rates = [] if given.rate is None else notation.numbers("--rate", given.rate)
    clients = [] if given.clients is None else notation.whole_numbers("--clients", given.clients)
    if given.find_capacity:
        if objective is None:
            raise UsageWrong('--find-capacity: needs an objective, such as --slo "p99<20ms"')
        if clients:
            raise UsageWrong("--clients: --find-capacity looks for a rate, not for clients")
        if len(rates) > 1:
            raise UsageWrong("--rate: --find-capacity starts at one rate")
        if given.resume:
            raise UsageWrong("--resume: a search for capacity cannot be resumed")
        return rates or [50.0], []
    if not rates and not clients:
        return [100.0], []
    return rates, clients


def _plan(given: argparse.Namespace) -> Plan:
    count = given.count
    if count is not None and count < 1:
        raise UsageWrong(f"--count: expected a whole number from 1 on, got {count}")
    default = _COUNTED_S if count is not None else 10.0
    time_s = default if given.duration is None else notation.seconds("--duration", given.duration)
    timeout_s = notation.seconds("--timeout", given.timeout)
    for option, value in (("--duration", time_s), ("--timeout", timeout_s)):
        if value <= 0:
            raise UsageWrong(f"{option}: expected a time above 0, got {value:g} s")
    return Plan(time_s, count, notation.seconds("--warmup", given.warmup), timeout_s)


def _before(
    given: argparse.Namespace, wanted: list[Point], objective: Objective | None
) -> dict[str, Any] | None:
    """
    Return the raw file that is to be gone on with; None where there is none.

    Raises:
        UsageWrong: it is there and not to be resumed, or was measured with other options.
    """
    if given.resume and given.raw is None:
        raise UsageWrong("--resume: goes on with a raw file, name it by --raw")
    if given.raw is None or not given.raw.exists():
        return None
    if not given.resume and not given.overwrite:
        raise UsageWrong(
            f"--raw: {given.raw}: is there already; --resume goes on with it,"
            " --overwrite begins anew"
        )
    if not given.resume:
        return None
    found = raw.read("--raw", given.raw)
    done = raw.measured(found)
    for point in wanted:
        if point.id in done:
            _check_same(point, done[point.id])
    _check_same_objective(found, objective)
    return found


def _objective_of(found: dict[str, Any]) -> Objective | None:
    return Objective.parse("--raw: slo", found["slo"]) if found.get("slo") else None


def _check_same(point: Point, old: dict[str, Any]) -> None:
    """
    Return when a point was measured as it would be now.

    Raises:
        UsageWrong: with other options; the first that differs is named.
    """
    would = point.as_dict()
    for was, now in (
        (old, {"connections": would["connections"]}),
        (old.get("options", {}), would["options"]),
    ):
        for name, value in now.items():
            if name in was and was[name] != value:
                raise UsageWrong(
                    f"--resume: {point.id} was measured with {name} {was[name]}, not {value}:"
                    " give the same options, or --overwrite"
                )


def _check_same_objective(found: dict[str, Any], objective: Objective | None) -> None:
    """
    Return when a raw file was measured against this objective, or none is given.

    Raises:
        UsageWrong: it was against another.
    """
    if objective is not None and found["points"] and found.get("slo") != objective.text:
        raise UsageWrong(
            f"--resume: the raw file was measured with --slo {found.get('slo') or 'none'}, not"
            f" {objective.text}: `report --slo` holds it against another"
        )


def _check_same_server(old: dict[str, Any], target: Target) -> None:
    """
    Return when a raw file is of this server and model.

    Raises:
        UsageWrong: it is of another.
    """
    was = old.get("url"), old.get("model") or target.model  # bodies may say it for themselves
    now = target.endpoint.url, target.model
    if was != now:
        raise UsageWrong(
            f"--resume: the raw file is of {was[0]} with model {was[1]}, not of {now[0]} with"
            f" {now[1]}"
        )
