"""
Candidates that take turns, each in a process of its own, the others stopped.

PyTorch's threads and onnxruntime's wait for work by spinning, some for long after
their last run: two such pools in one process, or in two that are both awake, take
each other's cores.  So every candidate has its own process, and all but the one
whose turn it is are stopped (SIGSTOP): they hold memory, but run nothing.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Run = Callable[[], tuple[Array, ...]]
"""Does the work once and returns the answer: the output, and the weights if they were asked for."""

Prepare = Callable[[npt.NDArray[np.float32], bool], Run]
"""Takes embeddings [B, S, E] and whether weights are wanted; what it does is not timed."""

START_LIMIT_S: Final = 300.0
"""For importing, opening and compiling, on a machine with other work."""

_END_LIMIT_S: Final = 10.0
_SPAWN: Final = multiprocessing.get_context("spawn")
_PR_SET_PDEATHSIG: Final = 1
_QUERIES: Final = 8


class Failed(Exception):
    """A candidate's process raised, ended or did not answer; the message says which."""


@dataclass(frozen=True)
class Timing:
    """Of some runs, after the first ones."""

    median_s: float
    best_s: float


class Candidate:
    """
    One candidate's process: started when entered, stopped but for its turns, gone when left.

    `make` is called there and must be picklable, as a `functools.partial` of a function is.
    """

    def __init__(self, make: Callable[[], Prepare]) -> None:
        self._pipe, self._theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(self._theirs, make))

    def __enter__(self) -> Self:
        """
        Return once the candidate is there, stopped.

        Raises:
            Failed: it cannot be made.
        """
        self._process.start()
        self._theirs.close()
        try:
            self._received("it")
        except Failed:
            self._end()
            raise
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def answer(self, embeddings: npt.NDArray[np.float32], *, weights: bool) -> tuple[Array, ...]:
        """
        Return output [B, S, E] and, if wanted, weights [B, H, some of S, S].

        Some of the queries are enough to compare by; all would be 200 MB at length 2048.

        Raises:
            Failed: see there.
        """
        found: tuple[Array, ...] = self._take_turn(_answer, embeddings, weights)
        return found

    def time(
        self, embeddings: npt.NDArray[np.float32], *, weights: bool, seconds: float, warm_up: int
    ) -> Timing:
        """
        Return what runs took for about so many seconds, three at least.

        The first `warm_up` runs bring code and weights into the caches and do not count.

        Raises:
            Failed: see there.
        """
        timing: Timing = self._take_turn(_time, embeddings, weights, seconds, warm_up)
        return timing

    def _take_turn(self, task: Callable[..., Any], *arguments: object) -> Any:
        self._signal(signal.SIGCONT)
        try:
            with contextlib.suppress(OSError):  # _received says it better
                self._pipe.send((task, arguments))
            return self._received("the answer")
        finally:
            self._signal(signal.SIGSTOP)

    def _received(self, what: str) -> Any:
        if not self._pipe.poll(START_LIMIT_S):
            raise Failed(f"{what} was not there within {START_LIMIT_S:.0f} s")
        try:
            found, problem = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(10)
            raise Failed(f"its process ended with {self._process.exitcode}") from None
        if problem is not None:
            raise Failed(problem)
        return found

    def _signal(self, number: signal.Signals) -> None:
        # The process is waited for by this object alone, so its id cannot be another's.
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, number)

    def _end(self) -> None:
        self._pipe.close()
        self._signal(signal.SIGCONT)
        self._process.join(_END_LIMIT_S)  # it ends by itself, once nobody can ask any more
        self._process.kill()
        self._process.join()


def once(function: Callable[..., Any], *arguments: object) -> Any:
    """
    Return what the function returns in a fresh process; both must be picklable.

    Raises:
        Failed: it raised, or took longer than `START_LIMIT_S`.
    """
    with Candidate(_Nothing()) as candidate:
        return candidate._take_turn(_call, function, arguments)


def embeddings_of(shape: tuple[int, int], width: int) -> npt.NDArray[np.float32]:
    """Return the same random embeddings [B, S, E] each time."""
    random = np.random.default_rng(0)
    return random.standard_normal((*shape, width), np.float32)


class _Nothing:
    """A candidate that does no work."""

    def __call__(self) -> Prepare:
        return lambda embeddings, weights: lambda: ()


def _serve(pipe: Connection, make: Callable[[], Prepare]) -> None:
    # Nobody would wake a stopped process whose parent was killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        prepare = make()
    except Exception as error:  # whatever keeps a candidate away is its reason
        pipe.send((None, _reason(error)))
        return
    pipe.send((None, None))
    while True:
        try:
            task, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((task(prepare, *arguments), None))
        except Exception as error:
            pipe.send((None, _reason(error)))


def _answer(
    prepare: Prepare, embeddings: npt.NDArray[np.float32], weights: bool
) -> tuple[Array, ...]:
    output, *rest = prepare(embeddings, weights)()
    step = max(1, embeddings.shape[1] // _QUERIES)
    return output, *(np.ascontiguousarray(tensor[:, :, ::step]) for tensor in rest)


def _time(
    prepare: Prepare,
    embeddings: npt.NDArray[np.float32],
    weights: bool,
    seconds: float,
    warm_up: int,
) -> Timing:
    run = prepare(embeddings, weights)
    for _ in range(warm_up):
        run()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return Timing(statistics.median(times), min(times))


def _call(prepare: Prepare, function: Callable[..., Any], arguments: tuple[object, ...]) -> Any:
    return function(*arguments)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
