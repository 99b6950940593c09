"""The command `headwise-load`, also `python -m loadtest`."""

import signal
import sys
from collections.abc import Sequence

from rich.console import Console

from loadtest import raw
from loadtest.errors import LoadTestError
from loadtest.exit_codes import IMPOSSIBLE, STOPPED
from loadtest.job import read_job
from loadtest.options import parser_of_loads
from loadtest.report.commands import main as report_main
from loadtest.runner import run_job


def main(argv: Sequence[str] | None = None) -> int:
    """Run one test, or report on one; return the exit code that `--help` describes."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ("report", "compare"):
        return report_main(arguments)
    screen = Console(stderr=True, emoji=False)
    # An end that was asked for is an interruption, however it was asked for.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        job = read_job(parser_of_loads().parse_args(arguments))
        command = ["headwise-load", *raw.shown(arguments)]
        return run_job(job, command, screen)
    except LoadTestError as error:
        screen.print(f"headwise-load: {error}", markup=False, highlight=False, soft_wrap=True)
        return IMPOSSIBLE
    except KeyboardInterrupt:
        screen.print("headwise-load: interrupted before anything was measured", highlight=False)
        return STOPPED
    finally:
        signal.signal(signal.SIGTERM, before)
