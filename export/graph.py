"""
Write a layer as an ONNX graph that answers every kind of call.

What lies between the projections is one `If`: without masks and without weights wanted it is the
bare `Attention` operator, or, where there are many keys, onnxruntime's `MultiHeadAttention`,
which never holds all weights at once; else it takes the masks and gives the weights.  There is one
graph and one copy of the weights, and a call without masks and weights does not pay for them
(bench/NOTES.md, "one graph or several" and "long sequences").

Letters as in `export.attention`.
"""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from export.layer_spec import LayerSpec
from export.operators import Operators
from export.weights_file import group_name, groups, write_weights
from service.contract import (
    EMBEDDINGS,
    HEAD_MASK,
    LAYER_METADATA,
    MEMORY,
    PAIR_MASK,
    PLAIN,
    POSITIONS,
    VALUE_MEMORY,
    WEIGHTS_FILE,
    GraphTensor,
    graph_inputs,
    graph_outputs,
)
from service.layer_config import Projection, Rotary

OPSET = 23
"""The first with the operators `Attention`, `RotaryEmbedding` and `RMSNormalization`."""

IR_VERSION = 11
"""The first that has this opset."""

LONG = 384
"""Keys from which the runtime's operator is used: as fast here, and faster the more there are."""

_RUNTIME = "com.microsoft"
"""onnxruntime's operators: https://onnxruntime.ai/docs/reference/operators/ContribOperators.html"""

_DTYPES = {
    "float32": ir.DataType.FLOAT,
    "bool": ir.DataType.BOOL,
    "int64": ir.DataType.INT64,
}


def write_graph(spec: LayerSpec, path: Path) -> None:
    """
    Write the layer's graph to `path`, and its weights beside it in one file.

    Inputs, outputs and their axes are those of `service.contract`.  The weights do not pass
    through protobuf, which takes no message of more than 2 GiB.
    """
    config = spec.config
    with path.with_name(WEIGHTS_FILE).open("wb") as file:
        weights = write_weights(spec, file)
    inputs = {tensor.name: _value(tensor) for tensor in graph_inputs(config)}
    layer = _Layer(spec, weights, inputs)
    outputs = layer.outputs()
    for value, tensor in zip(outputs, graph_outputs(config), strict=True):
        value.name, value.shape = tensor.name, ir.Shape(tensor.axes)
        value.dtype = _DTYPES[tensor.dtype]
    graph = ir.Graph(
        list(inputs.values()),
        outputs,
        nodes=layer.op.nodes,
        initializers=layer.op.initializers,
        opset_imports={"": OPSET, _RUNTIME: 1},
        name="layer",
    )
    model = ir.Model(
        graph,
        ir_version=IR_VERSION,
        producer_name="headwise",
        metadata_props={LAYER_METADATA: config.to_json()},
    )
    path.write_bytes(ir.to_proto(model).SerializeToString())
    onnx.checker.check_model(path, full_check=True)


def _value(tensor: GraphTensor) -> ir.Value:
    return ir.val(tensor.name, dtype=_DTYPES[tensor.dtype], shape=ir.Shape(tensor.axes))


