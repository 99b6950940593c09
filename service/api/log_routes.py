"""The protocol's log and trace settings."""

import logging
from typing import Final

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.api.control import check_control, json_object
from service.api.log_settings import changed, described
from service.api.oip_models import protocol_model
from service.api.openapi import LOGGING, NAME_PARAMETER, json_body, responses
from service.api.routing import BODY_ERRORS, add_get, add_only, add_post, json_response
from service.api.schemas import LOG_SETTINGS, TRACE_SETTINGS
from service.api.server import Server
from service.codecs.checks import check_known
from service.errors import Disabled, InvalidInput, NotReady, UnknownModel
from service.logs import LOGGER, event

_TRACE: Final[dict[str, str | list[str]]] = {
    "trace_file": "",
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
}

_OFF: Final[tuple[object, ...]] = ("OFF", ["OFF"], [], None)

_MODEL: Final = "/v2/models/{name}"


class LogRoutes:
    """The endpoints of one server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def router(self) -> APIRouter:
        """Return every endpoint with what OpenAPI says of it."""
        router = APIRouter(redirect_slashes=False, tags=[LOGGING])
        shown = responses(LOG_SETTINGS, None)
        add_get(router, "/v2/logging", self.log_settings, "Read the log settings", shown)
        add_post(
            router,
            "/v2/logging",
            self.change_log_settings,
            "Change the log's level",
            json_body(LOG_SETTINGS["properties"]),
            responses(LOG_SETTINGS, None, *BODY_ERRORS, Disabled),
        )
        add_only(router, "/v2/logging", "GET, POST")
        for path, of, parameters in (
            ("/v2/trace/setting", "", []),
            (_MODEL + "/trace/setting", " of a model", [NAME_PARAMETER]),
        ):
            unknown = [UnknownModel, NotReady] if parameters else []
            add_get(
                router,
                path,
                self.trace_settings,
                f"Read the trace settings{of}",
                responses(TRACE_SETTINGS, None, *unknown),
                parameters=parameters,
            )
            add_post(
                router,
                path,
                self.change_trace_settings,
                f"Change the trace settings{of}",
                json_body(TRACE_SETTINGS["properties"]),
                responses(TRACE_SETTINGS, None, *BODY_ERRORS, *unknown),
                parameters=parameters,
            )
            add_only(router, path, "GET, POST")
        return router

    async def log_settings(self) -> Response:
        """Return what is logged."""
        return json_response(described(_logger().level))

    async def change_log_settings(self, request: Request) -> Response:
        """Change the log's level; the switches are nested, and so is what they change."""
        check_control(self._server, "logging")
        body = await json_object(request, self._server)
        _logger().setLevel(changed(_logger().level, body))
        event("log level changed", log_level=logging.getLevelName(_logger().level).lower())
        return await self.log_settings()

    async def trace_settings(self, request: Request) -> Response:
        """Return that nothing is traced by this protocol; traces go by OpenTelemetry."""
        if "name" in request.path_params:
            protocol_model(self._server.models, request)
        return json_response(_TRACE)

    async def change_trace_settings(self, request: Request) -> Response:
        """Accept what changes nothing."""
        body = await json_object(request, self._server)
        check_known(body, _TRACE, "trace")
        wrong = [key for key, value in body.items() if value not in (None, _TRACE[key])]
        if body.get("trace_level", "") in _OFF:
            wrong = []  # at what rate nothing is traced does not matter
        if wrong:
            raise InvalidInput(
                f"{wrong[0]}: expected {orjson.dumps(_TRACE[wrong[0]]).decode()}, got another:"
                " traces go by OpenTelemetry (HEADWISE_TRACING)"
            )
        return await self.trace_settings(request)


def _logger() -> logging.Logger:
    return logging.getLogger(LOGGER)
