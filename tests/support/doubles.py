"""Stand-ins that pass through the real interfaces."""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from service.api.api_keys import ApiKeys
from service.api.server import Server
from service.app import make_server
from service.errors import InferenceFailed
from service.inference.calls import Inputs, Outputs, Run
from service.inference.engine import Engine, Provider, Stop
from service.layer_config import LayerConfig
from service.log_writer import LogWriter
from service.logs import Log
from service.settings import Settings
from service.telemetry.access_log import AccessLog
from service.telemetry.request_record import RequestRecord
from service.telemetry.tracing import NoTracing


@cache
def no_log() -> Log:
    """Return a log whose lines go nowhere."""
    writer = LogWriter(os.open(os.devnull, os.O_WRONLY), notice=lambda lines: b"")
    return Log(writer, is_text=False)


class KeptAccessLog(AccessLog):
    """An access log that keeps the record of each request that is over."""

    def __init__(self) -> None:
        super().__init__(no_log(), names_keys=False)
        self.records: list[RequestRecord] = []

    def write(self, record: RequestRecord, level: int = logging.INFO) -> None:
        """Keep it, after writing its line."""
        super().write(record, level)
        self.records.append(record)


def quiet_server(
    repository: Path,
    *,
    keys: ApiKeys | None = None,
    access_log: AccessLog | None = None,
    **settings: object,
) -> Server:
    """Return a server of those artifacts with real engines, loaded; call it where a loop runs."""
    server = make_server(
        Settings(repository=repository, threads=1, **settings),
        tracing=NoTracing(),
        keys=keys,
        access_log=access_log or AccessLog(no_log(), names_keys=keys is not None),
    )
    server.models.load_all()
    server.models.warm_up()
    return server


def _as_asked(inputs: Inputs) -> Inputs:
    return inputs


def _as_answered(inputs: Inputs, outputs: Outputs) -> Outputs:
    return outputs


@dataclass
class FaultyEngine:
    """
    A real engine with a fault planted before it, after it or both.

    `ask` changes what the engine is asked, `answer` what it answers; `inputs`
    there is what the caller gave, and `outputs.attention_weights` is None where
    no weights were asked for.
    """

    engine: Engine
    ask: Callable[[Inputs], Inputs] = _as_asked
    answer: Callable[[Inputs, Outputs], Outputs] = _as_answered
    layer: LayerConfig = field(init=False)
    provider: Provider = field(init=False)
    concurrent_runs: int = 1

    def __post_init__(self) -> None:
        self.layer = self.engine.layer
        self.provider = self.engine.provider

    def run(
        self, inputs: Inputs, *, weights: bool, stop: Stop | None = None, concurrent: bool = False
    ) -> Outputs:
        """See `Engine.run`."""
        return self.answer(inputs, self.engine.run(self.ask(inputs), weights=weights, stop=stop))


class HeldEngine:
    """An engine that holds each run until `free` is set, and records what it ran."""

    layer = LayerConfig(1, 1)
    provider: Provider = "cpu"

    def __init__(self, concurrent_runs: int = 1) -> None:
        self.concurrent_runs = concurrent_runs
        self.free = threading.Event()
        self.started = threading.Event()
        self.ended = threading.Event()
        self.ran: list[list[float]] = []
        self.concurrent: dict[float, bool] = {}
        """Whether it was a concurrent run, by the first mark of each."""
        self.stopped = 0

    def run(
        self, inputs: Inputs, *, weights: bool, stop: Stop | None = None, concurrent: bool = False
    ) -> Outputs:
        """Answer with the embeddings once `free` is set; a negative number fails."""
        self.started.set()
        while not self.free.wait(0.005):
            if stop is not None and stop.options.terminate:
                self.stopped += 1
                self.ended.set()
                raise InferenceFailed("stopped")
        marks = inputs.embeddings[:, 0, 0].tolist()
        self.ran.append(marks)
        self.concurrent[marks[0]] = concurrent
        if min(marks) < 0:
            raise InferenceFailed("refused")
        rows, length, _ = inputs.embeddings.shape
        cells = np.ones((rows, 1, length, length), np.float32)
        return Outputs(inputs.embeddings, cells if weights else None)


class RecordingObserver:
    """An observer of a batcher that keeps what it receives."""

    def __init__(self) -> None:
        self.depths: list[tuple[int, int]] = []
        self.runs: list[Run] = []
        self.drops: list[str] = []

    def on_queue_change(self, calls: int, tokens: int) -> None:
        """Keep it."""
        self.depths.append((calls, tokens))

    def on_run(self, run: Run) -> None:
        """Keep it."""
        self.runs.append(run)

    def on_drop(self, where: str) -> None:
        """Keep it."""
        self.drops.append(where)


class PromptEngine:
    """An engine that answers at once, and records where and how it ran."""

    layer = LayerConfig(1, 1)
    provider: Provider = "cpu"

    def __init__(self, concurrent_runs: int = 1) -> None:
        self.concurrent_runs = concurrent_runs
        self.ran: list[tuple[list[float], bool, bool]] = []
        """The marks, whether it was a concurrent run, and whether it was on the main thread."""

    def run(
        self, inputs: Inputs, *, weights: bool, stop: Stop | None = None, concurrent: bool = False
    ) -> Outputs:
        """Answer with the embeddings."""
        marks = inputs.embeddings[:, 0, 0].tolist()
        on_main = threading.current_thread() is threading.main_thread()
        self.ran.append((marks, concurrent, on_main))
        return Outputs(inputs.embeddings, None)


class RaisingEngine:
    """An engine that answers with the embeddings, and raises what it is given at a negative one."""

    layer = LayerConfig(1, 1)
    provider: Provider = "cpu"
    concurrent_runs = 2

    def __init__(self, failure: Callable[[], BaseException]) -> None:
        self._failure = failure

    def run(
        self, inputs: Inputs, *, weights: bool, stop: Stop | None = None, concurrent: bool = False
    ) -> Outputs:
        """Answer, or raise."""
        if inputs.embeddings.min() < 0:
            raise self._failure()
        rows, length, _ = inputs.embeddings.shape
        cells = np.ones((rows, 1, length, length), np.float32)
        return Outputs(inputs.embeddings, cells if weights else None)
