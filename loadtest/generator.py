"""
The generator in a process of its own: whatever is shown meanwhile does not slow it down.

It measures one point at a time, tells how that goes, and can be stopped.
"""

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final, Self

from loadtest.errors import LoadTestError
from loadtest.null import calls_per_s
from loadtest.plan import Live
from loadtest.point import Point, measure
from loadtest.target import Target

_END_S: Final = 10.0


@dataclass(frozen=True)
class _Null:
    """The wish to know what the generator itself can do."""

    requests: Sequence[bytes]
    answer_bytes: int
    seconds: float


class GeneratorEnded(LoadTestError):
    """The generator's process is gone."""


class Generator:
    """The process, from entering to leaving."""

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,), daemon=False)
        self._process.start()
        theirs.close()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pipe.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def null_calls_per_s(
        self, requests: Sequence[bytes], answer_bytes: int, *, seconds: float
    ) -> float:
        """Return how many such calls a second it makes of a server that does nothing."""
        return float(self._ask(_Null(requests, answer_bytes, seconds), lambda _: None))

    def measure(
        self, target: Target, point: Point, on_live: Callable[[Live], None]
    ) -> dict[str, Any]:
        """
        Return a measured point; see `loadtest.point.measure`.

        A KeyboardInterrupt ends it early, and what there is comes back, marked as
        interrupted; a second one is raised.

        Raises:
            LoadTestError: it cannot be measured, or the process is gone.
        """
        found: dict[str, Any] = self._ask((target, point), on_live)
        return found

    def _ask(self, wish: object, on_live: Callable[[Live], None]) -> Any:
        stopped = False
        told: tuple[str, Any] | None = None
        try:
            self._pipe.send(wish)
            while True:
                try:
                    # Kept over an interruption: what was told is not told again.
                    told = told or self._pipe.recv()
                    kind, what = told
                    if kind == "live":
                        told = None
                        on_live(what)
                    elif kind == "failed":
                        raise what
                    else:
                        return what
                except KeyboardInterrupt:
                    if stopped:
                        raise
                    stopped = True
                    self._pipe.send("stop")
        except (EOFError, OSError):
            self._process.join(_END_S)
            code = self._process.exitcode
            raise GeneratorEnded(f"the generator's process ended ({code})") from None


def _work(pipe: Connection) -> None:
    """Measure what is asked for until nobody asks."""
    # Ctrl-C reaches the whole group; who shows the results tells this one when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, OSError):
        while True:
            wish = pipe.recv()
            if wish == "stop":
                continue  # too late: what was to be stopped has ended
            try:
                pipe.send(("done", _do(wish, pipe)))
            except LoadTestError as error:
                pipe.send(("failed", error))


def _do(wish: Any, pipe: Connection) -> object:
    if isinstance(wish, _Null):
        return calls_per_s(wish.requests, wish.answer_bytes, seconds=wish.seconds)
    target, point = wish

    def watch(live: Live) -> bool:
        pipe.send(("live", live))
        # Also at the end of a pipe whose other side is gone.
        return not pipe.poll()

    return measure(target, point, watch)
