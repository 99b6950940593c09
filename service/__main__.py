"""The process: settings, models, a socket, and signals that end it cleanly."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from service import __version__
from service.app import create_app
from service.batcher import Batcher, QueueLimits
from service.cpu import cpu_budget
from service.engine import Engine
from service.errors import SettingsInvalid, StartRefused
from service.joining import RunLimits
from service.life import Life
from service.logs import configure, event
from service.metrics import Metrics
from service.models import load_models
from service.settings import Settings

_CONNECTION_END_S = 5
"""Time for the last answers to leave their sockets once every call is answered."""


def main(argv: list[str] | None = None) -> int:
    """Serve until told to stop; return 0 after a clean end, 2 when the start was refused."""
    try:
        settings = Settings.load(sys.argv[1:] if argv is None else argv, os.environ)
        configure(settings.log_format, settings.log_level)
        server = _prepare(settings)
    except StartRefused as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 (one line, before any log)
        return 2
    server.run()
    return 0


def _prepare(settings: Settings) -> "_Server":
    """
    Return a server that holds its port and its models.

    Raises:
        StartRefused: an artifact, the provider or the address is not to be had.
    """
    budget = cpu_budget(settings.threads)
    metrics = Metrics()

    def batcher_of(name: str, engine: Engine) -> Batcher:
        return Batcher(
            engine,
            QueueLimits(settings.max_queue_calls, settings.max_queue_tokens, settings.timeout_s),
            RunLimits(settings.max_run_tokens, settings.max_run_cells, settings.max_padding),
            metrics.of_model(name),
        )

    models = load_models(
        settings.repository,
        provider=settings.provider,
        threads=budget.threads,
        default=settings.default_model,
        batcher_of=batcher_of,
    )
    life = Life()
    app = create_app(settings, models, life, metrics)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=_CONNECTION_END_S,
    )
    listener = _listen(settings.host, settings.port)
    event(
        "starting",
        version=__version__,
        url=_url(listener),
        models=[f"{model.name}/{model.version}" for model in models],
        provider=settings.provider,
        threads=str(budget),
    )
    return _Server(config, settings, life, listener)


class _Server(uvicorn.Server):
    """
    Uvicorn with the ending of our own.

    Uvicorn closes its listener at once, ignores a second SIGTERM and raises the
    signal again at the end; a load balancer needs a grace first, and a clean end
    exits with 0.
    """

    def __init__(
        self, config: uvicorn.Config, settings: Settings, life: Life, listener: socket.socket
    ) -> None:
        super().__init__(config)
        self._settings = settings
        self._life = life
        self._listener = listener
        self._stopping: asyncio.Task[None] | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run([self._listener])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        yield

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopping is not None:
            event("stopping now: told a second time")
            os._exit(128 + number)
        # A person at a terminal has no load balancer that must notice first.
        grace_s = 0.0 if number == signal.SIGINT else self._settings.grace_s
        event("stopping", signal=number.name, grace_s=grace_s)
        self._stopping = asyncio.create_task(self._stop(grace_s))

    async def _stop(self, grace_s: float) -> None:
        finished = await self._life.stop(grace_s=grace_s, drain_s=self._settings.drain_s)
        event("stopped", every_call_answered=finished)
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    """
    Return a socket that listens there.

    Raises:
        SettingsInvalid: the address is taken, not ours or not to be resolved.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048, reuse_port=False)
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingsInvalid(f"host, port: cannot listen on {host}:{port}: {reason}") from None


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


if __name__ == "__main__":
    sys.exit(main())
