"""Attributes and constants of nodes as Python values."""

from typing import Any

import numpy as np
from onnx import AttributeProto, NodeProto, helper, numpy_helper


def attribute_value(attribute: AttributeProto) -> Any:
    """A Python value: int, float, str, list of these, numpy array for a tensor, GraphProto for a graph."""
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if attribute.type == AttributeProto.STRINGS:
        return [v.decode(errors="replace") for v in value]
    if attribute.type == AttributeProto.TENSOR:
        return numpy_helper.to_array(value)
    return list(value) if attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS) else value


def constant_value(node: NodeProto) -> np.ndarray:
    """The value of a Constant node."""
    attribute = node.attribute[0]
    if attribute.type == AttributeProto.SPARSE_TENSOR:
        raise ValueError(f"sparse constant '{node.output[0]}'")
    value = attribute_value(attribute)
    if isinstance(value, np.ndarray):
        return value
    floats = attribute.type in (AttributeProto.FLOAT, AttributeProto.FLOATS)
    strings = attribute.type in (AttributeProto.STRING, AttributeProto.STRINGS)
    return np.array(value, object if strings else np.float32 if floats else np.int64)
