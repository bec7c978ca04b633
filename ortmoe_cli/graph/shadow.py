"""The float32 shadow of a graph: the same nodes with every half-precision tensor widened.

The CPU provider lacks many half-precision kernels, and rounding to 8 or 11 bits would hide the small differences by
which a wrong rewrite gives itself away. What a graph computes does not depend on the precision it computes in.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ortmoe_cli.graph.types import HALF

_TYPE_ATTRIBUTES = {"to", "dtype", "output_dtype", "stash_type", "softmax_precision"}
_ROUNDING = {"accuracy_level"}
"""Attributes of quantised operators that let a kernel round activations."""


def widen(array: np.ndarray) -> np.ndarray:
    """float16 and bfloat16 as float32, all else as it is."""
    if array.dtype.kind in "fV" and array.dtype.itemsize == 2:
        return np.asarray(array, np.float32)
    return array


def shadow_node(node: NodeProto, names: Mapping[str, str]) -> NodeProto:
    """A copy of a node that computes in float32, with its tensors renamed, those in its subgraphs too."""
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.ClearField("name")
    copy.ClearField("doc_string")
    copy.ClearField("metadata_props")
    copy.input[:] = [names.get(name, name) for name in node.input]
    copy.output[:] = [names.get(name, name) for name in node.output]
    for attribute in copy.attribute:
        _widen_attribute(attribute, names)
    if copy.domain == "com.microsoft":
        _take(copy, [attribute for attribute in copy.attribute if attribute.name not in _ROUNDING])
    return copy


def _take(node: NodeProto, attributes: Sequence[AttributeProto]) -> None:
    if len(attributes) < len(node.attribute):
        kept = [attribute.SerializeToString() for attribute in attributes]
        del node.attribute[:]
        for attribute in kept:
            node.attribute.add().MergeFromString(attribute)


def _widen_attribute(attribute: AttributeProto, names: Mapping[str, str]) -> None:
    if attribute.type == AttributeProto.INT and attribute.name in _TYPE_ATTRIBUTES and attribute.i in HALF:
        attribute.i = TensorProto.FLOAT
    elif attribute.type == AttributeProto.TENSOR:
        _widen_tensor(attribute.t)
    elif attribute.type == AttributeProto.GRAPH:
        _shadow_graph(attribute.g, names)
    for graph in attribute.graphs:
        _shadow_graph(graph, names)


def _shadow_graph(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Widen a subgraph in place and rename what it captures; its own names hide outer ones."""
    inner = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    inner.update(name for node in graph.node for name in node.output)
    outer = {old: new for old, new in names.items() if old not in inner}
    nodes = [shadow_node(node, outer) for node in graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for info in (*graph.input, *graph.output, *graph.value_info):
        info.name = outer.get(info.name, info.name)
        if info.type.tensor_type.elem_type in HALF:
            info.type.tensor_type.elem_type = TensorProto.FLOAT


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in HALF:
        tensor.CopyFrom(numpy_helper.from_array(widen(numpy_helper.to_array(tensor)), tensor.name))


def value_info(name: str, array: np.ndarray) -> ValueInfoProto:
    """An input of any shape for this array, so that one session serves every size."""
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), None)
