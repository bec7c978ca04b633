"""Small decoders written node by node, the way exporters write attention."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, HIDDEN = 32, 24
LOWEST = np.float32(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Decoder:
    """One layer of attention with everything that varies between exporters. Sizes: H heads on N, of size D."""

    heads: int = 4
    kv_heads: int = 2
    size: int = 8
    value_size: int = 0
    cache: bool = True
    cache_layout: str = "bnsd"
    mask: str = (
        "add"  # add, where, none (causal by shape alone), padding (bidirectional), prefix, positions, data, tokens
    )
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    scale: float = 0.3
    repeat: str = "expand"  # expand, concat, tile (wrong order), fold (queries grouped instead), stacked (rank 3)
    slopes: bool = False
    half: bool = False
    opset: int = 18
    seed: int = 0
    hooks: Mapping[str, Callable[["Writer", str], str]] = field(default_factory=dict)
    """Changes to the tensor at a point: query, keys, values, old, cache, product, allowed, scores, weights, context."""
    flag: bool = False
    """An input of unknown meaning, 'mode'."""
    overridable: bool = False
    """The scale is an input too, with a default."""

    def build(self) -> onnx.ModelProto:
        return Writer(self).model()


class Writer:
    """Writes one decoder. `queries` [.., S, 1] and `keys` [T] are the positions, `total` their number."""

    queries = keys = total = ""

    def __init__(self, options: Decoder) -> None:
        self.o = options
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(options.seed)
        self.real = np.float16 if options.half else np.float32

    def at(self, point: str, tensor: str) -> str:
        """The tensor at a point, changed if there is a hook."""
        change = self.o.hooks.get(point)
        return change(self, tensor) if change else tensor

    def op(self, op_type: str, *inputs: str, outputs: int = 1, name: str = "", **attributes: object) -> str:
        made = [name or f"{op_type}_{len(self.nodes)}"] + [
            f"{op_type}_{len(self.nodes)}_{k}" for k in range(1, outputs)
        ]
        self.nodes.append(helper.make_node(op_type, inputs, made, **attributes))
        return made[0]

    def const(self, value: object, dtype: object = np.int64) -> str:
        name = f"const_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.const(self.rng.standard_normal(shape) * 0.3, self.real)

    def dim(self, tensor: str, axis: int) -> str:
        return self.op("Gather", self.op("Shape", tensor), self.const([axis]), axis=0)

    def model(self) -> onnx.ModelProto:
        o = self.o
        hidden = self.op("Gather", self.weight(VOCABULARY, HIDDEN), "input_ids")
        if o.mask == "positions":
            hidden = self.op("Add", hidden, self.op("Gather", self.weight(VOCABULARY - 1, HIDDEN), "position_ids"))
        batch, new = self.dim("input_ids", 0), self.dim("input_ids", 1)
        value_size = o.value_size or o.size
        q, k, v = (
            self.heads(self.op("MatMul", hidden, self.weight(HIDDEN, n * d)), batch, new, n, d)
            for n, d in ((o.heads, o.size), (o.kv_heads, o.size), (o.kv_heads, value_size))
        )
        total = new
        if o.cache:
            k, v = (self.cached(x, kind) for x, kind in ((k, "key"), (v, "value")))
            total = self.op("Add", self.dim("past.key", 2 if o.cache_layout == "bnsd" else 1), new)
            if o.cache_layout == "bsnd":
                k, v = (self.op("Transpose", x, perm=[0, 2, 1, 3]) for x in (k, v))
        self.total = total
        bias = self.bias(hidden, new, total)
        q, k, v = (self.at(point, x) for point, x in (("query", q), ("keys", k), ("values", v)))
        context = self.attend(q, k, v, bias, batch, new, total)
        merged = self.op(
            "Reshape", self.op("Transpose", context, perm=[0, 2, 1, 3]), self.const([0, 0, o.heads * value_size])
        )
        self.op("MatMul", merged, self.weight(o.heads * value_size, VOCABULARY), name="logits")
        return self.finish()

    def heads(self, x: str, batch: str, new: str, count: int, size: int) -> str:
        shape = self.op("Concat", batch, new, self.const([count]), self.const([size]), axis=0)
        x = self.op("Reshape", x, shape)
        if self.o.cache and self.o.cache_layout == "bsnd" and count == self.o.kv_heads:
            return x
        return self.op("Transpose", x, perm=[0, 2, 1, 3])

    def cached(self, x: str, kind: str) -> str:
        axis = -2 if self.o.cache_layout == "bnsd" else 1
        old = self.at("old", f"past.{kind}")
        if "cache" in self.o.hooks:
            return self.at("cache", f"{kind} {old} {x}")
        return self.op("Concat", old, x, axis=axis, name=f"present.{kind}")

    def repeated(self, x: str, batch: str, total: str, size: int) -> str:
        o = self.o
        group = o.heads // o.kv_heads
        if o.repeat in ("fold",) or group == 1:
            return x
        if o.repeat == "tile":
            return self.op("Tile", x, self.const([1, group, 1, 1]))
        x = self.op("Unsqueeze", x, self.const([2]))
        if o.repeat == "concat":
            x = self.op("Concat", *([x] * group), axis=2)
        else:
            wide = self.op(
                "Concat", batch, self.const([o.kv_heads]), self.const([group]), total, self.const([size]), axis=0
            )
            x = self.op("Expand", x, wide)
        return self.op("Reshape", x, self.op("Concat", batch, self.const([o.heads]), total, self.const([size]), axis=0))

    def attend(self, q: str, k: str, v: str, bias: str | None, batch: str, new: str, total: str) -> str:
        o = self.o
        value_size = o.value_size or o.size
        k, v = self.repeated(k, batch, total, o.size), self.repeated(v, batch, total, value_size)
        if o.repeat == "fold":
            q = self.op(
                "Reshape",
                q,
                self.op("Concat", batch, self.const([o.kv_heads]), self.const([-1]), self.const([o.size]), axis=0),
            )
        if o.repeat == "stacked":
            q, k, v = (
                self.op("Reshape", x, self.op("Concat", self.const([-1]), length, self.const([d]), axis=0))
                for x, length, d in ((q, new, o.size), (k, total, o.size), (v, total, value_size))
            )
        rank = 3 if o.repeat == "stacked" else 4
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[*range(rank - 2), rank - 1, rank - 2]))
        scores = self.op("Mul", self.at("product", scores), self.const(o.scale, self.real))
        if o.softcap:
            cap = self.const(o.softcap, self.real)
            scores = self.op("Mul", self.op("Tanh", self.op("Div", scores, cap)), cap)
        if o.repeat in ("fold", "stacked"):
            rows = self.op("Concat", batch, self.const([o.heads]), new, total, axis=0)
            scores = self.op("Reshape", scores, rows)
        if o.slopes:
            scores = self.op("Add", scores, self.slopes(total))
        if bias is not None:
            if o.mask == "where":
                scores = self.op("Where", bias, scores, self.const(-np.inf, self.real))
            else:
                scores = self.op("Add", scores, bias)
        scores = self.at("scores", scores)
        weights = self.op("Softmax", self.with_sinks(scores, batch, new) if o.sinks else scores, axis=-1)
        if o.sinks:
            weights = self.op("Slice", weights, self.const([0]), self.const([-1]), self.const([3]))
        if o.mask == "where":
            weights = self.op("Where", self.op("IsNaN", weights), self.const(0, self.real), weights)
        weights = self.at("weights", weights)
        if o.repeat == "fold":
            weights = self.op(
                "Reshape", weights, self.op("Concat", batch, self.const([o.kv_heads]), self.const([-1]), total, axis=0)
            )
        if o.repeat == "stacked":
            weights = self.op("Reshape", weights, self.op("Concat", self.const([-1]), new, total, axis=0))
        context = self.op("MatMul", weights, v)
        if o.repeat in ("fold", "stacked"):
            shape = self.op("Concat", batch, self.const([o.heads]), new, self.const([value_size]), axis=0)
            context = self.op("Reshape", context, shape)
        return self.at("context", context)

    def slopes(self, total: str) -> str:
        """ALiBi: every head prefers near keys, each by its own slope."""
        keys = self.op("Range", self.const(0), self.op("Squeeze", total, self.const([0])), self.const(1))
        steep = self.const(self.rng.uniform(0.01, 0.3, (1, self.o.heads, 1, 1)), self.real)
        kind = TensorProto.FLOAT16 if self.o.half else TensorProto.FLOAT
        return self.op("Mul", self.op("Cast", keys, to=kind), steep)

    def with_sinks(self, scores: str, batch: str, new: str) -> str:
        o = self.o
        sinks = self.const(self.rng.standard_normal((1, o.heads, 1, 1)), self.real)
        shape = self.op("Concat", batch, self.const([o.heads]), new, self.const([1]), axis=0)
        return self.op("Concat", scores, self.op("Expand", sinks, shape), axis=-1)

    def bias(self, hidden: str, new: str, total: str) -> str | None:
        """What hides keys: a condition for 'where', else numbers to add; [B|1, 1, S, T]."""
        o = self.o
        end, start = (self.op("Squeeze", x, self.const([0])) for x in (total, self.op("Sub", total, new)))
        keys = self.op("Range", self.const(0), end, self.const(1))
        queries = self.op("Unsqueeze", self.op("Range", start, end, self.const(1)), self.const([1]))
        if o.mask == "positions":
            queries = self.op("Unsqueeze", "position_ids", self.const([1, 3]))
        self.queries, self.keys = queries, keys
        allowed = self.at("allowed", self.op("LessOrEqual", keys, queries))
        if o.mask == "prefix":
            allowed = self.op("Or", allowed, self.op("Less", keys, self.const(3)))
        if o.window:
            recent = self.op("Less", self.op("Sub", queries, keys), self.const(o.window))
            allowed = self.op("And", allowed, recent)
        if o.mask == "padding":
            allowed = self.op("Cast", self.op("Mul", keys, self.const(0)), to=TensorProto.BOOL)
            allowed = self.op("Not", allowed)
        if o.mask != "none":
            real = self.op("Cast", self.op("Unsqueeze", "attention_mask", self.const([1, 2])), to=TensorProto.BOOL)
            allowed = self.op("And", allowed, real)
        if o.mask == "tokens":
            special = self.op("Equal", self.op("Unsqueeze", "input_ids", self.const([1, 3])), self.const(31))
            allowed = self.op("Or", allowed, special)
        if o.mask == "where":
            return allowed
        lowest = np.float32(np.finfo(self.real).min)
        numbers = self.op("Where", allowed, self.const(0, self.real), self.const(lowest, self.real))
        if o.mask == "data":
            strength = self.op("ReduceMax", self.op("Abs", hidden), axes=[2], keepdims=1)
            numbers = self.op("Add", numbers, self.op("Unsqueeze", strength, self.const([1])))
        return numbers

    def finish(self) -> onnx.ModelProto:
        o, ints = self.o, TensorProto.INT64
        real = TensorProto.FLOAT16 if o.half else TensorProto.FLOAT
        inputs = [("input_ids", ints, ["b", "s"])]
        read = {name for node in self.nodes for name in node.input}
        inputs += [(n, ints, ["b", d]) for n, d in (("attention_mask", "t"), ("position_ids", "s")) if n in read]
        inputs += [("mode", ints, [])] if o.flag else []
        if o.overridable:
            scales = [w for w in self.weights if not w.dims and numpy_helper.to_array(w) == self.real(o.scale)]
            inputs += [(w.name, w.data_type, []) for w in scales]
        outputs = ["logits"]
        if o.cache:
            order = (lambda n, d: ["b", n, "p", d]) if o.cache_layout == "bnsd" else (lambda n, d: ["b", "p", n, d])
            inputs += [("past.key", real, order(o.kv_heads, o.size))]
            inputs += [("past.value", real, order(o.kv_heads, o.value_size or o.size))]
            outputs += ["present.key", "present.value"]
        graph = helper.make_graph(
            self.nodes,
            "decoder",
            [helper.make_tensor_value_info(*item) for item in inputs],
            [helper.make_tensor_value_info(name, real, None) for name in outputs],
            self.weights,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", o.opset)], ir_version=9)
