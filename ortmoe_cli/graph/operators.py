"""What operators compute, in numpy: enough to follow shapes, masks and positions through a graph.

Half-precision values are float32 here, as everywhere in evaluation. An operator that is not in the table is computed by
`onnx.reference` when it belongs to the default domain, at the price of a few milliseconds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from ortmoe_cli.graph.movement import (
    MOVEMENT,
    Array,
    Attribute,
    Inputs,
    Operator,
    Unsupported,
    given,
    ints,
    optional,
)  # fmt: skip
from ortmoe_cli.graph.shadow import widen
from ortmoe_cli.graph.types import HALF


def numpy_type(elem_type: int) -> np.dtype[Any]:
    """The numpy type in which values of an element type are evaluated."""
    return np.dtype(np.float32 if elem_type in HALF else helper.tensor_dtype_to_np_dtype(elem_type))


def _elementwise(function: Callable[..., Any]) -> Operator:
    def operator(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
        return [np.asarray(function(*inputs))]

    return operator


def _scalar(value: Array) -> Any:
    return np.asarray(value).reshape(-1)[0].item()


def _divide(x: Array, y: Array) -> Array:
    if x.dtype.kind not in "iu":
        return np.asarray(np.divide(x, y))
    quotient = np.abs(x) // np.maximum(np.abs(y), 1)
    return np.asarray(np.sign(x) * np.sign(y) * quotient).astype(x.dtype)


def _modulo(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    x, y = given(inputs, 0), given(inputs, 1)
    return [np.fmod(x, y) if attribute("fmod", 0) else np.mod(x, y)]


def _reduce(function: Callable[..., Any]) -> Operator:
    def operator(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
        x = given(inputs, 0)
        axes = ints(optional(inputs, 1), attribute("axes", None))
        if not axes:
            if attribute("noop_with_empty_axes", 0):
                return [x]
            axes = range(x.ndim)
        return [np.asarray(function(x, axis=tuple(axes), keepdims=bool(attribute("keepdims", 1)))).astype(x.dtype)]

    return operator


def _arg(function: Callable[..., Any]) -> Operator:
    def operator(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
        axis, x = attribute("axis", 0), given(inputs, 0)
        if attribute("select_last_index", 0):
            found = x.shape[axis] - 1 - function(np.flip(x, axis), axis=axis)
        else:
            found = function(x, axis=axis)
        return [np.expand_dims(found, axis) if attribute("keepdims", 1) else np.asarray(found)]

    return operator


def _constant_of_shape(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    fill = attribute("value", None)
    scalar = np.float32(0) if fill is None else widen(np.asarray(fill)).reshape(-1)[0]
    return [np.broadcast_to(scalar, tuple(ints(inputs[0])))]


def _range(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    start, limit, delta = (_scalar(given(inputs, k)) for k in range(3))
    return [np.arange(start, limit, delta).astype(given(inputs, 0).dtype)]


def _cumsum(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    x, axis = given(inputs, 0), int(_scalar(given(inputs, 1)))
    flipped = np.flip(x, axis) if attribute("reverse", 0) else x
    total = np.cumsum(flipped, axis=axis).astype(x.dtype)
    if attribute("exclusive", 0):
        total = total - flipped
    return [np.flip(total, axis) if attribute("reverse", 0) else total]


def _trilu(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    offset = optional(inputs, 1)
    function = np.triu if attribute("upper", 1) else np.tril
    return [function(given(inputs, 0), 0 if offset is None else int(_scalar(offset)))]


def _one_hot(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    indices, values = given(inputs, 0), given(inputs, 2)
    depth = int(_scalar(given(inputs, 1)))
    hot = np.where(np.arange(depth) == (indices % depth)[..., None], values[1], values[0])
    inside = ((indices >= -depth) & (indices < depth))[..., None]
    return [np.moveaxis(np.where(inside, hot, values[0]), -1, attribute("axis", -1)).astype(values.dtype)]


def _top_k(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    x, axis = given(inputs, 0), attribute("axis", -1)
    k = int(_scalar(given(inputs, 1))) if len(inputs) > 1 else attribute("k", 1)
    keys = -x if attribute("largest", 1) else x
    indices = np.take(np.argsort(keys, axis=axis, kind="stable"), np.arange(k), axis=axis)
    return [np.take_along_axis(x, indices, axis), indices.astype(np.int64)]


def softmax(x: Array, axis: int = -1) -> Array:
    """Softmax in the precision of `x`; a row of -inf only gives nan, as in the runtime."""
    exponent = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(exponent / exponent.sum(axis, keepdims=True))


def _matmul_scaled(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    a, b = given(inputs, 0), given(inputs, 1)
    if attribute("transA", 0):
        a = a.swapaxes(-1, -2)
    if attribute("transB", 0):
        b = b.swapaxes(-1, -2)
    if attribute("transBatchA", 0) or attribute("transBatchB", 0):
        raise Unsupported("FusedMatMul with transBatch")
    product = np.float32(attribute("alpha", 1.0)) * np.matmul(a, b)
    bias = optional(inputs, 2)
    return [product if bias is None else product + np.float32(attribute("beta", 1.0)) * bias]


def _clip(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    x = given(inputs, 0)
    low = optional(inputs, 1) if len(inputs) > 1 else attribute("min", None)
    high = optional(inputs, 2) if len(inputs) > 2 else attribute("max", None)
    for bound, limit in ((low, np.maximum), (high, np.minimum)):
        x = x if bound is None else limit(x, np.asarray(bound, x.dtype).reshape(()))
    return [x]


def _all_nonzero(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    return [np.array(np.nonzero(np.atleast_1d(given(inputs, 0))), np.int64)]


def _is_inf(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    x = given(inputs, 0)
    positive, negative = attribute("detect_positive", 1), attribute("detect_negative", 1)
    return [np.isinf(x) & ((bool(positive) & (x > 0)) | (bool(negative) & (x < 0)))]


_erf = np.vectorize(math.erf, otypes=[np.float64])

UNARY: Mapping[str, Callable[..., Any]] = {
    "Abs": np.abs, "Acos": np.arccos, "Asin": np.arcsin, "Atan": np.arctan, "Ceil": np.ceil, "Cos": np.cos,
    "Cosh": np.cosh, "Erf": lambda x: _erf(x).astype(x.dtype), "Exp": np.exp, "Floor": np.floor,
    "Identity": lambda x: x, "IsNaN": np.isnan, "Log": np.log, "Neg": np.negative, "Not": np.logical_not,
    "Reciprocal": lambda x: np.divide(x.dtype.type(1), x), "Relu": lambda x: np.maximum(x, x.dtype.type(0)),
    "Round": np.round, "Sigmoid": lambda x: x.dtype.type(1) / (x.dtype.type(1) + np.exp(-x)), "Sign": np.sign,
    "Sin": np.sin, "Sinh": np.sinh, "Softplus": lambda x: np.logaddexp(x, x.dtype.type(0)), "Sqrt": np.sqrt,
    "Tan": np.tan, "Tanh": np.tanh, "BitwiseNot": np.invert,
}  # fmt: skip

BROADCAST: Mapping[str, Callable[..., Any]] = {
    "Add": np.add, "And": np.logical_and, "BitwiseAnd": np.bitwise_and, "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor, "Div": _divide, "Equal": np.equal, "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal, "Less": np.less, "LessOrEqual": np.less_equal,
    "Max": lambda *x: np.maximum.reduce(np.broadcast_arrays(*x)),
    "Mean": lambda *x: (sum(x[1:], start=x[0]) / x[0].dtype.type(len(x))),
    "Min": lambda *x: np.minimum.reduce(np.broadcast_arrays(*x)), "Mul": np.multiply, "Or": np.logical_or,
    "Pow": lambda x, y: np.power(x, y).astype(x.dtype), "Sub": np.subtract,
    "Sum": lambda *x: sum(x[1:], start=x[0]), "Where": np.where, "Xor": np.logical_xor,
}  # fmt: skip

REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "ReduceL1": lambda x, **k: np.sum(np.abs(x), **k), "ReduceL2": lambda x, **k: np.sqrt(np.sum(x * x, **k)),
    "ReduceLogSumExp": lambda x, **k: np.log(np.sum(np.exp(x), **k)), "ReduceMax": np.max, "ReduceMean": np.mean,
    "ReduceMin": np.min, "ReduceProd": np.prod, "ReduceSum": np.sum,
    "ReduceSumSquare": lambda x, **k: np.sum(x * x, **k),
}  # fmt: skip

OPERATORS: Mapping[str, Operator] = {
    **{op: _elementwise(function) for op, function in (*UNARY.items(), *BROADCAST.items())},
    **{op: _reduce(function) for op, function in REDUCTIONS.items()},
    **MOVEMENT,
    "ArgMax": _arg(np.argmax),
    "ArgMin": _arg(np.argmin),
    "Cast": lambda i, a, n: [given(i, 0).astype(numpy_type(a("to", TensorProto.FLOAT)))],
    "CastLike": lambda i, a, n: [given(i, 0).astype(given(i, 1).dtype)],
    "Clip": _clip,
    "ConstantOfShape": _constant_of_shape,
    "CumSum": _cumsum,
    "Dropout": lambda i, a, n: [given(i, 0), np.ones(given(i, 0).shape, bool)],
    "Einsum": lambda i, a, n: [np.einsum(a("equation", ""), *(given(i, k) for k in range(len(i))))],
    "Gemm": _matmul_scaled,
    "IsInf": _is_inf,
    "LogSoftmax": lambda i, a, n: [np.log(softmax(given(i, 0), a("axis", -1)))],
    "MatMul": lambda i, a, n: [np.matmul(given(i, 0), given(i, 1))],
    "Mod": _modulo,
    "NonZero": _all_nonzero,
    "OneHot": _one_hot,
    "Range": _range,
    "Softmax": lambda i, a, n: [softmax(given(i, 0), a("axis", -1))],
    "TopK": _top_k,
    "Trilu": _trilu,
    "com.microsoft.FusedMatMul": _matmul_scaled,
}


def compute(op: str, inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    """The outputs of one node from the table, in shadow types. Raises Unsupported, or what numpy raises."""
    operator = OPERATORS.get(op)
    if operator is None:
        raise Unsupported(op)
    with np.errstate(all="ignore"):
        results = operator(inputs, attribute, outputs)
    if op in _TYPED or any(x is not None and x.dtype == np.float64 for x in inputs):
        return [np.asarray(result) for result in results]
    return [_no_double(np.asarray(result)) for result in results]


_TYPED = {"Cast", "CastLike", "ConstantOfShape"}
"""Operators that may make a double out of something else."""


def _no_double(result: Array) -> Array:
    """Take back the widening to float64 that numpy does where ONNX does not."""
    return result.astype(np.float32) if result.dtype == np.float64 else result


def compute_by_reference(node: NodeProto, opset: int, inputs: Inputs) -> Sequence[Array]:
    """The outputs of one node of the default domain by onnx.reference: slow, complete."""
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415  loads every operator, rarely needed

    names = [name for name in node.input if name]
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in dict.fromkeys(names)],
        [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in node.output if name],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    values = {name: value for name, value in zip(node.input, inputs, strict=True) if name}
    results = iter(ReferenceEvaluator(model).run(None, values))
    empty = np.zeros(0, np.float32)
    return [widen(np.asarray(next(results))) if name else empty for name in node.output]
