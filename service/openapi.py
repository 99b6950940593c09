"""What OpenAPI says of the calls with tensors, and of bodies that FastAPI does not see."""

from collections.abc import Collection
from typing import Any, Final

from service import oip_request, safetensors_codec
from service.contract import EMBEDDINGS
from service.datatypes import DTYPES
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
from service.problems import STATUSES

Json = dict[str, Any]

ATTENTION: Final = "/v1/attention"
INFER: Final = "/v2/models/{name}/infer"
INFER_VERSION: Final = "/v2/models/{name}/versions/{version}/infer"


def _array(of: Json, **more: Any) -> Json:
    return {"type": "array", "items": of, **more}


_NUMBER: Final[Json] = {"type": "number"}
_BOOLEAN: Final[Json] = {"type": "boolean"}
_SEQUENCE: Final = _array(_array(_NUMBER, minItems=1), minItems=1)

ERROR: Final[Json] = {
    "type": "object",
    "required": ["error", "code"],
    "properties": {
        "error": {"type": "string", "description": "what was expected, what came, where"},
        "code": {"type": "string", "description": "a stable word for programs"},
    },
}

ATTENTION_REQUEST: Final[Json] = {
    "type": "object",
    "required": ["embeddings"],
    "additionalProperties": False,
    "properties": {
        "model": {"type": "string", "description": "default: the default model"},
        "embeddings": {
            "description": "[B][S][E], or one sequence [S][E]; sequences may differ in length",
            "anyOf": [_array(_SEQUENCE, minItems=1), _SEQUENCE],
        },
        "memory": {
            "description": "[B][T][M] or [T][M]: keys and values; cross-attention layers only",
            "anyOf": [_array(_SEQUENCE, minItems=1), _SEQUENCE],
        },
        "attend_mask": {
            "description": "[B][T] or [T]: padding; **true = this key takes part**",
            "anyOf": [_array(_array(_BOOLEAN)), _array(_BOOLEAN)],
        },
        "pair_mask": {
            "description": "[B or 1][H or 1][S][T], or one rank lower for one sequence:"
            " **true = this query may attend to this key**",
            "type": "array",
            "items": _array(_array({"anyOf": [_BOOLEAN, _array(_BOOLEAN)]})),
        },
        "head_mask": {
            "description": "[H] or [B][H]: multiplies each head's output; 0 switches it off",
            "anyOf": [_array(_NUMBER), _array(_array(_NUMBER))],
        },
        "causal": {"type": "boolean", "default": False, "description": "attend to t <= s only"},
        "weights": {
            "description": "also return attention weights: each head's, or those of some heads",
            "anyOf": [
                _BOOLEAN,
                {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "heads": _array(
                            {"type": "integer", "minimum": 0}, minItems=1, uniqueItems=True
                        )
                    },
                },
            ],
            "default": False,
        },
        "timeout_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 3600},
        "priority": {
            "type": "integer",
            "minimum": 0,
            "default": 0,
            "description": "1 = highest; 0 = default",
        },
    },
}

ATTENTION_ANSWER: Final[Json] = {
    "type": "object",
    "required": ["model", "version", "output"],
    "properties": {
        "model": {"type": "string"},
        "version": {"type": "integer"},
        "output": {"type": "array", "items": {}, "description": "[B][S][E] or [S][E]"},
        "attention_weights": {
            "type": "array",
            "items": {},
            "description": "[B][H][S][T] or [H][S][T], of the heads that were asked for;"
            " rows sum to 1, or to 0 when all is hidden",
        },
    },
}

_INFER_TENSOR: Final[Json] = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"enum": ["embeddings", "memory", "attend_mask", "pair_mask", "head_mask"]},
        "shape": _array({"type": "integer", "minimum": 1}),
        "datatype": {
            "enum": list(DTYPES),
            "description": "masks: BOOL; all else: FP32, or another that is read as FP32",
        },
        "parameters": {
            "type": "object",
            "description": "binary_data_size, or shared_memory_region, shared_memory_offset"
            " and shared_memory_byte_size; else the values are in data",
        },
        "data": {"type": "array", "items": {}, "description": "row-major, flat or nested"},
    },
}

INFER_REQUEST: Final[Json] = {
    "type": "object",
    "required": ["inputs"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string"},
        "model_name": {"description": "not read: the path names the model"},
        "parameters": {
            "type": "object",
            "description": "causal (boolean), timeout (µs), priority, binary_data_output,"
            ' heads (whose attention weights: [0, 3] or "0,3")',
        },
        "inputs": _array(_INFER_TENSOR, minItems=1),
        "outputs": _array(
            {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string"},
                    "parameters": {
                        "type": "object",
                        "description": "binary_data (boolean), or shared_memory_region,"
                        " shared_memory_offset and shared_memory_byte_size",
                    },
                },
            }
        ),
    },
}

INFER_ANSWER: Final[Json] = {
    "type": "object",
    "required": ["model_name", "model_version", "outputs"],
    "properties": {
        "model_name": {"type": "string"},
        "model_version": {"type": "string"},
        "id": {"type": "string"},
        "outputs": _array({"type": "object"}),
    },
}

_BYTES: Final[Json] = {"type": "string", "format": "binary"}

_TIMEOUT: Final[Json] = {
    "name": "X-Request-Timeout-S",
    "in": "header",
    "required": False,
    "description": "the call's own time limit, in seconds",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 3600},
}

