"""The command `headwise-load`, also `python -m loadtest`."""

import argparse
import contextlib
import dataclasses
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from rich.console import Console

from loadtest import capacity, notation, raw, sweep
from loadtest.arrivals import Arrivals
from loadtest.drive import Plan
from loadtest.endpoint import Endpoint
from loadtest.errors import LoadTestError, UsageWrong
from loadtest.formats import encode
from loadtest.generator import Generator
from loadtest.machine import describe
from loadtest.notation import Objective
from loadtest.point import Point
from loadtest.progress import Display, duration_text
from loadtest.report.commands import main as report_main
from loadtest.report.terminal import show
from loadtest.target import Target, discover
from loadtest.trust import BOTTLENECK, INTERRUPTED, Limits, is_trustworthy, warnings_of
from loadtest.work import Work, check_format, check_mask, check_weights, draw_tensors, shapes

GOOD, UNTRUSTWORTHY, IMPOSSIBLE, BROKEN, STOPPED = 0, 1, 2, 3, 130

_COUNTED_S: Final = 3600.0
"""How long a load may go on that is to make a number of calls, when no time is given."""
_LEFT_OUT: Final = ("parity",)
"""What a server tells of a model at length, and no report shows."""
_HIGHEST: Final = 1e6
_FEWEST: Final = 10
"""Calls that a probe of a search must have to tell anything."""
_FILE_WIDTH: Final = 160

_EXAMPLES: Final = """\
examples:
  headwise-load http://127.0.0.1:8000 --rate 100 --shape 1x8
      100 calls a second for 10 s, as independent callers come
  headwise-load http://127.0.0.1:8000 --clients 1,4,16 --shape 1x8,8x128 --format json,binary
      a sweep of 12 points: clients that wait for their answers
  headwise-load http://127.0.0.1:8000 --find-capacity --slo "p99<20ms" --shape 1xuniform:1:64
      the highest rate at which 99 of 100 calls take less than 20 ms
  headwise-load http://127.0.0.1:8000 --rate 50:500:50 --raw sweep.json --resume
      a long sweep that goes on where it was interrupted
  headwise-load report sweep.json --html sweep.html
  headwise-load compare before.json after.json --html both.html

exit codes:
  0    the figures can be trusted
  1    they cannot: the generator was the bottleneck, a load was unstable, an answer was
       wrong, or none was good, or the server was gone before the last load; it says which
  2    nothing was measured: the options make no sense, the server cannot be reached, or a
       raw file cannot be read
  3    the figures can be trusted, and --slo is broken, or at no rate kept
  130  interrupted; what was measured until then is told all the same
"""


@dataclass(frozen=True)
class _Test:
    """A whole test, every option read."""

    target: Target
    points: list[Point]
    limits: Limits
    objective: Objective | None
    find: bool
    precision: float
    raw: Path | None
    there: list[dict[str, Any]]
    null_s: float
    quiet: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Run one test, or report on one; return the exit code that `--help` describes."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ("report", "compare"):
        return report_main(arguments)
    screen = Console(stderr=True)
    # An end that was asked for is an interruption, however it was asked for.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        test = _read(_parser().parse_args(arguments))
        command = ["headwise-load", *raw.shown(arguments)]
        return _run(test, command, screen)
    except LoadTestError as error:
        screen.print(f"headwise-load: {error}", markup=False, highlight=False, soft_wrap=True)
        return IMPOSSIBLE
    except KeyboardInterrupt:
        screen.print("headwise-load: interrupted before anything was measured", highlight=False)
        return STOPPED
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(test: _Test, command: list[str], screen: Console) -> int:
    found = raw.Raw(command, describe(), _server(test.target), raw.now())
    found.points = list(test.there)
    found.slo = test.objective.text if test.objective is not None else None
    if test.raw is not None:
        found.write(test.raw)  # now, not after an hour, is it told that it cannot be
    total_s = None if test.find else sum(point.expected_s for point in test.points)
    display = Display(screen, total_s=total_s, quiet=test.quiet)
    with contextlib.ExitStack() as after, Generator() as generator, display:
        after.callback(_keep, found, test.raw)
        found.null_calls_per_s = _null_rate(generator, test)
        runner = _Runner(test, generator, display, found)
        if test.find:
            _find_capacity(test, runner, display)
        else:
            if len(test.points) > 1 and total_s:
                display.say(f"{len(test.points)} points, about {duration_text(total_s)}")
            for point in test.points:
                if not runner.run(point, of=len(test.points)):
                    break
        found.ended = raw.now()
    _show(found.as_dict())
    if test.raw is not None and found.points:
        display.say(f"raw file: {test.raw}")
    if found.interrupted:
        return STOPPED
    if runner.failure is not None:
        display.say(f"headwise-load: ended early: {runner.failure}")
        return UNTRUSTWORTHY
    # In a search, a rate that was too high is unstable as a matter of course.
    judged = runner.kept if test.find else found.points
    if runner.is_bottleneck or not all(is_trustworthy(point["warnings"]) for point in judged):
        return UNTRUSTWORTHY
    return BROKEN if _is_broken(test, runner, display) else GOOD


