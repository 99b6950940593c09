"""The description of the interface: OpenAPI, a page that shows it, and a plain list."""

from collections.abc import Collection
from importlib.resources import files
from typing import Final

import orjson
from fastapi import APIRouter, FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from service import __version__
from service.api.model_schemas import LISTING
from service.api.openapi import DOCUMENTATION, inference_paths, responses, with_keys
from service.api.routing import add_get
from service.api.schemas import Json
from service.errors import NotFound
from service.transport.negotiation import best_offer

ROOT: Final = "/"
DOCS: Final = "/docs"
OPENAPI: Final = "/openapi.json"

ASSETS: Final = "/docs/assets/{file}"
_FILES: Final = ("swagger-ui-bundle.js", "swagger-ui.css")
"""What the page loads: its assets come from a package, not from the network."""

_HTML: Final = "text/html"
_JSON: Final = "application/json"

PATHS: Final = (ROOT, DOCS, OPENAPI, *(ASSETS.format(file=file) for file in _FILES))
"""Open to callers without a key: none of it names a model or a key."""

ROUTES: Final = (DOCS, OPENAPI, ASSETS)
"""The routes that OpenAPI does not describe."""


class DocumentationRoutes:
    """
    The endpoints of one application; `describe` is called once it has all others.

    Every address in them is relative, so that they work behind a proxy that strips a prefix.
    """

    def __init__(self) -> None:
        self._document = self._listing = b""
        self._files = StaticFiles(directory=str(files("fastapi_offline") / "static"))

    def router(self) -> APIRouter:
        """Return every endpoint; the page and its parts are not in the description."""
        router = APIRouter(redirect_slashes=False, tags=[DOCUMENTATION])
        answers = responses(LISTING, None) | {"307": {"description": "to the page, in a browser"}}
        add_get(router, ROOT, self.root, "List the endpoints", answers)
        for path, handler in ((DOCS, self.docs), (OPENAPI, self.openapi), (ASSETS, self.asset)):
            router.add_api_route(path, handler, methods=["GET"], include_in_schema=False)
        return router

    def describe(self, app: FastAPI, open_paths: Collection[str] | None) -> Json:
        """
        Return the OpenAPI document of the application, which is answered from now on.

        `open_paths` are those that need no key; None = none does.
        """
        document = app.openapi()
        document["paths"] = inference_paths() | document["paths"]
        if open_paths is not None:
            document = with_keys(document, open_paths)
        listing = {
            "name": "headwise",
            "version": __version__,
            "documentation": DOCS.lstrip("/"),
            "endpoints": {
                f"{method.upper()} {path}": operation["summary"]
                for path, methods in document["paths"].items()
                for method, operation in methods.items()
            },
        }
        self._document = orjson.dumps(document)
        self._listing = orjson.dumps(listing, option=orjson.OPT_INDENT_2) + b"\n"
        return document

    async def root(self, request: Request) -> Response:
        """List the endpoints; a browser is led to the page that shows them."""
        if best_offer(request.headers.get("accept", ""), (_JSON, _HTML)) == _HTML:
            return RedirectResponse(DOCS.lstrip("/"), headers={"vary": "Accept"})
        return Response(self._listing, media_type=_JSON, headers={"vary": "Accept"})

    async def docs(self) -> Response:
        """Return the page."""
        script, style = (ASSETS.format(file=file).lstrip("/") for file in _FILES)
        return get_swagger_ui_html(
            openapi_url=OPENAPI.lstrip("/"),
            title="Headwise",
            swagger_js_url=script,
            swagger_css_url=style,
            swagger_favicon_url="data:,",
        )

    async def openapi(self) -> Response:
        """Return the OpenAPI document."""
        return Response(self._document, media_type=_JSON)

    async def asset(self, request: Request) -> Response:
        """Return a file that the page loads."""
        file = request.path_params["file"]
        if file not in _FILES:
            raise NotFound("path: no such endpoint; / lists them")
        return await self._files.get_response(file, request.scope)
