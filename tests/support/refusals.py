"""
Every refusal that a caller can meet, and its words: one table.

A message says where the mistake is, what was expected, what came, and, where it is not
plain from these, what to do.  `tests/service/test_refusals.py` makes every call of the table,
and looks for places of the service that refuse and are not in it.
"""

import gzip
import json
import os
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from safetensors.numpy import save

OPEN: dict[str, Any] = {
    "max_rows": 4,
    "max_length": 8,
    "max_tokens": 30,
    "max_answer_bytes": 1800,
    "max_body_bytes": 20_000,
    "max_decompressed_bytes": 30_000,
    "model_control": True,
    "shared_memory": True,
}
"""The settings of a server that offers everything, to small calls."""

CLOSED: dict[str, Any] = {"nonfinite": "refuse"}
"""Those of one that offers what is on by default, and wants finite numbers."""

WIDE: dict[str, Any] = {"default_model": "rotary", "max_length": 16, "max_answer_bytes": 1600}
"""Those of one of layers that are more than multi-head attention."""

SEGMENT = f"refusals-{os.getpid()}"
"""The segment of the regions `small` (8 bytes) and `large` (32 000 bytes) of the open server."""


@dataclass(frozen=True)
class Refusal:
    """A call, and the answer to it."""

    path: str
    content: bytes
    message: str
    """All of it; before three dots, its beginning: the rest is a library's."""
    status: int = 400
    code: str = "invalid_input"
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    server: str = "open"


