"""What OpenAPI says of each endpoint: its parameters, bodies, answers and errors."""

from collections.abc import Collection
from typing import Final

from service.api.examples import (
    ATTENTION_REQUESTS,
    ATTENTION_RESPONSE,
    INFER_REQUESTS,
    INFER_RESPONSE,
)
from service.api.schemas import (
    ATTENTION_ANSWER,
    ATTENTION_REQUEST,
    ERROR,
    INFER_ANSWER,
    INFER_REQUEST,
    Json,
)
from service.codecs import attention_safetensors, oip_request
from service.codecs.names import HEADS
from service.codecs.options import TEXT_NAMES
from service.errors import (
    DeadlineExceeded,
    Disabled,
    Draining,
    HeadwiseError,
    InferenceFailed,
    InvalidInput,
    NotAcceptable,
    NotFound,
    NotReady,
    QueueFull,
    TooLarge,
    TooSlow,
    Unauthorized,
    UnknownModel,
    UnsupportedMediaType,
)
from service.transport.problems import STATUSES

ATTENTION: Final = "/v1/attention"

INFER: Final = "/v2/models/{name}/infer"

INFER_VERSION: Final = "/v2/models/{name}/versions/{version}/infer"

INFERENCE: Final = "Inference"
MODELS: Final = "Models"
HEALTH: Final = "Health and metrics"
METADATA: Final = "Protocol: server and models"
REPOSITORY: Final = "Protocol: repository"
SHARED_MEMORY: Final = "Protocol: shared memory"
LOGGING: Final = "Protocol: log and trace settings"
DOCUMENTATION: Final = "Documentation"

TAGS: Final[list[Json]] = [
    {"name": INFERENCE, "description": "Tensors in, tensors out"},
    {"name": MODELS, "description": "What is served, and how well it was proven"},
    {"name": HEALTH, "description": "For orchestrators, load balancers and Prometheus"},
    {"name": METADATA, "description": "The Open Inference Protocol v2"},
    {"name": REPOSITORY, "description": "Load and unload, where HEADWISE_MODEL_CONTROL=true"},
    {"name": SHARED_MEMORY, "description": "Regions, where HEADWISE_SHARED_MEMORY=true"},
    {"name": LOGGING, "description": "Changes need HEADWISE_MODEL_CONTROL=true"},
    {"name": DOCUMENTATION, "description": "This page, and the same as JSON"},
]
"""The headings of the documentation, in its order."""

_BYTES: Final[Json] = {"type": "string", "format": "binary"}

_TIMEOUT: Final[Json] = {
    "name": "X-Request-Timeout-S",
    "in": "header",
    "required": False,
    "description": "the call's own time limit, in seconds",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 3600},
}

_HEADS: Final[Json] = {
    "type": "string",
    "pattern": r"^\d+(,\d+)*$",
    "description": "whose attention weights to return, by number from 0: 0,3",
}

_WEIGHTS: Final[Json] = {
    "type": "string",
    "pattern": r"^(true|false|\d+(,\d+)+|[2-9]|\d\d+)$",
    "description": "also return attention weights: true, or those of some heads, as in heads",
}

_CAUSAL: Final[Json] = ATTENTION_REQUEST["properties"]["causal"] | {"type": "boolean"}

OPTION_PARAMETERS: Final[list[Json]] = [
    {
        "name": name,
        "in": "query",
        "required": False,
        "schema": schema,
    }
    for name, schema in (
        ATTENTION_REQUEST["properties"] | {"weights": _WEIGHTS, HEADS: _HEADS, "causal": _CAUSAL}
    ).items()
    if name in TEXT_NAMES
] + [_TIMEOUT]

NAME_PARAMETER: Final[Json] = {
    "name": "name",
    "in": "path",
    "required": True,
    "description": "a model that is served",
    "schema": {"type": "string", "default": "tiny"},
}

VERSION_PARAMETER: Final[Json] = {
    "name": "version",
    "in": "path",
    "required": True,
    "description": "one of the versions that are served",
    "schema": {"type": "string", "default": "1"},
}

REGION_PARAMETER: Final[Json] = {
    "name": "region",
    "in": "path",
    "required": True,
    "description": "a region of shared memory",
    "schema": {"type": "string"},
}

INFER_PARAMETERS: Final[list[Json]] = [
    NAME_PARAMETER,
    {
        "name": "Inference-Header-Content-Length",
        "in": "header",
        "required": False,
        "description": "bytes of JSON before the binary tensors; absent = the body is all JSON",
        "schema": {"type": "integer", "minimum": 1},
    },
    _TIMEOUT,
]


