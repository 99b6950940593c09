"""
Every setting of the server, read once from the environment and the command line.

A field's description is its `--help` text and its row in the README; a flag
wins over the environment, and the environment over the default.
"""

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from service import __version__
from service.errors import SettingsInvalid

PREFIX = "HEADWISE_"

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\sA-Z/?#@*]+")
"""What a browser sends as `Origin`: https://fetch.spec.whatwg.org/#origin-header."""

_KUBERNETES = (
    "; Kubernetes injects such names for a Service called headwise:"
    " call it otherwise and set enableServiceLinks: false"
)


class Settings(BaseModel):
    """How this server runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repository: Path = Field(
        Path("artifacts"), description="directory of artifacts: <repository>/<name>/<version>/"
    )
    repository_poll_s: float = Field(
        0.0,
        ge=0,
        le=86_400,
        description="look at the repository for changes this often; 0 = only on SIGHUP",
    )
    versions_kept: int = Field(
        1,
        ge=1,
        le=1000,
        description="versions of each model that are served, the highest good ones; each takes"
        " memory and threads as a model of its own",
    )
    skip_broken: bool = Field(
        False,
        description="start without the artifacts that cannot be served, if any other can;"
        " else one that is broken ends the start",
    )
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address or name to listen on; :: = every address, of IPv4 too",
    )
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 = any free one")
    default_model: str | None = Field(
        None,
        description="model of a call that names none (default: mha, else the only one there is)",
    )
    provider: Literal["cpu", "cuda"] = Field(
        "cpu", description="hardware; cuda stops the start where it cannot be had"
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="threads of one run (default: the cores that affinity and CPU quota allow)",
    )
    concurrent_runs: int | None = Field(
        None,
        ge=1,
        le=64,
        description="runs in progress at once while calls wait, sharing the threads"
        " (default: up to 4 on CPU, 1 on CUDA)",
    )
    fast_path: Literal["auto", "off"] = Field(
        "auto",
        description="answer small infer calls straight from the connection's bytes;"
        " off = every request goes through ASGI",
    )
    nonfinite: Literal["accept", "refuse"] = Field(
        "accept", description="embeddings with NaN or infinity: accept, or refuse with 400"
    )
    max_body_bytes: int = Field(
        64 * 2**20, ge=1, description="largest request body; more is answered 413"
    )
    max_decompressed_bytes: int = Field(
        64 * 2**20, ge=1, description="what a gzip or deflate body may hold; more: 413"
    )
    max_bodies_bytes: int | None = Field(
        None,
        ge=1,
        description="memory that the bodies of all callers may take, received, decoded and"
        " computed: about 6 times their length in JSON, 3 times in binary; beyond: 429, or 413"
        " where one alone does (default: half of the memory limit)",
    )
    compress_answers: bool = Field(
        False,
        description="compress the answers of callers that accept gzip or deflate:"
        " saves 7 % of tensors and costs 100 times the encoding",
    )
    max_rows: int = Field(256, ge=1, description="most sequences in one call; more: 413")
    max_length: int = Field(4096, ge=1, description="longest sequence, in tokens; longer: 413")
    max_tokens: int = Field(
        131_072, ge=1, description="most queries and keys in one call, padding included; more: 413"
    )
    max_answer_bytes: int = Field(
        512 * 2**20,
        ge=1,
        description="largest answer, counted as FP32, whatever its format (JSON takes about three"
        " times as many bytes); larger: 413",
    )
    max_unsent_bytes: int | None = Field(
        None,
        ge=1,
        description="answers of all callers together, counted as FP32, from being let in until"
        " the system has taken their last byte; beyond: 429, or 413 where one alone is more"
        " (default: twice max_answer_bytes, a quarter of the memory limit at most)",
    )
    max_queue_calls: int = Field(
        256, ge=1, description="calls a model may hold, waiting and running; one more: 429"
    )
    max_queue_tokens: int = Field(
        262_144, ge=1, description="queries and keys of all those calls together; more: 429"
    )
    max_batch_tokens: int = Field(
        1024, ge=1, description="padded tokens of one batch; larger calls run in several"
    )
    max_batch_cells: int = Field(
        1_048_576,
        ge=1,
        description="attention cells of one batch: rows x queries x keys; a row is never split",
    )
    max_padding: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="share of padding that sequences of unequal length may cost a run"
        " (default: 0 on CPU, where each token costs, 0.25 on CUDA)",
    )
    timeout_s: float = Field(
        60.0, gt=0, le=3600, description="time a call may wait when it names no limit; then 504"
    )
    head_timeout_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="time a request's head may take to arrive; then 408;"
        " also the rest of a body after a refusal; then the connection is closed",
    )
    body_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="time a request's body may take to arrive; then 408"
    )
    decode_timeout_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="time that decoding a JSON body above 4 MiB may take; then 413",
    )
    answer_timeout_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="time in which a caller must take some of its answer; then it is cut off",
    )
    keep_alive_s: int = Field(
        75,
        ge=1,
        le=3600,
        description="time an idle connection stays open; above most proxies' 60 s",
    )
    grace_s: float = Field(
        2.0,
        ge=0,
        le=300,
        description="after SIGTERM, time in which ready says 503 but calls are still served;"
        " longer than a load balancer takes to notice",
    )
    drain_s: float = Field(
        30.0, ge=0, le=3600, description="after the grace, time for accepted calls to finish"
    )
    model_control: bool = Field(
        False,
        description="let clients load and unload models and set the log's level"
        " (POST /v2/repository/models/…, /v2/logging); else 403",
    )
    shared_memory: bool = Field(
        False,
        description="let clients pass tensors in system shared memory;"
        " their processes must share this one's /dev/shm",
    )
    api_keys_file: Path | None = Field(
        None,
        description="file of keys, name:key a line; with it, every call but health, metrics"
        " and the description of the interface needs one (Authorization: Bearer KEY, or X-API-Key)",
    )
    metrics_need_key: bool = Field(False, description="ask for a key at /metrics, too")
    cors_origins: str | None = Field(
        None,
        description="origins whose pages may call from a browser, separated by commas, such as"
        " https://app.example.com; * = every page (default: none)",
    )
    tls_cert_file: Path | None = Field(
        None,
        description="certificate and its chain, PEM; with it, the port speaks HTTPS only",
    )
    tls_key_file: Path | None = Field(
        None, description="the certificate's private key, PEM (default: in the certificate's file)"
    )
    tls_key_password_file: Path | None = Field(
        None, description="file whose first line opens the private key, where it is encrypted"
    )
    tls_client_ca_file: Path | None = Field(
        None,
        description="authorities, PEM; with it, callers need a certificate that one of them signed",
    )
    tracing: bool = Field(
        False, description="send OpenTelemetry spans by OTLP; needs the extra otel"
    )
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="log lines; auto = text on a terminal, json elsewhere"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severity that is logged"
    )

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: str | None) -> str | None:
        for origin in _parts(value):
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    "expected * or scheme://host[:port] in lower case, without a path,"
                    f" not {origin[:64]!r}"
                )
        return value

    @field_validator("max_unsent_bytes")
    @classmethod
    def _has_room_for_the_largest_answer(
        cls, value: int | None, info: ValidationInfo
    ) -> int | None:
        largest = info.data.get("max_answer_bytes", 0)
        if value is not None and value < largest:
            raise ValueError(f"expected at least max_answer_bytes, {largest}")
        return value

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Self:
        """
        Return the settings of a command line and an environment.

        Raises:
            SettingsInvalid: an unknown `HEADWISE_*` name, or a value of the wrong
                type or out of bounds; the message names both.
            SystemExit: `--help`, `--version`, or a flag that does not exist.
        """
        raw = _from_environment(cls, environ) | _from_flags(cls, argv)
        try:
            return cls(**{name: value for name, (_, value) in raw.items()})
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            name = str(problem["loc"][0])
            told, value = raw[name]
            hint = _KUBERNETES if value.startswith("tcp://") else ""
            raise SettingsInvalid(f"{told}: {problem['msg']}, got {value!r}{hint}") from None

    @property
    def padding(self) -> float:
        """`max_padding`, or what is best with the provider."""
        if self.max_padding is not None:
            return self.max_padding
        return 0.0 if self.provider == "cpu" else 0.25

    def bodies_bytes(self, memory_limit: int) -> int:
        """Return `max_bodies_bytes`, or what is best with so much memory."""
        return self.max_bodies_bytes or max(1, memory_limit // 2)

    def unsent_bytes(self, memory_limit: int) -> int:
        """Return `max_unsent_bytes`, or what is best with so much memory."""
        return self.max_unsent_bytes or min(2 * self.max_answer_bytes, max(1, memory_limit // 4))

    @property
    def origins(self) -> tuple[str, ...]:
        """The origins of `cors_origins`."""
        return _parts(self.cors_origins)

    @classmethod
    def flag(cls, name: str) -> str:
        """Return the command-line flag of a field."""
        return "--" + name.replace("_", "-")

    @classmethod
    def variable(cls, name: str) -> str:
        """Return the environment variable of a field."""
        return PREFIX + name.upper()


def _parts(value: str | None) -> tuple[str, ...]:
    """Return the parts of a list that is separated by commas."""
    return () if value is None else tuple(part.strip() for part in value.split(","))


def _from_environment(
    cls: type[Settings], environ: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    names = {cls.variable(name): name for name in cls.model_fields}
    found = {key: value for key, value in environ.items() if key.startswith(PREFIX)}
    for key, value in found.items():
        if key not in names:
            raise SettingsInvalid(f"{key}: no such setting{_hint(cls, key, value)}")
    # An empty variable counts as unset, as in `HEADWISE_PORT= make run`.
    return {names[key]: (key, value) for key, value in found.items() if value}


def _hint(cls: type[Settings], key: str, value: str) -> str:
    if value.startswith("tcp://") or "_SERVICE_" in key or "_PORT_" in key:
        return _KUBERNETES
    near = difflib.get_close_matches(key.removeprefix(PREFIX).lower(), cls.model_fields, n=1)
    return f"; did you mean {cls.variable(near[0])}?" if near else "; see --help"


def _from_flags(cls: type[Settings], argv: Sequence[str]) -> dict[str, tuple[str, str]]:
    parser = argparse.ArgumentParser(
        prog="python -m service",
        description="Serve exported attention layers over HTTP.",
        epilog="Each flag is also an environment variable: --max-rows is HEADWISE_MAX_ROWS.",
        allow_abbrev=False,  # the container's probe reads the same flags
    )
    parser.add_argument("--version", action="version", version=f"headwise {__version__}")
    for name, field in cls.model_fields.items():
        choices = ("true", "false") if field.annotation is bool else get_args(field.annotation)
        named = f" (default: {field.default})" if field.default is not None else ""
        parser.add_argument(
            cls.flag(name),
            metavar="|".join(choices)
            if all(isinstance(c, str) for c in choices) and choices
            else name.rsplit("_", 1)[-1].upper(),
            help=(field.description or "").replace("%", "%%") + named,
            default=None,
            # A switch alone means true.
            nargs="?" if field.annotation is bool else None,
            const="true" if field.annotation is bool else None,
        )
    given = vars(parser.parse_args(argv))
    return {name: (cls.flag(name), value) for name, value in given.items() if value is not None}
