"""Element types by operator, for graphs that carry no type annotations.

ONNX's own shape inference gives up at the first contrib operator; a fuser that guesses float32 there writes models that
do not load. Only operators whose output type is not that of their first input need a line.
"""

from dataclasses import dataclass

from onnx import NodeProto, TensorProto

HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
"""Types that evaluation replaces by float32."""

_BOOL = {
    "And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor",
}  # fmt: skip
_INT64 = {"ArgMax", "ArgMin", "NonZero", "Shape", "Size", "SequenceLength", "NonMaxSuppression"}
_FROM_ATTRIBUTE = {
    "Cast": "to", "EyeLike": "dtype", "Multinomial": "dtype", "RandomNormal": "dtype", "RandomUniform": "dtype",
    "RandomNormalLike": "dtype", "DequantizeLinear": "output_dtype",
}  # fmt: skip
_LIKE_INPUT = {
    "Where": 1, "OneHot": 2, "CastLike": 1, "QuantizeLinear": 2, "DequantizeLinear": 1, "GatherBlockQuantized": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Like:
    """The output has the element type of this input."""

    input: int


def elem_type_rule(node: NodeProto, position: int) -> int | Like:
    """Element type of one output of a node: a TensorProto.DataType (0: unknown), or that of one of its inputs."""
    op = node.op_type
    for attribute in node.attribute:
        if attribute.name == _FROM_ATTRIBUTE.get(op) and attribute.i:
            return int(attribute.i)
    if op in _BOOL or (op == "Dropout" and position == 1):
        return int(TensorProto.BOOL)
    if op in _INT64 or (op in ("TopK", "Unique", "MaxPool") and position):
        return int(TensorProto.INT64)
    if op in ("Constant", "ConstantOfShape"):
        return _constant_type(node)
    if op == "DynamicQuantizeLinear":
        return int(TensorProto.FLOAT if position == 1 else TensorProto.UINT8)
    if op in ("MatMulInteger", "ConvInteger"):
        return int(TensorProto.INT32)
    if op in ("If", "Loop", "Scan"):
        return 0
    return Like(_LIKE_INPUT.get(op, 0))


def _constant_type(node: NodeProto) -> int:
    for attribute in node.attribute:
        if attribute.name == "value":
            return int(attribute.t.data_type)
        if attribute.name.startswith("value_int"):
            return int(TensorProto.INT64)
        if attribute.name.startswith("value_string"):
            return int(TensorProto.STRING)
    return int(TensorProto.FLOAT)