def _keep(found: raw.Raw, path: Path | None) -> None:
    """Write what there is, where a file is wanted; one of nothing would bar the mended command."""
    if path is None:
        return
    if found.points:
        found.write(path)
    else:
        path.unlink(missing_ok=True)


def _is_broken(test: _Test, runner: "_Runner", display: Display) -> bool:
    """Return whether the objective is, or at every rate was, and say where."""
    if test.objective is None:
        return False
    if test.find:
        return not runner.kept
    for told, why in runner.broken:
        display.say(f"{told['id']}: breaks {test.objective.text}: {why}")
    return bool(runner.broken)


def _show(found: dict[str, Any]) -> None:
    # In a file or a pipe there is no width to keep to.
    show(found, Console() if sys.stdout.isatty() else Console(width=_FILE_WIDTH))


class _Runner:
    """Measures points, and keeps what is found."""

    def __init__(self, test: _Test, generator: Generator, display: Display, found: raw.Raw) -> None:
        self._test, self._generator, self._display = test, generator, display
        self._found = found
        self.kept: list[dict[str, Any]] = []
        """Points that kept the objective."""
        self.broken: list[tuple[dict[str, Any], str]] = []
        """Points that did not, and how."""
        self.is_bottleneck = False
        """Whether the generator was, in any point."""
        self.failure: str | None = None
        """Why the points after those that were measured could not be."""

    def run(self, point: Point, of: int | None = None) -> dict[str, Any] | None:
        """Measure a point, and return it; None = interrupted, and what there is is kept."""
        self._display.begin(point, of)
        try:
            told = self._generator.measure(self._test.target, point, self._display.live)
        except KeyboardInterrupt:
            self._found.interrupted = True
            return None
        except LoadTestError as error:
            if not self._found.points:
                raise
            self.failure = str(error)
            return None
        told["warnings"] = warnings_of(told, self._found.null_calls_per_s, self._test.limits)
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
        if self._test.objective is None:
            return
        why = self._test.objective.broken(told["latency_ms"], offered=told["offered"])
        if why is None:
            self.kept.append(told)
        else:
            self.broken.append((told, why))

    def save(self) -> None:
        """Write what there is by now, where a file is wanted."""
        self._found.ended = raw.now()
        _keep(self._found, self._test.raw)

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


def _find_capacity(test: _Test, runner: _Runner, display: Display) -> None:
    objective, start = cast(Objective, test.objective), test.points[0]
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
            precision=test.precision,
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


def _null_rate(generator: Generator, test: _Test) -> float | None:
    """Return what the generator can do at most, with calls of one row of eight tokens."""
    if not test.null_s:
        return None
    work = Work("1", "8")
    try:
        tensors = draw_tensors(work, test.target.inputs, 4, most_bytes=2**26, seed=0)
    except UsageWrong:  # the model takes no such shape
        work = test.points[0].work
        tensors = draw_tensors(work, test.target.inputs, 4, most_bytes=2**26, seed=0)
    plain = dataclasses.replace(work, weights="off", mask="none", format="binary")
    messages = [encode(test.target, plain, one) for one in tensors]
    endpoint = Endpoint("http", "127.0.0.1", 80)
    requests = [endpoint.post_bytes(m.path, m.body, m.headers) for m in messages]
    return generator.null_calls_per_s(requests, len(messages[0].body), seconds=test.null_s)


def _server(target: Target) -> dict[str, Any]:
    told = target.as_dict()
    details = told["details"] or {}
    return told | {"details": {k: v for k, v in details.items() if k not in _LEFT_OUT}}


