"""Calls whose bodies lie in a file, sent as they are."""

from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import orjson

from loadtest import oip
from loadtest.errors import UsageWrong
from loadtest.formats import Message
from loadtest.target import Target
from loadtest.work import Work

_KINDS: Final = (".json", ".jsonl", ".safetensors")


def work_of(option: str, text: str) -> Work:
    """
    Return the work of a file of bodies: `.json` and `.safetensors` hold one, `.jsonl` one a line.

    Raises:
        UsageWrong: there is no such file, or it is of another kind.
    """
    path = Path(text)
    if path.suffix not in _KINDS:
        raise UsageWrong(f"{option}: expected a file of {', '.join(_KINDS)}, got {text!r}")
    if not path.is_file():
        raise UsageWrong(f"{option}: {text}: no such file")
    return Work(
        rows="own",
        length="own",
        weights="own",
        format="safetensors" if path.suffix == ".safetensors" else "json",
        body=text,
    )


def messages_of(target: Target, work: Work) -> list[Message]:
    """
    Return the calls of a file, at least one.

    JSON with `inputs` is a call of the Open Inference Protocol to the target's model, other JSON
    and safetensors go to `/v1/attention`, with the model in the query where it was asked for.

    Raises:
        UsageWrong: it cannot be read, holds no call, or the server has no `/v1/attention`.
    """
    path = Path(work.body)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageWrong(f"--body: {path}: {error.strerror}") from None
    if work.format == "safetensors":
        _check_api(target)
        return [Message(_attention(target), content, {"Content-Type": "application/x-safetensors"})]
    bodies = content.splitlines() if path.suffix == ".jsonl" else [content]
    found = [
        _json(target, body, f"{path}, line {number}" if path.suffix == ".jsonl" else str(path))
        for number, body in enumerate(bodies, 1)
        if body.strip()
    ]
    if not found:
        raise UsageWrong(f"--body: {path}: expected at least one call, got an empty file")
    return found


def _json(target: Target, body: bytes, where: str) -> Message:
    try:
        call: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UsageWrong(f"--body: {where}: expected JSON: {error}") from None
    if not isinstance(call, dict):
        raise UsageWrong(f"--body: {where}: expected a JSON object, got {type(call).__name__}")
    headers = {"Content-Type": "application/json"}
    if "inputs" in call:
        return Message(oip.infer_path(target.model), body, headers)
    _check_api(target)
    return Message(_attention(target), body, headers)


def _attention(target: Target) -> str:
    return f"/v1/attention?model={quote(target.model)}" if target.is_named else "/v1/attention"


def _check_api(target: Target) -> None:
    if target.api == "v2":
        raise UsageWrong(
            "--body: expected a call of the Open Inference Protocol (JSON with inputs): only a"
            " Headwise server has /v1/attention"
        )
