"""The options of `headwise-load URL`: names, defaults and help texts."""

import argparse
from pathlib import Path
from typing import Final, NoReturn

from loadtest import raw
from loadtest.exit_codes import IMPOSSIBLE

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
  0    the figures can be trusted, and no load broke --slo
  1    they cannot: a call was never answered (connection lost, timed out, never sent), no
       answer came for a second or more while calls waited, the generator was the bottleneck,
       clocks disagree, a load was unstable or not finished, an answer was wrong, none was
       good, or a load could not be made at all; it says which
  2    nothing was measured: the options make no sense, the server cannot be reached, or a
       raw file cannot be read
  3    the figures can be trusted, and --slo is broken, or at no rate kept; without --slo,
       more than 1% of a load's calls were refused or failed
  130  interrupted; what was measured until then is told all the same
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, like every other error of this command."""

    def error(self, message: str) -> NoReturn:
        self.exit(IMPOSSIBLE, f"{self.prog}: {message}; see --help\n")


def parser_of_loads() -> argparse.ArgumentParser:
    """Return the parser of a test's options; a mistake ends the process in one line."""
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
        "-r", "--rate", help="calls a second: 100, or 50,100, or 100:500:100 (default: 100)"
    )
    load.add_argument(
        "-c", "--clients", help="clients that each wait for their answer: 4, or 1,4,16"
    )
    load.add_argument(
        "--arrivals",
        choices=("poisson", "constant"),
        default="poisson",
        help="when calls are due at a rate: as independent callers come, or evenly"
        " (default: poisson)",
    )
    load.add_argument(
        "-d", "--duration", help="time that is measured for each point (default: 10s)"
    )
    load.add_argument("-n", "--count", type=int, help="measure so many calls instead")
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
        help="ROWSxLENGTH; each a number, uniform:LOW:HIGH, lognormal:MU:SIGMA or file:PATH,"
        " drawn anew for each call (default: 1x8)",
    )
    work.add_argument("--weights", help="off, on or heads:0,3 (default: off)")
    work.add_argument("--mask", help="none, padding, causal or pair (default: none)")
    work.add_argument(
        "--format", help="json, binary, safetensors or shared-memory (default: binary)"
    )
    work.add_argument(
        "--body",
        metavar="FILE",
        help="instead of those four: send this file's own bodies in turn; .json and .safetensors"
        " hold one, .jsonl one a line",
    )
    work.add_argument(
        "--bodies", type=int, default=16, help="different drawn calls of one shape (default: 16)"
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
        "--slo", help='"p99<20ms" or "p50<5ms,p95<=20ms,errors<0.1%%" (errors: <=1%% unless told)'
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
    output.add_argument(
        "--json",
        action="store_true",
        help="print everything measured as JSON, as in --raw; the tables go to standard error",
    )
    output.add_argument("--quiet", action="store_true", help="show nothing but the results")