def _read(given: argparse.Namespace) -> _Test:
    """
    Return the test that options describe, once the server has told what it is.

    Raises:
        LoadTestError: they make no sense, or there is no server.
    """
    kinds = sweep.works(
        shapes("--shape", given.shape),
        [check_weights("--weights", word) for word in notation.words(given.weights)],
        [check_mask("--mask", word) for word in notation.words(given.mask)],
        [check_format("--format", word) for word in notation.words(given.format)],
    )
    objective = None if given.slo is None else Objective.parse("--slo", given.slo)
    rates, clients = _loads(given, objective)
    plan = _plan(given)
    limits = Limits(
        spread=notation.share("--max-spread", given.max_spread),
        lag_ms=notation.seconds("--max-lag", given.max_lag) * 1e3,
    )
    precision = notation.share("--precision", given.precision)
    if precision <= 0:
        raise UsageWrong(f"--precision: expected a share above 0, got {given.precision!r}")
    null_s = notation.seconds("--null-time", given.null_time)
    for option in ("connections", "bodies"):
        value = getattr(given, option)
        if value is not None and value < 1:
            raise UsageWrong(f"--{option}: expected a whole number from 1 on, got {value}")
    if given.repository is not None and not given.check:
        raise UsageWrong("--repository: only means something together with --check")
    if given.find_capacity and len(kinds) > 1:
        raise UsageWrong("--find-capacity: expected one shape, weights mode, mask and format")

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

    wanted = sweep.points(point, kinds, rates, clients)
    there = _there(given, wanted)
    endpoint = Endpoint.parse(
        given.url,
        tuple(given.header),
        ca_file=given.ca_file,
        cert_file=given.cert_file,
        insecure=given.insecure,
    )
    target = discover(endpoint, model=given.model, api=given.api)
    if there:
        _check_same_server(raw.read("--raw", given.raw)["server"], target)
    for work in kinds:  # what cannot be asked is told before anything is measured
        encode(target, work, draw_tensors(work, target.inputs, 1, most_bytes=1, seed=0)[0])
    return _Test(
        target=target,
        points=sweep.left(wanted, {point["id"] for point in there}),
        limits=limits,
        objective=objective,
        find=given.find_capacity,
        precision=precision,
        raw=given.raw,
        there=there,
        null_s=null_s,
        quiet=given.quiet,
    )


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


def _there(given: argparse.Namespace, wanted: list[Point]) -> list[dict[str, Any]]:
    """Return the points that the raw file holds already; none if it is not to be resumed."""
    if given.resume and given.raw is None:
        raise UsageWrong("--resume: goes on with a raw file, name it by --raw")
    if given.raw is None or not given.raw.exists():
        return []
    if not given.resume and not given.overwrite:
        raise UsageWrong(
            f"--raw: {given.raw}: is there already; --resume goes on with it,"
            " --overwrite begins anew"
        )
    if not given.resume:
        return []
    done = raw.measured(raw.read("--raw", given.raw))
    for point in wanted:
        if point.id in done:
            _check_same(point, done[point.id])
    return list(done.values())


def _check_same(point: Point, old: dict[str, Any]) -> None:
    """
    Return when a point was measured as it would be now.

    Raises:
        UsageWrong: for another time, or with another warm-up.
    """
    was = old["warmup_s"], None if point.plan.count else round(old["seconds"], 1)
    would = point.plan.warmup_s, None if point.plan.count else round(point.plan.seconds, 1)
    if was != would:
        raise UsageWrong(
            f"--resume: {point.id} was measured for another time ({was[1]} s after {was[0]} s of"
            " warm-up): give the same --duration and --warmup, or --overwrite"
        )


