"""Calls and answers of the small layer `tiny`, as the documentation shows and sends them."""

from typing import Any, Final

_A: Final = [1, 0, 0, 0, 0, 0, 0, 0]
_B: Final = [0, 1, 0, 0, 0, 0, 0, 0]
_NOTHING: Final = [0] * 8

ATTENTION_REQUESTS: Final[dict[str, Any]] = {
    "one sequence": {
        "summary": "One sequence of two tokens, and the weights of every head",
        "value": {"model": "tiny", "embeddings": [_A, _B], "weights": True},
    },
    "padding": {
        "summary": "A batch whose second sequence is padded: true = this token takes part",
        "value": {
            "model": "tiny",
            "embeddings": [[_A, _B], [_B, _NOTHING]],
            "attend_mask": [[True, True], [True, False]],
        },
    },
    "some heads": {
        "summary": "The weights of head 1 only; a token attends to itself and those before it",
        "value": {
            "model": "tiny",
            "embeddings": [_A, _B],
            "causal": True,
            "weights": {"heads": [1]},
        },
    },
    "pairs": {
        "summary": "A full mask, one for all heads: true = this query may attend to this key",
        "value": {
            "model": "tiny",
            "embeddings": [_A, _B],
            "pair_mask": [[[True, False], [True, True]]],
        },
    },
}

ATTENTION_RESPONSE: Final[dict[str, Any]] = {
    "model": "tiny",
    "version": 1,
    "output": [
        [0.0793, -0.1193, 0.156, -0.2091, 0.0137, -0.1365, -0.014, 0.1004],
        [0.0792, -0.1191, 0.1558, -0.2092, 0.0137, -0.1365, -0.0139, 0.1003],
    ],
    "attention_weights": [
        [[0.504, 0.496], [0.5042, 0.4958]],
        [[0.5199, 0.4801], [0.5207, 0.4793]],
    ],
}

_ONE_TOKEN: Final = {"name": "embeddings", "shape": [1, 1, 8], "datatype": "FP32", "data": _A}

INFER_REQUESTS: Final[dict[str, Any]] = {
    "one token": {"summary": "One token", "value": {"inputs": [_ONE_TOKEN]}},
    "padding": {
        "summary": "Two tokens, of which the second is padding; with a time limit of 1 s",
        "value": {
            "inputs": [
                {
                    "name": "embeddings",
                    "shape": [1, 2, 8],
                    "datatype": "FP32",
                    "data": [*_A, *_NOTHING],
                },
                {
                    "name": "attend_mask",
                    "shape": [1, 2],
                    "datatype": "BOOL",
                    "data": [True, False],
                },
            ],
            "parameters": {"timeout": 1_000_000},
        },
    },
}

INFER_RESPONSE: Final[dict[str, Any]] = {
    "model_name": "tiny",
    "model_version": "1",
    "outputs": [
        {
            "name": "output",
            "datatype": "FP32",
            "shape": [1, 1, 8],
            "data": [0.1106, -0.0191, 0.0786, -0.175, 0.1068, -0.0516, -0.0648, 0.067],
        }
    ],
}