OPTION_PARAMETERS: Final[list[Json]] = [
    {
        "name": name,
        "in": "query",
        "required": False,
        "schema": schema,
    }
    for name, schema in (ATTENTION_REQUEST["properties"] | {"weights": _BOOLEAN}).items()
    if name in ("model", "weights", "causal", "timeout_s", "priority")
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
    "description": "the version that is served",
    "schema": {"type": "string", "default": "1"},
}

REGION_PARAMETER: Final[Json] = {
    "name": "region",
    "in": "path",
    "required": True,
    "description": "a region of shared memory",
    "schema": {"type": "string"},
}

TENSOR_METADATA: Final[Json] = {
    "type": "object",
    "required": ["name", "datatype", "shape"],
    "properties": {
        "name": {"type": "string"},
        "datatype": {"type": "string"},
        "shape": _array({"type": "integer"}, description="-1 = any length"),
    },
}

SERVER_METADATA: Final[Json] = {
    "type": "object",
    "required": ["name", "version", "extensions"],
    "properties": {
        "name": {"type": "string"},
        "version": {"type": "string"},
        "extensions": _array({"type": "string"}),
    },
}

MODEL_METADATA: Final[Json] = {
    "type": "object",
    "required": ["name", "versions", "platform", "inputs", "outputs"],
    "properties": {
        "name": {"type": "string"},
        "versions": _array({"type": "string"}),
        "platform": {"type": "string"},
        "inputs": _array(TENSOR_METADATA, description="the required ones; masks may come too"),
        "outputs": _array(TENSOR_METADATA),
    },
}

MODEL_STATISTICS: Final[Json] = {
    "type": "object",
    "required": ["model_stats"],
    "properties": {
        "model_stats": _array(
            {"type": "object"},
            description="counts and nanoseconds of each model and version since the start",
        )
    },
}

REPOSITORY_INDEX: Final[Json] = _array(
    {
        "type": "object",
        "required": ["name", "version", "state", "reason"],
        "properties": {
            "name": {"type": "string"},
            "version": {"type": "string"},
            "state": {"enum": ["READY", "UNAVAILABLE"]},
            "reason": {"type": "string"},
        },
    }
)

LOG_SETTINGS: Final[Json] = {
    "type": "object",
    "properties": {
        "log_file": {"type": "string", "const": ""},
        "log_info": {"type": "boolean"},
        "log_warning": {"type": "boolean"},
        "log_error": {"type": "boolean", "const": True},
        "log_verbose_level": {"type": "integer", "minimum": 0},
        "log_format": {"type": "string", "const": "default"},
    },
}

TRACE_SETTINGS: Final[Json] = {
    "type": "object",
    "properties": {
        "trace_file": {"type": "string"},
        "trace_level": _array({"type": "string"}),
        "trace_rate": {"type": "string"},
        "trace_count": {"type": "string"},
        "log_frequency": {"type": "string"},
    },
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


def inference_paths() -> Json:
    """Return the paths of the calls with tensors, which are answered before FastAPI's routes."""
    errors = (
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
    attention = {
        "summary": "Attend over a batch of embeddings",
        "description": "The layer's output and, when asked, each head's attention weights, in the"
        " format of the request unless `Accept` says otherwise. A query with nothing to attend"
        " to gets zero weights and the output bias.",
        "operationId": "attention",
        "parameters": OPTION_PARAMETERS,
        "requestBody": _body(
            ATTENTION_REQUEST,
            safetensors_codec.MEDIA_TYPE,
            {"model": "tiny", "embeddings": [[1, 0, 0, 0, 0, 0, 0, 0]], "weights": True},
        ),
        "responses": responses(
            ATTENTION_ANSWER, safetensors_codec.MEDIA_TYPE, *errors, NotAcceptable
        ),
    }
    tensor = {
        "name": EMBEDDINGS,
        "shape": [1, 1, 8],
        "datatype": "FP32",
        "data": [1, 0, 0, 0, 0, 0, 0, 0],
    }
    infer = {
        "summary": "Infer, as the Open Inference Protocol v2 says",
        "description": "In JSON, binary tensors or both. `{name}` has the output alone;"
        " `{name}-weights` also has the attention weights.",
        "operationId": "infer",
        "parameters": INFER_PARAMETERS,
        "requestBody": _body(INFER_REQUEST, oip_request.BINARY_MEDIA_TYPE, {"inputs": [tensor]}),
        "responses": responses(
            INFER_ANSWER, oip_request.BINARY_MEDIA_TYPE, *errors, Disabled, NotFound
        ),
    }
    infer_version = infer | {
        "operationId": "infer_version",
        "parameters": [VERSION_PARAMETER, *INFER_PARAMETERS],
    }
    return {
        ATTENTION: {"post": attention},
        INFER: {"post": infer},
        INFER_VERSION: {"post": infer_version},
    }


def responses(json_schema: Json, binary_type: str | None, *errors: type[HeadwiseError]) -> Json:
    """Return the answers of an endpoint: what it gives, and each error that it may give."""
    content: Json = {"application/json": {"schema": json_schema}}
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


def _body(json_schema: Json, binary_type: str, example: Json) -> Json:
    """Return the request body of a call that takes JSON or binary tensors."""
    return {
        "required": True,
        "content": {
            "application/json": {"schema": json_schema, "example": example},
            binary_type: {"schema": _BYTES},
        },
    }
