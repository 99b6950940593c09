"""Put the parts together: one ASGI application around one set of models."""

import asyncio
import contextlib
import gc
import logging
import platform
import time
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from service import __version__
from service.api.api_keys import ApiKeys
from service.api.cuda_memory_routes import CudaMemoryRoutes
from service.api.documentation import DocumentationRoutes
from service.api.error_handlers import (
    answer_failure,
    answer_http_exception,
    answer_problem,
    answer_validation_error,
)
from service.api.expected import CALL_CODES, CODES, expected_requests
from service.api.log_routes import LogRoutes
from service.api.middleware import RequestFrame
from service.api.oip_routes import OipRoutes
from service.api.openapi import TAGS
from service.api.repository_routes import RepositoryRoutes
from service.api.requests import open_paths
from service.api.routes import Routes
from service.api.server import Server
from service.api.shared_memory_routes import SharedMemoryRoutes
from service.api.tensor_calls import TensorCalls
from service.api.unsent_answers import UnsentAnswers
from service.codecs.offload import Offload
from service.codecs.shared_memory import SharedMemory
from service.errors import HeadwiseError, StartRefused
from service.host.cpu import cpu_budget
from service.host.limits import watch_limits
from service.host.malloc import give_back
from service.host.memory_limit import memory_limit
from service.inference.batcher import Batcher
from service.inference.batches import BatchLimits
from service.inference.engine import RUNTIME_VERSION, Engine
from service.inference.lifecycle import Lifecycle
from service.inference.model import loader
from service.inference.models import Models
from service.inference.schedule import QueueLimits
from service.inference.validation import Limits
from service.logs import event
from service.settings import Settings
from service.telemetry.access_log import AccessLog
from service.telemetry.metrics import Metrics
from service.telemetry.recorder import Recorder
from service.telemetry.statistics import Statistics
from service.telemetry.tracing import Tracing
from service.threads import UnawaitedThreads, all_started
from service.transport.body_memory import BodyMemory

_WATCH_S = 1.0
"""How often the file of keys is read again: a key that is taken out is of no use after that."""

_SIDE_THREADS = 4
"""For loading models, reading files and giving memory back."""

_REST_S = 5.0
"""How long no engine must have run before memory is given back, at the least."""

_DESCRIPTION = """\
Serves attention layers: send embeddings, get outputs and each head's weights.

Masks say **true = takes part**. Errors are `{"error": …, "code": …}` with a fitting status.
HEAD is answered wherever GET is. Where the server asks for a key, **Authorize** takes it.
"""


def make_server(
    settings: Settings, *, tracing: Tracing, keys: ApiKeys | None, access_log: AccessLog
) -> Server:
    """Return the parts of one server; no model is loaded yet."""
    metrics = Metrics()
    offload = Offload(settings.decode_timeout_s)
    metrics.reader_memory_bytes = offload.readers.memory_bytes
    memory = memory_limit()
    bodies = BodyMemory(settings.bodies_bytes(memory))
    metrics.body_memory_bytes = bodies.bytes_held
    metrics.build = {
        "version": __version__,
        "python": platform.python_version(),
        "onnxruntime": RUNTIME_VERSION,
        "provider": settings.provider,
    }
    limits = Limits(
        settings.max_rows,
        settings.max_length,
        settings.max_tokens,
        settings.max_answer_bytes,
        refuse_nonfinite=settings.nonfinite == "refuse",
    )
    return Server(
        settings=settings,
        limits=limits,
        models=_models(settings, metrics),
        lifecycle=Lifecycle(),
        keys=keys,
        offload=offload,
        shared_memory=SharedMemory(is_offered=settings.shared_memory),
        bodies=bodies,
        unsent=UnsentAnswers(settings.unsent_bytes(memory), metrics),
        metrics=metrics,
        statistics=Statistics(),
        recorder=Recorder(metrics, tracing, access_log),
    )


