"""Put the parts together: one FastAPI application around one set of models."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from importlib.resources import files

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from service import __version__
from service.errors import HeadwiseError
from service.life import Life
from service.logs import event
from service.metrics import Metrics
from service.middleware import RequestFrame
from service.models import Models
from service.problems import answer_http_exception, answer_problem, answer_validation_error
from service.routes import Routes
from service.settings import Settings

_DESCRIPTION = """\
Serves a multi-head-attention layer: send embeddings, get outputs and each head's weights.

Masks say **true = takes part**. Errors are `{"error": …, "code": …}` with a fitting status.
"""


def create_app(settings: Settings, models: Models, life: Life, metrics: Metrics) -> FastAPI:
    """
    Return the application; starting it warms the models up in the background.

    It answers `live` at once and `ready` once every model gave its golden answer.
    """
    routes = Routes(settings, models, life, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        warming = asyncio.create_task(_warm_up(models))
        yield
        await warming
        await models.close()
        routes.close()

    app = FastAPI(
        title="Headwise",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.include_router(routes.router())
    _add_docs(app)
    app.add_exception_handler(HeadwiseError, answer_problem)
    app.add_exception_handler(HTTPException, answer_http_exception)
    app.add_exception_handler(RequestValidationError, answer_validation_error)
    app.add_middleware(RequestFrame, life=life, metrics=metrics)
    return app


async def _warm_up(models: Models) -> None:
    started = time.monotonic()
    await asyncio.to_thread(models.warm_up)
    seconds = round(time.monotonic() - started, 3)
    if models.problem is None:
        event("ready", models=[model.name for model in models], warm_up_s=seconds)
    else:
        event("not ready", level=logging.ERROR, problem=models.problem)


def _add_docs(app: FastAPI) -> None:
    """Serve the documentation page with assets from a package: it works without network."""
    assets = files("fastapi_offline") / "static"
    app.mount("/docs/assets", StaticFiles(directory=str(assets)), name="assets")

    async def docs() -> Response:
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="Headwise",
            swagger_js_url="/docs/assets/swagger-ui-bundle.js",
            swagger_css_url="/docs/assets/swagger-ui.css",
            swagger_favicon_url="data:,",
        )

    app.add_api_route("/docs", docs, methods=["GET"], include_in_schema=False)
