"""Routers: the matrix product whose result decides, by TopK or ArgMax, which experts a token goes to."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ortmoe_cli.graph.index import Index

PRODUCTS = ("MatMul", "Gemm", "com.microsoft.FusedMatMul", "com.microsoft.FusedGemm")
"""Operators that multiply two matrices."""
NBITS = "com.microsoft.MatMulNBits"
"""A product with quantised weights."""
VIEWS = frozenset({"Reshape", "Cast", "Identity", "Unsqueeze", "Squeeze", "Flatten", "Dropout"})
"""Operators that keep every value and their order."""
SELECTIONS = ("TopK", "ArgMax", "Hardmax")
"""Operators that choose."""

_BETWEEN = VIEWS | {
    "Abs", "Add", "And", "ArgMax", "Ceil", "Clip", "Concat", "Div", "Equal", "Exp", "Expand", "Floor", "Gather",
    "GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Log", "LogSoftmax",
    "Max", "Min", "Mul", "Neg", "Not", "Or", "Pow", "ReduceL1", "ReduceMax", "ReduceMean", "ReduceMin",
    "ReduceSum", "Relu", "Round", "ScatterElements", "ScatterND", "Sigmoid", "Slice", "Softmax", "Softplus",
    "Split", "Sqrt", "Sub", "Sum", "Tanh", "TopK", "Transpose", "Where",
}  # fmt: skip
"""What may stand between the router's product and the selection: views, elementwise operators, reductions, indexing."""
_MOST_STEPS = 300
_MOST_EXPERTS = 4096


@dataclass(frozen=True)
class Router:
    """Logits L (T,E) = hidden X (T,H) · weight; `hidden` is X seen back through views, `picks` choose by L."""

    node: int
    hidden: str
    logits: str
    width: int
    experts: int
    picks: tuple[int, ...]


ShapeOf = Callable[[str], tuple[int, ...] | None]
"""The shape of a constant."""


def find_routers(index: Index, shape_of: ShapeOf) -> list[Router]:
    """Every product with a constant weight that a selection goes back to, with all its selections, in graph order."""
    found: dict[int, tuple[Router, list[int]]] = {}
    for pick in index.nodes_of(*SELECTIONS):
        router = _router_of(index, pick, shape_of)
        if router is not None:
            found.setdefault(router.node, (router, []))[1].append(pick)
    return [
        Router(r.node, r.hidden, r.logits, r.width, r.experts, tuple(picks)) for _, (r, picks) in sorted(found.items())
    ]


def _router_of(index: Index, pick: int, shape_of: ShapeOf) -> Router | None:
    """The nearest product with a constant weight above a selection."""
    queue, seen = deque([index.inputs(pick)[0]]), set[str]()
    while queue and len(seen) < _MOST_STEPS:
        tensor = queue.popleft()
        i = index.producer(tensor)
        if tensor in seen or i is None or index.is_constant(tensor):
            continue
        seen.add(tensor)
        op = index.op(i)
        if op in PRODUCTS:
            router = _as_router(index, i, shape_of)
            if router is not None:
                return router
        elif op == NBITS and index.is_constant(index.inputs(i)[1]):
            data, width, experts = index.inputs(i)[0], index.attribute(i, "K"), index.attribute(i, "N")
            if 2 <= experts <= _MOST_EXPERTS:
                return Router(i, behind_views(index, data), index.outputs(i)[0], width, experts, ())
        elif op == "Mul" and (router := _as_rounding_router(index, i)) is not None:
            return router
        elif op in _BETWEEN:
            queue.extend(index.reads(i))
    return None


def _as_router(index: Index, i: int, shape_of: ShapeOf) -> Router | None:
    data, weight = index.inputs(i)[:2]
    if index.is_constant(data) or not index.is_constant(weight):
        return None
    shape = shape_of(weight)
    if shape is None or len(shape) < 2 or any(d != 1 for d in shape[:-2]):
        return None
    width, experts = shape[-2:]
    if index.attribute(i, "transB", 0):
        width, experts = experts, width
    if not 2 <= experts <= _MOST_EXPERTS or index.attribute(i, "transA", 0):
        return None
    return Router(i, behind_views(index, data), index.outputs(i)[0], width, experts, ())


def _as_rounding_router(index: Index, i: int) -> Router | None:
    """A router whose hidden states are quantised as they come: scale · (float) (integers · integers)."""
    for tensor in index.inputs(i):
        product = index.producer(behind_views(index, tensor))
        if product is None or index.op(product) != "MatMulInteger":
            continue
        data, weight = index.inputs(product)[:2]
        shape, quantise = index.constant_shape(weight), index.producer(data)
        if shape is None or len(shape) != 2 or not 2 <= shape[1] <= _MOST_EXPERTS:
            continue
        if quantise is not None and index.op(quantise) == "DynamicQuantizeLinear":
            hidden = behind_views(index, index.inputs(quantise)[0])
            return Router(i, hidden, index.outputs(i)[0], shape[0], shape[1], ())
    return None


def behind_views(index: Index, tensor: str) -> str:
    """The tensor that this one only shows in another shape or type."""
    while True:
        i = index.producer(tensor)
        if i is None or index.op(i) not in VIEWS:
            return tensor
        tensor = index.inputs(i)[0]