class _Layer:
    """The nodes of one layer."""

    def __init__(
        self,
        spec: LayerSpec,
        weights: dict[str, ir.ExternalTensor],
        inputs: dict[str, ir.Value],
    ) -> None:
        self.op = Operators()
        self._config = spec.config
        self._weights = {name: self.op.initializer(tensor) for name, tensor in weights.items()}
        self._inputs = inputs

    def outputs(self) -> list[ir.Value]:
        """Return output, weights and, where there are extra keys, their weights."""
        q, k, v = self._projections()
        q, k = self._normalised("query", q), self._normalised("key", k)
        if self._config.rotary is not None:
            q, k = self._turned(self._config.rotary, q, k)
        if self._config.extra_keys:
            k, v = self._with_extra("key", k), self._with_extra("value", v)
        bias = self._logit_bias(q)
        branches = {
            "then_branch": self._plain(q, k, v, bias),
            "else_branch": self._full(q, k, v, bias),
        }
        count = 3 if self._config.extra_keys else 2
        concat, *weights = self.op.op_multi_out(
            "If", [self._inputs[PLAIN]], branches, num_outputs=count
        )
        return [self._projected(("output",), concat), *weights]

    def _projections(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Return queries [B, S, H*D], keys and values [B, T, K*D]."""
        config = self._config
        sources = [self._embeddings()]
        sources += [self._inputs[name] for name in (MEMORY, VALUE_MEMORY) if name in self._inputs]
        width = {"query": config.num_heads * config.head_dim}
        parts: list[ir.Value] = []
        for group, source in zip(groups(config), sources, strict=False):
            projected = self._projected(group, source)
            if len(group) == 1:
                parts.append(projected)
                continue
            widths = [width.get(name, config.num_kv_heads * config.head_dim) for name in group]
            sizes = self.op.constant(widths)
            parts += self.op.op_multi_out(
                "Split", [projected, sizes], {"axis": -1}, num_outputs=len(group)
            )
        q, k, v = parts
        return q, k, v

    def _projected(self, group: tuple[Projection, ...], x: ir.Value) -> ir.Value:
        name = group_name(group)
        product = self.op("MatMul", x, self._weights[f"{name}.weight"])
        bias = self._weights.get(f"{name}.bias")
        return product if bias is None else self.op("Add", product, bias)

    def _embeddings(self) -> ir.Value:
        """Return the embeddings plus what `positional` adds to them, [B, S, E]."""
        op, embeddings = self.op, self._inputs[EMBEDDINGS]
        if self._config.positional is None:
            return embeddings
        positions = self._inputs[POSITIONS]
        if self._config.positional == "learned":
            return op("Add", embeddings, op("Gather", self._weights["positional.table"], positions))
        width = self._config.embed_dim
        frequencies = 10000.0 ** (-2 * (np.arange(width) // 2) / width)
        angles = self._angles(op.constant(frequencies, np.float32))
        is_even = op.constant(np.arange(width) % 2 == 0, np.bool_)
        return op("Add", embeddings, op("Where", is_even, op("Sin", angles), op("Cos", angles)))

    def _angles(self, frequencies: ir.Value) -> ir.Value:
        """Return position times frequency, [B or 1, S, number of frequencies]."""
        positions = self.op("Cast", self._inputs[POSITIONS], to=ir.DataType.FLOAT)
        column = self.op("Unsqueeze", positions, self.op.constant([-1]))
        return self.op("Mul", column, frequencies)

    def _normalised(self, name: str, x: ir.Value) -> ir.Value:
        """Return queries or keys [B, L, heads*D] after the configured norm, if any."""
        norm, op = self._config.norm, self.op
        if norm is None:
            return x
        per_head = norm.span == "head"
        if per_head:
            x = op("Reshape", x, op.constant([0, 0, -1, self._config.head_dim]))
        weight = self._weights[f"{name}_norm.weight"]
        if norm.kind == "rms":
            x = op("RMSNormalization", x, weight, axis=-1, epsilon=norm.epsilon)
        else:
            bias = self._weights[f"{name}_norm.bias"]
            x = op("LayerNormalization", x, weight, bias, axis=-1, epsilon=norm.epsilon)
        return op("Reshape", x, op.constant([0, 0, -1])) if per_head else x

    def _turned(self, rotary: Rotary, q: ir.Value, k: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return queries and keys turned by their positions."""
        op, config = self.op, self._config
        angles = self._angles(self._frequencies(rotary))
        # The operator wants a row for every sequence, also where all are alike.
        shape = op.join(op.sizes(q, 0, 2), op.constant([rotary.dims // 2]), axis=0)
        tables = []
        for function in ("Cos", "Sin"):
            table = op(function, angles)
            if rotary.magnitude != 1:
                table = op("Mul", table, op.constant(rotary.magnitude, np.float32))
            tables.append(op("Expand", table, shape))
        options = {
            "interleaved": int(rotary.interleaved),
            "rotary_embedding_dim": rotary.dims % config.head_dim,  # 0 = all
        }
        return (
            op("RotaryEmbedding", q, *tables, num_heads=config.num_heads, **options),
            op("RotaryEmbedding", k, *tables, num_heads=config.num_kv_heads, **options),
        )

    def _frequencies(self, rotary: Rotary) -> ir.Value:
        """Return radians a position, [dims/2], or [B or 1, 1, dims/2] by each one's length."""
        op, trained = self.op, self._weights["rotary.frequencies"]
        if not rotary.depends_on_length:
            return trained
        last = op("ReduceMax", self._inputs[POSITIONS], op.constant([1]), keepdims=1)
        length = op("Unsqueeze", op("Add", last, op.constant(1)), op.constant([-1]))
        is_longer = op("Greater", length, op.constant(rotary.original_length))
        if rotary.scaling == "longrope":
            return op("Where", is_longer, self._weights["rotary.long_frequencies"], trained)
        # In FP64, so that every runtime rounds to the same FP32 numbers.
        double = np.float64
        ratio = op.constant(rotary.factor / (rotary.original_length or 1), double)
        scaled = op("Mul", op("Cast", length, to=ir.DataType.DOUBLE), ratio)
        stretch = op("Sub", scaled, op.constant(rotary.factor - 1, double))
        stretch = op("Max", stretch, op.constant(1, double))
        power = op.constant(rotary.dims / (rotary.dims - 2), double)
        base = op("Mul", op("Pow", stretch, power), op.constant(rotary.base, double))
        exponents = op.constant(-np.arange(0, rotary.dims, 2) / rotary.dims, double)
        frequencies = op("Cast", op("Pow", base, exponents), to=ir.DataType.FLOAT)
        return op("Where", is_longer, frequencies, trained)

    def _with_extra(self, name: str, x: ir.Value) -> ir.Value:
        """Return keys or values with those of the extra keys behind them, [B, T + n, K*D]."""
        op, width = self.op, self._config.num_kv_heads * self._config.head_dim
        rows = []
        for kind in self._config.extra_keys:
            row = self._weights[f"extra.{name}"] if kind == "learned" else None
            rows.append(op.constant(np.zeros(width), np.float32) if row is None else row)
        extra = op("Reshape", op.join(*rows, axis=0), op.constant([1, -1, width]))
        shape = op.join(op.sizes(x, 0, 1), op.constant([1, 1]), axis=0)
        return op.join(x, op("Expand", extra, shape), axis=1)

    def _logit_bias(self, q: ir.Value) -> ir.Value | None:
        """Return what is added to the logits, [B or 1, H, S, T + n]; None = nothing."""
        op, config = self.op, self._config
        bias = self._distance_bias()
        if not config.extra_keys or (bias is None and "sink" not in config.extra_keys):
            return bias
        sinks = self._weights.get("extra.sinks")
        zeros = op.constant(np.zeros(config.num_heads), np.float32)
        columns = [
            sinks if kind == "sink" and sinks is not None else zeros for kind in config.extra_keys
        ]
        extra = op("Reshape", op.join(*columns, axis=0), op.constant([1, -1, config.num_heads, 1]))
        extra = op("Transpose", extra, perm=[0, 2, 3, 1])  # [1, H, 1, n]
        if bias is None:
            ahead = op.join(op.constant([1, config.num_heads]), op.sizes(q, 1, 2), axis=0)
            bias = op("ConstantOfShape", op.join(ahead, self._key_length(op), axis=0))
        shape = op.join(op.sizes(bias, 0, 3), op.constant([1]), axis=0)
        return op.join(bias, op("Expand", extra, shape), axis=-1)

    def _key_length(self, op: Operators) -> ir.Value:
        """Return T, a vector of one."""
        return op.sizes(self._inputs.get(MEMORY, self._inputs[EMBEDDINGS]), 1, 2)

    def _distance_bias(self) -> ir.Value | None:
        """Return what distances add to the logits, [B or 1, H, S, T]; None = nothing."""
        op, bias = self.op, self._config.position_bias
        if bias is None:
            return None
        positions = self._inputs[POSITIONS]
        queries = op("Unsqueeze", positions, op.constant([2]))
        distances = op("Sub", op("Unsqueeze", positions, op.constant([1])), queries)
        if bias.kind == "alibi":
            slopes = op("Reshape", self._weights["position_bias.slopes"], op.constant([-1, 1, 1]))
            steps = op("Cast", op("Unsqueeze", distances, op.constant([1])), to=ir.DataType.FLOAT)
            return op("Mul", steps, slopes)
        clipped = op("Clip", distances, op.constant(-bias.reach), op.constant(bias.reach))
        rows = op("Add", clipped, op.constant(bias.reach))
        found = op("Gather", self._weights["position_bias.table"], rows)  # [B or 1, S, T, H]
        return op("Transpose", found, perm=[0, 3, 1, 2])

    def _plain(self, q: ir.Value, k: ir.Value, v: ir.Value, bias: ir.Value | None) -> ir.Graph:
        """Return the branch without masks and without weights; causal as the layer is."""
        config, op = self._config, Operators()
        mask, options = bias, self._options()
        if config.causal and config.extra_keys:
            # `is_causal` would hide the extra keys.
            mask = self._masked(op, self._causal_mask(op, q), bias)
        elif config.causal:
            options["is_causal"] = 1
        short = Operators() if self._has_runtime_operator() else op
        concat = short("Attention", q, k, v, mask, **options)
        if short is not op:
            long = Operators()
            attributes = {"num_heads": config.num_heads, "scale": config.logit_scale}
            fused = long.op("MultiHeadAttention", [q, k, v], attributes, domain=_RUNTIME)
            is_long = op("GreaterOrEqual", op.sizes(k, 1, 2), op.constant([LONG]))
            concat = op(
                "If",
                is_long,
                then_branch=_branch("long", long, [fused]),
                else_branch=_branch("short", short, [concat]),
            )
        # Never fetched; a constant shape here would be taken for that of the real weights.
        nothing = op("ConstantOfShape", op("Shape", self._inputs[PAIR_MASK]))
        extra = [op("Identity", nothing)] if config.extra_keys else []
        return _branch("plain", op, [concat, nothing, *extra])

    def _options(self) -> dict[str, int | float]:
        """Return the attributes of `Attention`."""
        config = self._config
        options = {"q_num_heads": config.num_heads, "kv_num_heads": config.num_kv_heads}
        numbers = {"scale": config.scale, "softcap": config.softcap}
        return options | {name: value for name, value in numbers.items() if value is not None}

    def _has_runtime_operator(self) -> bool:
        """Say whether onnxruntime's `MultiHeadAttention` computes this layer's plain branch."""
        config = self._config
        return (
            config.num_heads == config.num_kv_heads
            and not config.causal
            and config.softcap is None
            and config.position_bias is None
            and "sink" not in config.extra_keys
        )

    def _full(self, q: ir.Value, k: ir.Value, v: ir.Value, bias: ir.Value | None) -> ir.Graph:
        """Return the branch that takes masks and gives the weights."""
        config, op = self._config, Operators()
        mask = self._masked(op, self._inputs[PAIR_MASK], bias)
        all_heads, _, _, weights = op.op_multi_out(
            "Attention",
            [q, k, v, mask],
            self._options() | {"qk_matmul_output_mode": 3},  # after softmax
            num_outputs=4,
        )
        heads = op("Reshape", all_heads, op.constant([0, 0, config.num_heads, -1]))
        factors = op("Unsqueeze", self._inputs[HEAD_MASK], op.constant([1, 3]))
        concat = op("Reshape", op("Mul", heads, factors), op.constant([0, 0, -1]))
        if not config.extra_keys:
            return _branch("full", op, [concat, weights])
        keys, end = self._key_length(op), op.constant([np.iinfo(np.int64).max])
        real = op("Slice", weights, op.constant([0]), keys, op.constant([-1]))
        extra = op("Slice", weights, keys, end, op.constant([-1]))
        return _branch("full", op, [concat, real, extra])

    def _masked(self, op: Operators, mask: ir.Value, bias: ir.Value | None) -> ir.Value:
        """Return a mask [B or 1, H or 1, S, T] as `Attention` takes it, with the logits' bias."""
        count = len(self._config.extra_keys)
        if count:
            shape = op.join(op.sizes(mask, 0, 3), op.constant([count]), axis=0)
            mask = op.join(mask, op("Expand", op.constant(True, np.bool_), shape), axis=-1)
        return mask if bias is None else op("Where", mask, bias, op.constant(-np.inf, np.float32))

    def _causal_mask(self, op: Operators, q: ir.Value) -> ir.Value:
        """Return where key t <= query s, [1, 1, S, S]."""
        length = op("Squeeze", op.sizes(q, 1, 2))
        steps = op("Range", op.constant(0), length, op.constant(1))
        queries = op("Unsqueeze", steps, op.constant([0, 1, 3]))
        return op("GreaterOrEqual", queries, op("Unsqueeze", steps, op.constant([0, 1, 2])))


def _branch(name: str, op: Operators, outputs: list[ir.Value]) -> ir.Graph:
    """Return the nodes as a branch that gives these outputs."""
    # A name is given once in a graph and all of its branches.
    values = [value for node in op.nodes for value in node.outputs]
    for i, value in enumerate(values):
        value.name = f"{name}_{i}"
    for value in outputs:
        # onnx does not infer types through operators of the runtime.
        value.dtype = ir.DataType.FLOAT
    return ir.Graph([], outputs, nodes=op.nodes, name=name)
