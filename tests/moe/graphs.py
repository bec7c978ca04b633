"""Small blocks of experts, written by hand in the forms that exporters use."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]

E, K, H, I = 6, 2, 16, 8  # noqa: E741  experts, chosen, hidden, inner


class Graph:
    """A graph under construction. Tensors are names."""

    def __init__(self, seed: int = 3) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.functions: list[onnx.FunctionProto] = []

    def constant(self, value: Any, name: str = "") -> str:
        name = name or f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def weight(self, *shape: int, scale: float = 0.4) -> Array:
        return (self.rng.standard_normal(shape) * scale).astype(np.float32)

    def op(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        made = [f"t{len(self.nodes)}_{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), made, name=f"n{len(self.nodes)}", **attributes))
        return made[0] if outputs == 1 else made

    def model(self, output: str, elem_type: int = TensorProto.FLOAT, opset: int = 18) -> onnx.ModelProto:
        nodes = [*self.nodes, helper.make_node("Identity", [output], ["y"])]
        graph = helper.make_graph(
            nodes,
            "block",
            [helper.make_tensor_value_info("x", elem_type, ["batch", "seq", H])],
            [helper.make_tensor_value_info("y", elem_type, None)],
            self.initializers,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


Activate = Callable[[Graph, str, str], str]


def silu(g: Graph, gate: str, up: str) -> str:
    return str(g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up))


def clamped(alpha: float = 1.702, limit: float = 3.0) -> Activate:
    """min(gate, limit)·σ(alpha·…)·(clip(up)+1)"""

    def activate(g: Graph, gate: str, up: str) -> str:
        top, bottom = g.constant(np.float32(limit)), g.constant(np.float32(-limit))
        gate, up = g.op("Clip", gate, "", top), g.op("Clip", up, bottom, top)
        inner = g.op("Mul", gate, g.op("Sigmoid", g.op("Mul", gate, g.constant(np.float32(alpha)))))
        return str(g.op("Mul", inner, g.op("Add", up, g.constant(np.float32(1)))))

    return activate


def gelu(g: Graph, gate: str, up: str) -> str:
    erf = g.op("Add", g.op("Erf", g.op("Mul", gate, g.constant(np.float32(0.70710678)))), g.constant(np.float32(1)))
    return str(g.op("Mul", g.op("Mul", g.op("Mul", gate, erf), g.constant(np.float32(0.5))), up))


def softmax_router(g: Graph, logits: str, renormalise: bool = True, temperature: float = 1.0) -> tuple[str, str]:
    """(ids, weights), each (T,k)."""
    if temperature != 1:
        logits = g.op("Div", logits, g.constant(np.float32(temperature)))
    top, ids = g.op("TopK", g.op("Softmax", logits, axis=-1), g.ints(K), outputs=2, axis=-1)
    if renormalise:
        top = g.op("Div", top, g.op("ReduceSum", top, g.ints(-1), keepdims=1))
    return ids, top


def sigmoid_router(g: Graph, logits: str, scale: float = 2.5) -> tuple[str, str]:
    """Selection corrected by a bias, weights from the scores without it, renormalised and scaled."""
    score = g.op("Sigmoid", logits)
    bias = g.constant((g.rng.standard_normal(E) * 0.2).astype(np.float32))
    _, ids = g.op("TopK", g.op("Add", score, bias), g.ints(K), outputs=2, axis=-1)
    weights = g.op("GatherElements", score, ids, axis=-1)
    total = g.op("Add", g.op("ReduceSum", weights, g.ints(-1), keepdims=1), g.constant(np.float32(1e-6)))
    return ids, g.op("Mul", g.op("Div", weights, total), g.constant(np.float32(scale)))


def tanh_router(g: Graph, logits: str) -> tuple[str, str]:
    """Weights may be negative."""
    top, ids = g.op("TopK", g.op("Tanh", logits), g.ints(K), outputs=2, axis=-1)
    return ids, g.op("Sub", top, g.constant(np.float32(0.9)))


@dataclass
class Parts:
    """What a form is made of. up_first: gate and up have changed places; skip: an expert that is left out;
    capacity: how many tokens an expert of a static loop takes at most."""

    router: Callable[[Graph, str], tuple[str, str]] = softmax_router
    activate: Activate = silu
    up_first: bool = False
    capacity: int = 0
    bias: bool = False
    skip: int | None = None
    weights: dict[str, Array] = field(default_factory=dict)


def _start(g: Graph, parts: Parts) -> tuple[str, str, str]:
    """(tokens (T,H), ids, weights)"""
    tokens = g.op("Reshape", "x", g.ints(-1, H))
    logits = g.op("MatMul", tokens, g.constant(g.weight(H, E), "router.weight"))
    ids, weights = parts.router(g, logits)
    parts.weights = {"w1": g.weight(E, 2 * I, H), "w2": g.weight(E, H, I)}
    if parts.bias:
        parts.weights |= {"b1": g.weight(E, 2 * I), "b2": g.weight(E, H)}
    return tokens, ids, weights


def _end(g: Graph, y: str) -> str:
    return str(g.op("Reshape", y, g.op("Shape", "x")))


def _expert(g: Graph, parts: Parts, rows: str, e: int) -> str:
    """One expert with its own matrices."""
    up = g.op("MatMul", rows, g.constant(parts.weights["w1"][e].T.copy(), f"experts.{e}.w1"))
    if parts.bias:
        up = g.op("Add", up, g.constant(parts.weights["b1"][e], f"experts.{e}.b1"))
    halves = g.op("Split", up, outputs=2, axis=-1, num_outputs=2)
    a, b = halves[::-1] if parts.up_first else halves
    down = g.op("MatMul", parts.activate(g, a, b), g.constant(parts.weights["w2"][e].T.copy(), f"experts.{e}.w2"))
    return str(g.op("Add", down, g.constant(parts.weights["b2"][e], f"experts.{e}.b2"))) if parts.bias else str(down)


def gathered(g: Graph, parts: Parts) -> str:
    """Weights of the chosen experts looked up for every token."""
    tokens, ids, weights = _start(g, parts)
    flat = g.op("Reshape", ids, g.ints(-1))
    rows = g.op("Expand", g.op("Unsqueeze", tokens, g.ints(1)), g.ints(1, K, 1))
    rows = g.op("Unsqueeze", g.op("Reshape", rows, g.ints(-1, H)), g.ints(-1))
    w1 = g.op("Gather", g.constant(parts.weights["w1"], "experts.w1"), flat, axis=0)
    up = g.op("Squeeze", g.op("MatMul", w1, rows), g.ints(-1))
    if parts.bias:
        up = g.op("Add", up, g.op("Gather", g.constant(parts.weights["b1"], "experts.b1"), flat, axis=0))
    halves = g.op("Split", up, outputs=2, axis=-1, num_outputs=2)
    a, b = halves[::-1] if parts.up_first else halves
    inner = g.op("Unsqueeze", parts.activate(g, a, b), g.ints(-1))
    w2 = g.op("Gather", g.constant(parts.weights["w2"], "experts.w2"), flat, axis=0)
    down = g.op("Squeeze", g.op("MatMul", w2, inner), g.ints(-1))
    if parts.bias:
        down = g.op("Add", down, g.op("Gather", g.constant(parts.weights["b2"], "experts.b2"), flat, axis=0))
    down = g.op("Mul", down, g.op("Reshape", weights, g.ints(-1, 1)))
    return _end(g, g.op("ReduceSum", g.op("Reshape", down, g.ints(-1, K, H)), g.ints(1), keepdims=0))


def static_loop(g: Graph, parts: Parts) -> str:
    """One body per expert on the rows that chose it, summed up by ScatterND."""
    tokens, ids, weights = _start(g, parts)
    total = g.op("Sub", tokens, tokens)
    for e in range(E):
        if e == parts.skip:
            continue
        where = g.op("Transpose", g.op("NonZero", g.op("Equal", ids, g.ints(e))), perm=[1, 0])
        if parts.capacity:
            where = g.op("Slice", where, g.ints(0), g.ints(parts.capacity), g.ints(0))
        token = g.op("Slice", where, g.ints(0), g.ints(1), g.ints(1))
        down = _expert(g, parts, g.op("GatherND", tokens, token), e)
        share = g.op("Unsqueeze", g.op("GatherND", weights, where), g.ints(-1))
        total = g.op("ScatterND", total, token, g.op("Mul", down, share), reduction="add")
    return _end(g, total)


def dense_loop(g: Graph, parts: Parts) -> str:
    """Every expert on every token, times its weight, zero for most."""
    tokens, ids, weights = _start(g, parts)
    total = ""
    for e in range(E):
        if e == parts.skip:
            continue
        chosen = g.op("Cast", g.op("Equal", ids, g.ints(e)), to=TensorProto.FLOAT)
        share = g.op("ReduceSum", g.op("Mul", weights, chosen), g.ints(-1), keepdims=1)
        scaled = g.op("Mul", _expert(g, parts, tokens, e), share)
        total = g.op("Add", total, scaled) if total else scaled
    return _end(g, total)


def dense_bmm(g: Graph, parts: Parts) -> str:
    """Every expert on every token in one batched product."""
    tokens, ids, weights = _start(g, parts)
    shape = g.op("Concat", g.op("Shape", tokens, start=0, end=1), g.ints(E), axis=0)
    zeros = g.op("ConstantOfShape", shape, value=numpy_helper.from_array(np.zeros(1, np.float32)))
    scores = g.op("ScatterElements", zeros, ids, weights, axis=1)
    up = g.op("MatMul", tokens, g.constant(parts.weights["w1"].transpose(0, 2, 1).copy(), "experts.w1"))
    if parts.bias:
        up = g.op("Add", up, g.constant(parts.weights["b1"][:, None], "experts.b1"))
    halves = g.op("Split", up, outputs=2, axis=-1, num_outputs=2)
    a, b = halves[::-1] if parts.up_first else halves
    down = g.op(
        "MatMul",
        parts.activate(g, a, b),
        g.constant(parts.weights["w2"].transpose(0, 2, 1).copy(), "experts.w2"),
    )
    if parts.bias:
        down = g.op("Add", down, g.constant(parts.weights["b2"][:, None], "experts.b2"))
    scores = g.op("Unsqueeze", g.op("Transpose", scores, perm=[1, 0]), g.ints(-1))
    return _end(g, g.op("ReduceSum", g.op("Mul", down, scores), g.ints(0), keepdims=0))


def hit_list(hits: int, stacked: bool = True) -> Callable[[Graph, Parts], str]:
    """As many bodies as experts were hit in a trace; their ids are computed, their weights looked up (or fixed)."""

    def form(g: Graph, parts: Parts) -> str:
        tokens, ids, weights = _start(g, parts)
        w1, w2 = g.constant(parts.weights["w1"], "experts.w1"), g.constant(parts.weights["w2"], "experts.w2")
        hot = g.op("OneHot", ids, g.ints(E), g.ints(0, 1), axis=-1)
        hot = g.op("Transpose", hot, perm=[2, 1, 0])
        hit = g.op("NonZero", g.op("Greater", g.op("ReduceSum", hot, g.ints(-1, -2), keepdims=0), g.ints(0)))
        pieces = g.op("Split", g.op("Transpose", hit, perm=[1, 0]), g.ints(*[1] * hits), outputs=hits, axis=0)
        total = g.op("Sub", tokens, tokens)
        for n, piece in enumerate(pieces):
            e = g.op("Squeeze", piece)
            where = g.op("NonZero", g.op("Cast", g.op("Gather", hot, e, axis=0), to=TensorProto.BOOL))
            slot, token = g.op("Split", where, outputs=2, axis=0, num_outputs=2)
            token = g.op("Transpose", token, perm=[1, 0])
            rows = g.op("GatherND", tokens, token)
            if stacked:
                up = g.op("MatMul", rows, g.op("Transpose", g.op("Gather", w1, e, axis=0), perm=[1, 0]))
                a, b = g.op("Split", up, outputs=2, axis=-1, num_outputs=2)
                inner = parts.activate(g, a, b)
                down = g.op("MatMul", inner, g.op("Transpose", g.op("Gather", w2, e, axis=0), perm=[1, 0]))
            else:
                down = _expert(g, parts, rows, n)
            place = g.op("Concat", token, g.op("Transpose", slot, perm=[1, 0]), axis=-1)
            share = g.op("Unsqueeze", g.op("GatherND", weights, place), g.ints(-1))
            total = g.op("ScatterND", total, token, g.op("Mul", down, share), reduction="add")
        return _end(g, total)

    return form


def frozen_sizes(g: Graph, parts: Parts) -> str:
    """Tokens sorted by expert and split by the counts of a trace of 8 tokens."""
    tokens, ids, weights = _start(g, parts)
    flat = g.op("Reshape", ids, g.ints(-1))
    _, order = g.op("TopK", flat, g.op("Shape", flat), outputs=2, axis=0, largest=0)
    token = g.op("Unsqueeze", g.op("Div", order, g.ints(K)), g.ints(-1))
    pieces = g.op("Split", g.op("GatherND", tokens, token), g.ints(5, 1, 4, 2, 3, 1), outputs=E, axis=0)
    down = g.op("Concat", *[_expert(g, parts, piece, e) for e, piece in enumerate(pieces)], axis=0)
    share = g.op("Gather", g.op("Reshape", weights, g.ints(-1, 1)), order, axis=0)
    zero = g.op("Sub", tokens, tokens)
    return _end(g, g.op("ScatterND", zero, token, g.op("Mul", down, share), reduction="add"))


def input_scaled(g: Graph, parts: Parts) -> str:
    """Scores scale what the experts read."""
    tokens, ids, weights = _start(g, parts)
    shape = g.op("Concat", g.op("Shape", tokens, start=0, end=1), g.ints(E), axis=0)
    zeros = g.op("ConstantOfShape", shape, value=numpy_helper.from_array(np.zeros(1, np.float32)))
    scores = g.op("Transpose", g.op("ScatterElements", zeros, ids, weights, axis=1), perm=[1, 0])
    rows = g.op("Mul", g.op("Unsqueeze", tokens, g.ints(0)), g.op("Unsqueeze", scores, g.ints(-1)))
    up = g.op("MatMul", rows, g.constant(parts.weights["w1"].transpose(0, 2, 1).copy(), "experts.w1"))
    a, b = g.op("Split", up, outputs=2, axis=-1, num_outputs=2)
    w2 = g.constant(parts.weights["w2"].transpose(0, 2, 1).copy(), "experts.w2")
    down = g.op("MatMul", parts.activate(g, a, b), w2)
    return _end(g, g.op("ReduceSum", down, g.ints(0), keepdims=0))
