"""What a person at the terminal can do once the server is ready."""

import json
import shlex
from typing import Final

_MAX_WIDTH: Final = 16
"""Numbers of a token in a call that is still read at a glance."""


def next_steps(
    url: str, pid: int, *, model: str | None, embed_dim: int, needs_key: bool
) -> list[str]:
    """
    Return the lines: a call to copy, the documentation, how to stop and to reload.

    `model` is one of self-attention, or None; where its tokens are too wide to be written by
    hand, the call is one that lists the models.
    """
    key = " -H 'X-API-Key: KEY'" if needs_key else ""
    call = f"curl -s{key} {shlex.quote(url + '/v1/models')}"
    if model is not None and embed_dim <= _MAX_WIDTH:
        tokens = [[int(place == token) for place in range(embed_dim)] for token in range(2)]
        body = json.dumps({"model": model, "embeddings": tokens, "weights": True})
        call = f"curl -s{key} {shlex.quote(url + '/v1/attention')} -d {shlex.quote(body)}"
    return [
        "",
        f"  Try it         {call}",
        f"  Documentation  {url}/docs",
        f"  Stop           Ctrl-C, or kill {pid}",
        f"  Reload         kill -HUP {pid} takes up newer versions",
        "",
    ]