def call(path: str, body: Any, message: str, **more: Any) -> Refusal:
    """Return a refusal of any path; what is not bytes is written as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Refusal(path, content, message, **more)


def v1(body: Any, message: str, *, query: str = "", **more: Any) -> Refusal:
    """Return a refusal of `/v1/attention`, in JSON unless a header says otherwise."""
    return call("/v1/attention?" + query, body, message, **more)


def st(
    tensors: dict[str, Any],
    message: str,
    *,
    query: str = "model=tiny",
    content: bytes | None = None,
    metadata: dict[str, str] | None = None,
    **more: Any,
) -> Refusal:
    """Return a refusal of `/v1/attention` in safetensors, of these tensors or this content."""
    body = file_of(tensors, metadata) if content is None else content
    headers = {"Content-Type": "application/x-safetensors"}
    return v1(body, message, query=query, headers=headers, **more)


def file_of(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """Return these tensors as safetensors."""
    # The reshaping keeps a tensor without axes one.
    return save(
        {name: np.ascontiguousarray(t).reshape(np.shape(t)) for name, t in tensors.items()},
        metadata,
    )


def v2(
    body: Any,
    message: str,
    *,
    model: str = "tiny",
    query: str = "",
    header_length: str | None = None,
    more: bytes = b"",
    **rest: Any,
) -> Refusal:
    """Return a refusal of the protocol; a dict is what changes in a right body."""
    content = body
    if isinstance(body, dict):
        content = json.dumps({"inputs": tensor()} | body).encode()
        header_length = header_length or str(len(content))
    headers = {} if header_length is None else {"Inference-Header-Content-Length": header_length}
    path = f"/v2/models/{model}/infer?{query}"
    return call(path, content + more, message, headers=headers, **rest)


def register(changes: dict[str, Any], message: str, *, region: str = "r", **more: Any) -> Refusal:
    """Return a refusal to register a region of shared memory."""
    body = {"key": "/" + SEGMENT, "byte_size": 8} | changes
    return call(f"/v2/systemsharedmemory/region/{region}/register", body, message, **more)


def tensor(**changes: Any) -> list[dict[str, Any]]:
    """Return the right inputs of `tiny` in the protocol, with changes; None drops a member."""
    right = {"name": "embeddings", "shape": [1, 2, 8], "datatype": "FP32", "data": [0.5] * 16}
    return [{key: value for key, value in (right | changes).items() if value is not None}]


def slot(region: str, byte_size: int) -> dict[str, Any]:
    """Return the parameters of a tensor in shared memory."""
    return {"shared_memory_region": region, "shared_memory_byte_size": byte_size}


def float8(name: str) -> bytes:
    """Return a safetensors file of a datatype that numpy does not have."""
    entry = {name: {"dtype": "F8_E4M3", "shape": [1, 2, 8], "data_offsets": [0, 16]}}
    header = json.dumps(entry).encode()
    return len(header).to_bytes(8, "little") + header + bytes(16)


def named(count: int, length: int = 0) -> bytes:
    """Return a safetensors file of so many empty tensors, its header at least that long."""
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{i}": empty for i in range(count)}).encode().ljust(length)
    return len(header).to_bytes(8, "little") + header


ONE: dict[str, Any] = {"model": "tiny", "embeddings": [[0.5] * 8] * 2}
TWO: dict[str, Any] = {"model": "tiny", "embeddings": [[[0.5] * 8] * 2, [[0.5] * 8]]}
MHA: dict[str, Any] = {"model": "mha"}
CROSS: dict[str, Any] = {"model": "cross", "embeddings": [[0.5] * 12], "memory": [[0.5] * 6]}
X = {"embeddings": np.full((1, 2, 8), 0.5, np.float32)}
PACKED = {"embeddings": np.full((3, 8), 0.5, np.float32), "lengths": np.array([1, 2])}
ROTARY: dict[str, Any] = {"model": "rotary", "embeddings": [[0.5] * 16] * 2}
LEARNED: dict[str, Any] = {"model": "learned", "embeddings": [[0.5] * 8] * 2}
VALUES: dict[str, Any] = CROSS | {"model": "values", "value_memory": [[0.5] * 5]}
ON_WIDE: dict[str, Any] = {"server": "wide"}
PACKED_CROSS = {"embeddings": np.zeros((1, 12), np.float32), "lengths": np.array([1])}

LARGE: dict[str, Any] = {"status": 413, "code": "too_large"}
UNKNOWN: dict[str, Any] = {"status": 404, "code": "unknown_model"}
NOT_FOUND: dict[str, Any] = {"status": 404, "code": "not_found"}
DISABLED: dict[str, Any] = {"status": 403, "code": "disabled"}
METHOD: dict[str, Any] = {"status": 405, "code": "method_not_allowed"}
MEDIA_TYPE: dict[str, Any] = {"status": 415, "code": "unsupported_media_type"}

# fmt: off
REFUSALS = [
    # JSON bodies of /v1/attention
    v1(b"",
       "body: expected a JSON object, got nothing"),
    v1(b"[1]",
       "body: expected a JSON object, got an array"),
    v1(b'{"model":}',
       "body: expected JSON, got a mistake at character 9: Expecting value"),
    v1(b'{"model":"\xff"}',
       "body: expected JSON in UTF-8, got byte 0xff at 10"),
    v1(b'{"model":' + b"[" * 20_000,
       "body: expected less deeply nested JSON, got too many levels", server="closed"),
    v1(b'{"embeddings":[' + b"{}," * 5500 + b"{}]}",
       "body: expected at most 1024 objects, got more"),
    v1(b'{"embeddings":[' + b"[]," * 5500 + b"[]]}",
       "body: at most 1070 arrays and …", **LARGE),
    v1(b'{"model":' + b"1" * 5000 + b"}",
       "body: expected integers of at most 4300 digits, got a longer one"),
    v1(b'{"embeddings":[1],"embeddings":[2]}',
       "body: expected each key of an object once, got 'embeddings' twice"),
    v1(b'{"weights":{"heads":[0],"heads":[1]},"embeddings":[[1]]}',
       "body: expected each key of an object once, got 'heads' twice"),
    v1(b"\x1f\x8b\x08\0",
       "body: expected JSON in UTF-8, got gzip: send Content-Encoding: gzip with it"),
    v1(b"\x93NUMPY\x01\0",
       "body: expected JSON in UTF-8, got a file of numpy: send safetensors or JSON"),
    v1(b"PK\x03\x04\x14\0",
       "body: expected JSON, got a zip file, as torch.save and numpy.savez write: send safetensors or JSON"),
    v1(b"\x80\x04\x95",
       "body: expected JSON in UTF-8, got a pickle: send safetensors or JSON"),
    v1('{"model":"tiny"}'.encode("utf-16"),
       "body: expected JSON in UTF-8, got UTF-16: send UTF-8"),
    v1(file_of(X),
       "body: expected JSON, got safetensors: send it to /v1/attention with Content-Type: application/x-safetensors"),
    v1({"model": "tiny"},
       "embeddings: expected [B][S][E] or [S][E], got none"),
    v1(ONE | {"version": "1"},
       "version: expected a whole number from 1 to 999999999, got a string"),
    v1(ONE,
       "query: version: expected a whole number from 1 to 999999999, got '01'", query="version=01"),
    v1({"model": 1},
       "model: expected a string, got a number"),
    v1(ONE | {"model": "nope"},
       "model: expected one of cross, mha, tiny, got 'nope'", **UNKNOWN),
    v1(ONE | {"embedding": 1},
       "body: unknown key 'embedding': send embeddings [B, S, E]: the numbers that enter the attention layer (a hidden state)"),
    v1(ONE | {"embeddings": 1},
       "embeddings: expected an array, got a number"),
    v1(ONE | {"embeddings": []},
       "embeddings: expected [B][S][E] or [S][E], got [] (one level of arrays)"),
    v1(ONE | {"embeddings": [1, 2]},
       "embeddings: expected [B][S][E] or [S][E], got [] (one level of arrays)"),
    v1(ONE | {"embeddings": [[]]},
       "embeddings: expected [S, 8], got [1, 0]"),
    v1(ONE | {"embeddings": [[[0.5] * 8], []]},
       "embeddings[1]: expected at least one token, got none"),
    v1(ONE | {"embeddings": [[0.5] * 8, [0.5] * 7]},
       "embeddings[1]: expected 8 numbers as in the first token, got 7"),
    v1(ONE | {"embeddings": [[0.5] * 7]},
       "embeddings: expected [S, 8], got [1, 7]"),
    v1({"embeddings": [[1, 0]]},
       "model mha (the default): embeddings: expected [S, 24], got [1, 2]"),
    v1(ONE | {"embeddings": [[[[[[1]]]]]]},
       "embeddings: expected at most 4 levels of arrays, got more"),
    v1(ONE | {"embeddings": [[0.5] * 7 + ["1"]]},
       "embeddings[0][7]: expected a number, got a string"),
    v1(ONE | {"embeddings": [[0.5] * 7 + [None]]},
       "embeddings[0][7]: expected a number, got null"),
    v1(ONE | {"embeddings": [[0.5] * 7 + [1e39]]},
       "embeddings[0][7]: expected a number within FP32 (up to 3.4e38), got a larger one"),
    v1(ONE | {"embeddings": [[0.5] * 8, 3]},
       "embeddings[1]: expected an array, got a number"),
    v1(ONE | {"embeddings": [[[0.5] * 8]] * 5},
       "embeddings: at most 4 sequences, got 5; send fewer at once", **LARGE),
    v1(ONE | {"embeddings": [[0.5] * 8] * 9},
       "embeddings: at most 8 tokens long, got 9", **LARGE),
    v1(ONE | {"embeddings": [[[0.5] * 8] * 8] * 4},
       "embeddings: at most 30 tokens with their padding, got 4 sequences of 8; send fewer at once", **LARGE),
    v1(ONE | {"embeddings": [[[0.5] * 8] * 8] * 2},
       "call: at most 30 queries and keys with their padding, got 2 sequences of 8 and 8: 32; send fewer at once", **LARGE),
    v1(ONE | {"embeddings": [[[0.5] * 8] * 6, [[0.5] * 8] * 8, [[0.5] * 8], [[0.5] * 8]]},
       "embeddings: at most 30 tokens with their padding, got 4 sequences of 8; send fewer at once", **LARGE),
    v1(MHA | {"embeddings": [[[0.5] * 24] * 7] * 2, "weights": True},
       "answer: at most 1800 bytes, this call asks for 2520, counted as FP32; send fewer sequences at once, or ask for fewer heads' weights", **LARGE),
    v1(ONE | {"memory": [[1]]},
       "memory: expected none for a self-attention layer, got one"),
    v1(ONE | {"attend_mask": [[True, True]]},
       "attend_mask: expected [T] beside embeddings [S][E], got [][] (2 levels of arrays)"),
    v1(ONE | {"attend_mask": [True]},
       "attend_mask: expected 2 values, one a key, got 1"),
    v1(ONE | {"attend_mask": [1, 2]},
       "attend_mask[1]: expected true, false, 1 or 0, got 2"),
    v1(ONE | {"attend_mask": [0.0, -10000.0]},
       "attend_mask[0]: expected true, false, 1 or 0, got 0.0; of a float mask that is added to the scores (0 and -inf) send the booleans mask == 0"),
    v1(ONE | {"attend_mask": ["x", True]},
       "attend_mask[0]: expected true, false, 1 or 0, got a string"),
    v1(TWO | {"attend_mask": [True, True]},
       "attend_mask: expected [B][T] beside embeddings [B][S][E], got [] (one level of arrays)"),
    v1(TWO | {"attend_mask": [[True, True]]},
       "attend_mask: expected 2 sequences as in embeddings, got 1"),
    v1(ONE | {"pair_mask": [[True, True]] * 2},
       "pair_mask: expected [H or 1][S][T] beside embeddings [S][E], got [][] (2 levels of arrays)"),
    v1(ONE | {"pair_mask": [[[True, True], [True]]]},
       "pair_mask: expected [H or 1][2][2], got rows of unequal length"),
    v1(ONE | {"pair_mask": [[[True, True]] * 2] * 3},
       "pair_mask: expected [2 or 1, 2, 2] (heads, queries, keys), got [3, 2, 2]"),
    v1(TWO | {"pair_mask": [[[[True]]], [[[True]]]]},
       "pair_mask[0]: expected [H or 1][2][2], got [1][1][1]"),
    v1(TWO | {"pair_mask": [[[[True] * 2] * 2], [[[True]]] * 2]},
       "pair_mask: expected the same number of heads for every sequence, got 1 and 2"),
    v1(TWO | {"pair_mask": [[[[True] * 2] * 2], [[[True]]], [[[True]]]]},
       "pair_mask: expected 2 sequences as in embeddings, got 3"),
    v1(ONE | {"head_mask": [1, 1, 1]},
       "head_mask: expected [2] or [1, 2], got [3]"),
    v1(ONE | {"head_mask": [[1], [1, 1]]},
       "head_mask: expected [H] or [B][H], got rows of unequal length"),
    v1(ONE | {"head_mask": [[[1]]]},
       "head_mask: expected [H] or [B][H], got [][][] (3 levels of arrays)"),
    v1(ONE | {"head_mask": [True, True]},
       "head_mask[0]: expected a number, got a boolean"),
    v1(ONE | {"weights": 1},
       'weights: expected true, false or {"heads": [0, 3]}, got a number'),
    v1(ONE | {"weights": {"queries": [0]}},
       "weights: unknown key 'queries'; expected heads"),
    v1(ONE | {"weights": {"heads": 0}},
       "weights.heads: expected an array of heads, got a number"),
    v1(ONE | {"weights": {"heads": []}},
       "weights.heads: expected at least one head, got none"),
    v1(ONE | {"weights": {"heads": [0.5]}},
       "weights.heads[0]: expected heads by number, from 0, got 0.5"),
    v1(ONE | {"weights": {"heads": [2]}},
       "weights: expected heads from 0 to 1, got 2"),
    v1(ONE | {"weights": {"heads": [0, 0]}},
       "weights: expected each head once, got 0 again"),
    v1(ONE | {"heads": [0]},
       "body: unknown key 'heads': say weights {\"heads\": [0, 3]} in JSON, weights=0,3 or heads=0,3 in the query and in the metadata of safetensors, and parameters.heads in /v2; heads are numbered from 0"),
    v1(ONE | {"key_padding_mask": [True, False]},
       "body: unknown key 'key_padding_mask': send attend_mask [B, T], booleans or 0 and 1, one a key: true hides in PyTorch and takes part here, so invert it (~mask)"),
    v1(ONE | {"attn_mask": [[True, False]] * 2},
       "body: unknown key 'attn_mask': send pair_mask [B or 1, H or 1, S, T], booleans or 0 and 1, one a query and key: true hides in PyTorch and takes part here, so invert it (~mask) (scaled_dot_product_attention alone has true = takes part, as here); [S, T] becomes [1, 1, S, T], and [B * H, S, T] becomes [B, H, S, T]; of a float mask that is added to the scores (0 and -inf) send the booleans mask == 0"),
    v1(ONE | {"attention_mask": [1, 0]},
       "body: unknown key 'attention_mask': send attend_mask [B, T] for padding (Hugging Face's 1 = takes part is the same here), or pair_mask [B or 1, H or 1, S, T] for a mask of queries by keys (true = this query may attend to this key); nothing is inverted; of a float mask that is added to the scores (0 and -inf) send the booleans mask == 0"),
    v1(ONE | {"text": "hello"},
       "body: unknown key 'text': text and tokens are not read: a layer is served, not a model; send embeddings [B, S, E], the hidden state that enters the layer"),
    v1(ONE | {"causal": 1},
       "causal: expected true or false, got 1"),
    v1(ONE | {"timeout_s": "1"},
       "timeout_s: expected a number of seconds, got a string"),
    v1(ONE | {"timeout_s": 0},
       "timeout_s: expected seconds above 0 and at most 3600, got 0"),
    v1(ONE | {"priority": 1.5},
       "priority: expected 0 (default) or a whole number from 1 (highest) to 2147483647, got 1.5"),
    v1(CROSS | {"causal": True},
       "causal: expected false for a cross-attention layer, got true"),
    v1({"model": "cross", "embeddings": [[0.5] * 12]},
       "memory: expected [B, T, 6] for a cross-attention layer, got none"),
    v1(CROSS | {"memory": [[0.5] * 5]},
       "memory: expected [T, 6], got [1, 5]"),
    v1(CROSS | {"memory": [[[0.5] * 6]]},
       "memory: expected [T][M] beside embeddings [S][E], got [][][] (3 levels of arrays)"),
    v1({"model": "cross", "embeddings": [[[0.5] * 12]] * 2, "memory": [[[0.5] * 6]]},
       "memory: expected 2 sequences as in embeddings, got 1"),
    v1(CROSS | {"memory": [[0.5] * 6] * 9},
       "memory: at most 8 tokens long, got 9", **LARGE),
    v1(ONE | {"embeddings": [[0.5] * 7 + [float("nan")]]},
       "embeddings: expected finite numbers, got nan at [0, 0, 7]", server="closed"),
    # Positions, value memories, extra keys
    v1(ONE | {"positions": [0, 1]},
       "positions: expected none for a layer without positions, got some"),
    v1(ROTARY | {"positions": [0]},
       "positions: expected 2 numbers, one a token, got 1", **ON_WIDE),
    v1(ROTARY | {"embeddings": [[[0.5] * 16] * 2, [[0.5] * 16]], "positions": [[0, 1], [0, 1]]},
       "positions[1]: expected 1 numbers, one a token, got 2", **ON_WIDE),
    v1(ROTARY | {"positions": [[0, 1]]},
       "positions: expected [S] beside embeddings [S][E], got [][] (2 levels of arrays)", **ON_WIDE),
    v1(ROTARY | {"positions": [0, 0.5]},
       "positions[1]: expected a whole number of INT64, got 0.5", **ON_WIDE),
    v1(ROTARY | {"positions": [0, -1]},
       "positions: expected whole numbers from 0 to 16777215, got -1 at [0, 1]", **ON_WIDE),
    v1(ROTARY | {"positions": [2**24, 0]},
       "positions: expected whole numbers from 0 to 16777215, got 16777216 at [0, 0]", **ON_WIDE),
    v1(LEARNED | {"positions": [8, 9]},
       "positions: expected whole numbers from 0 to 8, the last row of the layer's table, got 9 at [0, 1]", **ON_WIDE),
    v1(LEARNED | {"embeddings": [[0.5] * 8] * 10},
       "embeddings: at most 9 tokens long, as many as the layer's table of positions has rows, got 10", **LARGE, **ON_WIDE),
    v1(ONE | {"position_bias": [[[0.0]]]},
       "body: unknown key 'position_bias': nothing is added to the scores but the position bias of a layer that has one (ALiBi, the buckets of T5), which is part of it and which positions [B, S] move; of a bias of 0 and -inf send pair_mask [B or 1, H or 1, S, T] = bias == 0"),
    v1(ONE | {"alibi_slopes": [0.5, 0.25]},
       "body: unknown key 'alibi_slopes': a position bias is part of the layer (GET /v1/models/{name} shows it); positions [B, S], whole numbers from 0, say between which places it counts the distances"),
    v1(ONE | {"position_ids": [0, 1]},
       "body: unknown key 'position_ids': send positions [B, S], whole numbers from 0, to a layer that has positions (GET /v1/models/{name} lists its inputs); what a model adds to embeddings before the layer is added before the call"),
    v1(CROSS | {"value_memory": [[0.5] * 6]},
       "value_memory: expected none for a layer whose keys and values have one source, got one"),
    v1(VALUES | {"value_memory": None},
       "value_memory: expected [B, T, 5], the source of values beside memory, got none", **ON_WIDE),
    v1(VALUES | {"value_memory": [[0.5] * 6]},
       "value_memory: expected [1, 5], got [1, 6]", **ON_WIDE),
    v1(VALUES | {"value_memory": [[0.5] * 5] * 2},
       "value_memory: expected 1 tokens, one a key, got 2", **ON_WIDE),
    v1(VALUES | {"causal": True},
       "causal: expected false for a cross-attention layer, got true", **ON_WIDE),
    v1({"model": "extra", "embeddings": [[[0.5] * 8] * 8] * 2, "weights": True},
       "answer: at most 1600 bytes, this call asks for 1792, counted as FP32; send fewer sequences at once, or ask for fewer heads' weights", **LARGE, **ON_WIDE),
    st(X | {"positions": np.arange(3)[None]},
       "positions: expected [1, 2], got [1, 3]", query="model=learned", **ON_WIDE),
    st(X | {"positions": np.zeros((1, 2), np.float32)},
       "positions: expected I64 (also read: I32), got 'F32'", query="model=learned", **ON_WIDE),
    st(PACKED | {"positions": np.arange(2)},
       "positions: expected [3], the sum of the lengths, got [2]", query="model=learned", **ON_WIDE),
    v2({"inputs": [*tensor(), {"name": "positions", "shape": [1, 2], "datatype": "FP32", "data": [0, 1]}]},
       "inputs[1].datatype: positions: expected INT64 (also read: INT32), got 'FP32'", model="learned", **ON_WIDE),
    v2({"inputs": [*tensor(), {"name": "positions", "shape": [1, 2], "datatype": "INT64", "data": [0, 1]}]},
       "positions: expected none for a layer without positions, got some"),
    v2({"outputs": [{"name": "extra_weights"}]},
       "outputs[0]: expected output, got 'extra_weights', an output of the model <name>-weights", model="extra", **ON_WIDE),
    v2({"outputs": [{"name": "extra_weights"}]},
       "outputs[0]: expected output or attention_weights, got 'extra_weights': the layer has no extra keys", model="tiny-weights"),
    # Its query and headers
    v1(ONE,
       "query: weights: expected true, false or heads such as 0,3, got 'yes'", query="weights=yes"),
    v1(ONE,
       "query: weights: expected true, false or heads, got '1', which may mean either; say weights=true, or heads=1 for one head", query="weights=1"),
    v1(ONE,
       "query: weights: expected true, false or heads such as 0,3, got '0,'", query="weights=0,"),
    v1(ONE,
       "query: heads: expected heads by number, from 0, such as 0,3, got 'first'", query="heads=first"),
    v1(ONE,
       "query: heads: expected weights=true or the same heads beside it, got others", query="weights=false&heads=0"),
    v1(ONE,
       "query: weights: expected once, got it twice", query="weights=true&weights=true"),
    v1(ONE,
       "query: unknown key 'wieghts'; did you mean weights? expected model, version, weights, causal, timeout_s, priority, heads", query="wieghts=true"),
    v1(ONE,
       "query: unknown key 'attend_mask': it is a tensor: send it in the body of /v1/attention, or as one of the inputs of /v2/models/{name}/infer", query="attend_mask=1"),
    v1(ONE,
       "query: causal: expected true or false, got 'yes'", query="causal=yes"),
    v1(ONE,
       "query: priority: expected a number, got 'high'", query="priority=high"),
    v1(ONE,
       "query: timeout_s: expected a finite number, got 'inf'", query="timeout_s=inf"),
    v1(ONE,
       'model: expected the same in body and query, got "tiny" and "mha"', query="model=mha"),
    v1(ONE | {"weights": {"heads": [0]}},
       'weights: expected the same in body and query, got {"heads": [0]} and {"heads": [1]}', query="heads=1"),
    v1(ONE,
       "header X-Request-Timeout-S: expected a number, got 'soon'", headers={"X-Request-Timeout-S": "soon"}),
    v1(ONE,
       "header X-Request-Timeout-S: expected seconds above 0 and at most 3600, got 0.0", headers={"X-Request-Timeout-S": "0"}),
    v1(ONE,
       "header Content-Type: expected application/json for JSON or application/x-safetensors for safetensors, got 'application/octet-stream'", headers={"Content-Type": "application/octet-stream"}, **MEDIA_TYPE),
    v1(ONE,
       "header Accept: expected application/json or application/x-safetensors, got 'text/html'", headers={"Accept": "text/html"}, status=406, code="not_acceptable"),
    v1(ONE,
       "header Content-Encoding: expected gzip, deflate or none, got 'br'", headers={"Content-Encoding": "br"}, **MEDIA_TYPE),
    v1(b"no",
       "body: expected gzip data, got other bytes", headers={"Content-Encoding": "gzip"}),
    v1(gzip.compress(b"no")[:-1],
       "body: expected whole gzip data, got its beginning", headers={"Content-Encoding": "gzip"}),
    v1(gzip.compress(b"") * 5000,
       "body: expected at most 4096 gzip members, got more", headers={"Content-Encoding": "gzip"}, server="closed"),
    v1(zlib.compress(b"no") + b"x",
       "body: expected nothing after the deflate data, got more", headers={"Content-Encoding": "deflate"}),
    v1(gzip.compress(bytes(40_000)),
       "body: at most 30000 bytes decompressed, got more", headers={"Content-Encoding": "gzip"}, **LARGE),
    v1(bytes(30_000),
       "body: at most 20000 bytes, got 30000", **LARGE),
    # safetensors
    st({},
       "body: expected safetensors: a header of 120 bytes, got 0", content=b"x"),
    st({},
       "body: at most 11520 bytes of safetensors header for 13 tensors, got 12000", content=named(0, 12_000), **LARGE),
    st({},
       "body: at most 13 tensors in safetensors, got 14", content=named(14), **LARGE),
    st({},
       "body: at most 13 tensors in safetensors, got 99", content=named(99), **LARGE),
    st({},
       "body: expected safetensors, got JSON: send Content-Type: application/json with it", content=b'{"embeddings": [[1]]}'),
    st({"x": X["embeddings"]},
       "body: unknown key 'x': send embeddings [B, S, E]: the numbers that enter the attention layer (a hidden state)"),
    st({"lengths": np.array([1])},
       "embeddings: expected a tensor of that name, got 'lengths'"),
    st({"attend_mask": np.ones((1, 2), bool)},
       "embeddings: expected a tensor of that name, got 'attend_mask'"),
    st({**X, "embeddings": np.zeros((1, 2, 8), bool)},
       "embeddings: expected F32 (also read: F16, BF16, F64, I8, I16, I32, I64, U8, U16, U32, U64), got 'BOOL'"),
    st({},
       "embeddings: expected F32 (also read: F16, BF16, F64, I8, I16, I32, I64, U8, U16, U32, U64), got 'F8_E4M3'", content=float8("embeddings")),
    st({"embeddings": np.zeros((1, 0, 8), np.float32)},
       "embeddings: expected at least one sequence of at least one token, got 1 of 0"),
    st({"embeddings": np.full((1, 2, 8), 2**24 + 1)},
       "embeddings: expected a whole number that FP32 holds exactly, got 16777217 at [0, 0, 0]"),
    st({"embeddings": np.full((1, 2, 8), 1e39)},
       "embeddings: expected a number within FP32 (up to 3.4e38), got 1e+39 at [0, 0, 0]"),
    st({**X, "causal": np.ones(1, bool)},
       "body: unknown key 'causal': it is an option: send it in the query of /v1/attention, in the metadata of safetensors, beside embeddings in JSON, or in the parameters of /v2"),
    st({**X, "attend_mask": np.ones(3, bool)},
       "attend_mask: expected [1, 2], got [3]"),
    st({**X, "attend_mask": np.array([[1, 2]])},
       "attend_mask: expected 0 or 1, got 2 at [0, 1]"),
    st({**X, "attend_mask": np.zeros((1, 2), np.float32)},
       "attend_mask: expected BOOL or whole numbers 0 and 1 (I8, I16, I32, I64, U8, U16, U32, U64), got 'F32'; of a float mask that is added to the scores (0 and -inf) send the booleans mask == 0"),
    st({**X, "head_mask": np.ones((2, 2), np.float32)},
       "head_mask: expected [2] or [1, 2], got [2, 2]"),
    st({**X, "pair_mask": np.ones((1, 3, 2, 2), bool)},
       "pair_mask: expected [1, 2 or 1, 2, 2] (batch, heads, queries, keys), got [1, 3, 2, 2]"),
    st({**X, "memory_lengths": np.array([1])},
       "lengths: expected beside memory_lengths, got none"),
    st({**X, "pair_mask.0": np.ones((1, 2, 2), bool)},
       "lengths: expected beside pair_mask.0, got none"),
    st({"embeddings": np.array(2**24 + 1)},
       "embeddings: expected a whole number that FP32 holds exactly, got 16777217 at []"),
    st(PACKED | {"lengths": np.array([1, 0])},
       "lengths[1]: expected at least one length, each at least 1, got 0"),
    st(PACKED | {"lengths": np.array([1.0, 2.0])},
       "lengths: expected whole numbers [B], such as I64, got F64 [2]"),
    st(PACKED | {"lengths": np.array([1, 1])},
       "embeddings: expected [2, E], the sum of the lengths first, got [3, 8]"),
    st(PACKED | {"lengths": np.ones(5, np.int64)},
       "lengths: at most 4 sequences, got 5; send fewer at once", **LARGE),
    st(PACKED | {"attend_mask": np.ones(2, bool)},
       "attend_mask: expected [3], the sum of the lengths, got [2]"),
    st(PACKED | {"pair_mask": np.ones((1, 1, 2, 2), bool)},
       "pair_mask: expected pair_mask.0, pair_mask.1 … beside lengths, one a sequence, got one for all"),
    st(PACKED | {"pair_mask.0": np.ones((1, 1, 1), bool)},
       "pair_mask.1: expected one mask for each sequence, got none"),
    st(PACKED | {f"pair_mask.{i}": np.ones((1, 1, 1), bool) for i in (0, 1)},
       "pair_mask.1: expected [1, 2, 2], got [1, 1, 1]"),
    st({"embeddings": np.zeros((8, 8), np.float32), "lengths": np.array([7, 1]), "pair_mask.0": np.ones((20, 7, 7), bool), "pair_mask.1": np.ones((20, 1, 1), bool)},
       "pair_mask: at most 1800 bytes with its padding, got 1960", **LARGE),
    st(PACKED_CROSS | {"memory": np.zeros((2, 6), np.float32)},
       "memory_lengths: expected beside lengths and memory, got none", query="model=cross"),
    st(PACKED_CROSS | {"memory": np.zeros((2, 6), np.float32), "memory_lengths": np.array([1, 1])},
       "memory_lengths: expected 1 lengths, got 2", query="model=cross"),
    st({"embeddings": np.zeros((1, 2, 12), np.float32), "memory": np.zeros((1, 0, 6), np.float32)},
       "memory: expected at least one key, got none", query="model=cross"),
    st(X,
       "metadata: unknown key 'note'; expected model, version, weights, causal, timeout_s, priority, heads", metadata={"note": "mine"}),
    st(X,
       "metadata: weights: expected true, false or heads such as 0,3, got 'yes'", metadata={"weights": "yes"}),
    st(X,
       'weights: expected the same in metadata and query, got {"heads": [0]} and {"heads": [1]}', metadata={"heads": "0"}, query="model=tiny&heads=1"),
    # The protocol
    v2(b"{}",
       "inputs: expected an array of tensors, got none"),
    v2({"inputs": None},
       "inputs: expected an array, got null"),
    v2({"inputs": []},
       "inputs: expected one named embeddings, got none"),
    v2({"inputs": [1]},
       "inputs[0]: expected an object, got a number"),
    v2({"embeddings": [[1]]},
       "body: unknown key 'embeddings': it is a tensor: send it in the body of /v1/attention, or as one of the inputs of /v2/models/{name}/infer"),
    v2({"id": 7},
       "id: expected a string, got a number"),
    v2({"id": "x" * 70_000},
       "id: expected at most 65536 characters, got 70000", server="closed"),
    v2({"id": "\ud800"},
       "id: expected Unicode characters, got a lone surrogate"),
    v2({"parameters": 1},
       "parameters: expected an object, got a number"),
    v2({"parameters": {"causal": 1}},
       "causal: expected true or false, got 1"),
    v2({"parameters": {"weights": True}},
       "parameters: unknown key 'weights': ask for attention weights with weights true at /v1/attention, or of the model <name>-weights in /v2; they come for each head, not averaged"),
    v2({"parameters": {"timeout_s": 1}},
       "parameters: unknown key 'timeout_s': it is an option of /v1/attention; in /v2 say parameters.timeout, in microseconds, or X-Request-Timeout-S"),
    v2({"parameters": {"is_causal": True}},
       "parameters: unknown key 'is_causal': say causal true or false: true = query s attends to key t only if t <= s"),
    v2({"parameters": {"position_ids": [0, 1]}},
       "parameters: unknown key 'position_ids': send positions [B, S], whole numbers from 0, to a layer that has positions (GET /v1/models/{name} lists its inputs); what a model adds to embeddings before the layer is added before the call"),
    v2({"parameters": {"valid_lens": [1]}},
       "parameters: unknown key 'valid_lens': sequences of a batch may differ in length: in JSON each has its own; in safetensors they lie one after the other beside lengths [B]; in /v2 pad them, and hide the padding with attend_mask [B, T]"),
    v2({"parameters": {"timeout": 0.5}},
       "parameters.timeout: expected whole microseconds up to 3600000000, got 0.5"),
    v2({"parameters": {"binary_data_output": 1}},
       "parameters.binary_data_output: expected true or false, got a number"),
    v2({"parameters": {"sequence_id": 7}},
       "parameters.sequence_id: expected none, got 7; calls are independent here"),
    v2({"parameters": {"triton_x": 1}},
       "parameters: expected no name beginning with triton_, which is reserved, got 'triton_x'"),
    v2({"parameters": {"heads": [0]}},
       "parameters.heads: expected none, got some: heads are chosen from the attention_weights of the model <name>-weights; this one has none"),
    v2({"parameters": {"heads": 1}},
       'parameters.heads: expected "0,3" or [0, 3], got 1', model="tiny-weights"),
    v2({"parameters": {"heads": "0;1"}},
       "parameters.heads: expected heads by number, from 0, such as 0,3, got '0;1'", model="tiny-weights"),
    v2({"inputs": tensor(name=1)},
       "inputs[0].name: expected a string, got a number"),
    v2({"inputs": tensor(name="x1")},
       "inputs[0]: unknown key 'x1'; expected embeddings, memory, value_memory, positions, attend_mask, pair_mask, head_mask"),
    v2({"inputs": tensor(dtype="FP32")},
       "inputs[0]: unknown key 'dtype'; did you mean datatype? expected name, shape, datatype, parameters, data"),
    v2({"inputs": tensor() * 2},
       "inputs[1]: expected each input once, got embeddings twice"),
    v2({"inputs": tensor(shape="-1")},
       "inputs[0].shape: expected at most 5 axes, each a whole number from 1 to 2147483647, got a string"),
    v2({"inputs": tensor(shape=[1] * 6)},
       "inputs[0].shape: expected at most 5 axes, each a whole number from 1 to 2147483647, got 6 axes"),
    v2({"inputs": tensor(shape=[1, -2, 8])},
       "inputs[0].shape: expected at most 5 axes, each a whole number from 1 to 2147483647, got -2"),
    v2({"inputs": tensor(shape=[1, 10**12])},
       "inputs[0].shape: expected at most 5 axes, each a whole number from 1 to 2147483647, got 1000000000000"),
    v2({"inputs": tensor(datatype=1)},
       "inputs[0].datatype: embeddings: expected FP32, got a number"),
    v2({"inputs": tensor(datatype="BYTES")},
       "inputs[0].datatype: embeddings: expected FP32 (also read: FP16, BF16, FP64, INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64), got 'BYTES'"),
    v2({"inputs": tensor(parameters=1)},
       "inputs[0].parameters: expected an object, got a number"),
    v2({"inputs": tensor(parameters={"binary_data_size": 64})},
       "embeddings: expected one of data, parameters.binary_data_size and parameters.shared_memory_region, got 2"),
    v2({"inputs": tensor(data=[0.5])},
       "embeddings: expected data of shape [1, 2, 8] or 16 flat values, got 1 flat values"),
    v2({"inputs": [*tensor(), {"name": "attend_mask", "shape": [1, 2], "datatype": "FP32", "data": [1, 1]}]},
       "inputs[1].datatype: attend_mask: expected BOOL or whole numbers 0 and 1 (INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64), got 'FP32'; of a float mask that is added to the scores (0 and -inf) send the booleans mask == 0"),
    v2({"inputs": [{"name": "attend_mask", "shape": [1, 2], "datatype": "BOOL", "data": [1, 1]}]},
       "inputs: expected one named embeddings, got none"),
    v2({"inputs": tensor(parameters={"binary_data_size": 63}, data=None)},
       "embeddings: binary_data_size: expected 64 bytes for FP32 [1, 2, 8], got 63"),
    v2({"inputs": tensor(parameters={"binary_data_size": 64}, data=None)},
       "embeddings: expected 64 bytes of binary data, got 0"),
    v2({"inputs": tensor()},
       "body: expected 0 bytes of binary tensors after the JSON header, got 4", more=b"1234"),
    v2({"inputs": tensor(parameters={"shared_memory_region": 1}, data=None)},
       "inputs[0].parameters.shared_memory_region: expected a string, got a number"),
    v2({"inputs": tensor(parameters={"shared_memory_region": "r"}, data=None)},
       "inputs[0].parameters.shared_memory_byte_size: expected a whole number of bytes from 1, got null"),
    v2({"inputs": tensor(parameters=slot("r", 64), data=None)},
       "shared memory region 'r': no region of that name is registered; register it first", **NOT_FOUND),
    v2({"inputs": tensor(parameters=slot("r", 64), data=None)},
       "system shared memory: switched off; HEADWISE_SHARED_MEMORY=true switches it on", server="closed", **DISABLED),
    v2({"inputs": tensor(parameters=slot("small", 64), data=None)},
       "shared memory region 'small': expected shared_memory_offset and shared_memory_byte_size within its 8 bytes, got 0 and 64"),
    v2({"outputs": [{"name": "output", "parameters": slot("small", 8)}]},
       "output: expected a shared_memory_byte_size of at least 64 for FP32 [1, 2, 8], got 8"),
    v2({"inputs": tensor(shape=[1, 1000, 8], parameters=slot("large", 32000), data=None)},
       "inputs: at most 20000 bytes in shared memory, got 32000", **LARGE),
    v2({"outputs": 1},
       "outputs: expected an array, got a number"),
    v2({"outputs": [{"name": "x1"}]},
       "outputs[0]: expected output, got 'x1'"),
    v2({"outputs": [{"name": "attention_weights"}]},
       "outputs[0]: expected output, got 'attention_weights', an output of the model <name>-weights"),
    v2({"outputs": [{"name": "output"}] * 2},
       "outputs[1]: expected each output once, got output twice"),
    v2({"outputs": [{"name": "output", "parameters": {"classification": 3}}]},
       "outputs[0].parameters.classification: expected none, got one: not offered"),
    v2({},
       "query: unknown key 'weights': ask for attention weights with weights true at /v1/attention, or of the model <name>-weights in /v2; they come for each head, not averaged", query="weights=true"),
    v2({},
       "query: unknown key 'causal': it is an option: send it in the query of /v1/attention, in the metadata of safetensors, beside embeddings in JSON, or in the parameters of /v2", query="causal=true"),
    v2({},
       "header Inference-Header-Content-Length: expected a number of bytes, got 'abc'", header_length="abc"),
    v2({},
       "header Inference-Header-Content-Length: expected at least 1, got 0: tensors without JSON before them cannot say which of two free axes is which", header_length="0"),
    v2({},
       "header Inference-Header-Content-Length: expected at most the body's 166 bytes, got 99999", header_length="99999"),
    v2({},
       "model: expected one of cross, mha, tiny, got 'nope'", model="nope", **UNKNOWN),
    v2({},
       "model tiny: version 1 is served, got '7'", model="tiny/versions/7", **UNKNOWN),
    v2(file_of(X),
       "body: expected JSON, got safetensors: send it to /v1/attention with Content-Type: application/x-safetensors"),
    # What carries no tensors
    call("/docs/assets/none.js", b"",
       "path: no such endpoint; / lists them", method="GET", **NOT_FOUND),
    call("/v1/atention", {},
       "path: no such endpoint, got '/v1/atention'; expected POST /v1/attention, POST /v2/models/{name}/infer, or another that /docs lists", **NOT_FOUND),
    call("/v1/attention", {},
       "method: expected POST, got GET", method="GET", **METHOD),
    call("/v2/logging", {},
       "method: expected GET, HEAD, POST, got PUT", method="PUT", **METHOD),
    call("/v2/health/live", {},
       "method: expected GET, HEAD, got POST", **METHOD),
    call("/v2/repository/models/tiny/load", {},
       "load, unload: switched off; HEADWISE_MODEL_CONTROL=true switches it on", server="closed", **DISABLED),
    call("/v2/repository/models/tiny/load", {"parameters": 1},
       "parameters: expected an object, got a number"),
    call("/v2/repository/models/tiny/load", {"parameters": {"config": "{}"}},
       "parameters: 'config' is not offered: an artifact is served as published"),
    call("/v2/repository/models/tiny/load", b'{"parameters":{"a":1,"a":2}}',
       "body: expected each key of an object once, got 'a' twice"),
    call("/v2/repository/models/nope/load", {},
       "model: nothing in the repository is named 'nope'", **UNKNOWN),
    call("/v2/repository/index", {"ready": 1},
       "ready: expected true or false, got a number"),
    call("/v2/repository/index", b"{",
       "body: expected JSON, got a mistake at character 1: Expecting property name enclosed in double quotes"),
    call("/v2/logging", {"level": "info"},
       "logging: unknown key 'level'; expected log_file, log_info, log_warning, log_error, log_verbose_level, log_format"),
    call("/v2/logging", {"log_info": 1},
       "log_info: expected true or false, got a number"),
    call("/v2/logging", {"log_file": "x"},
       "log_file: expected '', got another; the operator sets it"),
    call("/v2/logging", {"log_error": False},
       "log_error: expected true, got false; errors are always logged"),
    call("/v2/logging", {"log_info": True, "log_warning": False},
       "logging: expected every level from the least severe one up, got one without the next; log_verbose_level contains log_info, which contains log_warning"),
    call("/v2/logging", {"log_verbose_level": "1"},
       "log_verbose_level: expected a whole number, got a string"),
    call("/v2/logging", {"log_verbose_level": -1},
       "log_verbose_level: expected 0 or more, got -1"),
    call("/v2/trace/setting", {"trace_rate": "1"},
       'trace_rate: expected "1000", got another: traces go by OpenTelemetry (HEADWISE_TRACING)'),
    call("/v2/cudasharedmemory/region/r/status", b"",
       "region: expected none, got 'r'", method="GET", **NOT_FOUND),
    call("/v2/cudasharedmemory/region/r/register", {},
       "cudasharedmemory: not offered; expected tensors in the body, got a region"),
    call("/v2/systemsharedmemory/region/r/register", {},
       "system shared memory: switched off; HEADWISE_SHARED_MEMORY=true switches it on", server="closed", **DISABLED),
    register({"key": 1},
       "key: expected / and a name of letters, digits, dots, underscores and hyphens, got a number"),
    register({"key": "/../x"},
       "key: expected / and a name of letters, digits, dots, underscores and hyphens, got '/../x'"),
    register({"key": "/sem.x"},
       "key: names from /headwise, /sem., /triton_python_backend on are reserved, got '/sem.x'"),
    register({"key": "/no-such-segment"},
       "key: expected that of a shared memory segment; none has it"),
    register({"byte_size": "1"},
       "byte_size: expected a whole number of bytes from 1, got a string"),
    register({"byte_size": 2**20},
       "byte_size: expected offset and byte_size within the segment's 32000 bytes, got 0 and 1048576"),
    register({"size": 1},
       "body: unknown key 'size'; did you mean byte_size? expected key, offset, byte_size"),
    register({},
       "shared memory region 'small': already in manager; unregister it first", region="small"),
    register({},
       "shared memory region 'rrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrr': expected a name of at most 256 characters, got 257", region="r" * 257),
]
