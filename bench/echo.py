"""
The floor of the wire: a bare ASGI application that answers with the body it got.

    python -m bench.echo PORT
"""

import sys
from typing import Any

import uvicorn


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer one request with its own body."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    length = str(len(body)).encode()
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
    await send(start)
    await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", access_log=False, lifespan="off")