def _check_same_server(old: dict[str, Any], target: Target) -> None:
    """
    Return when a raw file is of this server and model.

    Raises:
        UsageWrong: it is of another.
    """
    was, now = (old.get("url"), old.get("model")), (target.endpoint.url, target.model)
    if was != now:
        raise UsageWrong(
            f"--resume: the raw file is of {was[0]} with model {was[1]}, not of {now[0]} with"
            f" {now[1]}"
        )


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, like every other error of this command."""

    def error(self, message: str) -> NoReturn:
        self.exit(IMPOSSIBLE, f"{self.prog}: {message}; see --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="headwise-load",
        usage="headwise-load URL [options]\n       headwise-load report RAW... [options]\n"
        "       headwise-load compare RAW RAW [options]",
        description="Measure the latency of an attention server under load, as its callers see it."
        " The server is Headwise, or any other of the Open Inference Protocol v2.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("url", metavar="URL", help="http://host:port, or https://host:port")
    parser.add_argument("--version", action="version", version=raw.TOOL)
    _load_options(parser)
    _work_options(parser)
    _server_options(parser)
    _trust_options(parser)
    _output_options(parser)
    return parser


def _load_options(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group(
        "load",
        "open (--rate: latency counts from when a call was due) or closed (--clients); given both,"
        " each is measured",
    )
    load.add_argument(
        "--rate", help="calls a second: 100, or 50,100, or 100:500:100 (default: 100)"
    )
    load.add_argument("--clients", help="clients that each wait for their answer: 4, or 1,4,16")
    load.add_argument(
        "--arrivals",
        choices=("poisson", "constant"),
        default="poisson",
        help="when calls are due at a rate: as independent callers come, or evenly"
        " (default: poisson)",
    )
    load.add_argument("--duration", help="time that is measured for each point (default: 10s)")
    load.add_argument("--count", type=int, help="measure so many calls instead")
    load.add_argument(
        "--warmup", default="1s", help="time before, under the same load (default: 1s)"
    )
    load.add_argument(
        "--timeout",
        default="30s",
        help="time a call may take, and may wait for a connection (default: 30s)",
    )
    load.add_argument(
        "--connections",
        type=int,
        help="most calls under way at a rate; further ones wait, which counts"
        " (default: a second's calls, 32 to 512)",
    )


def _work_options(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("work", "lists by commas are multiplied into a sweep")
    work.add_argument(
        "--shape",
        default="1x8",
        help="ROWSxLENGTH; each a number, uniform:LOW:HIGH, lognormal:MU:SIGMA or file:PATH,"
        " drawn anew for each call (default: 1x8)",
    )
    work.add_argument("--weights", default="off", help="off, on or heads:0,3 (default: off)")
    work.add_argument(
        "--mask", default="none", help="none, padding, causal or pair (default: none)"
    )
    work.add_argument(
        "--format",
        default="binary",
        help="json, binary, safetensors or shared-memory (default: binary)",
    )
    work.add_argument(
        "--bodies", type=int, default=16, help="different calls of one shape (default: 16)"
    )
    work.add_argument(
        "--seed", type=int, default=0, help="of bodies, lengths and arrivals (default: 0)"
    )


def _server_options(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--model", help="default: the server's own, or its only one")
    server.add_argument(
        "--api",
        choices=("auto", "v2"),
        default="auto",
        help="v2: nothing but the Open Inference Protocol, of Headwise too (default: auto)",
    )
    server.add_argument(
        "-H",
        "--header",
        action="append",
        default=[],
        help='sent with every call: "Authorization: Bearer KEY"; never written down',
    )
    server.add_argument("--ca-file", type=Path, help="who signed the server's certificate, PEM")
    server.add_argument("--cert-file", type=Path, help="your own certificate and its key, PEM")
    server.add_argument(
        "--insecure", action="store_true", help="take any certificate of the server"
    )


def _trust_options(parser: argparse.ArgumentParser) -> None:
    trust = parser.add_argument_group("objectives and trust")
    trust.add_argument(
        "--slo", help='"p99<20ms" or "p50<5ms,p99<20ms,errors<0.1%%" (errors: 1%% unless told)'
    )
    trust.add_argument(
        "--find-capacity",
        action="store_true",
        help="look for the highest rate that keeps --slo, from --rate (default: 50) on",
    )
    trust.add_argument(
        "--precision", default="3%", help="how closely it is looked for (default: 3%%)"
    )
    trust.add_argument(
        "--check",
        action="store_true",
        help="compare every answer with what the server says to the same call alone",
    )
    trust.add_argument(
        "--repository", type=Path, help="with --check: compare with this artifact's own answers"
    )
    trust.add_argument(
        "--max-spread",
        default="50%",
        help="how far windows' medians may lie apart before a load is unstable (default: 50%%)",
    )
    trust.add_argument(
        "--max-lag",
        default="1ms",
        help="how late the generator itself may send at p99 (default: 1ms, or 10%% of p99 latency"
        " where that is more)",
    )
    trust.add_argument(
        "--null-time",
        default="1s",
        help="time to find out what the generator can do at most; 0 = leave it (default: 1s)",
    )


def _output_options(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument(
        "--raw", type=Path, help="write everything measured there, as JSON, after every point"
    )
    output.add_argument(
        "--resume", action="store_true", help="leave out the points that --raw holds already"
    )
    output.add_argument("--overwrite", action="store_true", help="replace the file of --raw")
    output.add_argument("--quiet", action="store_true", help="show nothing but the results")
