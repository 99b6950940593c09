"""The server under test: what it is, which model is meant, and what that model takes."""

from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import quote

from loadtest import oip
from loadtest.endpoint import Endpoint
from loadtest.errors import TargetRefused, UsageWrong

Api = Literal["headwise", "v2"]

DTYPES: Final = {name: oip.DTYPES[name] for name in ("FP16", "FP32", "FP64")}
"""Inputs that can be drawn."""
_RANK: Final = 3


@dataclass(frozen=True)
class Input:
    """A tensor that every call must hold: [rows, length, width]."""

    name: str
    datatype: str
    rows: int | None
    length: int | None
    """None = free."""
    width: int

    def check(self, rows: int, length: int) -> None:
        """
        Return when a shape fits.

        Raises:
            UsageWrong: an axis that the model fixes is another one.
        """
        for what, fixed, found in (("rows", self.rows, rows), ("length", self.length, length)):
            if fixed is not None and fixed != found:
                raise UsageWrong(
                    f"--shape: the model's {self.name} has {what} fixed at {fixed}, got {found}"
                )


@dataclass(frozen=True)
class Target:
    """One model of one server; it can be sent to another process."""

    endpoint: Endpoint
    api: Api
    """`headwise`: also its own `/v1/attention`; `v2`: the Open Inference Protocol alone."""
    name: str
    version: str
    model: str
    inputs: tuple[Input, ...]
    details: dict[str, Any] | None
    is_named: bool = True
    """Whether the model was asked for by name; else it is the server's default."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as the raw file has it."""
        return {
            "url": self.endpoint.url,
            "name": self.name,
            "version": self.version,
            "model": self.model,
            "details": self.details,
        }


def discover(endpoint: Endpoint, *, model: str | None, api: str = "auto") -> Target:
    """
    Return what a server says of itself and of one model; by default its only or default one.

    Raises:
        Unreachable: nobody answers.
        TargetRefused: it answers, but neither as Headwise nor as a v2 server.
        UsageWrong: there is no such model, or one must be named.
    """
    about = _get(endpoint, "/v2", "no Open Inference Protocol v2")
    own = endpoint.ask("GET", "/v1/models")
    listed = own.json() if own.status == 200 and about.get("name") == "headwise" else None
    is_headwise = api != "v2" and isinstance(listed, dict) and "models" in listed
    names = _names(endpoint, listed)
    default = listed.get("default") if isinstance(listed, dict) else None
    is_named = model is not None
    if model is None:
        model = default or (names[0] if len(names) == 1 else None)
    if model is None or (names and model not in names):
        known = f"expected one of {', '.join(names)}, got " if names else "name one, got "
        raise UsageWrong(f"--model: {known}{'none' if model is None else repr(model)}")
    metadata = _get(endpoint, f"/v2/models/{quote(model, safe='')}", "no such model")
    details = metadata
    if is_headwise:
        details = _get(endpoint, f"/v1/models/{quote(model, safe='')}", "no such model")
    return Target(
        endpoint,
        "headwise" if is_headwise else "v2",
        str(about.get("name", "unknown")),
        str(about.get("version", "unknown")),
        model,
        tuple(_input(entry) for entry in metadata.get("inputs", [])),
        details,
        is_named,
    )


def _names(endpoint: Endpoint, listed: object) -> list[str]:
    if isinstance(listed, dict):
        return [str(entry["name"]) for entry in listed.get("models", [])]
    index = endpoint.ask("POST", "/v2/repository/index", b"{}").json()
    if not isinstance(index, list):
        return []
    return sorted({str(entry["name"]) for entry in index if "name" in entry})


def _get(endpoint: Endpoint, path: str, otherwise: str) -> dict[str, Any]:
    reply = endpoint.ask("GET", path)
    found = reply.json()
    if reply.status != 200 or not isinstance(found, dict):
        told = found.get("error") if isinstance(found, dict) else None
        why = f": {told}" if told else ""
        raise TargetRefused(f"{endpoint.url}{path}: {otherwise}: answered {reply.status}{why}")
    return found


def _input(entry: dict[str, Any]) -> Input:
    name, datatype, shape = str(entry["name"]), str(entry["datatype"]), entry["shape"]
    if datatype not in DTYPES or len(shape) != _RANK or int(shape[-1]) < 1:
        raise UsageWrong(
            f"--model: expected inputs [rows, length, width] of {', '.join(DTYPES)},"
            f" got {name} {datatype} {shape}"
        )
    rows, length, width = (int(axis) for axis in shape)
    return Input(name, datatype, rows if rows > 0 else None, length if length > 0 else None, width)
