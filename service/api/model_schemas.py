"""The JSON schemas of what is told of models and of the server's health."""

from typing import Final

from service.api.schemas import BOOLEAN, Json, array, json_object

_NUMBER: Final[Json] = {"type": "number"}
_INTEGER: Final[Json] = {"type": "integer"}
_STRING: Final[Json] = {"type": "string"}

_ROTARY: Final = json_object(
    {
        "base": _NUMBER,
        "dims": {"type": "integer", "description": "numbers of each head that are turned"},
        "interleaved": {"type": "boolean", "description": "pairs are (0, 1), (2, 3), …"},
        "scaling": {"type": "string", "description": "none, linear, dynamic, yarn, …"},
        "factor": _NUMBER,
        "original_length": {"type": ["integer", "null"]},
        "magnitude": {"type": "number", "description": "multiplies cosine and sine"},
    }
)

_NORM: Final = json_object(
    {
        "kind": {"enum": ["rms", "layer"]},
        "epsilon": _NUMBER,
        "span": {"enum": ["head", "projection"]},
    }
)

_POSITION_BIAS: Final = json_object(
    {
        "kind": {"enum": ["alibi", "buckets"]},
        "reach": {"type": "integer", "description": "distances beyond it count as this one"},
    }
)

_NONE: Final[Json] = {"type": "null"}

_LAYER: Final = json_object(
    {
        "embed_dim": _INTEGER,
        "num_heads": _INTEGER,
        "memory_dim": {"type": ["integer", "null"], "description": "null = self-attention"},
        "value_memory_dim": {
            "type": ["integer", "null"],
            "description": "width of the source of values; null = they are made of memory",
        },
        "num_kv_heads": {
            "type": "integer",
            "description": "heads of keys and values, each of which serves several of queries",
        },
        "head_dim": _INTEGER,
        "biases": array(_STRING, description="the projections that have a bias"),
        "scale": {"type": ["number", "null"], "description": "null = 1 / sqrt(head_dim)"},
        "softcap": {"type": ["number", "null"]},
        "causal": {"type": "boolean", "description": "of a call that does not say"},
        "window": {
            "type": ["integer", "null"],
            "description": "query s attends to key t only where |s - t| < window",
        },
        "rotary": {"anyOf": [_ROTARY, _NONE]},
        "norm": {"anyOf": [_NORM, _NONE], "description": "of queries and keys"},
        "position_bias": {"anyOf": [_POSITION_BIAS, _NONE]},
        "extra_keys": array(_STRING, description="learned, zero or sink; see extra_weights"),
        "positional": {
            "type": ["string", "null"],
            "description": "what is added to embeddings for their positions: sinusoidal, learned",
        },
        "max_positions": {
            "type": ["integer", "null"],
            "description": "how many positions the learned table has",
        },
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
            "value_memory_dim": None,
            "num_kv_heads": 2,
            "head_dim": 4,
            "biases": ["query", "key", "value", "output"],
            "scale": None,
            "softcap": None,
            "causal": False,
            "window": None,
            "rotary": None,
            "norm": None,
            "position_bias": None,
            "extra_keys": [],
            "positional": None,
            "max_positions": None,
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
        "outputs": {
            "type": "object",
            "additionalProperties": _STRING,
            "description": "what is answered: datatype, shape, meaning",
            "example": {"output": "FP32 [B, S, 8]"},
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
        "tensors": array(_STRING, description="of the source, of which the layer was made"),
        "proof": {
            "enum": ["whole", "reduced"],
            "description": "which grid the cases of parity are of",
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