CALL_ERRORS: Final[tuple[type[HeadwiseError], ...]] = (
    InvalidInput,
    UnknownModel,
    TooSlow,
    TooLarge,
    UnsupportedMediaType,
    QueueFull,
    NotReady,
    Draining,
    DeadlineExceeded,
    InferenceFailed,
)
"""What may go wrong with any call with tensors."""


def inference_paths() -> Json:
    """Return the paths of the calls with tensors, which are answered before FastAPI's routes."""
    attention = {
        "tags": [INFERENCE],
        "summary": "Attend over a batch of embeddings",
        "description": "The layer's output and, when asked, each head's attention weights, in the"
        " format of the request unless `Accept` says otherwise. A query with nothing to attend"
        " to gets zero weights and the output bias, unless the layer has extra keys.",
        "operationId": "attention",
        "parameters": OPTION_PARAMETERS,
        "requestBody": _body(
            ATTENTION_REQUEST, attention_safetensors.MEDIA_TYPE, ATTENTION_REQUESTS
        ),
        "responses": responses(
            ATTENTION_ANSWER,
            attention_safetensors.MEDIA_TYPE,
            *CALL_ERRORS,
            NotAcceptable,
            example=ATTENTION_RESPONSE,
        ),
    }
    infer = {
        "tags": [INFERENCE],
        "summary": "Infer, as the Open Inference Protocol v2 says",
        "description": "In JSON, binary tensors or both. `{name}` has the output alone;"
        " `{name}-weights` also has the attention weights.",
        "operationId": "infer",
        "parameters": INFER_PARAMETERS,
        "requestBody": _body(INFER_REQUEST, oip_request.BINARY_MEDIA_TYPE, INFER_REQUESTS),
        "responses": responses(
            INFER_ANSWER,
            oip_request.BINARY_MEDIA_TYPE,
            *CALL_ERRORS,
            Disabled,
            NotFound,
            example=INFER_RESPONSE,
        ),
    }
    infer_version = infer | {
        "summary": "Infer with one version of a model",
        "operationId": "infer_version",
        "parameters": [VERSION_PARAMETER, *INFER_PARAMETERS],
    }
    return {
        ATTENTION: {"post": attention},
        INFER: {"post": infer},
        INFER_VERSION: {"post": infer_version},
    }


def responses(
    json_schema: Json,
    binary_type: str | None,
    *errors: type[HeadwiseError],
    example: Json | None = None,
) -> Json:
    """Return the answers of an endpoint: what it gives, and each error that it may give."""
    content: Json = {"application/json": {"schema": json_schema}}
    if example is not None:
        content["application/json"]["example"] = example
    if binary_type is not None:
        content[binary_type] = {"schema": _BYTES}
    return {"200": {"description": "the answer", "content": content}, **problems(*errors)}


def problems(*errors: type[HeadwiseError]) -> Json:
    """Return the answers for each error that an endpoint may give."""
    by_status: dict[int, list[type[HeadwiseError]]] = {}
    for error in errors:
        by_status.setdefault(STATUSES[error], []).append(error)
    return {
        str(status): {
            "description": "; ".join(
                f"`{kind.code}`: {(kind.__doc__ or '').strip()}" for kind in kinds
            ),
            "content": {"application/json": {"schema": ERROR}},
        }
        for status, kinds in sorted(by_status.items())
    }


def with_keys(document: Json, open_paths: Collection[str]) -> Json:
    """Return the document of a server that asks for a key, but at some paths."""
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    components = document.get("components", {}) | {"securitySchemes": schemes}
    return document | {
        "components": components,
        "paths": {
            path: verbs if path in open_paths else {v: _keyed(verbs[v]) for v in verbs}
            for path, verbs in document["paths"].items()
        },
    }


def _keyed(operation: Json) -> Json:
    answers = operation["responses"] | problems(Unauthorized)
    return operation | {"responses": answers, "security": [{"bearer": []}, {"header": []}]}


def json_body(properties: Json) -> Json:
    """Return the request body of a control request: an object of such keys, or nothing."""
    schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return {"required": False, "content": {"application/json": {"schema": schema}}}


def _body(json_schema: Json, binary_type: str, examples: Json) -> Json:
    """Return the request body of a call that takes JSON or binary tensors."""
    return {
        "required": True,
        "content": {
            "application/json": {"schema": json_schema, "examples": examples},
            binary_type: {"schema": _BYTES},
        },
    }
