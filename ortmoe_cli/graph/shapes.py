"""Shapes of node outputs from the shapes of the inputs, for tensors whose values nobody knows.

Rules cover what decoders are made of, contrib operators included; ONNX's own inference, one node at a time, does the
long tail. A rule returns one shape per output, None where it cannot tell.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ortmoe_cli.graph.movement import VIEWS, Attribute, Unsupported, flattened, ints, target_shape
from ortmoe_cli.graph.operators import BROADCAST, REDUCTIONS, UNARY, numpy_type

Shape = tuple[int, ...]
Shapes = Sequence[Shape | None]
Values = Sequence[np.ndarray | None]
Rule = Callable[[Shapes, Values, Attribute, int], Sequence[Shape | None]]
"""rule(input shapes, input values where known, attribute, number of outputs)."""


def _need(shapes: Shapes, position: int) -> Shape:
    shape = shapes[position] if position < len(shapes) else None
    if shape is None:
        raise Unsupported(f"shape of input {position}")
    return shape


def _value(values: Values, position: int) -> np.ndarray | None:
    return values[position] if position < len(values) else None


def _numbers(values: Values, position: int) -> list[int]:
    """The integers of an input that decides a shape."""
    value = _value(values, position)
    if value is None:
        raise Unsupported(f"value of input {position}")
    return list(ints(value))


def _same(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    return [_need(shapes, 0)] * outputs


def _first(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    return [_need(shapes, 0), *[None] * (outputs - 1)]


def _broadcast(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    return [np.broadcast_shapes(*(_need(shapes, k) for k in range(len(shapes))))]


def _view(op: str) -> Rule:
    def rule(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
        empty = np.broadcast_to(np.int8(0), _need(shapes, 0))
        if any(shape is not None and value is None for shape, value in zip(shapes[1:], values[1:], strict=True)):
            raise Unsupported(f"{op} by unknown values")
        return [view.shape for view in VIEWS[op]([empty, *values[1:]], attribute, outputs)]

    return rule


def _reduce(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    shape = _need(shapes, 0)
    axes = _numbers(values, 1) if len(shapes) > 1 and shapes[1] is not None else attribute("axes", None) or []
    if not axes:
        if attribute("noop_with_empty_axes", 0):
            return [shape]
        axes = list(range(len(shape)))
    return [_without(shape, axes, bool(attribute("keepdims", 1)))]


def _arg(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    return [_without(_need(shapes, 0), [attribute("axis", 0)], bool(attribute("keepdims", 1)))]


def _without(shape: Shape, axes: Sequence[int], keep: bool) -> Shape:
    gone = {axis % len(shape) for axis in axes} if shape else set()
    if keep:
        return tuple(1 if k in gone else size for k, size in enumerate(shape))
    return tuple(size for k, size in enumerate(shape) if k not in gone)


def _matmul(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    a, b = _need(shapes, 0), _need(shapes, 1)
    if attribute("transA", 0):
        a = (*a[:-2], a[-1], a[-2])
    if attribute("transB", 0):
        b = (*b[:-2], b[-1], b[-2])
    if len(a) == 1 or len(b) == 1:
        return [np.matmul(np.broadcast_to(np.int8(0), a), np.broadcast_to(np.int8(0), b)).shape]
    if a[-1] != b[-2]:
        raise Unsupported(f"MatMul of {a} and {b}")
    return [(*np.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1])]


def _reshape(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    wanted = attribute("shape", None) or _numbers(values, 1)
    if shapes[0] is None and min(wanted, default=1) > 0:  # the target says it all
        return [tuple(wanted)]
    return [target_shape(_need(shapes, 0), wanted, bool(attribute("allowzero", 0)))]


def _concat(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    every = [_need(shapes, k) for k in range(len(shapes))]
    axis = attribute("axis", 0) % len(every[0])
    return [(*every[0][:axis], sum(shape[axis] for shape in every), *every[0][axis + 1 :])]


def _gather(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    data, indices = _need(shapes, 0), _need(shapes, 1)
    axis = attribute("axis", 0) % len(data)
    return [(*data[:axis], *indices, *data[axis + 1 :])]


def _gather_nd(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    data, indices = _need(shapes, 0), _need(shapes, 1)
    return [(*indices[:-1], *data[attribute("batch_dims", 0) + indices[-1] :])]


def _gather_elements(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    return [_need(shapes, 1)]


def _top_k(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    shape = list(_need(shapes, 0))
    shape[attribute("axis", -1)] = _numbers(values, 1)[0] if len(shapes) > 1 else attribute("k", 1)
    return [tuple(shape)] * outputs


def _tile(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    return [tuple(size * times for size, times in zip(_need(shapes, 0), _numbers(values, 1), strict=True))]


def _one_hot(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    shape, axis = list(_need(shapes, 0)), attribute("axis", -1)
    shape.insert(axis if axis >= 0 else axis + len(shape) + 1, _numbers(values, 1)[0])
    return [tuple(shape)]


def _flatten(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    return [flattened(_need(shapes, 0), attribute("axis", 1))]


def _of_numbers(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    return [tuple(_numbers(values, 0))]


def _skip_norm(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    """Normalised, mean, inverse deviation, sum of the two inputs."""
    return [_need(shapes, 0) if k in (0, 3) else None for k in range(outputs)]


def _grouped_query(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    batch, new, width = _need(shapes, 0)
    heads, kv_heads = attribute("num_heads", 1), attribute("kv_num_heads", 1)
    packed = len(shapes) < 2 or shapes[1] is None
    size = width // (heads + 2 * kv_heads) if packed else width // heads
    past = shapes[3] if len(shapes) > 3 else None
    present = None if past is None else (batch, kv_heads, past[2] + new, size)
    return [(batch, new, heads * size), *[present] * (outputs - 1)]


def _multi_head(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    query, value = _need(shapes, 0), shapes[2] if len(shapes) > 2 else None
    if len(query) != 3 or value is None:
        raise Unsupported("packed MultiHeadAttention")
    width = value[-1] if len(value) == 3 else value[1] * value[3]
    return [(query[0], query[1], width), *[None] * (outputs - 1)]


def _attention(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    query, key, value = (_need(shapes, k) for k in range(3))
    past = shapes[4] if len(shapes) > 4 else None
    if len(query) == 3:
        heads, kv_heads = attribute("q_num_heads", 1), attribute("kv_num_heads", 1)
        result: Shape = (query[0], query[1], heads * (value[2] // kv_heads))
        key, value = ((x[0], kv_heads, x[1], x[2] // kv_heads) for x in (key, value))
    else:
        result = (*query[:3], value[3])
    old = past[2] if past else 0
    presents: list[Shape | None] = [(*x[:2], old + x[2], x[3]) for x in (key, value)]
    return [result, *presents, None][:outputs]


def _quantised_matmul(shapes: Shapes, values: Values, attribute: Attribute, outputs: int) -> Sequence[Shape | None]:
    return [(*_need(shapes, 0)[:-1], attribute("N", 0))]


_SAME = [
    *UNARY, "BitShift", "Cast", "CastLike", "Celu", "Clip", "CumSum", "Elu", "Gelu", "HardSigmoid",
    "HardSwish", "IsInf", "LeakyRelu", "LogSoftmax", "LpNormalization", "Mish", "PRelu", "QuickGelu", "RotaryEmbedding",
    "ScatterElements", "ScatterND", "Selu", "Softmax", "Softsign", "Swish", "TensorScatter", "Trilu",
    *(f"com.microsoft.{op}" for op in ("BiasGelu", "FastGelu", "Gelu", "QuickGelu", "RotaryEmbedding", "MoE", "QMoE")),
]  # fmt: skip
_FIRST = [
    "Dropout", "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "BatchNormalization",
    "com.microsoft.SimplifiedLayerNormalization",
]  # fmt: skip

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(_FIRST, _first),
    **dict.fromkeys((*BROADCAST, "Mod"), _broadcast),
    **dict.fromkeys(REDUCTIONS, _reduce),
    **{op: _view(op) for op in VIEWS},
    "ArgMax": _arg,
    "ArgMin": _arg,
    "Attention": _attention,
    "Concat": _concat,
    "ConstantOfShape": _of_numbers,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gemm": _matmul,
    "MatMul": _matmul,
    "OneHot": _one_hot,
    "Reshape": _reshape,
    "Tile": _tile,
    "TopK": _top_k,
    "com.microsoft.FusedMatMul": _matmul,
    "com.microsoft.GroupQueryAttention": _grouped_query,
    "com.microsoft.MatMulNBits": _quantised_matmul,
    "com.microsoft.MultiHeadAttention": _multi_head,
    "com.microsoft.SkipLayerNormalization": _skip_norm,
    "com.microsoft.SkipSimplifiedLayerNormalization": _skip_norm,
}


def infer_by_onnx(
    node: NodeProto, opset: int, shapes: Shapes, elem_types: Sequence[int], values: Values
) -> Sequence[Shape | None]:
    """The shapes of a default-domain node by ONNX's own inference, None where it cannot tell."""
    schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    types, data = {}, {}
    for name, shape, elem_type, value in zip(node.input, shapes, elem_types, values, strict=True):
        if not name or shape is None:
            continue
        types[name] = helper.make_tensor_type_proto(elem_type or TensorProto.FLOAT, shape)
        if value is not None and value.size <= 64 and numpy_type(elem_type or TensorProto.FLOAT) == value.dtype:
            data[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
    inferred = onnx.shape_inference.infer_node_outputs(
        schema, node, types, data, opset_imports=[helper.make_opsetid("", opset)]
    )
    return [_dims(inferred[name]) if name in inferred else None for name in node.output]


def _dims(proto: onnx.TypeProto) -> Shape | None:
    if not proto.tensor_type.HasField("shape"):
        return None
    dims = proto.tensor_type.shape.dim
    return tuple(dim.dim_value for dim in dims) if all(dim.HasField("dim_value") for dim in dims) else None
