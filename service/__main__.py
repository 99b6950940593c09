"""The process: settings, models, a socket, and signals that end it cleanly."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial

import uvicorn

from service import __version__
from service.api.api_keys import ApiKeys
from service.api.fast_path import InferFastPath
from service.api.requests import head_refused
from service.api.server import Server
from service.app import create_app, make_server
from service.errors import SettingsInvalid, StartRefused
from service.host.cpu import cpu_budget
from service.host.malloc import keep_blocks
from service.logs import Log, configure, event
from service.settings import Settings
from service.telemetry.access_log import AccessLog
from service.telemetry.tracing import NoTracing, OpenTelemetry
from service.transport.connection import HttpConnection
from service.transport.receiving import receiving
from service.transport.tls import tls_context

_CONNECTION_END_S = 5
"""Time for the last answers to leave their sockets once every call is answered."""

_CLEAN_UP_S = 2
"""Time for closing models, threads and tracing after that; then the process just ends."""

_THREADS_END_S = 1
"""Time for threads to notice that the server has ended, and for the interpreter to end."""


def main(argv: list[str] | None = None) -> int:
    """Serve until told to stop; return 0 after a clean end, 2 when the start was refused."""
    log: Log | None = None
    keep_blocks()  # before the first thread, which would get an arena of its own
    try:
        settings = Settings.load(sys.argv[1:] if argv is None else argv, os.environ)
        log = configure(settings.log_format, settings.log_level)
        tracing = OpenTelemetry() if settings.tracing else NoTracing()
        keys = _keys(settings)
        tls = tls_context(settings)
        listener = _listen(settings.host, settings.port)
    except StartRefused as error:
        _tell(error, log)
        return 2
    server = make_server(
        settings,
        tracing=tracing,
        keys=keys,
        access_log=AccessLog(log, names_keys=keys is not None),
    )
    process = _UvicornServer(server, tls, log)
    event(
        "starting",
        version=__version__,
        url=_url(listener, "http" if tls is None else "https"),
        repository=settings.repository,
        provider=settings.provider,
        threads=cpu_budget(settings.threads),
    )
    process.run([listener])
    process.end_within(_THREADS_END_S)
    return process.exit_code


class _UvicornServer(uvicorn.Server):
    """
    Uvicorn around our application, with the ending of our own.

    Uvicorn closes its listener at once, ignores a second SIGTERM and raises the
    signal again at the end; a load balancer needs a grace first, and a clean end
    exits with 0.
    """

    def __init__(self, server: Server, tls: ssl.SSLContext | None, log: Log) -> None:
        self.exit_code = 0
        self._server = server
        self._log = log
        self._tasks: set[asyncio.Task[None]] = set()
        super().__init__(
            uvicorn.Config(
                create_app(server, refuse=self._refuse),
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                http=_connections(server),  # type: ignore[arg-type]
                ws="none",
                lifespan="on",
                timeout_keep_alive=server.settings.keep_alive_s,
                timeout_graceful_shutdown=_CONNECTION_END_S,
            )
        )
        # Loaded here, so that it does not make a context of its own.
        self.config.load()
        self.config.ssl = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_refresh)
        yield

    def _refuse(self, error: StartRefused) -> None:
        """End a start that cannot succeed."""
        _tell(error, self._log)
        self.exit_code = 2
        self._end()

    def _on_refresh(self) -> None:
        self._start(self._server.models.refresh(retry=True))
        if self._server.keys is not None:
            self._start(asyncio.to_thread(self._server.keys.refresh, retry=True))

    def _on_stop(self, number: signal.Signals) -> None:
        if self._server.lifecycle.phase != "serving":
            event("stopping now: told a second time")
            self._log.writer.flush()
            os._exit(128 + number)
        # A person at a terminal has no load balancer that must notice first.
        grace_s = 0.0 if number == signal.SIGINT else self._server.settings.grace_s
        event("stopping", signal=number.name, grace_s=grace_s)
        self._server.lifecycle.phase = "grace"
        self.end_within(grace_s + self._server.settings.drain_s + _CONNECTION_END_S + _CLEAN_UP_S)
        self._start(self._stop(grace_s))

    async def _stop(self, grace_s: float) -> None:
        finished = await self._server.lifecycle.stop(
            grace_s=grace_s, drain_s=self._server.settings.drain_s
        )
        event("stopped", every_call_answered=finished)
        self._end()

    def _end(self) -> None:
        self.should_exit = True
        self.end_within(_CONNECTION_END_S + _CLEAN_UP_S)

    def end_within(self, seconds: float) -> None:
        """
        End the process with its exit code then at the latest, whatever still waits for what.

        The interpreter itself would wait for every thread: for a library that loads a model,
        for instance, and cannot be interrupted.
        """

        def end() -> None:
            event("ended by force: work was still under way", level=logging.WARNING)
            self._log.writer.flush()
            os._exit(self.exit_code)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Run something beside serving, and keep it until it is done."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _connections(server: Server) -> Callable[..., asyncio.BaseProtocol]:
    """Return what makes a connection's protocol; uvicorn only calls it."""
    settings = server.settings
    connection = partial(
        HttpConnection,
        fast_path=InferFastPath(server) if settings.fast_path == "auto" else None,
        head_timeout_s=settings.head_timeout_s,
        answer_timeout_s=settings.answer_timeout_s,
        on_head_refused=partial(head_refused, server),
    )
    # Without keys, nothing that is received needs to be overwritten.
    return connection if server.keys is None else receiving(connection)


def _tell(error: StartRefused, log: Log | None) -> None:
    """Say in one line why nothing is served, after all that was logged until then."""
    if log is not None:
        log.writer.flush()
    with contextlib.suppress(OSError):  # standard error is a pipe that nobody reads any more
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 (whatever the log's form)


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


def _keys(settings: Settings) -> ApiKeys | None:
    """
    Return the keys that callers need; None = they need none.

    Raises:
        SettingsInvalid: the file is wrong, or one is needed for what shall be kept from callers.
    """
    if settings.api_keys_file is not None:
        return ApiKeys(settings.api_keys_file)
    if settings.metrics_need_key:
        raise SettingsInvalid("metrics_need_key: expected api_keys_file beside it, got none")
    return None


def _url(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


if __name__ == "__main__":
    sys.exit(main())