def create_app(
    server: Server,
    *,
    refuse: Callable[[StartRefused], None],
    on_ready: Callable[[], None] = lambda: None,
) -> ASGIApp:
    """
    Return the application, for any ASGI server.

    Starting it loads and warms the models up in the background.  It answers `live` at
    once and `ready` once every model gave its golden answer.
    `refuse` is called when an artifact cannot be read: the process must not go on.
    `on_ready` is called once, when `ready` begins to answer 200.
    """
    app = FastAPI(
        title="Headwise",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lambda app: _lifespan(server, refuse, on_ready),
        openapi_tags=TAGS,
        openapi_url=None,
        # Relative to where the description was read from: a proxy may strip a prefix.
        servers=[{"url": ".", "description": "this server"}],
        redirect_slashes=False,
    )
    documentation = DocumentationRoutes()
    for routes in (
        documentation,
        Routes(server),
        OipRoutes(server),
        RepositoryRoutes(server),
        LogRoutes(server),
        CudaMemoryRoutes(),
        SharedMemoryRoutes(server),
    ):
        app.include_router(routes.router())
    document = documentation.describe(app, None if server.keys is None else open_paths(server))
    server.metrics.expect(expected_requests(server, document), CODES, CALL_CODES)
    app.add_exception_handler(HeadwiseError, answer_problem)
    app.add_exception_handler(HTTPException, answer_http_exception)
    app.add_exception_handler(RequestValidationError, answer_validation_error)
    app.add_exception_handler(Exception, answer_failure)
    return RequestFrame(TensorCalls(app, server), server)


@contextlib.asynccontextmanager
async def _lifespan(
    server: Server, refuse: Callable[[StartRefused], None], on_ready: Callable[[], None]
) -> AsyncIterator[None]:
    settings, models, keys = server.settings, server.models, server.keys
    # What still runs in a thread when the server stops, loading a model for instance, must
    # not hold it up: the loop waits for its own threads.
    side = UnawaitedThreads(_SIDE_THREADS, "side")
    asyncio.get_running_loop().set_default_executor(side)
    tasks = [
        asyncio.create_task(_bring_up(server, side, refuse, on_ready)),
        asyncio.create_task(_rest(server.metrics, models)),
        asyncio.create_task(watch_limits()),
    ]
    if settings.repository_poll_s:
        tasks.append(asyncio.create_task(_poll(models, settings.repository_poll_s)))
    if keys is not None:
        tasks.append(asyncio.create_task(_watch(keys)))
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await models.close()
    server.offload.close()
    await asyncio.to_thread(server.recorder.close)


def _models(settings: Settings, metrics: Metrics) -> Models:
    """Return the models that will be served; none is loaded yet."""
    threads = cpu_budget(settings.threads).threads
    queue = QueueLimits(settings.max_queue_calls, settings.max_queue_tokens, settings.timeout_s)
    run = BatchLimits(settings.max_batch_tokens, settings.max_batch_cells, settings.padding)

    def batcher_of(name: str, engine: Engine) -> Batcher:
        return Batcher(engine, queue, run, metrics.of_model(name).queue())

    load = loader(
        provider=settings.provider,
        threads=threads,
        concurrent_runs=settings.concurrent_runs
        or (min(4, threads) if settings.provider == "cpu" else 1),
        batcher_of=batcher_of,
    )
    return Models(
        load,
        settings.repository,
        default=settings.default_model,
        versions_kept=settings.versions_kept,
        skip_broken=settings.skip_broken,
    )


async def _bring_up(
    server: Server,
    side: UnawaitedThreads,
    refuse: Callable[[StartRefused], None],
    on_ready: Callable[[], None],
) -> None:
    models = server.models
    started = time.monotonic()
    async with models.changing:
        try:
            all_started(side, _SIDE_THREADS)
            await asyncio.to_thread(models.load_all)
        except StartRefused as error:
            refuse(error)
            return
        except Exception as error:  # whatever it is, a start that cannot finish ends
            refuse(StartRefused(f"the models cannot be loaded: {type(error).__name__}: {error}"))
            return
        loaded = [f"{model.name}/{model.version}" for model in models]
        event("loaded", models=loaded, seconds=round(time.monotonic() - started, 3))
        if models.broken:
            event("started without", level=logging.WARNING, broken=models.broken)
        await asyncio.to_thread(models.warm_up)
    # What is here now stays: the collector need not look at it again and again.  What is
    # garbage now, such as that of refused requests, would stay, too.
    gc.collect()
    gc.freeze()
    if models.problem is None:
        event("ready", seconds=round(time.monotonic() - started, 3))
        on_ready()
    else:
        event("not ready", level=logging.ERROR, problem=models.problem)
    await server.offload.readers.check()


async def _rest(metrics: Metrics, models: Models) -> None:
    """Give freed memory back whenever no engine has run and no model has come for a while."""
    before = given = (0, 0)
    while True:
        await asyncio.sleep(_REST_S)
        done = metrics.runs, models.changes
        if done == before != given:
            await asyncio.to_thread(give_back)
            given = done
        before = done


async def _poll(models: Models, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        await models.refresh(retry=False)


async def _watch(keys: ApiKeys) -> None:
    while True:
        await asyncio.sleep(_WATCH_S)
        await asyncio.to_thread(keys.refresh, retry=False)
