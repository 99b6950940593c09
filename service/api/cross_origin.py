"""Cross-origin calls: pages of other origins that a browser lets call this server (CORS)."""

from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from service.api.error_handlers import to_response
from service.errors import InvalidInput
from service.transport.problems import CODE_HEADER
from service.transport.standard_headers import REQUEST_ID, TIMING

_SHOWN: Final = (
    *(name.decode() for name in (REQUEST_ID, TIMING, CODE_HEADER)),
    *("retry-after", "inference-header-content-length"),
)
"""Headers of answers that a page may read beside those that every page may."""


class CrossOrigin(CORSMiddleware):
    """
    Tells browsers that pages of these origins may call; answers their preflight requests.

    `*` = every page.  Cookies are never asked for: a page sends its key in a header.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=_SHOWN,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return what a preflight request is answered; a refusal has the form of every error."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        return to_response(
            InvalidInput(
                f"preflight: {bytes(response.body).decode()}; expected an origin of the setting"
                " HEADWISE_CORS_ORIGINS and one of the methods GET, HEAD, POST"
            )
        )
