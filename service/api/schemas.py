"""The JSON schemas of bodies and answers, as OpenAPI describes them."""

from collections.abc import Collection
from typing import Any, Final

from service.codecs.datatypes import DTYPES, INPUTS
from service.contract import ATTENTION_WEIGHTS, EXTRA_WEIGHTS, MAX_VERSION, OUTPUT
from service.layer_config import MAX_POSITION

Json = dict[str, Any]


def array(of: Json, **more: Any) -> Json:
    """Return the schema of an array of these."""
    return {"type": "array", "items": of, **more}


def json_object(properties: dict[str, Json], *, optional: Collection[str] = ()) -> Json:
    """Return the schema of an object that has all of these, but for the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "required": required, "properties": properties}


_NUMBER: Final[Json] = {"type": "number"}

_FLAG: Final[Json] = {"enum": [True, False, 1, 0]}

BOOLEAN: Final[Json] = {"type": "boolean"}

_POSITION: Final[Json] = {"type": "integer", "minimum": 0, "maximum": MAX_POSITION}

_SEQUENCE: Final = array(array(_NUMBER, minItems=1), minItems=1)

_MATRIX: Final = array(array({"type": ["number", "null"]}))

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
        "version": {
            "type": "integer",
            "minimum": 1,
            "maximum": MAX_VERSION,
            "description": "one of the versions that are served; default: the highest",
        },
        "embeddings": {
            "description": "[B][S][E], or one sequence [S][E]; sequences may differ in length",
            "anyOf": [array(_SEQUENCE, minItems=1), _SEQUENCE],
        },
        "memory": {
            "description": "[B][T][M] or [T][M]: keys and values; cross-attention layers only",
            "anyOf": [array(_SEQUENCE, minItems=1), _SEQUENCE],
        },
        "value_memory": {
            "description": "[B][T][M_v] or [T][M_v]: values, for layers whose values have another"
            " source than keys",
            "anyOf": [array(_SEQUENCE, minItems=1), _SEQUENCE],
        },
        "positions": {
            "description": "[B][S] or [S]: for layers that have positions; default: 0, 1, 2, …",
            "anyOf": [array(array(_POSITION)), array(_POSITION)],
        },
        "attend_mask": {
            "description": "[B][T] or [T]: padding; **true, or 1, = this key takes part**",
            "anyOf": [array(array(_FLAG)), array(_FLAG)],
        },
        "pair_mask": {
            "description": "[B or 1][H or 1][S][T], or one rank lower for one sequence:"
            " **true, or 1, = this query may attend to this key**",
            "type": "array",
            "items": array(array({"anyOf": [_FLAG, array(_FLAG)]})),
        },
        "head_mask": {
            "description": "[H] or [B][H]: multiplies each head's output; 0 switches it off",
            "anyOf": [array(_NUMBER), array(array(_NUMBER))],
        },
        "causal": {
            "type": ["boolean", "null"],
            "description": "attend to t <= s only; default: as the layer was published, which"
            " `/v1/models/{name}` says",
        },
        "weights": {
            "description": "also return attention weights: each head's, or those of some heads,"
            " numbered from 0",
            "anyOf": [
                BOOLEAN,
                {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "heads": array(
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
        "heads": array(
            {"type": "integer"},
            description="whose weights these are, where some heads were chosen; from 0",
        ),
        "output": {
            "description": "[B][S][E] or [S][E]; null where embeddings were not finite",
            "anyOf": [array(_MATRIX), _MATRIX],
        },
        "attention_weights": {
            "description": "[B][H][S][T] or [H][S][T], of the heads that were asked for;"
            " rows sum to 1 together with extra_weights, or to 0 when all is hidden",
            "anyOf": [array(array(_MATRIX)), array(_MATRIX)],
        },
        "extra_weights": {
            "description": "[B][H][S][n] or [H][S][n], beside attention_weights where the layer"
            " has n extra keys (learned, zero, sink)",
            "anyOf": [array(array(_MATRIX)), array(_MATRIX)],
        },
    },
}

_INFER_TENSOR: Final[Json] = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"enum": list(INPUTS)},
        "shape": array({"type": "integer", "minimum": 1}),
        "datatype": {
            "enum": list(DTYPES),
            "description": "masks: BOOL, or integers 0 and 1; positions: INT64 or INT32; all"
            " else: FP32, or another number type, of values that FP32 holds",
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
        "inputs": array(_INFER_TENSOR, minItems=1),
        "outputs": array(
            {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {
                        "type": "string",
                        "description": "output; of {name}-weights also attention_weights, and"
                        " extra_weights where the layer has extra keys",
                    },
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
        "parameters": {
            "type": "object",
            "description": 'heads: whose weights these are, where some were chosen: "0,3"',
        },
        "outputs": array(
            {
                "type": "object",
                "required": ["name", "datatype", "shape"],
                "properties": {
                    "name": {"enum": [OUTPUT, ATTENTION_WEIGHTS, EXTRA_WEIGHTS]},
                    "datatype": {"type": "string"},
                    "shape": array({"type": "integer"}),
                    "parameters": {
                        "type": "object",
                        "description": "binary_data_size, where the values are in binary",
                    },
                    "data": array({"type": ["number", "null"]}, description="row-major, flat"),
                },
            }
        ),
    },
}

TENSOR_METADATA: Final[Json] = {
    "type": "object",
    "required": ["name", "datatype", "shape"],
    "properties": {
        "name": {"type": "string"},
        "datatype": {"type": "string"},
        "shape": array({"type": "integer"}, description="-1 = any length"),
    },
}

SERVER_METADATA: Final[Json] = {
    "type": "object",
    "required": ["name", "version", "extensions"],
    "properties": {
        "name": {"type": "string"},
        "version": {"type": "string"},
        "extensions": array({"type": "string"}),
    },
}

MODEL_METADATA: Final[Json] = {
    "type": "object",
    "required": ["name", "versions", "platform", "inputs", "outputs"],
    "properties": {
        "name": {"type": "string"},
        "versions": array({"type": "string"}, description="those that are served"),
        "platform": {"type": "string"},
        "inputs": array(
            TENSOR_METADATA, description="the required ones; masks and positions may come too"
        ),
        "outputs": array(TENSOR_METADATA),
    },
}

MODEL_STATISTICS: Final[Json] = {
    "type": "object",
    "required": ["model_stats"],
    "properties": {
        "model_stats": array(
            {"type": "object"},
            description="counts and nanoseconds of each model and version since the start",
        )
    },
}

REPOSITORY_INDEX: Final[Json] = array(
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
        "trace_level": array({"type": "string"}),
        "trace_rate": {"type": "string"},
        "trace_count": {"type": "string"},
        "log_frequency": {"type": "string"},
    },
}
