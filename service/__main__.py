"""The process: settings, models, sockets, and signals that end it cleanly."""

import sys

from service.host.early_signals import handle_signals

if __name__ == "__main__" or sys.argv[0].endswith("/headwise-serve"):
    handle_signals()  # before the imports that take long

import os

# Before numpy is imported: it multiplies no matrices here, and where the system starts no more
# threads its library interrupts the process.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator, Sequence
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
from service.host.malloc import KEPT_BYTES, keep_blocks
from service.host.memory_limit import memory_limit
from service.host.terminal import follows_terminal, has_terminal, leader_waits
from service.logs import Log, configure, event
from service.next_steps import next_steps
from service.settings import Settings
from service.telemetry.access_log import AccessLog
from service.telemetry.tracing import NoTracing, OpenTelemetry
from service.threads import LastResort
from service.transport.connection import HttpConnection
from service.transport.listener import addresses, listen, url
from service.transport.receiving import receiving
from service.transport.tls import tls_context

_CONNECTION_END_S = 5
"""Time for the last answers to leave their sockets once every call is answered."""

_ABORT_S = 0.5
"""Time after that for the answers to what is cut off."""

_CLEAN_UP_S = 2
"""Time for closing models, threads and tracing after that; then the process just ends."""

_THREADS_END_S = 1
"""Time for threads to notice that the server has ended, and for the interpreter to end."""

_HANGUP_S = 0.5
"""How long the kernel may take to detach a terminal after its SIGHUP."""

_WATCH_S = 1.0
"""How often it is looked whether the terminal is still there."""


def main(argv: list[str] | None = None) -> int:
    """Serve until told to stop; return 0 after a clean end, 2 when the start was refused."""
    log: Log | None = None
    keep_blocks(
        min(KEPT_BYTES, memory_limit() // 8)
    )  # before the first thread, which would get an arena of its own
    try:
        settings = Settings.load(sys.argv[1:] if argv is None else argv, os.environ)
        log = configure(settings.log_format, settings.log_level)
        tracing = OpenTelemetry() if settings.tracing else NoTracing()
        keys = _keys(settings)
        tls = tls_context(settings)
        listeners = listen(settings.host, settings.port)
    except StartRefused as error:
        _tell(error, log)
        return 2
    try:
        server = make_server(
            settings,
            tracing=tracing,
            keys=keys,
            access_log=AccessLog(log, names_keys=keys is not None),
        )
        process = _UvicornServer(server, tls, log, listeners)
    except StartRefused as error:
        _tell(error, log)
        return 2
    event(
        "starting",
        version=__version__,
        pid=os.getpid(),
        url=process.url,
        addresses=addresses(listeners),
        repository=settings.repository,
        provider=settings.provider,
        threads=cpu_budget(settings.threads),
    )
    try:
        process.run(listeners)
    except RuntimeError:
        # Closing the event loop takes a thread, which the system may not start any more.
        if not process.should_exit:
            raise
    handle_signals()  # the event loop does not any more
    process.end_within(_THREADS_END_S)
    return process.exit_code


class _UvicornServer(uvicorn.Server):
    """
    Uvicorn around our application, with the ending of our own.

    Uvicorn closes its listener at once, ignores a second SIGTERM and raises the
    signal again at the end; a load balancer needs a grace first, and a clean end
    exits with 0.
    """

    def __init__(
        self,
        server: Server,
        tls: ssl.SSLContext | None,
        log: Log,
        listeners: Sequence[socket.socket],
    ) -> None:
        self.exit_code = 0
        self.url = url(listeners, is_tls=tls is not None)
        self._server = server
        self._log = log
        self._follows_terminal = follows_terminal()
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_resort = LastResort(self._end_by_force)
        super().__init__(
            uvicorn.Config(
                create_app(server, refuse=self._refuse, on_ready=self._on_ready),
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                http=_connections(server),  # type: ignore[arg-type]
                ws="none",
                lifespan="on",
                timeout_keep_alive=server.settings.keep_alive_s,
                # We cut off earlier, and say so in our own words.
                timeout_graceful_shutdown=_CONNECTION_END_S + 2 * _ABORT_S,  # type: ignore[arg-type]
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
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        if self._follows_terminal:
            self._start(self._watch_terminal())
        yield

    def _refuse(self, error: StartRefused) -> None:
        """End a start that cannot succeed."""
        _tell(error, self._log)
        self.exit_code = 2
        self._end()

    def _on_ready(self) -> None:
        """Tell a person at the terminal how to go on."""
        if not (self._log.is_text and os.isatty(2)):
            return
        layers = {model.name: model.layer for model in self._server.models}
        widths = {n: layer.embed_dim for n, layer in layers.items() if layer.memory_dim is None}
        model = min(widths, key=widths.__getitem__, default=None)
        lines = next_steps(
            self.url,
            os.getpid(),
            model=model,
            embed_dim=widths.get(model or "", 0),
            needs_key=self._server.keys is not None,
        )
        self._log.writer.write("".join(f"{line}\n" for line in lines).encode(), at_once=True)

    def _on_hangup(self) -> None:
        """Stop when the terminal was closed, else look at the repository and the keys again."""
        if self._server.lifecycle.phase != "serving" or self._stop_without_terminal():
            return
        # A session that ends is told before its terminal is taken away.
        asyncio.get_running_loop().call_later(_HANGUP_S, self._stop_without_terminal)
        self._start(self._server.models.refresh(retry=True))
        if self._server.keys is not None:
            self._start(asyncio.to_thread(self._server.keys.refresh, retry=True))

    async def _watch_terminal(self) -> None:
        """Stop when the terminal is closed and whoever is told so does not pass it on."""
        while has_terminal():  # noqa: ASYNC110 - nothing tells of its end
            await asyncio.sleep(_WATCH_S)
        if leader_waits():
            self._stop_without_terminal()

    def _stop_without_terminal(self) -> bool:
        """Stop as on Ctrl-C if the terminal of the start is gone; return whether it is."""
        if not self._follows_terminal or has_terminal():
            return False
        if self._server.lifecycle.phase == "serving":
            event("terminal closed")
            self._on_stop(signal.SIGHUP)
        return True

    def _on_stop(self, number: signal.Signals) -> None:
        if self._server.lifecycle.phase != "serving":
            event("stopping now: told a second time")
            self._log.writer.flush()
            os._exit(128 + number)
        # A person at a terminal has no load balancer that must notice first.
        grace_s = self._server.settings.grace_s if number == signal.SIGTERM else 0.0
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
        asyncio.get_running_loop().call_later(_CONNECTION_END_S, self._cut_off)
        self.end_within(_CONNECTION_END_S + _CLEAN_UP_S)

    def _cut_off(self) -> None:
        """Answer 503 what has no answer yet, and reset what is being answered still."""
        state = self.server_state
        if not state.connections:
            return
        event(
            "cut off",
            level=logging.WARNING,
            requests=len(state.tasks),
            connections=len(state.connections),
        )
        for task in state.tasks:
            task.cancel()

        def abort() -> None:
            for connection in state.connections:
                connection.transport.abort()

        asyncio.get_running_loop().call_later(_ABORT_S, abort)

    def end_within(self, seconds: float) -> None:
        """
        End the process with its exit code then at the latest, whatever still waits for what.

        The interpreter itself would wait for every thread: for a library that loads a model,
        for instance, and cannot be interrupted.
        """
        self._last_resort.within(seconds)

    def _end_by_force(self) -> None:
        event("ended by force: work was still under way", level=logging.WARNING)
        self._log.writer.flush()
        os._exit(self.exit_code)

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


if __name__ == "__main__":
    sys.exit(main())
