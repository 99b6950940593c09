"""The JSON schemas of what is told of models and of the server's health."""

from typing import Final

from service.api.schemas import BOOLEAN, Json, array, json_object

_NUMBER: Final[Json] = {"type": "number"}
_INTEGER: Final[Json] = {"type": "integer"}
_STRING: Final[Json] = {"type": "string"}

_LAYER: Final = json_object(
    {
        "embed_dim": _INTEGER,
        "num_heads": _INTEGER,
        "memory_dim": {"type": ["integer", "null"], "description": "null = self-attention"},
        "bias": BOOLEAN,
        "head_dim": _INTEGER,
    }
)

_SHORT: Final[dict[str, Json]] = {
    "name": {"type": "string", "example": "tiny"},
    "version": {"type": "integer", "example": 1},
    "served_versions": array(
        json_object(
            {
                "version": {"type": "integer", "example": 1},
                "default": {"type": "boolean", "description": "answers calls that name none"},
                "ready": BOOLEAN,
            }
        )
    ),
    "ready": {"type": "boolean", "example": True},
    "problem": {"type": ["string", "null"], "description": "why it is not ready", "example": None},
    "layer": _LAYER
    | {
        "example": {
            "embed_dim": 8,
            "num_heads": 2,
            "memory_dim": None,
            "bias": True,
            "head_dim": 4,
        }
    },
    "precision": {"type": "string", "example": "fp32"},
    "provider": {"type": "string", "description": "in use, not asked for", "example": "cpu"},
    "tolerance": {"type": "number", "example": 1e-5},
    "worst_output_error": {"type": "number", "example": 2.1e-7},
    "worst_weights_error": {"type": "number", "example": 1.2e-7},
}

MODEL_LIST: Final = json_object(
    {
        "models": array(json_object(_SHORT)),
        "default": {
            "type": ["string", "null"],
            "description": "the model of a call that names none",
            "example": "mha",
        },
    }
)

MODEL: Final = json_object(
    {
        **_SHORT,
        "inputs": {
            "type": "object",
            "additionalProperties": _STRING,
            "description": "what a call may hold: datatype, shape, meaning",
            "example": {"embeddings": "FP32 [B, S, 8], required"},
        },
        "limits": {
            "type": "object",
            "additionalProperties": {"type": ["integer", "boolean"]},
            "example": {"max_rows": 256, "max_length": 4096},
        },
        "parity": array(
            json_object(
                {
                    "batch": _INTEGER,
                    "length": _INTEGER,
                    "key_length": _INTEGER,
                    "masks": {"type": "string", "example": "padding"},
                    "reference": {"type": "string", "example": "torch"},
                    "output_error": {"type": "number", "example": 4.5e-8},
                    "weights_error": {"type": ["number", "null"], "example": 0.0},
                }
            ),
            description="the largest difference from each reference, case by case",
        ),
        "input_scale": {"type": "number", "example": 1.0},
        "source": {
            "type": "object",
            "description": "what the layer was exported from",
            "example": {"kind": "seed", "seed": 0},
        },
        "versions": {
            "type": "object",
            "additionalProperties": _STRING,
            "description": "of the libraries that exported and proved it",
            "example": {"torch": "2.13.0"},
        },
        "proven_on": {
            "type": "object",
            "additionalProperties": {"type": ["string", "integer"]},
            "description": "the machine that proved it; empty = exported before that was recorded",
        },
        "created": {"type": "string", "example": "2026-01-31T12:00:00Z"},
    }
)

LIVE: Final = json_object({"live": {"type": "boolean", "const": True}})

READY: Final = json_object(
    {
        "ready": {"type": "boolean", "const": True},
        "broken": array(
            {"type": "string", "example": "mha/3"},
            description="versions in the repository that cannot be served; absent = none",
        ),
    },
    optional=("broken",),
)

MODEL_READY: Final = json_object(
    {"name": {"type": "string", "example": "tiny"}, "ready": {"type": "boolean", "const": True}}
)

_CONFIG_TENSOR: Final = json_object(
    {
        "name": {"type": "string", "example": "embeddings"},
        "data_type": {"type": "string", "example": "TYPE_FP32"},
        "dims": array(_INTEGER, description="without the batch; -1 = any", example=[-1, 8]),
    }
)

MODEL_CONFIG: Final = json_object(
    {
        "name": {"type": "string", "example": "tiny"},
        "platform": {"type": "string", "example": "onnxruntime_onnx"},
        "backend": {"type": "string", "example": "onnxruntime"},
        "version_policy": {"type": "object", "example": {"latest": {"num_versions": 1}}},
        "max_batch_size": {"type": "integer", "example": 256},
        "input": array(_CONFIG_TENSOR),
        "output": array(_CONFIG_TENSOR),
        "dynamic_batching": {"type": "object", "example": {}},
    }
)

LISTING: Final = json_object(
    {
        "name": {"type": "string", "const": "headwise"},
        "version": _STRING,
        "documentation": {"type": "string", "example": "docs"},
        "endpoints": {
            "type": "object",
            "additionalProperties": _STRING,
            "description": "what each is for, by method and path",
            "example": {"GET /v1/models": "List the models that are served"},
        },
    }
)
